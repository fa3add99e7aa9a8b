/* `specontext run` under test: in a temporary world of its own (runtime and cache directories), with the real
 * model, its report read back. */
#ifndef TESTS_LIB_RUNCASE_H
#define TESTS_LIB_RUNCASE_H

#include <jansson.h>
#include <limits.h>
#include <stdbool.h>

#include "tests/lib/proc.h"

#define RUNCASE_MODEL   "models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define RUNCASE_ARGS    48
#define RUNCASE_START_S 300 /* on a busy machine */

enum runcase_part { RUNCASE_KVSTORE, RUNCASE_RETRIEVER, RUNCASE_DECODER, RUNCASE_PARTS };

struct runcase {
    struct proc proc;
    char report_path[PATH_MAX + 64];
    json_t *report;             /* of the last run, or NULL */
    pid_t parts[RUNCASE_PARTS]; /* filled by runcase_find_parts */
};

/* Of a group of tests: makes and removes its world. */
int runcase_set_up(void **state);
int runcase_tear_down(void **state);

/* Skips the running test, by name, without the model. */
void runcase_need_model(void);

/* Starts `specontext run -m MODEL --report FILE` and the further arguments, NULL-terminated. */
void runcase_start(struct runcase *c, const char *const *arguments);
#define RUNCASE_START(c, ...) runcase_start(c, (const char *const[]){__VA_ARGS__, NULL})

/* Until the first byte of text. Fails the test otherwise. */
void runcase_wait_text(struct runcase *c);

/* Pids of the three daemons; fails the test unless all are there. */
void runcase_find_parts(struct runcase *c);

/* Until the end; exit code and no remains are asserted, the report is read. */
void runcase_end(struct runcase *c, int code, int64_t deadline_ns);

/* As runcase_start and runcase_end(0) with a generous deadline. */
void runcase_run(struct runcase *c, const char *const *arguments);
#define RUNCASE_RUN(c, ...) runcase_run(c, (const char *const[]){__VA_ARGS__, NULL})

void runcase_free(struct runcase *c);

/* Fails unless the field is the same in both: reports, or sequences of them. */
void runcase_expect_equal(const json_t *a, const json_t *b, const char *name);

/* Three runs: `arguments` alone, all layers on the device; with `option` as `some` says, at least `least`
 * layers offloaded; as `none` says, all of them. The same tokens, and rows loaded where they must be. */
struct runcase_residency {
    const char *option, *some, *none;
    int least;
};
void runcase_residencies(const char *const *arguments, const struct runcase_residency *r);
#define RUNCASE_RESIDENCIES(r, ...) runcase_residencies((const char *const[]){__VA_ARGS__, NULL}, r)

/* Nothing lies in the runtime directory, and nothing of ours in /dev/shm. */
void runcase_no_remains(void);

/* A bound of time that users are promised, as a test may ask for it now: longer in proportion where the
 * machine has more to do than cores to do it. */
int64_t runcase_bound_ns(int64_t ns);

/* A path in the test's temporary world. Valid until the next call. */
const char *runcase_path(const char *name);

/* The first `bytes` bytes of the demo's document, cut at a blank, as a file in the temporary world. */
const char *runcase_document(size_t bytes);

/* Fields of the report; the test fails when they are missing. */
double runcase_number(const json_t *report, const char *name);
const json_t *runcase_field(const json_t *report, const char *name);

#endif
