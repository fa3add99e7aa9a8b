/* The worker thread; see worker.h.
 *
 * It alone touches the selector (head, keys, sets) and may block on its mailbox only, which wakes it once
 * a second at the latest. Answers travel as pointers; their buffers come back and are used again, so that a
 * step in full flow allocates nothing. */
#include "retriever/worker.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/mailbox.h"
#include "base/thread.h"

enum { TASKS = 1024, ANSWERS = 1024, SPARES = 8 };

struct worker {
    pthread_t thread;
    struct selector *selector;
    uint64_t decoder; /* whose sequences are open */
    struct mailbox *tasks, *answers, *spares;
    struct worker_answer *answer; /* being filled; NULL: none is at hand */
    atomic_bool stopping;
    pthread_mutex_t mutex; /* guards stats */
    struct selector_stats stats;
};

void worker_task_free(struct worker_task **task)
{
    if (*task && (*task)->kind == WORKER_FEATURES && (*task)->features >= 0)
        close((*task)->features);
    if (*task)
        msg_free(&(*task)->msg);
    mem_free(task);
}

static void free_task(void *item)
{
    struct worker_task *task = item;
    worker_task_free(&task);
}

static void free_answer(void *item)
{
    struct worker_answer *answer = item;
    selector_result_free(&answer->result);
    mem_free(&answer);
}

static struct worker_answer *spare_answer(struct worker *w)
{
    if (!w->answer)
        w->answer = mailbox_take(w->spares);
    if (!w->answer)
        w->answer = mem_alloc(1, sizeof *w->answer);
    w->answer->err.code = 0;
    w->answer->features = w->answer->granted = false;
    w->answer->result.entry_count = w->answer->result.refusal_count = 0;
    return w->answer;
}

/* Fills the answer. 1 when it says something that must be sent. */
static int take_message(struct worker *w, const struct msg *msg, struct worker_answer *answer)
{
    int rc = 0;
    switch (msg->kind) {
    case MSG_OPEN:
        if (selector_open(w->selector, &msg->open, &answer->err) < 0)
            return 1;
        answer->granted = msg->open.flags & OPEN_REUSE;
        answer->grant = (struct msg_grant){.sequence = msg->open.sequence,
                                           .cached = selector_kept(w->selector, msg->open.sequence)};
        return answer->granted;
    case MSG_CLOSE:
        selector_close(w->selector, msg->close.sequence); /* one that is not open needs no closing */
        return 0;
    case MSG_STEP:
        selector_step(w->selector, (uint32_t)msg->id, &msg->step, &answer->result);
        return w->answer->result.entry_count || w->answer->result.refusal_count; /* of its last part */
    case MSG_RESELECT:
        rc = selector_repeat(w->selector, msg->reselect.sequence, (uint32_t)msg->id, &answer->result);
        return rc == 0;
    default:
        CHECK(!"a task that the loop never makes");
        return 0;
    }
}

static int take_task(struct worker *w, struct worker_task *task, struct worker_answer *answer)
{
    if (task->decoder != w->decoder) { /* also when there was no room for the task that says so */
        selector_close_all(w->selector);
        selector_drop_features(w->selector);
        w->decoder = task->decoder;
    }
    answer->decoder = task->decoder;
    answer->id = task->msg.id;
    switch (task->kind) {
    case WORKER_NEW_DECODER:
        return 0;
    case WORKER_FORGET:
        selector_forget_sent(w->selector);
        return 0;
    case WORKER_FEATURES:
        answer->features = true;
        selector_take_features(w->selector, task->features, &task->peers, &answer->err);
        task->features = -1;
        return 1;
    default:
        return take_message(w, &task->msg, answer);
    }
}

static void publish_stats(struct worker *w)
{
    pthread_mutex_lock(&w->mutex);
    selector_stats(w->selector, &w->stats);
    pthread_mutex_unlock(&w->mutex);
}

/* The loop is far behind: what this answer said will be said by the next set, whole. */
static void lose_answer(struct worker *w, const struct worker_answer *answer)
{
    for (uint32_t i = 0; i < answer->result.entry_count; i++)
        selector_forget_sent_of(w->selector, answer->result.entries[i].sequence);
}

static void send_answer(struct worker *w)
{
    publish_stats(w); /* before the answer: whoever has seen it finds it counted */
    if (mailbox_put(w->answers, w->answer) < 0)
        lose_answer(w, w->answer);
    else
        w->answer = NULL;
}

static struct selector_result *send_part(void *arg, struct selector_result *result)
{
    struct worker *w = arg;
    uint64_t decoder = w->answer->decoder, id = w->answer->id;
    CHECK(result == &w->answer->result);
    send_answer(w);
    struct worker_answer *next = spare_answer(w);
    next->decoder = decoder;
    next->id = id;
    return &next->result;
}

static void *run(void *arg)
{
    struct worker *w = arg;
    while (!atomic_load(&w->stopping)) {
        struct worker_task *task = mailbox_wait(w->tasks, clock_now_ns() + CLOCK_S);
        if (!task)
            continue;
        if (take_task(w, task, spare_answer(w)))
            send_answer(w);
        else
            publish_stats(w);
        worker_task_free(&task);
    }
    if (w->answer)
        free_answer(w->answer);
    return NULL;
}

struct worker *worker_create(struct selector *selector)
{
    struct worker *w = mem_alloc(1, sizeof *w);
    w->selector = selector;
    selector_on_part(selector, send_part, w);
    w->tasks = mailbox_create(TASKS);
    w->answers = mailbox_create(ANSWERS);
    w->spares = mailbox_create(SPARES);
    pthread_mutex_init(&w->mutex, NULL);
    selector_stats(selector, &w->stats);
    thread_start(&w->thread, run, w);
    pthread_setname_np(w->thread, "worker");
    return w;
}

void worker_free(struct worker **worker)
{
    struct worker *w = *worker;
    if (!w)
        return;
    atomic_store(&w->stopping, true);
    struct worker_task *wake = mem_alloc(1, sizeof *wake); /* only to end its wait */
    wake->kind = WORKER_FORGET;
    if (mailbox_put(w->tasks, wake) < 0)
        worker_task_free(&wake);
    pthread_join(w->thread, NULL);
    mailbox_free(&w->tasks, free_task);
    mailbox_free(&w->answers, free_answer);
    mailbox_free(&w->spares, free_answer);
    pthread_mutex_destroy(&w->mutex);
    selector_free(&w->selector);
    mem_free(worker);
}

int worker_put(struct worker *w, struct worker_task *task)
{
    return mailbox_put(w->tasks, task);
}

int worker_fd(const struct worker *w)
{
    return mailbox_fd(w->answers);
}

struct worker_answer *worker_take(struct worker *w)
{
    return mailbox_take(w->answers);
}

void worker_done(struct worker *w, struct worker_answer **answer)
{
    if (mailbox_put(w->spares, *answer) < 0)
        free_answer(*answer);
    *answer = NULL;
}

void worker_stats(struct worker *w, struct selector_stats *ret_stats)
{
    pthread_mutex_lock(&w->mutex);
    *ret_stats = w->stats;
    pthread_mutex_unlock(&w->mutex);
}
