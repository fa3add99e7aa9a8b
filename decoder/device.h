/* The device thread: owns weights, activations, the control segment's contents and all sequences. The loop
 * thread talks to it by orders and hears of it by posts (decoder/order.h). */
#ifndef DECODER_DEVICE_H
#define DECODER_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mailbox.h"
#include "decoder/gpu_device.h"
#include "decoder/pass.h"
#include "decoder/order.h"
#include "decoder/scheduler.h"
#include "decoder/step_gpu.h"
#include "decoder/stepper.h"
#include "model/model.h"

struct device_options {
    const struct model *model;
    const char *device; /* "cpu" or a GPU's name */
    struct pass_options pass;
    uint32_t context, sequences, chunk;
};

struct device_figures { /* a copy of the state after the last turn, or step */
    struct scheduler_figures requests;
    struct stepper_times steps;
    struct pass_times times;
    uint64_t activation_bytes;
    char backend[128];
    bool on_gpu; /* then: */
    struct gpu_device_figures gpu;
    struct step_gpu_figures gpu_steps;
};

struct device;

/* Starts the thread, which opens the device (POST_OPENED), loads the weights and waits for device_attach;
 * then POST_READY. `posts` is the loop's mailbox, borrowed; texts of the options too. */
struct device *device_start(const struct device_options *options, struct mailbox *posts);

/* Once: what the store handed over, which stays mapped until the device is freed, and the fingerprint of the
 * retrieval head. */
void device_attach(struct device *d, const struct stepper_attachment *attachment, uint64_t head);

/* Ends the thread at its next step boundary (abort the flags first where it may wait) and frees all. */
void device_free(struct device **device);

/* Any thread. Takes the order (mem_alloc'ed); -EAGAIN when the mailbox is full: the order stays the
 * caller's. */
int device_order(struct device *d, struct order *order);

void device_figures(struct device *d, struct device_figures *ret); /* any thread */

void order_free(void *order); /* with its message */
void post_free(void *post);

#endif
