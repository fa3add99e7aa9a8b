/* See clock.h. */
#include "base/clock.h"

#include <time.h>

int64_t clock_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * CLOCK_S + ts.tv_nsec;
}

int clock_left_ms(int64_t deadline_ns, int most)
{
    int64_t left = deadline_ns - clock_now_ns();
    if (left <= 0)
        return 0;
    int64_t ms = (left + CLOCK_MS - 1) / CLOCK_MS;
    return ms > most ? most : (int)ms;
}
