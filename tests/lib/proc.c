/* Starts, watches and ends processes under test. State is the caller's struct proc; single-threaded. Waits
 * are polls on descriptors (outputs, pidfds) with a deadline; nothing here sleeps for a fixed time. */
#include "tests/lib/proc.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"

static int pidfd_of(pid_t pid)
{
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

static void become(const char *const *argv, const char *const *environment, int out, int err)
{
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that failed half-way leaves nothing running beside the next */
    if (null < 0 || dup2(null, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0)
        _exit(126);
    for (; environment && *environment; environment++)
        putenv((char *)(uintptr_t)*environment);
    execv(argv[0], (char *const *)(uintptr_t)argv);
    _exit(127);
}

void proc_start(struct proc *p, const char *const *argv, const char *const *environment)
{
    int out[2], err[2];
    CHECK(!pipe2(out, O_CLOEXEC) && !pipe2(err, O_CLOEXEC));
    *p = (struct proc){.pid = fork(), .out_fd = out[0], .err_fd = err[0]};
    CHECK(p->pid >= 0);
    if (p->pid == 0)
        become(argv, environment, out[1], err[1]);
    close(out[1]);
    close(err[1]);
    p->pidfd = pidfd_of(p->pid);
    CHECK(p->pidfd >= 0);
}

static void take(int *fd, struct proc_text *text)
{
    char part[4096];
    ssize_t n = read(*fd, part, sizeof part);
    if (n <= 0) {
        close(*fd);
        *fd = -1;
        return;
    }
    text->text = mem_resize(text->text, text->bytes + (size_t)n + 1, 1);
    memcpy(text->text + text->bytes, part, (size_t)n);
    text->bytes += (size_t)n;
    text->text[text->bytes] = 0;
}

bool proc_pump(struct proc *p, int64_t deadline_ns)
{
    struct pollfd fds[3] = {{.fd = p->out_fd, .events = POLLIN},
                            {.fd = p->err_fd, .events = POLLIN},
                            {.fd = p->pidfd, .events = POLLIN}};
    if (poll(fds, 3, clock_left_ms(deadline_ns, 1000)) > 0) {
        if (fds[0].revents)
            take(&p->out_fd, &p->out);
        if (fds[1].revents)
            take(&p->err_fd, &p->err);
        if (fds[2].revents && waitpid(p->pid, &p->status, WNOHANG) == p->pid) {
            close(p->pidfd);
            p->pidfd = -1;
        }
    }
    return clock_now_ns() < deadline_ns;
}

bool proc_wait_output(struct proc *p, size_t bytes, int64_t deadline_ns)
{
    while (p->out.bytes < bytes) {
        if ((p->out_fd < 0 && p->err_fd < 0) || !proc_pump(p, deadline_ns))
            return p->out.bytes >= bytes;
    }
    return true;
}

bool proc_wait(struct proc *p, int64_t deadline_ns)
{
    while (p->pidfd >= 0)
        if (!proc_pump(p, deadline_ns))
            return p->pidfd < 0;
    /* What it wrote before its end. Its children may hold the pipes for longer, hence the deadline. */
    while ((p->out_fd >= 0 || p->err_fd >= 0) && proc_pump(p, deadline_ns))
        ;
    return true;
}

bool proc_exited(const struct proc *p, int code)
{
    return p->pidfd < 0 && WIFEXITED(p->status) && WEXITSTATUS(p->status) == code;
}

void proc_free(struct proc *p)
{
    if (!p->pid)
        return;
    if (p->pidfd >= 0) {
        kill(p->pid, SIGKILL);
        waitpid(p->pid, &p->status, 0);
        close(p->pidfd);
    }
    if (p->out_fd >= 0)
        close(p->out_fd);
    if (p->err_fd >= 0)
        close(p->err_fd);
    mem_free(&p->out.text);
    mem_free(&p->err.text);
    *p = (struct proc){0};
}

/* Name, state and parent out of /proc/PID/stat. */
static bool read_stat(pid_t pid, char name[64], char *ret_state, pid_t *ret_parent)
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *from = fopen(path, "re");
    if (!from)
        return false;
    bool good = fgets(line, sizeof line, from) != NULL;
    fclose(from);
    char *open = good ? strchr(line, '(') : NULL, *end = good ? strrchr(line, ')') : NULL;
    int parent;
    if (!open || !end || sscanf(end + 1, " %c %d", ret_state, &parent) != 2)
        return false;
    *ret_parent = parent;
    snprintf(name, 64, "%.*s", (int)(end - open - 1), open + 1);
    return true;
}

pid_t proc_child(pid_t parent, const char *name)
{
    DIR *dir = opendir("/proc");
    CHECK(dir);
    pid_t found = 0;
    size_t length = strlen(name) < 15 ? strlen(name) : 15; /* the kernel keeps 15 characters */
    for (struct dirent *entry; !found && (entry = readdir(dir));) {
        char has[64], state;
        pid_t its_parent, pid = (pid_t)strtol(entry->d_name, NULL, 10);
        if (pid > 0 && read_stat(pid, has, &state, &its_parent) && its_parent == parent && state != 'Z' &&
            !strncmp(has, name, length))
            found = pid;
    }
    closedir(dir);
    return found;
}

bool proc_gone(pid_t pid)
{
    char name[64], state;
    pid_t parent;
    return !read_stat(pid, name, &state, &parent) || state == 'Z' || state == 'X';
}

bool proc_wait_gone(const pid_t *pids, int count, int64_t deadline_ns)
{
    for (int i = 0; i < count; i++) {
        int fd = pidfd_of(pids[i]);
        struct pollfd p = {.fd = fd, .events = POLLIN};
        while (fd >= 0 && !proc_gone(pids[i]) && clock_now_ns() < deadline_ns)
            poll(&p, 1, clock_left_ms(deadline_ns, 1000));
        if (fd >= 0)
            close(fd);
        if (!proc_gone(pids[i]))
            return false;
    }
    return true;
}

bool proc_maps_have(pid_t pid, const char *text)
{
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *from = fopen(path, "re");
    CHECK(from); /* the test holds it alive */
    bool found = false;
    while (!found && fgets(line, sizeof line, from))
        found = strstr(line, text) != NULL;
    fclose(from);
    return found;
}

const char *proc_program(const char *name)
{
    static char path[PATH_MAX];
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    CHECK(n > 0);
    self[n] = 0;
    char *tests = strstr(self, "/tests/");
    CHECK(tests);
    *tests = 0;
    char *config = strrchr(self, '/');
    if (config && !strcmp(config, "/gcc")) /* mk: the default build's programs lie in build/bin */
        *config = 0;
    CHECK(snprintf(path, sizeof path, "%s/bin/%s", self, name) < (int)sizeof path);
    return path;
}
