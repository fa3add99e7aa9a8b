/* The device thread; see device.h.
 *
 * It blocks on its mailbox, and inside a step on the store's flags with a deadline; on nothing else. What it
 * has to say goes to the loop's mailbox; where that is full, posts wait in a list of their own, in order. */
#include "decoder/device.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/thread.h"
#include "model/tokenizer.h"

enum { ORDERS_MAX = 4096 };

struct backlog { /* a post that found the mailbox full */
    struct post *post;
    struct backlog *next;
};

struct device {
    struct device_options options;
    struct mailbox *orders, *posts;
    pthread_t thread;
    uint8_t *eos;
    struct stepper_attachment attachment; /* written before ORDER_ATTACH */
    struct device_head head;
    struct export *export; /* NULL: the head reads no hidden states */
    struct pass *pass;
    struct gpu_device *gpu; /* instead of the pass */
    struct weights_gpu *weights;
    struct pass_gpu *pass_gpu;
    struct stepper *stepper;
    struct scheduler *scheduler;
    struct awake *awake; /* NULL: cores sleep between the pieces of a step */
    struct backlog *backlog, **backlog_end;
    atomic_int stop;
    atomic_uint losses;               /* of the retriever: a step that waits for it learns of it by this */
    unsigned losses_heard;            /* by the thread; until it is attached the loop's */
    struct stepper_refusals refusals; /* as losses */
    pthread_mutex_t mutex;            /* of `figures` */
    struct device_figures figures;
    bool stale; /* a turn was made since */
};

void order_free(void *order_at)
{
    struct order *order = order_at;
    msg_free(&order->msg);
    mem_free(&order);
}

void post_free(void *post_at)
{
    struct post *post = post_at;
    mem_free(&post->msg.memory);
    if (post->kind == POST_EXPORT && post->fd >= 0)
        close(post->fd);
    mem_free(&post);
}

static void flush_backlog(struct device *d)
{
    while (d->backlog && mailbox_put(d->posts, d->backlog->post) == 0) {
        struct backlog *sent = d->backlog;
        d->backlog = sent->next;
        mem_free(&sent);
    }
    if (!d->backlog)
        d->backlog_end = &d->backlog;
}

static void put_post(struct device *d, struct post *post)
{
    flush_backlog(d);
    if (!d->backlog && mailbox_put(d->posts, post) == 0)
        return;
    struct backlog *item = mem_alloc(1, sizeof *item);
    item->post = post;
    *d->backlog_end = item;
    d->backlog_end = &item->next;
}

static void emit(void *arg, enum scheduler_target target, const struct msg *msg)
{
    struct device *d = arg;
    static const enum post_kind kinds[] = {
        [SCHEDULER_TO_CLIENT] = POST_CLIENT,
        [SCHEDULER_TO_STORE] = POST_STORE,
        [SCHEDULER_TO_RETRIEVER] = POST_RETRIEVER,
    };
    struct post *post = mem_alloc(1, sizeof *post);
    post->kind = kinds[target];
    post->msg = *msg;
    post->losses = d->losses_heard;
    put_post(d, post);
}

static void post_text(struct device *d, enum post_kind kind, const char *text)
{
    struct post *post = mem_alloc(1, sizeof *post);
    post->kind = kind;
    snprintf(post->text, sizeof post->text, "%s", text);
    put_post(d, post);
}

static void gpu_figures(struct device *d, struct device_figures *f)
{
    gpu_device_figures(d->gpu, &f->gpu);
    stepper_gpu_figures(d->stepper, &f->gpu_steps);
    f->on_gpu = true;
    f->activation_bytes = f->gpu.bytes[GPU_DEVICE_ACTIVATIONS];
    f->times = f->gpu_steps.times.compute;
    snprintf(f->backend, sizeof f->backend, "%s", f->gpu.info.name);
}

static void publish_figures(void *arg)
{
    struct device *d = arg;
    struct device_figures f = {0};
    scheduler_figures(d->scheduler, &f.requests);
    f.steps = *stepper_times(d->stepper);
    export_figures(d->export, &f.features);
    if (d->gpu) {
        gpu_figures(d, &f);
    } else {
        f.activation_bytes = pass_bytes(d->pass);
        f.times = *pass_times(d->pass);
        snprintf(f.backend, sizeof f.backend, "%s", pass_backend(d->pass));
    }
    pthread_mutex_lock(&d->mutex);
    d->figures = f;
    pthread_mutex_unlock(&d->mutex);
    d->stale = false;
}

void device_figures(struct device *d, struct device_figures *ret)
{
    pthread_mutex_lock(&d->mutex);
    *ret = d->figures;
    pthread_mutex_unlock(&d->mutex);
}

