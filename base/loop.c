/* The event loop; see loop.h.
 *
 * Owner: the one thread that runs it; nothing here is locked. Sources are freed only between two rounds of
 * dispatch, so a callback may remove any descriptor, its own included, while events for it are still in the
 * batch. It must never block anywhere but in epoll_wait, and there only until the next timer. */
#include "base/loop.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"

enum { LOOP_BATCH = 64, LOOP_SLEEP_MAX_MS = 60000 };

struct loop_source {
    int fd; /* -1: removed, waits to be freed */
    void (*fn)(void *arg, uint32_t events);
    void *arg;
    struct loop_source *next;
};

struct loop_timer {
    int64_t period_ns, next_ns; /* period 0: a free place */
    void (*fn)(void *arg);
    void *arg;
};

struct loop_signals {
    int fd;
    void (*fn)(void *arg, int signal);
    void *arg;
    struct loop_signals *next;
};

struct loop_hook {
    int (*fn)(void *arg); /* NULL: a free place */
    void *arg;
};

struct loop {
    int epoll;
    int code;
    bool stopping;
    struct loop_source *sources, *removed;
    struct loop_signals *signals;
    struct loop_timer *timers;
    int timer_count;
    struct loop_hook *hooks;
    int hook_count;
};

struct loop *loop_create(void)
{
    struct loop *loop = mem_alloc(1, sizeof *loop);
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    CHECK(loop->epoll >= 0);
    return loop;
}

static void free_sources(struct loop_source **list)
{
    while (*list) {
        struct loop_source *source = *list;
        *list = source->next;
        mem_free(&source);
    }
}

void loop_free(struct loop **loop_at)
{
    struct loop *loop = *loop_at;
    if (!loop)
        return;
    *loop_at = NULL;
    free_sources(&loop->sources);
    free_sources(&loop->removed);
    while (loop->signals) {
        struct loop_signals *signals = loop->signals;
        loop->signals = signals->next;
        close(signals->fd);
        mem_free(&signals);
    }
    close(loop->epoll);
    mem_free(&loop->timers);
    mem_free(&loop->hooks);
    mem_free(&loop);
}

int loop_add_fd(struct loop *loop, int fd, uint32_t events, void (*fn)(void *arg, uint32_t events), void *arg)
{
    struct loop_source *source = mem_alloc(1, sizeof *source);
    struct epoll_event event = {.events = events, .data.ptr = source};
    if (epoll_ctl(loop->epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
        int code = -errno;
        mem_free(&source);
        return code;
    }
    *source = (struct loop_source){.fd = fd, .fn = fn, .arg = arg, .next = loop->sources};
    loop->sources = source;
    return 0;
}

void loop_remove_fd(struct loop *loop, int fd)
{
    struct loop_source **at = &loop->sources;
    while (*at && (*at)->fd != fd)
        at = &(*at)->next;
    struct loop_source *source = *at;
    if (!source)
        return;
    epoll_ctl(loop->epoll, EPOLL_CTL_DEL, fd, NULL); /* fails harmlessly when fd is closed already */
    *at = source->next;
    source->fd = -1;
    source->next = loop->removed;
    loop->removed = source;
}

int loop_add_timer(struct loop *loop, int64_t period_ns, void (*fn)(void *arg), void *arg)
{
    CHECK(period_ns > 0);
    int id = 0;
    while (id < loop->timer_count && loop->timers[id].period_ns)
        id++;
    if (id == loop->timer_count) {
        loop->timers = mem_resize(loop->timers, (size_t)id + 1, sizeof *loop->timers);
        loop->timer_count++;
    }
    loop->timers[id] = (struct loop_timer){
        .period_ns = period_ns, .next_ns = clock_now_ns() + period_ns, .fn = fn, .arg = arg};
    return id;
}

void loop_remove_timer(struct loop *loop, int timer)
{
    if (timer >= 0 && timer < loop->timer_count)
        loop->timers[timer].period_ns = 0;
}

static void read_signals(void *arg, uint32_t events)
{
    (void)events;
    struct loop_signals *signals = arg;
    struct signalfd_siginfo info;
    while (read(signals->fd, &info, sizeof info) == (ssize_t)sizeof info)
        signals->fn(signals->arg, (int)info.ssi_signo);
}

int loop_add_signals(struct loop *loop, const int *list, void (*fn)(void *arg, int signal), void *arg)
{
    sigset_t set;
    sigemptyset(&set);
    for (; *list; list++)
        sigaddset(&set, *list);
    int r = pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (r)
        return -r;
    int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0)
        return -errno;
    struct loop_signals *signals = mem_alloc(1, sizeof *signals);
    *signals = (struct loop_signals){.fd = fd, .fn = fn, .arg = arg, .next = loop->signals};
    r = loop_add_fd(loop, fd, EPOLLIN, read_signals, signals);
    if (r < 0) {
        close(fd);
        mem_free(&signals);
        return r;
    }
    loop->signals = signals;
    return 0;
}

