/* See gpu_probe.h. The child writes one struct into a pipe and ends without any of our handlers. */
#include "launch/gpu_probe.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"

#define PROBE_NS (60 * CLOCK_S)

struct answer {
    int code;
    struct err err;
    struct gpu_probe probe;
};

static void ask(const char *device, struct answer *ret)
{
    const struct gpu_api *api = NULL;
    struct gpu *gpu = NULL;
    ret->code = gpu_load(&api, &ret->err);
    if (ret->code == 0)
        ret->code = api->open(device, &gpu, &ret->err);
    if (ret->code < 0)
        return;
    ret->probe.info = *api->info(gpu);
    ret->code = api->memory_free(gpu, &ret->probe.free_bytes);
    if (ret->code < 0)
        err_set(&ret->err, ret->code, "device %s: its free memory is not known", device);
    ret->probe.free_bytes += ret->probe.info.context_bytes; /* ours, gone when this process is */
    api->close(&gpu);
}

static int take_answer(int fd, struct answer *ret)
{
    int64_t deadline = clock_now_ns() + PROBE_NS;
    for (size_t got = 0; got < sizeof *ret;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int left = clock_left_ms(deadline, 60000), ready = poll(&p, 1, left);
        if (ready == 0 && left == 0)
            return -ETIMEDOUT;
        if (ready < 0 && errno != EINTR)
            return -errno;
        if (ready <= 0)
            continue;
        ssize_t n = read(fd, (uint8_t *)ret + got, sizeof *ret - got);
        if (n == 0)
            return -EIO; /* it ended before it had answered */
        if (n < 0 && errno != EINTR)
            return -errno;
        got += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

int gpu_probe(const char *device, struct gpu_probe *ret, struct err *err)
{
    struct answer answer;
    int ends[2];
    memset(&answer, 0, sizeof answer);
    if (pipe2(ends, O_CLOEXEC) < 0)
        return err_set(err, -errno, "pipe: %s", strerror(errno));
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        ask(device, &answer);
        ssize_t n = write(ends[1], &answer, sizeof answer);
        _exit(n == (ssize_t)sizeof answer ? 0 : 1);
    }
    int r = pid < 0 ? -errno : 0;
    close(ends[1]);
    if (r == 0) {
        r = take_answer(ends[0], &answer);
        if (r < 0)
            kill(pid, SIGKILL);
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    close(ends[0]);
    if (r < 0)
        return err_set(err, r, "device %s: asking for its memory: %s", device, strerror(-r));
    if (answer.code < 0)
        return err_set(err, answer.code, "%s", answer.err.text);
    *ret = answer.probe;
    return 0;
}
