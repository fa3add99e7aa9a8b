/* A bounded queue of pointers; see mailbox.h.
 *
 * Any thread puts, one takes. A mutex guards the ring: it is held for a few instructions, and the eventfd is
 * written and cleared under it, so that "readable" and "not empty" never disagree. */
#include "base/mailbox.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"

enum { MAILBOX_POLL_MAX_MS = 60000 };

struct mailbox {
    pthread_mutex_t mutex;
    int fd;
    uint32_t capacity;
    uint32_t head, tail; /* taken and put so far; their difference is the fill */
    void **items;
};

struct mailbox *mailbox_create(uint32_t capacity)
{
    CHECK(capacity > 0 && (capacity & (capacity - 1)) == 0);
    struct mailbox *mailbox = mem_alloc(1, sizeof *mailbox);
    mailbox->items = mem_alloc(capacity, sizeof *mailbox->items);
    mailbox->capacity = capacity;
    mailbox->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(mailbox->fd >= 0);
    pthread_mutex_init(&mailbox->mutex, NULL);
    return mailbox;
}

void mailbox_free(struct mailbox **mailbox_at, void (*free_item)(void *item))
{
    struct mailbox *mailbox = *mailbox_at;
    if (!mailbox)
        return;
    *mailbox_at = NULL;
    void *item;
    while ((item = mailbox_take(mailbox)))
        if (free_item)
            free_item(item);
    close(mailbox->fd);
    pthread_mutex_destroy(&mailbox->mutex);
    mem_free(&mailbox->items);
    mem_free(&mailbox);
}

int mailbox_put(struct mailbox *mailbox, void *item)
{
    CHECK(item != NULL);
    int r = 0;
    pthread_mutex_lock(&mailbox->mutex);
    if (mailbox->tail - mailbox->head == mailbox->capacity) {
        r = -EAGAIN;
    } else {
        mailbox->items[mailbox->tail & (mailbox->capacity - 1)] = item;
        if (mailbox->tail++ == mailbox->head)
            CHECK(eventfd_write(mailbox->fd, 1) == 0);
    }
    pthread_mutex_unlock(&mailbox->mutex);
    return r;
}

void *mailbox_take(struct mailbox *mailbox)
{
    void *item = NULL;
    pthread_mutex_lock(&mailbox->mutex);
    if (mailbox->tail != mailbox->head) {
        item = mailbox->items[mailbox->head++ & (mailbox->capacity - 1)];
        eventfd_t count;
        if (mailbox->tail == mailbox->head)
            CHECK(eventfd_read(mailbox->fd, &count) == 0);
    }
    pthread_mutex_unlock(&mailbox->mutex);
    return item;
}

void *mailbox_wait(struct mailbox *mailbox, int64_t deadline_ns)
{
    for (;;) {
        void *item = mailbox_take(mailbox);
        if (item)
            return item;
        int left = clock_left_ms(deadline_ns, MAILBOX_POLL_MAX_MS);
        if (left == 0)
            return NULL;
        struct pollfd wait = {.fd = mailbox->fd, .events = POLLIN};
        int r = poll(&wait, 1, left);
        CHECK(r >= 0 || errno == EINTR);
    }
}

int mailbox_fd(const struct mailbox *mailbox)
{
    return mailbox->fd;
}
