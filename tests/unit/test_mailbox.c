/* Mailboxes: order, bounds, waking, and many writers. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/mailbox.h"

enum { WRITERS = 4, ITEMS = 5000 };

static void *item(uintptr_t value)
{
    return (void *)value;
}

static bool is_readable(const struct mailbox *mailbox)
{
    struct pollfd wait = {.fd = mailbox_fd(mailbox), .events = POLLIN};
    return poll(&wait, 1, 0) == 1;
}

static void first_in_is_first_out_and_full_is_told(void **state)
{
    (void)state;
    struct mailbox *mailbox = mailbox_create(4);
    assert_null(mailbox_take(mailbox));
    for (uintptr_t round = 0; round < 5; round++) {
        assert_false(is_readable(mailbox));
        for (uintptr_t i = 1; i <= 4; i++)
            assert_int_equal(mailbox_put(mailbox, item(round * 10 + i)), 0);
        assert_int_equal(mailbox_put(mailbox, item(99)), -EAGAIN);
        for (uintptr_t i = 1; i <= 4; i++) {
            assert_true(is_readable(mailbox));
            assert_ptr_equal(mailbox_take(mailbox), item(round * 10 + i));
        }
    }
    mailbox_free(&mailbox, NULL);
    assert_null(mailbox);
    mailbox_free(&mailbox, NULL);
}

static int freed;

static void count_free(void *p)
{
    freed++;
    free(p);
}

static void what_is_inside_is_freed(void **state)
{
    (void)state;
    struct mailbox *mailbox = mailbox_create(8);
    for (int i = 0; i < 3; i++)
        assert_int_equal(mailbox_put(mailbox, malloc(10)), 0);
    mailbox_free(&mailbox, count_free);
    assert_int_equal(freed, 3);
}

static void waiting_ends_at_the_deadline(void **state)
{
    (void)state;
    struct mailbox *mailbox = mailbox_create(1);
    int64_t deadline_ns = clock_now_ns() + 5 * CLOCK_MS;
    assert_null(mailbox_wait(mailbox, deadline_ns));
    assert_true(clock_now_ns() >= deadline_ns);
    assert_int_equal(mailbox_put(mailbox, item(1)), 0);
    assert_ptr_equal(mailbox_wait(mailbox, 0), item(1));
    mailbox_free(&mailbox, NULL);
}

struct writer {
    struct mailbox *mailbox;
    uintptr_t index;
    pthread_t thread;
};

static void *write_items(void *arg)
{
    struct writer *writer = arg;
    for (uintptr_t i = 1; i <= ITEMS; i++)
        while (mailbox_put(writer->mailbox, item(writer->index * ITEMS + i)) == -EAGAIN)
            sched_yield();
    return NULL;
}

static void many_writers_lose_nothing(void **state)
{
    (void)state;
    struct mailbox *mailbox = mailbox_create(64);
    struct writer writers[WRITERS];
    uintptr_t last[WRITERS] = {0};
    for (uintptr_t w = 0; w < WRITERS; w++) {
        writers[w] = (struct writer){.mailbox = mailbox, .index = w};
        assert_int_equal(pthread_create(&writers[w].thread, NULL, write_items, &writers[w]), 0);
    }
    int64_t deadline_ns = clock_now_ns() + 30 * CLOCK_S;
    for (int i = 0; i < WRITERS * ITEMS; i++) {
        uintptr_t value = (uintptr_t)mailbox_wait(mailbox, deadline_ns);
        assert_true(value != 0);
        uintptr_t w = (value - 1) / ITEMS;
        assert_true(w < WRITERS && value - w * ITEMS == last[w] + 1); /* each writer's in order */
        last[w]++;
    }
    for (int w = 0; w < WRITERS; w++)
        pthread_join(writers[w].thread, NULL);
    assert_null(mailbox_take(mailbox));
    mailbox_free(&mailbox, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_in_is_first_out_and_full_is_told),
        cmocka_unit_test(what_is_inside_is_freed),
        cmocka_unit_test(waiting_ends_at_the_deadline),
        cmocka_unit_test(many_writers_lose_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
