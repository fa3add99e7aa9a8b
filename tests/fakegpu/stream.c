/* Streams of the double: a thread and a queue each, events, flags, graphs. A stream takes its work in order
 * and whenever its thread comes to it, a batch at a time. The mutex of a stream guards its queue. */
#include <errno.h>
#include <stdio.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "tests/fakegpu/fakegpu.h"

enum { FREE_WAIT_S = 20, POLL_NS = 20000 };

struct item {
    struct item *next;
    struct fakegpu_op op;
};

enum { GUESTS_MAX = 4 };

struct gpu_graph {
    struct fakegpu_op *ops;
    size_t count, capacity;
    uint32_t flags;
    struct CUstream_st *guests[GUESTS_MAX]; /* streams that are captured with the one that began */
    uint32_t guest_count;
};

struct CUstream_st {
    struct gpu *gpu;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t added, finished;
    struct item *first, **last;
    struct item *spare; /* done with: one in use for each piece that is on its way */
    uint64_t queued;
    atomic_uint_fast64_t done;
    atomic_int waiting; /* for `finished` */
    bool stop;
    struct gpu_graph *capture; /* owner's thread only */
    bool is_guest;             /* the capture is of a stream that this one follows */
    bool owes;                 /* a guest: the capture's own stream has not followed it since */
    struct fakegpu_worker worker;
};

/* Counts of records, so that a wait is for those that were queued before it. */
struct gpu_event {
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    uint64_t queued, done;
    int64_t at_ns; /* of the last one that is done */
};

struct flag_argument {
    uint32_t *flag;
    uint32_t value;
};

struct event_argument {
    struct gpu_event *event;
    uint64_t count;
};

struct copy_argument {
    void *to;
    const void *from;
    size_t bytes;
    int byte;
};

struct call_argument {
    void (*call)(void *);
    void *arg;
};

void *fakegpu_scratch(struct fakegpu_worker *worker, int index, size_t bytes)
{
    if (worker->scratch_bytes[index] < bytes) {
        mem_free(&worker->scratch[index]);
        worker->scratch[index] = mem_alloc_aligned(bytes, 1);
        worker->scratch_bytes[index] = bytes;
    }
    return worker->scratch[index];
}

static void run_item(struct CUstream_st *s, struct item *item)
{
    if (fakegpu_sound(s->gpu) == 0 || item->op.is_flag)
        item->op.run(&s->worker, item->op.argument);
    atomic_fetch_add(&s->done, 1);
    if (atomic_load(&s->waiting) == 0) /* who waits counts itself first, then looks at `done` */
        return;
    pthread_mutex_lock(&s->mutex);
    pthread_cond_broadcast(&s->finished);
    pthread_mutex_unlock(&s->mutex);
}

