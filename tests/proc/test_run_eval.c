/* `specontext eval` with the real model: the shape of its JSON, that its figures are possible ones and the
 * same in every run, refusals, and an interrupt. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>
#include <signal.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/lib/proc.h"
#include "tests/lib/runcase.h"
#include "tests/lib/temp.h"

#define HEAD "heads/SmolLM2-135M-Instruct.safetensors"

enum { ARGS = 48, LIMIT_S = 240 }; /* on a busy machine */

static void start(struct proc *proc, const char *const *arguments)
{
    const char *argv[ARGS] = {proc_program("specontext"), "eval"};
    int n = 2;
    for (; arguments[n - 2] && n < ARGS - 1; n++)
        argv[n] = arguments[n - 2];
    proc_start(proc, argv, NULL);
}

static void run(struct proc *proc, int code, const char *const *arguments)
{
    start(proc, arguments);
    assert_true(proc_wait(proc, clock_now_ns() + LIMIT_S * CLOCK_S));
    if (!proc_exited(proc, code))
        fail_msg("status %x: %s", proc->status, proc->err.text ? proc->err.text : "");
}
#define RUN(proc, code, ...) run(proc, code, (const char *const[]){__VA_ARGS__, NULL})

static json_t *json_of(const struct proc *proc)
{
    json_error_t error;
    json_t *json = json_loads(proc->out.text ? proc->out.text : "", 0, &error);
    if (!json)
        fail_msg("no JSON: %s", error.text);
    return json;
}

/* The field is a number within the bounds. */
static double number(const json_t *object, const char *name, double low, double high)
{
    const json_t *field = json_object_get(object, name);
    if (!json_is_number(field))
        fail_msg("%s is no number", name);
    double value = json_number_value(field);
    if (!(value >= low && value <= high))
        fail_msg("%s: found %g, expected %g to %g", name, value, low, high);
    return value;
}

static void check_row(const json_t *row, const char *head, int budget)
{
    assert_string_equal(json_string_value(json_object_get(row, "head")), head);
    number(row, "budget", budget, budget);
    number(row, "context", 640, 640);
    number(row, "from", 256, 256);
    const json_t *mass = json_object_get(row, "mass"), *oracle = json_object_get(row, "oracle");
    double mean = number(mass, "mean", 0.1, 1), best = number(oracle, "per_layer_head", mean, 1);
    number(mass, "p10", 0, mean);
    number(mass, "worst_head", 0, number(mass, "worst_layer", 0, mean));
    const json_t *layers = json_object_get(mass, "by_layer_head");
    assert_int_equal(json_array_size(layers), 30);
    assert_int_equal(json_array_size(json_array_get(layers, 29)), 3);
    double group = number(oracle, "per_group", mean, best), shared = number(oracle, "shared", 0, group);
    number(oracle, "batch", 0, shared);
    number(oracle, "newest", 0, best);
    number(oracle, "sinks_newest", 0, best);
    number(row, "hit_rate", 0.01, 1);
    number(json_object_get(row, "batch"), "mass", 0.1, 1);
    number(row, "overlap", 0.01, 1);
    number(row, "bytes_saved", 0.01, 1);
    number(row, "bytes_saved_default_slots", 0.01, 1);
    number(row, "scored", 12, 12);
    number(row, "ppl_full", 1.5, 1000);
    number(row, "ppl_sparse", 1.5, 1000);
    number(row, "kl", 1e-6, 3);
    number(row, "top1_agreement", 0.2, 1);
}

static void test_json(void **state)
{
    (void)state;
    runcase_need_model();
    char plot[PATH_MAX], *texts[2];
    const char *document = runcase_document(6000);
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s", document);
    snprintf(plot, sizeof plot, "%s", runcase_path("mass.svg"));
    for (int again = 0; again < 2; again++) {
        struct proc proc;
        RUN(&proc, 0, "-m", RUNCASE_MODEL, "-H", HEAD, "-H", "bootstrap", "-f", file, "--budget", "96,160",
            "--context", "640", "--from", "256", "--positions", "3", "--steps", "12", "--json", "--plot",
            plot, "--tasks", "needle", "--items", "1", "--task-context", "256", "--long-generation", "8",
            "--long-prompt", "64", "--long-seeds", "1");
        texts[again] = strdup(proc.out.text);
        json_t *json = json_of(&proc);
        const json_t *rows = json_object_get(json, "results"), *tasks = json_object_get(json, "tasks");
        const json_t *generations = json_object_get(json, "generations");
        assert_int_equal(json_array_size(rows), 4);
        check_row(json_array_get(rows, 0), HEAD, 96);
        check_row(json_array_get(rows, 1), HEAD, 160);
        check_row(json_array_get(rows, 2), "bootstrap", 96);
        assert_int_equal(json_array_size(tasks), 4);
        const json_t *task = json_array_get(tasks, 1);
        assert_string_equal(json_string_value(json_object_get(task, "task")), "needle");
        double full = number(task, "full", 0, 1), sparse = number(task, "sparse", 0, 1);
        number(task, "difference", sparse - full, sparse - full);
        assert_int_equal(json_array_size(generations), 10);
        number(json_array_get(generations, 0), "ppl_under_full", 1, 1000);
        number(json_array_get(generations, 9), "tokens", 8, 8);
        json_decref(json);
        proc_free(&proc);
    }
    assert_string_equal(texts[0], texts[1]);
    free(texts[0]);
    free(texts[1]);
    char begin[8] = {0};
    FILE *svg = fopen(plot, "r");
    assert_non_null(svg);
    assert_int_equal(fread(begin, 1, 4, svg), 4);
    fclose(svg);
    assert_string_equal(begin, "<svg");
}

