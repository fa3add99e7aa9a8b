/* Starts the parts, hears their readiness, sees their ends, ends them. Owns the children, their pidfds, the
 * runtime directory, the notify socket and the life line's write end. Runs on the loop's thread; it must
 * never wait for a child by blocking while the loop runs, and never leave one behind. */
#include "launch/supervise.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/program.h"
#include "launch/notify.h"
#include "link/daemon.h"
#include "link/runtime.h"

#define TICK_NS (50 * CLOCK_MS)
/* The death of one part makes others exit by their own decision; so long a plain exit waits for the news of a
 * violent end, which then is the one to name. */
#define SETTLE_NS       (100 * CLOCK_MS)
#define PROCESS_EXITING 0x4u /* PF_EXITING: the same in all kernels that we run on */
/* Who is stopped while starting is lost after this part of the time for starting: 4 s, as on the bus. */
#define STOPPED_SHARE 15

enum phase { STARTING, RUNNING, STOPPING, STOPPED };

struct part {
    const char *program;
    pid_t pid;
    int pidfd; /* -1: it has ended and was reaped */
    bool ready;
    int64_t stopped_ns; /* since when it was seen stopped while starting; 0: it is not */
    int wait_status;
    char last_words[256]; /* why it stops, as it told before it ended; "": it did not */
};

struct supervise {
    struct loop *loop;
    const struct supervise_ops *ops;
    void *arg;
    char bin_dir[PATH_MAX];
    char dir[RUNTIME_PATH_MAX];
    char notify_path[RUNTIME_PATH_MAX];
    int notify_fd;
    int lifeline[2];
    int timer;
    enum phase phase;
    bool failed;
    bool ordered; /* STOPPING: one part after the other */
    int64_t start_ns, start_deadline_ns, start_limit_ns;
    int64_t settle_ns; /* when the first unexpected end is reported; 0: none */
    int64_t kill_ns;   /* when SIGTERM was not enough */
    struct part *first_end;
    struct part parts[SUPERVISE_PARTS_MAX];
    int count;
};

static void on_tick(void *arg);
static void on_notify(void *arg, uint32_t events);
static void on_end(void *arg, uint32_t events);

static int find_bin_dir(const char *given, char ret[PATH_MAX], struct err *err)
{
    if (!given)
        return program_folder(ret, err);
    if (snprintf(ret, PATH_MAX, "%s", given) >= PATH_MAX)
        return err_set(err, -ENAMETOOLONG, "directory of the programs: name too long");
    return 0;
}

int supervise_create(const struct supervise_config *config, const struct supervise_ops *ops, void *arg,
                     struct supervise **ret_supervise, struct err *err)
{
    struct supervise *s = mem_alloc(1, sizeof *s);
    *s = (struct supervise){
        .loop = config->loop, .ops = ops, .arg = arg, .notify_fd = -1, .lifeline = {-1, -1}, .timer = -1};
    int r = daemon_open_files(err);
    if (!r)
        r = find_bin_dir(config->bin_dir, s->bin_dir, err);
    if (r)
        goto fail;
    if (!config->dir) {
        r = runtime_make_private(s->dir, err);
    } else {
        r = runtime_prepare(config->dir, err);
        if (!r && snprintf(s->dir, sizeof s->dir, "%s", config->dir) >= (int)sizeof s->dir)
            r = err_set(err, -ENAMETOOLONG, "%s: too long for a runtime directory", config->dir);
    }
    if (r) {
        s->dir[0] = 0; /* not ours to remove */
        goto fail;
    }
    r = runtime_path(s->dir, "notify.sock", s->notify_path, err);
    if (!r)
        r = notify_listen(s->notify_path, &s->notify_fd, err);
    if (r) {
        if (r == -EADDRINUSE)
            s->dir[0] = 0; /* another run's */
        goto fail;
    }
    r = runtime_lifeline(s->lifeline);
    if (r) {
        err_set(err, r, "life line: %s", strerror(-r));
        goto fail;
    }
    r = loop_add_fd(s->loop, s->notify_fd, EPOLLIN, on_notify, s);
    if (r) {
        err_set(err, r, "event loop: %s", strerror(-r));
        goto fail;
    }
    s->timer = loop_add_timer(s->loop, TICK_NS, on_tick, s);
    s->start_ns = config->start_ns ? config->start_ns : SUPERVISE_START_NS;
    s->start_deadline_ns = clock_now_ns() + s->start_ns;
    s->start_limit_ns = clock_now_ns() + SUPERVISE_START_MAX_NS;
    *ret_supervise = s;
    return 0;
fail:
    supervise_free(&s);
    return r;
}

