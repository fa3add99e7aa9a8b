/* The one convention for errors: a function returns 0 or a negative errno.
 *
 * Where a bare number would lose what a person needs (which file, which field, found and expected), the
 * function takes a `struct err *` as its last parameter and fills one line of text. Libraries never log;
 * the daemon that called prints err->text once. `err` may be NULL everywhere. */
#ifndef BASE_ERR_H
#define BASE_ERR_H

#define ERR_TEXT_MAX 512

struct err {
    int code;                /* negative errno, 0 when nothing was set */
    char text[ERR_TEXT_MAX]; /* one line, no newline */
};

/* Sets code and text and returns `code` (which must be negative), so that callers write
 * `return err_set(err, -EINVAL, "...")`. An earlier text is replaced. */
int err_set(struct err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " before the text that is there, for context that only the caller knows. Returns err's
 * code, or `code` when err is NULL. */
int err_prefix(struct err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#endif
