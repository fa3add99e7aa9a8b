/* The queue in front of standard output: a reader that does not read blocks nobody, all text arrives in
 * order, a reader that is gone is told once, files take everything at once. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "launch/output.h"

#define TEXT_BYTES 300000

struct world {
    struct loop *loop;
    struct output *output;
    int fds[2];
    char *text, *got;
    size_t got_bytes;
    int empty, broken, error;
    int64_t deadline_ns;
};

static void on_moved(void *arg, int error)
{
    struct world *w = arg;
    if (error) {
        w->broken++;
        w->error = error;
    } else {
        w->empty++;
    }
}

static void on_text(void *arg, uint32_t events)
{
    struct world *w = arg;
    (void)events;
    ssize_t n = read(w->fds[0], w->got + w->got_bytes, 1000);
    if (n > 0)
        w->got_bytes += (size_t)n;
    if (w->got_bytes == TEXT_BYTES)
        loop_stop(w->loop, 0);
}

static void on_tick(void *arg)
{
    struct world *w = arg;
    if (clock_now_ns() >= w->deadline_ns)
        loop_stop(w->loop, -1);
}

static void begin(struct world *w)
{
    *w = (struct world){.loop = loop_create(), .deadline_ns = clock_now_ns() + 60 * CLOCK_S};
    assert_int_equal(pipe2(w->fds, O_CLOEXEC), 0);
    w->output = output_create(w->loop, w->fds[1], on_moved, w);
    w->text = mem_alloc(TEXT_BYTES, 1);
    w->got = mem_alloc(TEXT_BYTES + 1000, 1);
    for (size_t i = 0; i < TEXT_BYTES; i++)
        w->text[i] = (char)('a' + i * 7919 % 26);
    loop_add_timer(w->loop, 50 * CLOCK_MS, on_tick, w);
}

static void end(struct world *w)
{
    output_free(&w->output);
    assert_null(w->output);
    loop_free(&w->loop);
    if (w->fds[0] >= 0)
        close(w->fds[0]);
    close(w->fds[1]);
    mem_free(&w->text);
    mem_free(&w->got);
}

static void test_slow_reader(void **state)
{
    (void)state;
    struct world w;
    begin(&w);
    for (size_t at = 0; at < TEXT_BYTES; at += 10000) /* returns, although the pipe holds a fifth of it */
        output_write(w.output, w.text + at, 10000);
    assert_false(output_empty(w.output));
    loop_add_fd(w.loop, w.fds[0], EPOLLIN, on_text, &w);
    assert_int_equal(loop_run(w.loop), 0);
    assert_true(output_empty(w.output));
    assert_memory_equal(w.got, w.text, TEXT_BYTES);
    assert_int_equal(w.broken, 0);
    assert_true(w.empty > 0);
    end(&w);
}

static void test_reader_is_gone(void **state)
{
    (void)state;
    struct world w;
    begin(&w);
    close(w.fds[0]);
    w.fds[0] = -1;
    output_write(w.output, "a", 1);
    output_write(w.output, "b", 1);
    assert_int_equal(w.broken, 1);
    assert_int_equal(w.error, -EPIPE);
    assert_true(output_empty(w.output));
    end(&w);
}

static void test_file(void **state)
{
    (void)state;
    struct world w;
    begin(&w);
    FILE *file = tmpfile();
    struct output *output = output_create(w.loop, fileno(file), on_moved, &w);
    output_write(output, w.text, TEXT_BYTES);
    assert_true(output_empty(output));
    rewind(file);
    assert_int_equal(fread(w.got, 1, TEXT_BYTES + 1, file), TEXT_BYTES);
    assert_memory_equal(w.got, w.text, TEXT_BYTES);
    output_free(&output);
    fclose(file);
    end(&w);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slow_reader),
        cmocka_unit_test(test_reader_is_gone),
        cmocka_unit_test(test_file),
    };
    signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
