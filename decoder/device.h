/* The device thread: owns weights, activations, the control segment's contents and all sequences. The loop
 * thread talks to it by orders and hears of it by posts (decoder/order.h). */
#ifndef DECODER_DEVICE_H
#define DECODER_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/awake.h"
#include "base/err.h"
#include "base/mailbox.h"
#include "decoder/export.h"
#include "decoder/gpu_device.h"
#include "decoder/pass.h"
#include "decoder/order.h"
#include "decoder/scheduler.h"
#include "decoder/step_gpu.h"
#include "decoder/stepper.h"
#include "model/model.h"

/* How long requests wait for another retriever when one is gone: as long as for any peer's answer, since to
 * load a head takes seconds. */
#define DEVICE_GRACE_S 30

struct device_options {
    const struct model *model;
    const char *device; /* "cpu" or a GPU's name */
    struct pass_options pass;
    uint32_t context, sequences, chunk;
    uint32_t awake; /* cores that are kept awake while steps follow one another; 0: none */
};

struct device_figures { /* a copy of the state within the last step, or after the last turn */
    struct scheduler_figures requests;
    struct stepper_times steps;
    struct pass_times times;
    uint64_t activation_bytes;
    struct export_figures features;
    char backend[128];
    bool on_gpu; /* then: */
    struct gpu_device_figures gpu;
    struct step_gpu_figures gpu_steps;
};

struct device;

/* Starts the thread, which opens the device (POST_OPENED), loads the weights and waits for device_attach;
 * then POST_READY. `posts` is the loop's mailbox, borrowed; texts of the options too. */
struct device *device_start(const struct device_options *options, struct mailbox *posts);

/* What the retriever's head is, and whom hidden states go to where it reads any (layers 0: none). */
struct device_head {
    uint64_t fingerprint;
    struct layout_features features;
    uint64_t decoder_epoch, retriever_epoch;
    char retriever_device[64]; /* "cpu", or a GPU's UUID */
};

/* Once: what the store handed over, which stays mapped until the device is freed. Where the head reads hidden
 * states POST_EXPORT comes before POST_READY, and again for each ORDER_EXPORT. */
void device_attach(struct device *d, const struct stepper_attachment *attachment,
                   const struct device_head *head);

/* Ends the thread at its next step boundary (abort the flags first where it may wait) and frees all. */
void device_free(struct device **device);

/* Any thread. Takes the order (mem_alloc'ed); -EAGAIN when the mailbox is full: the order stays the
 * caller's. */
int device_order(struct device *d, struct order *order);

void device_figures(struct device *d, struct device_figures *ret); /* any thread */

void order_free(void *order); /* with its message */
void post_free(void *post);

#endif
