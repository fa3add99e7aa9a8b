/* Segments: seals, growth without moving, holes, and what must not be mapped. The runtime directory too. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "link/runtime.h"
#include "link/segment.h"
#include "link/unix_socket.h"

enum { PAGE = 4096 };

static void a_segment_is_zero_and_sealed_against_shrinking(void **state)
{
    (void)state;
    struct segment s;
    struct err err;
    assert_int_equal(segment_create("test", 3 * PAGE + 5, &s, &err), 0);
    assert_int_equal(s.bytes, 3 * PAGE + 5);
    const uint8_t *bytes = s.at;
    for (uint64_t i = 0; i < s.bytes; i++)
        assert_int_equal(bytes[i], 0);
    assert_int_equal(ftruncate(s.fd, PAGE), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(fcntl(s.fd, F_ADD_SEALS, F_SEAL_GROW), -1); /* a peer may not forbid growth either */
    assert_true(fcntl(s.fd, F_GETFD) & FD_CLOEXEC);
    segment_close(&s);
    assert_int_equal(s.fd, -1);
    segment_close(&s);
    if (fcntl(0, F_GETFD) < 0)
        assert_int_equal(open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
    struct segment zeroed = {0};
    segment_close(&zeroed); /* must not close descriptor 0 */
    assert_true(fcntl(0, F_GETFD) >= 0);
    assert_int_equal(zeroed.fd, -1);
    assert_int_equal(segment_create("test", 0, &s, &err), -EINVAL);
}

static void both_sides_see_the_same_bytes(void **state)
{
    (void)state;
    struct segment a, b;
    assert_int_equal(segment_create("test", 2 * PAGE, &a, NULL), 0);
    assert_int_equal(segment_map(dup(a.fd), 0, &b, NULL), 0);
    assert_int_equal(b.bytes, 2 * PAGE);
    memcpy((uint8_t *)a.at + PAGE, "hello", 6);
    assert_string_equal((char *)b.at + PAGE, "hello");
    segment_close(&b);
    assert_int_equal(segment_map(dup(a.fd), PAGE, &b, NULL), 0);
    assert_int_equal(b.bytes, PAGE);
    segment_close(&b);
    segment_close(&a);
}

/* Left open by the callee: a descriptor is taken on success only. */
static void refuses(int fd, uint64_t bytes, int code)
{
    struct segment s;
    struct err err;
    assert_int_equal(segment_map(fd, bytes, &s, &err), code);
    assert_int_equal(s.fd, -1);
    assert_true(fcntl(fd, F_GETFD) >= 0);
    close(fd);
}

