/* Time as the project counts it: nanoseconds of CLOCK_MONOTONIC, which is the same in every process of a
 * machine, so deadlines may cross in messages. */
#ifndef BASE_CLOCK_H
#define BASE_CLOCK_H

#include <stdint.h>

#define CLOCK_MS INT64_C(1000000)
#define CLOCK_S  INT64_C(1000000000)

int64_t clock_now_ns(void);

/* Milliseconds from now to the deadline, rounded up, at least 0, at most `most`: what poll wants. */
int clock_left_ms(int64_t deadline_ns, int most);

#endif
