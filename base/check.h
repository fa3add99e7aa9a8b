/* Assertions that stay on in release builds.
 *
 * A failed CHECK is a programmer's error: it prints the expression and the place and aborts, so that the
 * supervisor restarts the daemon. Bad input is never checked this way; it gets an error value
 * (base/err.h). */
#ifndef BASE_CHECK_H
#define BASE_CHECK_H

void check_failed(const char *expr, const char *file, int line) __attribute__((noreturn, cold));

#define CHECK(expr) ((expr) ? (void)0 : check_failed(#expr, __FILE__, __LINE__))

/* The system has no more of what the process cannot do without: prints "PROGRAM: " and the line, and ends the
 * process with exit code 1. Nobody's error, so nothing is aborted. */
void check_exhausted(const char *fmt, ...) __attribute__((noreturn, cold, format(printf, 1, 2)));

#endif