static void *stream_main(void *arg)
{
    struct CUstream_st *s = arg;
    pthread_mutex_lock(&s->mutex);
    for (;;) {
        while (!s->first && !s->stop)
            pthread_cond_wait(&s->added, &s->mutex);
        struct item *first = s->first, **last = s->last;
        if (!first)
            break;
        s->first = NULL;
        s->last = &s->first;
        pthread_mutex_unlock(&s->mutex);
        for (struct item *item = first; item; item = item->next)
            run_item(s, item);
        pthread_mutex_lock(&s->mutex);
        *last = s->spare;
        s->spare = first;
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

/* Until `until` pieces are done; with the mutex held. -ETIMEDOUT. */
static int wait_done(struct CUstream_st *s, uint64_t until, const struct timespec *deadline)
{
    int r = 0;
    atomic_fetch_add(&s->waiting, 1);
    while (atomic_load(&s->done) < until && r == 0)
        r = deadline ? -pthread_cond_timedwait(&s->finished, &s->mutex, deadline)
                     : -pthread_cond_wait(&s->finished, &s->mutex);
    atomic_fetch_sub(&s->waiting, 1);
    return r;
}

int fakegpu_stream_create(struct gpu *gpu, enum gpu_priority priority, struct CUstream_st **ret_stream,
                          struct err *err)
{
    struct CUstream_st *s = mem_alloc(1, sizeof *s);
    (void)priority;
    s->gpu = gpu;
    s->last = &s->first;
    pthread_mutex_init(&s->mutex, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&s->added, NULL);
    pthread_cond_init(&s->finished, &clock);
    pthread_condattr_destroy(&clock);
    int r = compute_create("cpu", 1, COMPUTE_ISA_AUTO, &s->worker.compute, err);
    if (r == 0 && (r = -pthread_create(&s->thread, NULL, stream_main, s)) < 0)
        err_set(err, r, "thread of a stream: %s", strerror(-r));
    if (r < 0) {
        compute_free(&s->worker.compute);
        mem_free(&s);
        return r;
    }
    *ret_stream = s;
    return 0;
}

static void forget_guest(struct gpu_graph *g, const struct CUstream_st *guest)
{
    for (uint32_t i = 0; i < g->guest_count; i++)
        if (g->guests[i] == guest)
            g->guests[i--] = g->guests[--g->guest_count];
}

/* Work that never ends (a wait that nobody released) is a fault of the program under test. */
void fakegpu_stream_free(struct gpu *gpu, struct CUstream_st **address)
{
    struct CUstream_st *s = *address;
    struct timespec until;
    (void)gpu;
    if (!s)
        return;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += FREE_WAIT_S;
    pthread_mutex_lock(&s->mutex);
    if (wait_done(s, s->queued, &until) < 0) {
        fprintf(stderr, "fakegpu: stream_free: work is left after %d s\n", FREE_WAIT_S);
        abort();
    }
    s->stop = true;
    pthread_cond_signal(&s->added);
    pthread_mutex_unlock(&s->mutex);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->added);
    pthread_cond_destroy(&s->finished);
    pthread_mutex_destroy(&s->mutex);
    if (s->is_guest)
        forget_guest(s->capture, s);
    else
        fakegpu_graph_free(&s->capture);
    for (struct item *item; (item = s->spare);) {
        s->spare = item->next;
        mem_free(&item);
    }
    for (int i = 0; i < 4; i++)
        mem_free(&s->worker.scratch[i]);
    compute_free(&s->worker.compute);
    mem_free(address);
}

static void add_item(struct CUstream_st *s, const struct fakegpu_op *op)
{
    pthread_mutex_lock(&s->mutex);
    struct item *item = s->spare;
    if (item)
        s->spare = item->next;
    else
        item = mem_alloc_aligned(1, sizeof *item);
    item->op = *op;
    item->next = NULL;
    *s->last = item;
    s->last = &item->next;
    s->queued++;
    pthread_cond_signal(&s->added);
    pthread_mutex_unlock(&s->mutex);
}

static int add_op(struct CUstream_st *s, const struct fakegpu_op *op)
{
    struct gpu_graph *g = s->capture;
    if (!g) {
        add_item(s, op);
        return 0;
    }
    s->owes = s->is_guest;
    if (g->count == g->capacity) {
        /* Not mem_resize: operations are aligned. */
        size_t capacity = g->capacity ? 2 * g->capacity : 256;
        struct fakegpu_op *ops = mem_alloc_aligned(capacity, sizeof *ops);
        if (g->count)
            memcpy(ops, g->ops, g->count * sizeof *ops);
        mem_free(&g->ops);
        g->ops = ops;
        g->capacity = capacity;
    }
    g->ops[g->count++] = *op;
    g->flags += op->is_flag;
    return 0;
}

static void count_launch(struct gpu *gpu)
{
    static atomic_llong launches;
    const char *fail = getenv("SPECONTEXT_FAKEGPU_FAIL");
    if (fail && fail[0] && atomic_fetch_add(&launches, 1) + 1 >= atoll(fail))
        fakegpu_break(gpu, "launch %s failed on demand: an illegal memory access was encountered", fail);
}

int fakegpu_queue(struct CUstream_st *stream, void (*run)(struct fakegpu_worker *, void *),
                  const void *argument, size_t bytes, const void *const *reaches, int count)
{
    struct fakegpu_op op = {.run = run};
    if (!stream || bytes > sizeof op.argument)
        return -EINVAL;
    count_launch(stream->gpu);
    for (int i = 0; i < count; i++)
        if (reaches[i] && !fakegpu_reaches(stream->gpu, reaches[i]))
            fakegpu_break(stream->gpu,
                          "illegal memory access: %p (argument %d) is neither device memory nor "
                          "registered",
                          reaches[i], i);
    if (fakegpu_sound(stream->gpu) < 0)
        return -EIO;
    memcpy(op.argument, argument, bytes);
    return add_op(stream, &op);
}

/* Between two streams: one passes it, the other waits for that. The last to use it frees it. */
struct order {
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    bool passed;
    int users;
};

static void leave_order(struct order *o)
{
    bool last = --o->users == 0;
    pthread_mutex_unlock(&o->mutex);
    if (!last)
        return;
    pthread_cond_destroy(&o->moved);
    pthread_mutex_destroy(&o->mutex);
    mem_free(&o);
}

static void run_pass(struct fakegpu_worker *worker, void *argument)
{
    struct order *o = *(struct order **)argument;
    (void)worker;
    pthread_mutex_lock(&o->mutex);
    o->passed = true;
    pthread_cond_broadcast(&o->moved);
    leave_order(o);
}

static void run_await(struct fakegpu_worker *worker, void *argument)
{
    struct order *o = *(struct order **)argument;
    (void)worker;
    pthread_mutex_lock(&o->mutex);
    while (!o->passed)
        pthread_cond_wait(&o->moved, &o->mutex);
    leave_order(o);
}

/* Both streams' work of a capture goes into one list, which is an order that CUDA could choose. */
int fakegpu_stream_follow(struct gpu *gpu, struct CUstream_st *stream, struct CUstream_st *after)
{
    (void)gpu;
    if (!stream || !after || stream == after)
        return -EINVAL;
    if (after->capture && !stream->capture) {
        struct gpu_graph *g = after->capture;
        if (g->guest_count == GUESTS_MAX)
            return -EINVAL;
        g->guests[g->guest_count++] = stream;
        stream->capture = g;
        stream->is_guest = stream->owes = true;
        return 0;
    }
    if (stream->capture != after->capture) /* a captured stream cannot wait for work outside */
        return -EINVAL;
    if (stream->capture) {
        if (!stream->is_guest)
            after->owes = false;
        return 0;
    }
    struct order *o = mem_alloc(1, sizeof *o);
    pthread_mutex_init(&o->mutex, NULL);
    pthread_cond_init(&o->moved, NULL);
    o->users = 2;
    struct fakegpu_op pass = {.run = run_pass, .is_flag = true}, await = {.run = run_await, .is_flag = true};
    memcpy(pass.argument, &o, sizeof o);
    memcpy(await.argument, &o, sizeof o);
    add_item(after, &pass);
    add_item(stream, &await);
    return 0;
}

int fakegpu_stream_sync(struct CUstream_st *s)
{
    if (s->capture)
        return -EINVAL;
    pthread_mutex_lock(&s->mutex);
    wait_done(s, s->queued, NULL);
    pthread_mutex_unlock(&s->mutex);
    return fakegpu_sound(s->gpu) < 0 ? -EIO : 0;
}

int fakegpu_stream_done(struct CUstream_st *s)
{
    if (s->capture)
        return -EINVAL;
    pthread_mutex_lock(&s->mutex);
    int done = atomic_load(&s->done) == s->queued;
    pthread_mutex_unlock(&s->mutex);
    return fakegpu_sound(s->gpu) < 0 ? -EIO : done;
}

bool fakegpu_capturing(const struct CUstream_st *stream)
{
    return stream->capture != NULL;
}

/* ---- copies and calls ---------------------------------------------------------------------------------- */

static void run_copy(struct fakegpu_worker *worker, void *argument)
{
    const struct copy_argument *a = argument;
    (void)worker;
    if (a->from)
        memmove(a->to, a->from, a->bytes);
    else
        memset(a->to, a->byte, a->bytes);
}

/* Host memory that is not pinned is allowed here, and read when the copy is done. */
int fakegpu_copy(void *to, const void *from, size_t bytes, struct CUstream_st *stream)
{
    struct copy_argument a = {to, from, bytes, 0};
    if (!bytes)
        return 0;
    if (!to || !from)
        return -EINVAL;
    return FAKEGPU_LAUNCH(stream, run_copy, &a, NULL);
}

int fakegpu_copy_mapped(const struct cuda_mapped_copy *copies, uint32_t count, struct CUstream_st *stream)
{
    int r = count <= CUDA_MAPPED_COPIES ? 0 : -EINVAL;
    for (uint32_t i = 0; i < count && r == 0; i++) {
        const struct cuda_mapped_copy *c = &copies[i];
        uint64_t stride = c->rows > 1 ? c->stride : 0;
        if (!fakegpu_aligned(c->to, 4) || !fakegpu_aligned(c->from, 4) || (c->bytes | stride) % 4 ||
            (c->rows > 1 && stride < c->bytes) || c->bytes > UINT64_C(1) << 32 ||
            c->bytes * c->rows > UINT64_C(1) << 32)
            return -EINVAL;
        for (uint32_t row = 0; row < c->rows && c->bytes && r == 0; row++) {
            struct copy_argument a = {(uint8_t *)c->to + row * stride,
                                      (const uint8_t *)c->from + row * stride, c->bytes, 0};
            r = FAKEGPU_LAUNCH(stream, run_copy, &a, a.to, a.from);
        }
    }
    return r;
}

int fakegpu_copy_rows(void *to, const void *from, size_t bytes, size_t stride, size_t rows,
                      struct CUstream_st *stream)
{
    int r = bytes <= stride ? 0 : -EINVAL;
    for (size_t i = 0; i < rows && r == 0; i++)
        r = fakegpu_copy((uint8_t *)to + i * stride, (const uint8_t *)from + i * stride, bytes, stream);
    return r;
}

int fakegpu_fill(void *to, uint8_t byte, size_t bytes, struct CUstream_st *stream)
{
    struct copy_argument a = {to, NULL, bytes, byte};
    if (!bytes)
        return 0;
    return FAKEGPU_LAUNCH(stream, run_copy, &a, to);
}

static void run_call(struct fakegpu_worker *worker, void *argument)
{
    const struct call_argument *a = argument;
    (void)worker;
    a->call(a->arg);
}

int fakegpu_host_call(struct CUstream_st *stream, void (*call)(void *), void *arg)
{
    struct call_argument a = {call, arg};
    if (stream->capture)
        return -EINVAL;
    return FAKEGPU_LAUNCH(stream, run_call, &a, NULL);
}

/* ---- events -------------------------------------------------------------------------------------------- */

int fakegpu_event_create(struct gpu *gpu, struct gpu_event **ret_event, struct err *err)
{
    (void)gpu;
    (void)err;
    *ret_event = mem_alloc(1, sizeof **ret_event);
    pthread_mutex_init(&(*ret_event)->mutex, NULL);
    pthread_cond_init(&(*ret_event)->moved, NULL);
    return 0;
}

/* Records that are on their way still use it. */
void fakegpu_event_free(struct gpu_event **event)
{
    struct gpu_event *e = *event;
    if (!e)
        return;
    pthread_mutex_lock(&e->mutex);
    while (e->done < e->queued)
        pthread_cond_wait(&e->moved, &e->mutex);
    pthread_mutex_unlock(&e->mutex);
    pthread_cond_destroy(&e->moved);
    pthread_mutex_destroy(&e->mutex);
    mem_free(event);
}

static void run_record(struct fakegpu_worker *worker, void *argument)
{
    const struct event_argument *a = argument;
    (void)worker;
    pthread_mutex_lock(&a->event->mutex);
    if (a->event->done < a->count)
        a->event->done = a->count;
    a->event->at_ns = clock_now_ns();
    pthread_cond_broadcast(&a->event->moved);
    pthread_mutex_unlock(&a->event->mutex);
}

/* Events are done even when the context is broken, so that nobody waits for ever: as flags, see
 * stream_main. */
int fakegpu_event_record(struct gpu_event *event, struct CUstream_st *stream)
{
    if (stream->capture)
        return -ENOTSUP;
    pthread_mutex_lock(&event->mutex);
    struct event_argument a = {event, ++event->queued};
    pthread_mutex_unlock(&event->mutex);
    struct fakegpu_op op = {.run = run_record, .is_flag = true};
    memcpy(op.argument, &a, sizeof a);
    add_item(stream, &op);
    return 0;
}

int fakegpu_event_elapsed(struct gpu_event *from, struct gpu_event *to, float *ret_ms)
{
    int r = 0;
    pthread_mutex_lock(&from->mutex);
    int64_t begin = from->at_ns;
    r = !from->done || from->done < from->queued ? -EBUSY : 0;
    pthread_mutex_unlock(&from->mutex);
    pthread_mutex_lock(&to->mutex);
    int64_t end = to->at_ns;
    r = !to->done || to->done < to->queued ? -EBUSY : r;
    pthread_mutex_unlock(&to->mutex);
    *ret_ms = (float)(end - begin) / 1e6f;
    return r;
}

/* ---- flags and graphs ---------------------------------------------------------------------------------- */

static void run_flag_write(struct fakegpu_worker *worker, void *argument)
{
    const struct flag_argument *a = argument;
    (void)worker;
    __atomic_store_n(a->flag, a->value, __ATOMIC_RELEASE);
}

static void run_flag_wait(struct fakegpu_worker *worker, void *argument)
{
    const struct flag_argument *a = argument;
    (void)worker;
    while ((int32_t)(__atomic_load_n(a->flag, __ATOMIC_ACQUIRE) - a->value) < 0)
        ppoll(NULL, 0, &(struct timespec){.tv_nsec = POLL_NS}, NULL);
}

static int add_flag(void (*run)(struct fakegpu_worker *, void *), uint32_t *flag, uint32_t value,
                    struct CUstream_st *stream)
{
    struct fakegpu_op op = {.run = run, .is_flag = true};
    struct flag_argument a = {flag, value};
    if (!stream || !fakegpu_aligned(flag, 4))
        return -EINVAL;
    if (!fakegpu_reaches(stream->gpu, flag))
        fakegpu_break(stream->gpu, "illegal memory access: flag %p is not registered", (void *)flag);
    if (fakegpu_sound(stream->gpu) < 0)
        return -EIO;
    memcpy(op.argument, &a, sizeof a);
    return add_op(stream, &op);
}

int fakegpu_flag_write(uint32_t *flag, uint32_t value, struct CUstream_st *stream)
{
    return add_flag(run_flag_write, flag, value, stream);
}

int fakegpu_flag_wait(uint32_t *flag, uint32_t value, struct CUstream_st *stream)
{
    return add_flag(run_flag_wait, flag, value, stream);
}

int fakegpu_capture_begin(struct CUstream_st *stream, struct err *err)
{
    if (stream->capture)
        return err_set(err, -EBUSY, "capture_begin: the stream is being captured");
    stream->capture = mem_alloc(1, sizeof *stream->capture);
    return 0;
}

int fakegpu_capture_end(struct gpu *gpu, struct CUstream_st *stream, struct gpu_graph **ret_graph,
                        struct err *err)
{
    (void)gpu;
    if (!stream->capture)
        return err_set(err, -EINVAL, "capture_end: no capture");
    if (stream->is_guest)
        return err_set(err, -EINVAL, "capture_end: another stream's capture");
    *ret_graph = stream->capture;
    stream->capture = NULL;
    bool unjoined = false;
    for (uint32_t i = 0; i < (*ret_graph)->guest_count; i++) {
        struct CUstream_st *guest = (*ret_graph)->guests[i];
        unjoined |= guest->owes;
        guest->capture = NULL;
        guest->is_guest = guest->owes = false;
    }
    (*ret_graph)->guest_count = 0;
    if (!unjoined && !getenv("SPECONTEXT_FAKEGPU_NO_GRAPHS"))
        return 0;
    fakegpu_graph_free(ret_graph);
    return err_set(err, -EIO,
                   unjoined ? "capture_end: a stream's work is not followed"
                            : "capture_end: refused on demand");
}

uint32_t fakegpu_graph_flags(const struct gpu_graph *graph)
{
    return graph->flags;
}

int fakegpu_graph_launch(struct gpu_graph *graph, const uint32_t *values, struct CUstream_st *stream)
{
    uint32_t flag = 0;
    if (stream->capture)
        return -EINVAL;
    count_launch(stream->gpu);
    if (fakegpu_sound(stream->gpu) < 0)
        return -EIO;
    for (size_t i = 0; i < graph->count; i++) {
        struct fakegpu_op op = graph->ops[i];
        if (op.is_flag)
            memcpy(op.argument + offsetof(struct flag_argument, value), &values[flag++], sizeof *values);
        add_item(stream, &op);
    }
    return 0;
}

/* A launch gives all of them again. */
int fakegpu_graph_set(struct gpu_graph *graph, const uint32_t *values)
{
    uint32_t flag = 0;
    for (size_t i = 0; i < graph->count; i++)
        if (graph->ops[i].is_flag)
            memcpy(graph->ops[i].argument + offsetof(struct flag_argument, value), &values[flag++],
                   sizeof *values);
    return 0;
}

void fakegpu_graph_free(struct gpu_graph **graph)
{
    if (!*graph)
        return;
    mem_free(&(*graph)->ops);
    mem_free(graph);
}
