/* See gpu_ask.h. The child writes one struct into a pipe and ends without any of our handlers. */
#include "launch/gpu_ask.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"

#define ASK_NS (60 * CLOCK_S)

struct answer {
    int code;
    struct err err;
    _Alignas(16) uint8_t data[GPU_ASK_BYTES];
};

static int take_answer(int fd, struct answer *ret)
{
    int64_t deadline = clock_now_ns() + ASK_NS;
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

int gpu_ask(const char *device, const char *what, gpu_question *ask, void *ret, size_t bytes, struct err *err)
{
    struct answer answer;
    int ends[2];
    CHECK(bytes <= GPU_ASK_BYTES);
    memset(&answer, 0, sizeof answer);
    if (pipe2(ends, O_CLOEXEC) < 0)
        return err_set(err, -errno, "pipe: %s", strerror(errno));
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        answer.code = ask(device, answer.data, &answer.err);
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
        return err_set(err, r, "device %s: %s: %s", device, what, strerror(-r));
    if (answer.code < 0)
        return err_set(err, answer.code, "%s", answer.err.text);
    memcpy(ret, answer.data, bytes);
    return 0;
}
