/* Descriptors between processes: what arrives, what is refused, and that nothing leaks either way. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "link/fdpass.h"
#include "link/runtime.h"
#include "link/segment.h"

struct fixture {
    char dir[RUNTIME_PATH_MAX], path[RUNTIME_PATH_MAX];
    int listener;
    int pair[2]; /* a connection without a listener */
    int open;    /* descriptors before the test */
};

static int64_t soon(void)
{
    return clock_now_ns() + 60 * CLOCK_S;
}

static int open_descriptors(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static int setup(void **state)
{
    static struct fixture f;
    assert_int_equal(runtime_make_private(f.dir, NULL), 0);
    assert_int_equal(runtime_path(f.dir, "kvstore.fd", f.path, NULL), 0);
    assert_int_equal(fdpass_listen(f.path, &f.listener, NULL), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, f.pair), 0);
    f.open = open_descriptors();
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(open_descriptors(), f->open);
    close(f->listener);
    close(f->pair[0]);
    close(f->pair[1]);
    runtime_remove(f->dir);
    return 0;
}

static struct fdpass_frame frame_of(uint32_t fds)
{
    return (struct fdpass_frame){.magic = FDPASS_MAGIC,
                                 .kind = FDPASS_DECODER,
                                 .epoch = 5,
                                 .role = 3,
                                 .fds = fds,
                                 .value = {1, 2, 3, 4, UINT64_MAX}};
}

/* The child: connects before anybody listens, asks, maps what it gets, answers through it. */
static void ask_and_write(const char *path)
{
    int fd, fds[FDPASS_FDS_MAX];
    pid_t pid;
    struct fdpass_frame frame = {.magic = FDPASS_MAGIC, .kind = FDPASS_ASK, .role = 1};
    struct segment segment;
    if (fdpass_connect(path, soon(), &fd, &pid, NULL) < 0 || pid != getppid() ||
        fdpass_send(fd, &frame, NULL, NULL) < 0 || fdpass_recv(fd, soon(), &frame, fds, NULL) < 0)
        _exit(1);
    if (frame.fds != 1 || frame.value[0] != 8192 || segment_map(fds[0], 8192, &segment, NULL) < 0)
        _exit(2);
    memcpy(segment.at, "from the child", 15);
    _exit(fds[1] == -1 ? 0 : 3); /* its end closes the connection */
}