/* Ids that end a generation: the tokenizer's, or the configuration's where a file has no tokenizer. */
static uint8_t *collect_eos(const struct model *model)
{
    const struct model_config *c = model_config(model);
    uint8_t *eos = mem_alloc(c->vocab, 1);
    struct tokenizer *tokenizer = NULL;
    if (tokenizer_create(model, &tokenizer, NULL) == 0)
        for (uint32_t id = 0; id < c->vocab; id++)
            eos[id] = tokenizer_is_eos(tokenizer, id);
    tokenizer_free(&tokenizer);
    if (c->eos < c->vocab)
        eos[c->eos] = 1;
    return eos;
}

/* Opens the device and makes what needs no store. */
static int load(struct device *d, struct err *err)
{
    const struct device_options *o = &d->options;
    int on_gpu = gpu_named(o->device);
    int r = on_gpu ? gpu_device_open(o->device, &d->gpu, err) : 0;
    if (r < 0)
        return r;
    post_text(d, POST_OPENED, on_gpu ? d->gpu->api->info(d->gpu->gpu)->uuid : "cpu");
    d->eos = collect_eos(o->model);
    return on_gpu ? weights_gpu_create(d->gpu, o->model, o->pass.threads, &d->stop, &d->weights, err)
                  : pass_create(o->model, &o->pass, &d->pass, err);
}

/* 0: attached, or to end. */
static int wait_attach(struct device *d)
{
    bool attached = false;
    while (!d->stop && !attached) {
        struct order *order = mailbox_wait(d->orders, clock_now_ns() + CLOCK_S);
        attached = order && order->kind == ORDER_ATTACH;
        if (order)
            order_free(order); /* nothing else concerns anybody yet */
    }
    return attached;
}

static int make_stepper(struct device *d, struct err *err)
{
    const struct stepper_attachment *at = &d->attachment;
    struct pass_gpu_options options = {.tokens_max = d->options.pass.tokens_max,
                                       .entries_max = d->options.pass.entries_max,
                                       .list_max = at->control->list_max,
                                       .context = d->options.context};
    if (!d->gpu) {
        d->stepper = stepper_create(at, d->pass);
        return 0;
    }
    int r = pass_gpu_create(d->gpu, model_config(d->options.model), d->weights, &options, &d->pass_gpu, err);
    return r < 0 ? r : stepper_create_gpu(at, d->pass_gpu, &d->stepper, err);
}

/* A feature segment for the retriever that greeted last; the one before is let go. */
static int make_export(struct device *d, struct err *err)
{
    struct export_options o = {.wanted = d->head.features,
                               .decoder_epoch = d->head.decoder_epoch,
                               .retriever_epoch = d->head.retriever_epoch,
                               .chunk = d->options.chunk,
                               .reader = d->head.retriever_device,
                               .device = d->gpu};
    if (o.wanted.layers == 0)
        return 0;
    scheduler_export(d->scheduler, NULL);
    export_free(&d->export);
    int r = export_create(&o, &d->export, err);
    if (r < 0)
        return r;
    scheduler_export(d->scheduler, d->export);
    struct post *post = mem_alloc(1, sizeof *post);
    post->kind = POST_EXPORT;
    post->epoch = d->head.retriever_epoch;
    post->fd = fcntl(export_fd(d->export), F_DUPFD_CLOEXEC, 0);
    CHECK(post->fd >= 0);
    put_post(d, post);
    return 0;
}

static int prepare(struct device *d, struct err *err)
{
    const struct stepper_attachment *at = &d->attachment;
    int r = make_stepper(d, err);
    if (r < 0)
        return r;
    uint32_t sequences =
        d->options.sequences < at->control->sequences_max ? d->options.sequences : at->control->sequences_max;
    struct scheduler_options options = {.vocab = model_config(d->options.model)->vocab,
                                        .context = d->options.context,
                                        .list_max = at->control->list_max,
                                        .sequences = sequences,
                                        .chunk = d->options.chunk,
                                        .head = d->head.fingerprint,
                                        .features = d->head.features.layers > 0,
                                        .grace_ns = DEVICE_GRACE_S * CLOCK_S,
                                        .eos = d->eos,
                                        .emit = emit,
                                        .meanwhile = publish_figures,
                                        .arg = d};
    d->scheduler = scheduler_create(&options, d->stepper);
    if (!d->head.retriever_epoch)
        scheduler_retriever_ready(d->scheduler, 0);
    return make_export(d, err);
}