/* `--key-type` is what heads have unless a variant says otherwise; rounded keys give other figures, and the
 * same ones however they are asked for. */
static void test_key_types(void **state)
{
    (void)state;
    runcase_need_model();
    static const char *const kinds[] = {"f16", "int8", "auto"};
    enum { ROWS = 3 }; /* as all, f16, int8 */
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct proc proc;
        RUN(&proc, 0, "-m", RUNCASE_MODEL, "-H", "bootstrap", "-f", runcase_document(3000), "--budget", "96",
            "--context", "512", "--from", "256", "--positions", "4", "--steps", "8", "--key-type", kinds[i],
            "--variant", "key-type=f16", "key-type=int8", "--json");
        json_t *json = json_of(&proc);
        const json_t *rows = json_object_get(json, "results"), *mass[ROWS];
        double kl[ROWS];
        assert_int_equal(json_array_size(rows), ROWS);
        for (int r = 0; r < ROWS; r++) {
            mass[r] = json_object_get(json_array_get(rows, (size_t)r), "mass");
            number(mass[r], "mean", 0.1, 1);
            kl[r] = number(json_array_get(rows, (size_t)r), "kl", 1e-6, 3);
        }
        int same = i == 1 ? 2 : 1;
        assert_true(!json_equal(mass[1], mass[2]) && kl[1] != kl[2]);
        assert_true(json_equal(mass[0], mass[same]) && kl[0] == kl[same]);
        json_decref(json);
        proc_free(&proc);
    }
}

/* One line that names what is wrong, and nothing else. */
static void check_refusal(struct proc *proc, const char *text, int lines)
{
    assert_null(proc->out.text);
    assert_non_null(proc->err.text);
    assert_non_null(strstr(proc->err.text, text));
    int found = 0;
    for (const char *at = proc->err.text; *at; at++)
        found += *at == '\n';
    assert_int_equal(found, lines);
    proc_free(proc);
}

static void test_refusals(void **state)
{
    (void)state;
    struct proc proc;
    RUN(&proc, 2, "-f", "x");
    check_refusal(&proc, "-m MODEL", 2); /* the second points to --help */
    RUN(&proc, 2, "-m", "x", "-f", "x", "--budget", "many");
    check_refusal(&proc, "--budget", 2);
    RUN(&proc, 1, "-m", "x", "-f", "x", "--plot", "/nowhere/mass.svg");
    check_refusal(&proc, "--plot: /nowhere/mass.svg: No such file or directory", 1);
    RUN(&proc, 1, "-m", "x", "-f", "x", "--plot", "/tmp");
    check_refusal(&proc, "--plot: /tmp: Is a directory", 1);
    RUN(&proc, 1, "-m", "x", "-f", "x", "--json-file", "/nowhere/figures.json");
    check_refusal(&proc, "--json-file: /nowhere/figures.json: No such file or directory", 1);
    RUN(&proc, 2, "-m", "x", "-f", "x", "--no-texts");
    check_refusal(&proc, "nothing to do: --no-texts", 2);
    RUN(&proc, 2, "-m", "x", "-f", "x", "--variant", "bogus=1");
    check_refusal(&proc, "--variant 'bogus=1': found 'bogus', expected head=, ", 2);
    RUN(&proc, 2, "-m", "x", "-f", "x", "--variant", "budget=512,min-mass=2");
    check_refusal(&proc, "min-mass: found '2', expected a share from 0 to 1", 2);
    RUN(&proc, 1, "-m", "/nowhere/model.gguf", "-f", "x");
    check_refusal(&proc, "/nowhere/model.gguf", 1);
    runcase_need_model();
    RUN(&proc, 1, "-m", RUNCASE_MODEL, "-H", HEAD, "-f", "/nowhere/text");
    check_refusal(&proc, "/nowhere/text", 1);
    RUN(&proc, 1, "-m", RUNCASE_MODEL, "-H", "/nowhere/head", "-f", "README.md");
    check_refusal(&proc, "/nowhere/head", 1);
    RUN(&proc, 1, "-m", RUNCASE_MODEL, "-H", HEAD, "-f", "README.md", "--context", "1000000");
    check_refusal(&proc, "1000000", 1);
    RUN(&proc, 1, "-m", RUNCASE_MODEL, "-H", HEAD, "-f", "/");
    check_refusal(&proc, "/: read: Is a directory", 1);
    char bytes[PATH_MAX];
    snprintf(bytes, sizeof bytes, "%s", runcase_path("bytes.txt"));
    temp_write(bytes, "abc\xff");
    RUN(&proc, 1, "-m", RUNCASE_MODEL, "-H", HEAD, "-f", bytes);
    check_refusal(&proc, "bytes.txt: text: byte 3", 1);
    /* Before anything is measured. */
    RUN(&proc, 1, "-m", RUNCASE_MODEL, "-H", HEAD, "-f", "README.md", "--long-generation", "2",
        "--long-prompt", "8000");
    check_refusal(&proc, "--long-prompt: found no text of 8000 tokens", 1);
    RUN(&proc, 1, "-m", RUNCASE_MODEL, "-H", HEAD, "-f", "README.md", "--variant",
        "group-budgets=300:200:100");
    check_refusal(&proc, "found 3, expected one for each of the head's groups, 8", 1);
}