static void signal_part(const struct part *part, int number)
{
    if (part->pidfd >= 0)
        kill(part->pid, number); /* not reaped yet, so the pid cannot be another's */
}

static void reap(struct supervise *s, struct part *part)
{
    if (part->pidfd < 0 || waitpid(part->pid, &part->wait_status, WNOHANG) != part->pid)
        return;
    loop_remove_fd(s->loop, part->pidfd);
    close(part->pidfd);
    part->pidfd = -1;
}

void supervise_free(struct supervise **supervise)
{
    struct supervise *s = *supervise;
    *supervise = NULL;
    if (!s)
        return;
    for (int i = 0; i < s->count; i++)
        signal_part(&s->parts[i], SIGKILL);
    for (int i = 0; i < s->count; i++) {
        struct part *part = &s->parts[i];
        if (part->pidfd < 0)
            continue;
        waitpid(part->pid, &part->wait_status, 0); /* it was killed: this is short */
        loop_remove_fd(s->loop, part->pidfd);
        close(part->pidfd);
    }
    if (s->timer >= 0)
        loop_remove_timer(s->loop, s->timer);
    if (s->notify_fd >= 0) {
        loop_remove_fd(s->loop, s->notify_fd);
        close(s->notify_fd);
    }
    for (int i = 0; i < 2; i++)
        if (s->lifeline[i] >= 0)
            close(s->lifeline[i]);
    if (s->dir[0])
        runtime_remove(s->dir);
    mem_free(&s);
}

const char *supervise_dir(const struct supervise *s)
{
    return s->dir;
}

void supervise_arg(struct supervise_part *part, const char *name, const char *value)
{
    CHECK(part->arg_count + 2 <= SUPERVISE_ARGS_MAX);
    part->args[part->arg_count++] = name;
    if (value)
        part->args[part->arg_count++] = value;
}

/* In the child, which is single-threaded as its parent was. Never returns. */
static void become(const struct supervise *s, const struct supervise_part *part, const char *path,
                   pid_t parent)
{
    char lifeline[16];
    const char *argv[SUPERVISE_ARGS_MAX + 6];
    int n = 0;
    argv[n++] = part->program;
    argv[n++] = "--runtime";
    argv[n++] = s->dir;
    argv[n++] = "--lifeline";
    argv[n++] = lifeline;
    for (int i = 0; i < part->arg_count; i++)
        argv[n++] = part->args[i];
    argv[n] = NULL;
    snprintf(lifeline, sizeof lifeline, "%d", s->lifeline[0]);
    /* A group of its own: Ctrl-C must reach the supervisor alone, which then ends the parts. */
    setpgid(0, 0);
    if (part->die_with_parent) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
    }
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGQUIT, SIGCHLD};
    for (unsigned i = 0; i < sizeof signals / sizeof *signals; i++)
        signal(signals[i], SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(STDERR_FILENO, STDOUT_FILENO) < 0 ||
        fcntl(s->lifeline[0], F_SETFD, 0) < 0)
        _exit(126);
    static const char *const foreign[] = {"LISTEN_FDS",    "LISTEN_PID",   "LISTEN_FDNAMES",
                                          "WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM"};
    for (unsigned i = 0; i < sizeof foreign / sizeof *foreign; i++)
        unsetenv(foreign[i]);
    setenv("NOTIFY_SOCKET", s->notify_path, 1);
    execv(path, (char *const *)argv);
    _exit(127);
}

int supervise_start(struct supervise *s, const struct supervise_part *part, struct err *err)
{
    CHECK(s->count < SUPERVISE_PARTS_MAX && s->phase == STARTING);
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", s->bin_dir, part->program);
    if (access(path, X_OK))
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    pid_t parent = getpid(), pid = fork();
    if (pid < 0)
        return err_set(err, -errno, "fork: %s", strerror(errno));
    if (pid == 0)
        become(s, part, path, parent);
    setpgid(pid, pid); /* as the child does; whoever comes first */
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0) {
        int r = -errno;
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        return err_set(err, r, "pidfd_open: %s", strerror(-r));
    }
    struct part *p = &s->parts[s->count++];
    *p = (struct part){.program = part->program, .pid = pid, .pidfd = pidfd};
    int r = loop_add_fd(s->loop, pidfd, EPOLLIN, on_end, s);
    return r ? err_set(err, r, "event loop: %s", strerror(-r)) : 0;
}

static struct part *find_part(const struct supervise *s, const char *program)
{
    for (int i = 0; i < s->count; i++)
        if (!strcmp(s->parts[i].program, program))
            return (struct part *)&s->parts[i];
    return NULL;
}

pid_t supervise_pid(const struct supervise *s, const char *program)
{
    const struct part *part = find_part(s, program);
    return part ? part->pid : 0;
}

