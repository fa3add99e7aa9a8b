/* The device thread: owns weights, activations, the control segment's contents and all sequences. The loop
 * thread talks to it by orders and hears of it by posts (decoder/order.h). */
#ifndef DECODER_DEVICE_H
#define DECODER_DEVICE_H

#include <stdint.h>

#include "base/err.h"
#include "base/mailbox.h"
#include "decoder/pass.h"
#include "decoder/order.h"
#include "decoder/scheduler.h"
#include "decoder/stepper.h"
#include "model/model.h"

struct device_options {
    const struct model *model;
    struct pass_options pass;
    uint32_t context, sequences, chunk;
    uint64_t head;                        /* fingerprint of the retrieval head */
    struct stepper_attachment attachment; /* stays mapped until the device is freed */
};

struct device_figures { /* a copy of the state after the last turn, or step */
    struct scheduler_figures requests;
    struct stepper_times steps;
    struct pass_times times;
    uint64_t activation_bytes;
    char backend[32];
};

struct device;

/* Starts the thread. `posts` is the loop's mailbox, borrowed. */
struct device *device_start(const struct device_options *options, struct mailbox *posts);

/* Ends the thread at its next step boundary (abort the flags first where it may wait) and frees all. */
void device_free(struct device **device);

/* Any thread. Takes the order (mem_alloc'ed); -EAGAIN when the mailbox is full: the order stays the
 * caller's. */
int device_order(struct device *d, struct order *order);

void device_figures(struct device *d, struct device_figures *ret); /* any thread */

void order_free(void *order); /* with its message */
void post_free(void *post);

#endif