static void a_segment_crosses_to_another_process(void **state)
{
    struct fixture *f = *state;
    close(f->listener);
    unlink(f->path);
    pid_t child = fork(), pid;
    assert_true(child >= 0);
    if (child == 0)
        ask_and_write(f->path);
    assert_int_equal(fdpass_listen(f->path, &f->listener, NULL), 0);
    struct stat st;
    assert_int_equal(stat(f->path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    int fd, fds[FDPASS_FDS_MAX], r;
    int64_t deadline_ns = soon();
    while ((r = fdpass_accept(f->listener, &fd, &pid, NULL)) == -EAGAIN && clock_now_ns() < deadline_ns)
        sched_yield();
    assert_int_equal(r, 0);
    assert_int_equal(pid, child);
    struct fdpass_frame frame;
    assert_int_equal(fdpass_recv(fd, soon(), &frame, fds, NULL), 0);
    assert_int_equal(frame.kind, FDPASS_ASK);
    struct segment segment;
    assert_int_equal(segment_create("crossing", 8192, &segment, NULL), 0);
    frame = frame_of(1);
    frame.value[0] = segment.bytes;
    assert_int_equal(fdpass_send(fd, &frame, &segment.fd, NULL), 0);
    assert_int_equal(fdpass_recv(fd, soon(), &frame, fds, NULL), -ECONNRESET); /* the child's death is seen */
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_string_equal(segment.at, "from the child");
    segment_close(&segment);
    close(fd);
}

static void all_fields_and_descriptors_arrive(void **state)
{
    struct fixture *f = *state;
    struct fdpass_frame sent = frame_of(FDPASS_FDS_MAX), got;
    int fds[FDPASS_FDS_MAX], back[FDPASS_FDS_MAX];
    for (int i = 0; i < FDPASS_FDS_MAX; i++)
        fds[i] = f->listener;
    assert_int_equal(fdpass_send(f->pair[0], &sent, fds, NULL), 0);
    assert_int_equal(fdpass_recv(f->pair[1], 0, &got, back, NULL), 0);
    assert_memory_equal(&sent, &got, sizeof sent);
    for (int i = 0; i < FDPASS_FDS_MAX; i++) {
        assert_true(fcntl(back[i], F_GETFD) & FD_CLOEXEC);
        close(back[i]);
    }
}

static void nothing_yet_is_no_error_of_the_peer(void **state)
{
    struct fixture *f = *state;
    struct fdpass_frame frame;
    int fds[FDPASS_FDS_MAX], fd;
    int64_t deadline_ns = clock_now_ns() + 3 * CLOCK_MS;
    assert_int_equal(fdpass_recv(f->pair[1], 0, &frame, fds, NULL), -ETIMEDOUT);
    assert_int_equal(fdpass_recv(f->pair[1], deadline_ns, &frame, fds, NULL), -ETIMEDOUT);
    assert_true(clock_now_ns() >= deadline_ns);
    assert_int_equal(fdpass_accept(f->listener, &fd, NULL, NULL), -EAGAIN);
    frame = frame_of(0);
    assert_int_equal(fdpass_send(f->pair[0], &frame, NULL, NULL), 0);
    assert_int_equal(fdpass_recv(f->pair[1], 0, &frame, fds, NULL), 0);
}

/* Sends raw bytes with `count` descriptors, more than the module itself would. */
static void send_raw(int fd, const void *bytes, size_t length, int passed, int count)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = length};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * 32)] = {0};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        header.msg_control = control;
        header.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *item = CMSG_FIRSTHDR(&header);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        for (int i = 0; i < count; i++)
            memcpy(CMSG_DATA(item) + (size_t)i * sizeof(int), &passed, sizeof(int));
    }
    assert_int_equal(sendmsg(fd, &header, 0), (ssize_t)length);
}