static int parts_left(const struct supervise *s)
{
    int left = 0;
    for (int i = 0; i < s->count; i++)
        left += s->parts[i].pidfd >= 0;
    return left;
}

static void check_stopped(struct supervise *s)
{
    if (s->phase != STOPPING || parts_left(s))
        return;
    s->phase = STOPPED;
    runtime_remove(s->dir);
    s->dir[0] = 0;
    s->ops->stopped(s->arg);
}

/* The part that was started last and lives still. */
static struct part *last_part(struct supervise *s)
{
    for (int i = s->count - 1; i >= 0; i--)
        if (s->parts[i].pidfd >= 0)
            return &s->parts[i];
    return NULL;
}

/* An ordinary end goes part by part, the one started last first, so that nobody takes the end of what it
 * leans on for a fault. After a failure all are told at once. */
static void begin_stop(struct supervise *s, int64_t grace_ns, bool ordered)
{
    s->phase = STOPPING;
    s->ordered = ordered;
    s->settle_ns = 0;
    s->kill_ns = clock_now_ns() + grace_ns;
    for (int i = 0; i < s->count && !ordered; i++)
        signal_part(&s->parts[i], SIGTERM);
    struct part *last = last_part(s);
    if (ordered && last)
        signal_part(last, SIGTERM);
}

static void fail(struct supervise *s, const char *text)
{
    if (s->failed || s->phase >= STOPPING)
        return;
    s->failed = true;
    begin_stop(s, SUPERVISE_FAIL_NS, false);
    s->ops->failed(s->arg, text);
}

void supervise_stop(struct supervise *s)
{
    if (s->phase < STOPPING)
        begin_stop(s, SUPERVISE_STOP_NS, true);
}

void supervise_kill(struct supervise *s)
{
    if (s->phase < STOPPING)
        begin_stop(s, 0, false);
    for (int i = 0; i < s->count; i++)
        signal_part(&s->parts[i], SIGKILL);
}

/* Stopped by a signal, as far as the kernel tells its parent. */
static int stopped_by(const struct part *part)
{
    siginfo_t info = {0};
    if (part->pidfd < 0 || waitid(P_PID, (id_t)part->pid, &info, WSTOPPED | WNOHANG | WNOWAIT) ||
        !info.si_pid)
        return 0;
    return info.si_status;
}