/* Starts it and interrupts it as soon as standard error has `word`. */
static void interrupt_at(struct proc *proc, const char *word, const char *const *arguments)
{
    start(proc, arguments);
    int64_t deadline = clock_now_ns() + LIMIT_S * CLOCK_S;
    while (!proc->err.text || !strstr(proc->err.text, word))
        assert_true(proc_pump(proc, deadline));
    kill(proc->pid, SIGINT);
    assert_true(proc_wait(proc, clock_now_ns() + LIMIT_S * CLOCK_S));
    if (!proc_exited(proc, 130) || !strstr(proc->err.text, "specontext eval: interrupted"))
        fail_msg("status %x: %s", proc->status, proc->err.text);
}
#define INTERRUPT_AT(proc, word, ...) interrupt_at(proc, word, (const char *const[]){__VA_ARGS__, NULL})

/* Before anything was measured there is nothing to print. */
static void test_interrupt(void **state)
{
    (void)state;
    runcase_need_model();
    struct proc proc;
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s", runcase_document(20000));
    /* The first position to be looked at is far behind. */
    INTERRUPT_AT(&proc, "attention of", "-m", RUNCASE_MODEL, "-H", HEAD, "-f", file, "--json", "--positions",
                 "1");
    assert_null(proc.out.text);
    proc_free(&proc);
}

/* What was measured by then is told, as a part. */
static void test_interrupt_late(void **state)
{
    (void)state;
    runcase_need_model();
    struct proc proc;
    char first[PATH_MAX], second[PATH_MAX], saved[PATH_MAX];
    snprintf(first, sizeof first, "%s", runcase_document(2500));
    snprintf(second, sizeof second, "%s", runcase_document(30000));
    snprintf(saved, sizeof saved, "%s", runcase_path("part.json"));
    /* A text is done when the next one is named, a task when its figures stand there; the next take long. */
    INTERRUPT_AT(&proc, "document-30000.txt: positions 256", "-m", RUNCASE_MODEL, "-H", HEAD, "-f", first,
                 "-f", second, "--budget", "96", "--context", "6000", "--from", "256", "--no-mass", "--batch",
                 "2", "--json", "--tasks", "needle", "--json-file", saved);
    json_t *json = json_of(&proc), *file = json_load_file(saved, 0, NULL);
    assert_true(json_is_true(json_object_get(json, "incomplete")));
    assert_true(json_equal(json, file));
    assert_int_equal(json_array_size(json_object_get(json, "results")), 1);
    const json_t *row = json_array_get(json_object_get(json, "results"), 0);
    number(row, "texts", 1, 2);
    number(row, "scored", 200, 6000);
    number(row, "ppl_sparse", 1.5, 1000);
    number(row, "overlap", 0.01, 1);
    assert_int_equal(json_array_size(json_object_get(json, "tasks")), 0);
    json_decref(json);
    json_decref(file);
    proc_free(&proc);

    INTERRUPT_AT(&proc, "  1 items: full", "-m", RUNCASE_MODEL, "-H", HEAD, "--tasks", "needle", "--items",
                 "1", "--budget", "96", "--task-context", "256,6000");
    assert_non_null(strstr(proc.out.text, "Incomplete: figures of what was measured until it ended"));
    assert_non_null(strstr(proc.out.text, "     256 needle          1 "));
    assert_null(strstr(proc.out.text, "    6000 needle"));
    proc_free(&proc);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),       cmocka_unit_test(test_json),
        cmocka_unit_test(test_key_types),      cmocka_unit_test(test_interrupt),
        cmocka_unit_test(test_interrupt_late),
    };
    return cmocka_run_group_tests(tests, runcase_set_up, runcase_tear_down);
}