static void what_could_fault_is_not_mapped(void **state)
{
    (void)state;
    int plain = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(plain, PAGE), 0);
    refuses(plain, 0, -EPERM); /* no seal */
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    refuses(null, 0, -EPERM);
    int empty = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(fcntl(empty, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    refuses(empty, 0, -EINVAL);
    struct segment s;
    assert_int_equal(segment_create("test", PAGE, &s, NULL), 0);
    refuses(dup(s.fd), PAGE + 1, -EINVAL);
    refuses(dup(s.fd), UINT64_MAX, -EINVAL);
    segment_close(&s);
}

static void a_reserved_segment_grows_in_place(void **state)
{
    (void)state;
    struct segment a, b;
    assert_int_equal(segment_create_reserved("test", PAGE, 1ull << 30, &a, NULL), 0);
    assert_int_equal(segment_map_reserved(dup(a.fd), 1ull << 30, &b, NULL), 0);
    assert_int_equal((uintptr_t)a.at % (2u << 20), 0); /* where a huge page can begin */
    assert_int_equal((uintptr_t)b.at % (2u << 20), 0);
    uint8_t *was = a.at;
    was[0] = 1;
    for (uint64_t pages = 2; pages < 200; pages = pages * 2 + 1) {
        assert_int_equal(segment_grow(&a, pages * PAGE, NULL), 0);
        assert_ptr_equal(a.at, was);
        was[pages * PAGE - 1] = 7;
        assert_int_equal(segment_grow(&b, pages * PAGE, NULL),
                         0); /* longer already: only the mapping follows */
        assert_int_equal(((uint8_t *)b.at)[pages * PAGE - 1], 7);
    }
    assert_int_equal(was[0], 1);
    struct err err;
    assert_int_equal(segment_grow(&a, (1ull << 30) + 1, &err), -ENOSPC);
    assert_int_equal(segment_grow(&a, PAGE, &err), -EINVAL);
    segment_close(&a);
    segment_close(&b);
}

static void a_plain_segment_grows_too(void **state)
{
    (void)state;
    struct segment s;
    assert_int_equal(segment_create("test", PAGE, &s, NULL), 0);
    memcpy(s.at, "kept", 5);
    assert_int_equal(segment_grow(&s, 4096ull * PAGE, NULL), 0);
    assert_string_equal(s.at, "kept");
    ((uint8_t *)s.at)[4096ull * PAGE - 1] = 1;
    segment_close(&s);
}

static void a_segment_has_no_name_in_a_file_system(void **state)
{
    (void)state;
    struct segment s;
    char link[64], target[128] = "";
    assert_int_equal(segment_create("scpx-arena", PAGE, &s, NULL), 0);
    snprintf(link, sizeof link, "/proc/self/fd/%d", s.fd);
    assert_true(readlink(link, target, sizeof target - 1) > 0);
    assert_string_equal(target, "/memfd:scpx-arena (deleted)");
    segment_close(&s);
}

/* ---- runtime directory ---- */

static void private_directories_are_private(void **state)
{
    (void)state;
    char dir[RUNTIME_PATH_MAX], path[RUNTIME_PATH_MAX];
    struct err err;
    struct stat st;
    assert_int_equal(runtime_make_private(dir, &err), 0);
    assert_int_equal(stat(dir, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    assert_int_equal(runtime_prepare(dir, &err), 0);
    assert_int_equal(runtime_path(dir, "kvstore.sock", path, &err), 0);
    int fd;
    assert_int_equal(unix_socket_listen(path, 1, &fd, &err), 0);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    close(fd);
    runtime_remove(dir);
    assert_int_equal(stat(dir, &st), -1);
    assert_int_equal(errno, ENOENT);
}

static void only_our_own_names_are_removed(void **state)
{
    (void)state;
    char dir[RUNTIME_PATH_MAX], path[RUNTIME_PATH_MAX];
    struct stat st;
    int fd;
    assert_int_equal(runtime_make_private(dir, NULL), 0);
    assert_int_equal(runtime_path(dir, "kvstore.fd", path, NULL), 0);
    assert_int_equal(unix_socket_listen(path, 1, &fd, NULL), 0);
    close(fd);
    assert_int_equal(runtime_path(dir, "notes.sock", path, NULL), 0);
    close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600)); /* a file, whatever its name */
    runtime_remove(dir);
    assert_int_equal(stat(path, &st), 0);
    unlink(path);
    assert_int_equal(rmdir(dir), 0); /* the socket was removed */
    runtime_remove(dir);             /* nothing there: no harm */
}

static void directories_of_others_are_refused(void **state)
{
    (void)state;
    char dir[RUNTIME_PATH_MAX], link[RUNTIME_PATH_MAX];
    struct err err;
    assert_int_equal(runtime_make_private(dir, NULL), 0);
    assert_int_equal(chmod(dir, 0720), 0);
    assert_int_equal(runtime_prepare(dir, &err), -EPERM);
    assert_non_null(strstr(err.text, "720"));
    assert_int_equal(chmod(dir, 0702), 0);
    assert_int_equal(runtime_prepare(dir, &err), -EPERM);
    assert_int_equal(chmod(dir, 0700), 0);
    assert_int_equal(runtime_path(dir, "l", link, NULL), 0);
    assert_int_equal(symlink(dir, link), 0);
    assert_true(runtime_prepare(link, &err) < 0); /* whoever owns the link could point it elsewhere */
    if (geteuid() == 0) {
        assert_int_equal(chown(dir, 12345, (gid_t)-1), 0);
        assert_int_equal(runtime_prepare(dir, &err), -EPERM);
        assert_non_null(strstr(err.text, "12345"));
    }
    unlink(link);
    assert_int_equal(rmdir(dir), 0);
    assert_int_equal(runtime_prepare("/nonexistent/x", &err), -ENOENT);
}

static void long_names_are_refused(void **state)
{
    (void)state;
    char dir[200], path[RUNTIME_PATH_MAX];
    struct err err;
    memset(dir, 'x', sizeof dir);
    dir[0] = '/';
    dir[RUNTIME_PATH_MAX - 1 - 13] = 0; /* with "/kvstore.sock": 99 characters */
    assert_int_equal(runtime_path(dir, "kvstore.sock", path, &err), 0);
    assert_int_equal(strlen(path), RUNTIME_PATH_MAX - 1);
    assert_int_equal(runtime_path(dir, "kvstore1.sock", path, &err), -ENAMETOOLONG);
    assert_int_equal(runtime_prepare(dir, &err), -ENAMETOOLONG); /* the longest name would not fit */
}

static void a_live_socket_is_not_taken_away(void **state)
{
    (void)state;
    char dir[RUNTIME_PATH_MAX], path[RUNTIME_PATH_MAX];
    struct err err;
    int first, second;
    assert_int_equal(runtime_make_private(dir, NULL), 0);
    assert_int_equal(runtime_path(dir, "kvstore.sock", path, NULL), 0);
    assert_int_equal(unix_socket_listen(path, 1, &first, &err), 0);
    assert_int_equal(unix_socket_listen(path, 1, &second, &err), -EADDRINUSE);
    close(first); /* dead, its file is left */
    assert_int_equal(unix_socket_listen(path, 1, &second, &err), 0);
    close(second);
    runtime_remove(dir);
    assert_int_equal(runtime_make_private(dir, NULL), 0);
    assert_int_equal(runtime_path(dir, "kvstore.sock", path, NULL), 0);
    close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    assert_int_equal(unix_socket_listen(path, 1, &second, &err), -EEXIST); /* a file is not ours to remove */
    unlink(path);
    runtime_remove(dir);
    assert_int_equal(unix_socket_listen("relative.sock", 1, &second, &err), -EINVAL);
}

static void the_life_line_ends_with_its_holder(void **state)
{
    (void)state;
    int fds[2];
    char byte;
    assert_int_equal(runtime_lifeline(fds), 0);
    close(fds[1]);
    assert_int_equal(read(fds[0], &byte, 1), 0);
    close(fds[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_segment_is_zero_and_sealed_against_shrinking),
        cmocka_unit_test(both_sides_see_the_same_bytes),
        cmocka_unit_test(what_could_fault_is_not_mapped),
        cmocka_unit_test(a_reserved_segment_grows_in_place),
        cmocka_unit_test(a_plain_segment_grows_too),
        cmocka_unit_test(a_segment_has_no_name_in_a_file_system),
        cmocka_unit_test(private_directories_are_private),
        cmocka_unit_test(only_our_own_names_are_removed),
        cmocka_unit_test(directories_of_others_are_refused),
        cmocka_unit_test(long_names_are_refused),
        cmocka_unit_test(a_live_socket_is_not_taken_away),
        cmocka_unit_test(the_life_line_ends_with_its_holder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
