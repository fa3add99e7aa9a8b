/* A queue of pointers from any thread to one thread, with an eventfd for the reader's loop. Bounded. */
#ifndef BASE_MAILBOX_H
#define BASE_MAILBOX_H

#include <stdbool.h>
#include <stdint.h>

struct mailbox;

/* `capacity`: items; a power of two. */
struct mailbox *mailbox_create(uint32_t capacity);
/* Items that are still inside are handed to free_item (may be NULL when there are none). */
void mailbox_free(struct mailbox **mailbox, void (*free_item)(void *item));

/* 0, or -EAGAIN when full (the caller keeps the item and counts a refusal). Wakes the reader. */
int mailbox_put(struct mailbox *mailbox, void *item);

/* The oldest item, or NULL. Clears the eventfd when it becomes empty. */
void *mailbox_take(struct mailbox *mailbox);

/* Waits for an item until deadline_ns (CLOCK_MONOTONIC). NULL when none came. */
void *mailbox_wait(struct mailbox *mailbox, int64_t deadline_ns);

int mailbox_fd(const struct mailbox *mailbox); /* readable while items are inside */

#endif