static void remove_hooks(struct loop *loop, const void *arg)
{
    for (int i = 0; i < loop->hook_count; i++)
        if (loop->hooks[i].arg == arg)
            loop->hooks[i].fn = NULL;
}

void loop_before_sleep(struct loop *loop, int (*fn)(void *arg), void *arg)
{
    if (!fn) {
        remove_hooks(loop, arg);
        return;
    }
    int i = 0;
    while (i < loop->hook_count && loop->hooks[i].fn)
        i++;
    if (i == loop->hook_count) {
        loop->hooks = mem_resize(loop->hooks, (size_t)i + 1, sizeof *loop->hooks);
        loop->hook_count++;
    }
    loop->hooks[i] = (struct loop_hook){.fn = fn, .arg = arg};
}

static bool run_hooks(struct loop *loop)
{
    bool again = false;
    for (int i = 0; i < loop->hook_count; i++)
        if (loop->hooks[i].fn && loop->hooks[i].fn(loop->hooks[i].arg))
            again = true;
    return again;
}

static int sleep_ms(const struct loop *loop)
{
    int64_t next = INT64_MAX;
    for (int i = 0; i < loop->timer_count; i++)
        if (loop->timers[i].period_ns && loop->timers[i].next_ns < next)
            next = loop->timers[i].next_ns;
    return next == INT64_MAX ? -1 : clock_left_ms(next, LOOP_SLEEP_MAX_MS);
}

static void run_timers(struct loop *loop)
{
    int64_t now = clock_now_ns();
    int count = loop->timer_count; /* timers that callbacks add are not due yet */
    for (int i = 0; i < count; i++) {
        struct loop_timer *timer = &loop->timers[i];
        if (!timer->period_ns || timer->next_ns > now)
            continue;
        timer->next_ns += timer->period_ns;
        if (timer->next_ns <= now) /* periods that were missed are not made up for */
            timer->next_ns = now + timer->period_ns;
        timer->fn(timer->arg); /* may move the array */
    }
}

static void dispatch(const struct epoll_event *events, int count)
{
    for (int i = 0; i < count; i++) {
        struct loop_source *source = events[i].data.ptr;
        if (source->fd >= 0)
            source->fn(source->arg, events[i].events);
    }
}

int loop_run(struct loop *loop)
{
    struct epoll_event events[LOOP_BATCH];
    loop->stopping = false;
    for (;;) {
        bool again = run_hooks(loop);
        free_sources(&loop->removed);
        if (loop->stopping)
            return loop->code;
        int count = epoll_wait(loop->epoll, events, LOOP_BATCH, again ? 0 : sleep_ms(loop));
        CHECK(count >= 0 || errno == EINTR);
        dispatch(events, count);
        run_timers(loop);
    }
}

void loop_stop(struct loop *loop, int code)
{
    loop->stopping = true;
    loop->code = code;
}