/* The flags of a process, 0 where it is gone; the ninth field of its line in /proc. */
static unsigned process_flags(pid_t pid)
{
    char path[32], line[512];
    unsigned flags = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *from = fopen(path, "re");
    char *end = from && fgets(line, sizeof line, from) ? strrchr(line, ')') : NULL;
    if (!end || sscanf(end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1)
        flags = 0;
    if (from)
        fclose(from);
    return flags;
}

bool supervise_ending(const struct supervise *s)
{
    for (int i = 0; i < s->count; i++)
        if (s->parts[i].pidfd >= 0 && process_flags(s->parts[i].pid) & PROCESS_EXITING)
            return true;
    return false;
}

/* Whether the first unexpected end may be told: one by a signal is known, or none will be. */
static bool is_settled(const struct supervise *s)
{
    int64_t now = clock_now_ns();
    if (!s->settle_ns || now < s->settle_ns)
        return false;
    for (int i = 0; i < s->count; i++)
        if (s->parts[i].pidfd < 0 && WIFSIGNALED(s->parts[i].wait_status))
            return true;
    return now >= s->settle_ns + SUPERVISE_ENDING_NS || !supervise_ending(s);
}

static void fail_silent(struct supervise *s, struct part *part, const char *why)
{
    char text[ERR_TEXT_MAX];
    int number = stopped_by(part);
    if (number)
        snprintf(text, sizeof text, "%s (pid %d) does not answer: stopped by signal %d (%s)", part->program,
                 (int)part->pid, number, strsignal(number));
    else
        snprintf(text, sizeof text, "%s (pid %d) does not answer: %s", part->program, (int)part->pid, why);
    fail(s, text);
    signal_part(part, SIGKILL); /* whoever hangs does not hear SIGTERM */
}

void supervise_lost(struct supervise *s, const char *program, const char *why)
{
    struct part *part = find_part(s, program);
    CHECK(part);
    if (s->phase >= STOPPING || s->settle_ns)
        return;
    reap(s, part);
    if (part->pidfd < 0) { /* that it died is the better news */
        s->first_end = s->first_end ? s->first_end : part;
        s->settle_ns = clock_now_ns() + SETTLE_NS;
        return;
    }
    fail_silent(s, part, why);
}

static void on_notify(void *arg, uint32_t events);

static void report_end(struct supervise *s)
{
    on_notify(s, 0); /* last words were sent before the end that was seen first */
    struct part *part = s->first_end;
    for (int i = 0; i < s->count; i++)
        if (s->parts[i].pidfd < 0 && WIFSIGNALED(s->parts[i].wait_status) && !WIFSIGNALED(part->wait_status))
            part = &s->parts[i];
    for (int i = 0; i < s->count && !WIFSIGNALED(part->wait_status); i++)
        if (stopped_by(&s->parts[i])) { /* its peers notice the silence when we do, and may end before */
            fail_silent(s, &s->parts[i], "stopped");
            return;
        }
    const char *when = s->phase == STARTING ? " while starting" : "";
    char text[ERR_TEXT_MAX];
    if (WIFSIGNALED(part->wait_status)) {
        int number = WTERMSIG(part->wait_status);
        snprintf(text, sizeof text, "%s (pid %d) was ended by signal %d (%s)%s", part->program,
                 (int)part->pid, number, strsignal(number), when);
    } else {
        snprintf(text, sizeof text, "%s (pid %d) ended with exit code %d%s%s%s", part->program,
                 (int)part->pid, WEXITSTATUS(part->wait_status), when, part->last_words[0] ? ": " : "",
                 part->last_words);
    }
    fail(s, text);
}

static void on_end(void *arg, uint32_t events)
{
    struct supervise *s = arg;
    (void)events;
    for (int i = 0; i < s->count; i++) {
        struct part *part = &s->parts[i];
        if (part->pidfd < 0)
            continue;
        reap(s, part);
        if (part->pidfd >= 0)
            continue;
        if (s->phase == STOPPING && s->ordered && last_part(s))
            signal_part(last_part(s), SIGTERM);
        if (s->phase >= STOPPING)
            continue;
        if (!s->first_end) {
            s->first_end = part;
            s->settle_ns = clock_now_ns() + SETTLE_NS;
        }
        if (WIFSIGNALED(part->wait_status))
            s->settle_ns = clock_now_ns();
    }
    if (is_settled(s))
        report_end(s);
    check_stopped(s);
}

/* Before the bus is there, silence tells nothing; but the kernel tells who is stopped. */
static void check_stopped_parts(struct supervise *s, int64_t now)
{
    for (int i = 0; i < s->count && s->phase == STARTING; i++) {
        struct part *part = &s->parts[i];
        if (!stopped_by(part))
            part->stopped_ns = 0;
        else if (!part->stopped_ns)
            part->stopped_ns = now;
        else if (now - part->stopped_ns >= s->start_ns / STOPPED_SHARE)
            supervise_lost(s, part->program, "stopped");
    }
}

static void check_start(struct supervise *s)
{
    int64_t now = clock_now_ns();
    check_stopped_parts(s, now);
    if (now < s->start_deadline_ns && now < s->start_limit_ns)
        return;
    for (int i = 0; i < s->count; i++) {
        struct part *part = &s->parts[i];
        if (part->ready)
            continue;
        char text[ERR_TEXT_MAX];
        snprintf(text, sizeof text, "%s (pid %d) did not become ready: no progress for %g s, or %g s in all",
                 part->program, (int)part->pid, (double)s->start_ns / (double)CLOCK_S,
                 (double)SUPERVISE_START_MAX_NS / (double)CLOCK_S);
        fail(s, text);
        return;
    }
}

static void on_tick(void *arg)
{
    struct supervise *s = arg;
    if (is_settled(s))
        report_end(s);
    if (s->phase == STARTING)
        check_start(s);
    if (s->phase == STOPPING && clock_now_ns() >= s->kill_ns)
        for (int i = 0; i < s->count; i++)
            signal_part(&s->parts[i], SIGKILL);
    on_end(s, 0); /* also when an end was told by no event */
}

static void on_notify(void *arg, uint32_t events)
{
    struct supervise *s = arg;
    (void)events;
    struct notify_news news;
    while (notify_receive(s->notify_fd, &news) == 0) {
        struct part *part = NULL;
        for (int i = 0; i < s->count; i++)
            if (s->parts[i].pid == news.pid)
                part = &s->parts[i];
        if (part && news.stopping && news.status[0])
            snprintf(part->last_words, sizeof part->last_words, "%s", news.status);
        if (!part || s->phase != STARTING)
            continue;
        s->start_deadline_ns = clock_now_ns() + s->start_ns;
        if (news.status[0] && s->ops->status)
            s->ops->status(s->arg, part->program, news.status);
        if (!news.ready || part->ready)
            continue;
        part->ready = true;
        int missing = 0;
        for (int i = 0; i < s->count; i++)
            missing += !s->parts[i].ready;
        if (!missing) {
            s->phase = RUNNING;
            s->ops->ready(s->arg);
        }
    }
}