static int obey(struct device *d, struct order *order, struct err *err)
{
    switch (order->kind) {
    case ORDER_GENERATE:
        scheduler_generate(d->scheduler, order->id, &order->msg);
        break;
    case ORDER_CANCEL:
        scheduler_cancel(d->scheduler, order->id);
        break;
    case ORDER_STORE:
        scheduler_store(d->scheduler, &order->msg);
        break;
    case ORDER_RETRIEVER:
        if (order->msg.kind == MSG_ERROR)
            stepper_retriever_refused(d->stepper);
        scheduler_retriever(d->scheduler, &order->msg);
        break;
    case ORDER_RETRIEVER_LOST:
        d->losses_heard++;
        scheduler_retriever_ready(d->scheduler, 0);
        break;
    case ORDER_RETRIEVER_READY:
        scheduler_retriever_ready(d->scheduler, 1);
        break;
    case ORDER_EXPORT:
        d->head.retriever_epoch = order->id;
        snprintf(d->head.retriever_device, sizeof d->head.retriever_device, "%s", order->msg.hello.device);
        return make_export(d, err);
    case ORDER_WAKE:
    case ORDER_ATTACH:
        break;
    }
    return 0;
}

static int work(struct device *d, struct err *err)
{
    int more = 0;
    while (!d->stop) {
        struct order *order =
            more ? mailbox_take(d->orders) : mailbox_wait(d->orders, clock_now_ns() + CLOCK_S);
        if (order && d->stale) /* who hears the last word on a request finds its last step counted */
            publish_figures(d);
        while (order) {
            int r = obey(d, order, err);
            order_free(order);
            if (r < 0)
                return r;
            order = mailbox_take(d->orders);
        }
        more = scheduler_turn(d->scheduler, err);
        if (more < 0)
            return more;
        flush_backlog(d);
        d->stale = true;
        if (!more) /* else within the next step */
            publish_figures(d);
    }
    return 0;
}

static void *device_main(void *arg)
{
    struct device *d = arg;
    struct err err = {0};
    prctl(PR_SET_NAME, "device");
    int r = load(d, &err);
    int attached = r == 0 && wait_attach(d);
    if (attached)
        r = prepare(d, &err);
    if (attached && r == 0) {
        publish_figures(d);
        struct post *post = mem_alloc(1, sizeof *post);
        post->kind = POST_READY;
        put_post(d, post);
        r = work(d, &err);
    }
    if (r < 0)
        post_text(d, POST_FATAL, err.text);
    while (d->backlog && !d->stop) { /* the loop must hear of a failure, however busy it is */
        void *order = mailbox_wait(d->orders, clock_now_ns() + 10 * CLOCK_MS);
        if (order)
            order_free(order);
        flush_backlog(d);
    }
    scheduler_free(&d->scheduler);
    stepper_free(&d->stepper);
    export_free(&d->export);
    pass_free(&d->pass); /* by the thread that made it */
    pass_gpu_free(&d->pass_gpu);
    weights_gpu_free(&d->weights);
    gpu_device_free(&d->gpu);
    return NULL;
}

struct device *device_start(const struct device_options *options, struct mailbox *posts)
{
    struct device *d = mem_alloc(1, sizeof *d);
    d->options = *options;
    d->posts = posts;
    d->orders = mailbox_create(ORDERS_MAX);
    d->backlog_end = &d->backlog;
    pthread_mutex_init(&d->mutex, NULL);
    if (options->awake)
        awake_create(&d->awake, options->awake);
    thread_start(&d->thread, device_main, d);
    return d;
}

void device_attach(struct device *d, const struct stepper_attachment *attachment,
                   const struct device_head *head)
{
    d->attachment = *attachment;
    d->losses_heard = d->losses; /* orders that tell of these come before this one */
    d->attachment.losses = &d->losses;
    d->attachment.losses_heard = &d->losses_heard;
    d->attachment.refusals = &d->refusals;
    d->attachment.awake = d->awake;
    d->head = *head;
    struct order *order = mem_alloc(1, sizeof *order);
    order->kind = ORDER_ATTACH;
    CHECK(mailbox_put(d->orders, order) == 0); /* nobody has ordered anything in numbers yet */
}

int device_order(struct device *d, struct order *order)
{
    if (order->kind == ORDER_RETRIEVER_LOST)
        atomic_fetch_add(&d->losses, 1);
    if (order->kind == ORDER_RETRIEVER && order->msg.kind == MSG_ERROR)
        stepper_refused(&d->refusals, order->msg.id);
    return mailbox_put(d->orders, order);
}

void device_free(struct device **device)
{
    struct device *d = *device;
    if (!d)
        return;
    d->stop = 1;
    struct order *wake = mem_alloc(1, sizeof *wake);
    wake->kind = ORDER_WAKE;
    if (mailbox_put(d->orders, wake) < 0) /* full: then it is awake */
        order_free(wake);
    pthread_join(d->thread, NULL);
    awake_free(&d->awake);
    while (d->backlog) {
        struct backlog *item = d->backlog;
        d->backlog = item->next;
        post_free(item->post);
        mem_free(&item);
    }
    mailbox_free(&d->orders, order_free);
    pthread_mutex_destroy(&d->mutex);
    mem_free(&d->eos);
    mem_free(device);
}