static void malformed_frames_are_refused_and_closed(void **state)
{
    struct fixture *f = *state;
    struct fdpass_frame got;
    int fds[FDPASS_FDS_MAX];
    struct err err;
    struct {
        uint32_t magic, kind, told;
        int passed;
        const char *says;
    } cases[] = {
        {0x12345678, FDPASS_ARENA, 1, 1, "magic"},
        {FDPASS_MAGIC, 0, 1, 1, "kind"},
        {FDPASS_MAGIC, 6, 0, 0, "kind"},
        {FDPASS_MAGIC, FDPASS_ARENA, 2, 1, "found 1, expected 2"},
        {FDPASS_MAGIC, FDPASS_ARENA, 1, 0, "found 0"},
        {FDPASS_MAGIC, FDPASS_ARENA, 0, 3, "found 3"},
        {FDPASS_MAGIC, FDPASS_ARENA, 8, 9, "more"},
        {FDPASS_MAGIC, FDPASS_ARENA, 8, 30, "more"},
        {FDPASS_MAGIC, FDPASS_ARENA, UINT32_MAX, 0, "found 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int pair[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        struct fdpass_frame frame = frame_of(cases[i].told);
        frame.magic = cases[i].magic;
        frame.kind = cases[i].kind;
        send_raw(pair[0], &frame, sizeof frame, f->listener, cases[i].passed);
        assert_int_equal(fdpass_recv(pair[1], soon(), &got, fds, &err), -EPROTO);
        assert_non_null(strstr(err.text, cases[i].says));
        for (int k = 0; k < FDPASS_FDS_MAX; k++)
            assert_int_equal(fds[k], -1);
        close(pair[0]);
        close(pair[1]);
    }
}

static void a_frame_in_pieces_is_put_together(void **state)
{
    struct fixture *f = *state;
    struct fdpass_frame frame = frame_of(2), got;
    int fds[FDPASS_FDS_MAX];
    send_raw(f->pair[0], &frame, 10, f->listener, 1);
    send_raw(f->pair[0], (uint8_t *)&frame + 10, 1, f->listener, 1);
    send_raw(f->pair[0], (uint8_t *)&frame + 11, sizeof frame - 11, 0, 0);
    assert_int_equal(fdpass_recv(f->pair[1], soon(), &got, fds, NULL), 0);
    assert_memory_equal(&frame, &got, sizeof frame);
    close(fds[0]);
    close(fds[1]);
}

static void half_a_frame_and_a_death_leak_nothing(void **state)
{
    struct fixture *f = *state;
    struct fdpass_frame frame = frame_of(1), got;
    int fds[FDPASS_FDS_MAX], pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    send_raw(pair[0], &frame, 40, f->listener, 1);
    assert_int_equal(fdpass_recv(pair[1], 0, &got, fds, NULL), -ETIMEDOUT);
    send_raw(pair[0], &frame, 40, f->listener, 1);
    close(pair[0]);
    assert_int_equal(fdpass_recv(pair[1], soon(), &got, fds, NULL), -ECONNRESET);
    close(pair[1]);
}

static void a_dead_or_deaf_peer_does_not_stop_the_sender(void **state)
{
    struct fixture *f = *state;
    struct fdpass_frame frame = frame_of(0);
    int r = 0, pair[2];
    for (int i = 0; i < 1000000 && r == 0; i++)
        r = fdpass_send(f->pair[0], &frame, NULL, NULL);
    assert_int_equal(r, -EAGAIN);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    close(pair[1]);
    assert_int_equal(fdpass_send(pair[0], &frame, NULL, NULL), -ECONNRESET);
    close(pair[0]);
}

static void connecting_is_bounded(void **state)
{
    struct fixture *f = *state;
    int fd;
    struct err err;
    close(f->listener);
    int64_t deadline_ns = clock_now_ns() + 15 * CLOCK_MS;
    assert_int_equal(fdpass_connect(f->path, deadline_ns, &fd, NULL, &err), -ETIMEDOUT);
    assert_true(clock_now_ns() >= deadline_ns);
    assert_non_null(strstr(err.text, "nobody listens"));
    assert_int_equal(fdpass_connect("relative", soon(), &fd, NULL, &err), -EINVAL);
    assert_int_equal(fdpass_listen(f->path, &f->listener, NULL), 0); /* over the stale file */
}

/* The credentials are those at connect(): a child that has become another user is a stranger. */
static void strangers_are_refused(void **state)
{
    struct fixture *f = *state;
    if (geteuid() != 0)
        skip();
    assert_int_equal(chmod(f->dir, 0777), 0); /* the lock that is under test is the next one */
    assert_int_equal(chmod(f->path, 0777), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int fd;
        if (setresuid(12345, 12345, 12345) < 0)
            _exit(1);
        /* Root is trusted by everybody, so connecting succeeds; the listener refuses. */
        _exit(fdpass_connect(f->path, soon(), &fd, NULL, NULL) == 0 ? 0 : 2);
    }
    int status, fd = -1;
    struct err err;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(fdpass_accept(f->listener, &fd, NULL, &err), -EPERM);
    assert_non_null(strstr(err.text, "12345"));
    assert_int_equal(fd, -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_segment_crosses_to_another_process, setup, teardown),
        cmocka_unit_test_setup_teardown(all_fields_and_descriptors_arrive, setup, teardown),
        cmocka_unit_test_setup_teardown(nothing_yet_is_no_error_of_the_peer, setup, teardown),
        cmocka_unit_test_setup_teardown(malformed_frames_are_refused_and_closed, setup, teardown),
        cmocka_unit_test_setup_teardown(a_frame_in_pieces_is_put_together, setup, teardown),
        cmocka_unit_test_setup_teardown(half_a_frame_and_a_death_leak_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(a_dead_or_deaf_peer_does_not_stop_the_sender, setup, teardown),
        cmocka_unit_test_setup_teardown(connecting_is_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(strangers_are_refused, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
