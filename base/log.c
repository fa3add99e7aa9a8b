/* Writes log lines; one write(2) a line, so that lines of threads and processes do not mix. Set up once in
 * main; afterwards any thread may log. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static const char *log_name = "specontext";
static enum log_level log_max = LOG_LEVEL_INFO;
static int log_journal;

static const char *const level_names[] = {"error", "warn", "info", "debug"};
static const int level_priority[] = {3, 4, 6, 7}; /* syslog numbers, read by the journal */

void log_init(const char *name, enum log_level level)
{
    log_name = name;
    log_max = level;
    log_journal = getenv("JOURNAL_STREAM") != NULL;
}

const char *log_level_name(enum log_level level)
{
    return level_names[level];
}

void log_write(enum log_level level, const char *fmt, ...)
{
    if (level > log_max)
        return;
    char line[1024];
    int n;
    if (log_journal) {
        n = snprintf(line, sizeof line, "<%d>%s: ", level_priority[level], log_name);
    } else {
        struct timespec ts;
        struct tm tm;
        clock_gettime(CLOCK_REALTIME, &ts);
        localtime_r(&ts.tv_sec, &tm);
        n = snprintf(line, sizeof line, "%02d:%02d:%02d.%03ld %s %s: ", tm.tm_hour, tm.tm_min, tm.tm_sec,
                     ts.tv_nsec / 1000000, level_names[level], log_name);
    }
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
    va_end(ap);
    if (m < 0)
        return;
    n += m;
    if ((size_t)n > sizeof line - 2)
        n = sizeof line - 2;
    line[n++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, (size_t)n);
    (void)written; /* nowhere left to report it */
}
