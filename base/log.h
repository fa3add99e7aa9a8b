/* Log lines of daemons, to stderr: "time level name: text key=value ...". Under systemd the time is left to
 * the journal and the level becomes a "<n>" prefix. Libraries below the daemons do not call this. */
#ifndef BASE_LOG_H
#define BASE_LOG_H

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };
#define LOG_LEVELS "error|warn|info|debug" /* in that order */

/* `name` (e.g. "kvstore") is kept by pointer and stands in each line. Call once, before any thread starts. */
void log_init(const char *name, enum log_level level);

const char *log_level_name(enum log_level level);

void log_write(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...)  log_write(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...)  log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_write(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
