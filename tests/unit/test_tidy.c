/* The house rules that a machine can check: who may include whom, sizes of files, banned calls, functions
 * that are defined twice, a comment at the top of every source, and that the protocol's and shared memory's
 * documents name what the headers have. Runs in the repository's root. */
#include <ctype.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/check.h"

#define FILES_MAX        1024
#define SOURCE_LINES_MAX 700
#define HEADER_LINES_MAX 250
#define COLUMNS_MAX      110

struct file {
    char *path; /* "link/bus.c" */
    char *text; /* NUL-terminated */
};

static struct file files[FILES_MAX];
static int file_count;

/* What each folder may include besides itself; "*": anything. A daemon never stands in another's list. */
static const struct {
    const char *folder, *allowed;
} folders[] = {
    {"base", ""},
    {"proto", "base"},
    {"link", "base proto"},
    {"model", "base proto"},
    {"compute", "base"},
    {"kvstore", "base proto link compute"},
    {"retriever", "base proto link model compute"},
    {"decoder", "base proto link model compute"},
    {"launch", "base proto link model compute"},
    {"eval", "base proto link model compute kvstore retriever decoder launch"},
    {"bench", "*"},
    {"tools", "*"},
    {"tests", "*"},
};

/* ---- reading ------------------------------------------------------------------------------------------- */

static char *read_text(const char *path)
{
    FILE *from = fopen(path, "re");
    if (!from)
        return NULL;
    size_t bytes = 0, capacity = 1 << 16;
    char *text = mem_alloc(capacity, 1);
    for (size_t n; (n = fread(text + bytes, 1, capacity - bytes - 1, from)) > 0;) {
        bytes += n;
        if (bytes + 1 == capacity)
            text = mem_resize(text, capacity *= 2, 1);
    }
    text[bytes] = 0;
    fclose(from);
    return text;
}

/* Whether the blank-separated list has the word of `n` bytes. */
static bool has_word(const char *list, const char *word, size_t n)
{
    for (const char *at = list; *at;) {
        size_t m = strcspn(at, " ");
        if (m == n && !memcmp(at, word, n))
            return true;
        at += m + (at[m] == ' ');
    }
    return false;
}

static int take_file(const char *path, const struct stat *st, int kind, struct FTW *where)
{
    (void)st;
    (void)where;
    const char *end = strrchr(path, '.');
    if (kind != FTW_F || !end || !has_word("c h cu cuh", end + 1, strlen(end + 1)))
        return 0;
    CHECK(file_count < FILES_MAX);
    files[file_count++] = (struct file){.path = mem_strdup(path), .text = read_text(path)};
    return 0;
}

static int set_up(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        nftw(folders[i].folder, take_file, 16, FTW_PHYS); /* a folder may not be there yet */
    return file_count ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < file_count; i++) {
        mem_free(&files[i].path);
        mem_free(&files[i].text);
    }
    return 0;
}

static bool in_folder(const struct file *file, const char *folder)
{
    size_t n = strlen(folder);
    return !strncmp(file->path, folder, n) && file->path[n] == '/';
}

static bool is_header(const struct file *file)
{
    return file->path[strlen(file->path) - 1] == 'h';
}

/* Line number of a place in a text. */
static int line_of(const char *text, const char *at)
{
    int line = 1;
    for (; text < at; text++)
        line += *text == '\n';
    return line;
}

/* ---- rules --------------------------------------------------------------------------------------------- */

static int bad_includes(const struct file *file, const char *folder, const char *allowed)
{
    int bad = 0;
    for (const char *at = file->text; (at = strstr(at, "#include \"")); at++) {
        const char *name = at + strlen("#include \"");
        size_t n = strcspn(name, "/\"");
        bool own = n == strlen(folder) && !memcmp(name, folder, n);
        if (name[n] == '/' && (own || has_word(allowed, name, n)))
            continue;
        print_error("%s:%d: may not include \"%.*s\"\n", file->path, line_of(file->text, at),
                    (int)strcspn(name, "\""), name);
        bad++;
    }
    return bad;
}

static void test_includes(void **state)
{
    (void)state;
    int bad = 0;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        for (int f = 0; f < file_count; f++)
            if (in_folder(&files[f], folders[i].folder) && strcmp(folders[i].allowed, "*"))
                bad += bad_includes(&files[f], folders[i].folder, folders[i].allowed);
    assert_int_equal(bad, 0);
}

/* eval/ measures in one process: it may use what the daemons compute with, not what makes them daemons; and
 * nothing but tests uses it. */
static void test_eval_takes_computation_alone(void **state)
{
    (void)state;
    static const char allowed[] = "decoder/pass.h decoder/pass_gpu.h decoder/weights_gpu.h "
                                  "decoder/gpu_device.h retriever/keys.h retriever/positions.h "
                                  "retriever/projection.h retriever/rank.h retriever/reach.h "
                                  "kvstore/elastic.h launch/head.h launch/head_cache.h "
                                  "launch/tokenizer_source.h";
    int bad = 0;
    for (int f = 0; f < file_count; f++)
        for (const char *at = files[f].text; (at = strstr(at, "#include \"")); at++) {
            const char *name = at + strlen("#include \"");
            size_t n = strcspn(name, "/\""), whole = strcspn(name, "\"");
            bool daemons = has_word("decoder retriever kvstore launch", name, n);
            bool ours = in_folder(&files[f], "eval"), uses = n == 4 && !memcmp(name, "eval", n);
            if (ours ? daemons && !has_word(allowed, name, whole) : uses && !in_folder(&files[f], "tests")) {
                print_error("%s:%d: may not include \"%.*s\"\n", files[f].path, line_of(files[f].text, at),
                            (int)whole, name);
                bad++;
            }
        }
    assert_int_equal(bad, 0);
}

static void test_table_of_folders_keeps_daemons_apart(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        for (const char *daemons = "kvstore retriever decoder launch eval"; *daemons;) {
            size_t n = strcspn(daemons, " ");
            assert_true(!has_word(folders[i].allowed, daemons, n) || !strcmp(folders[i].folder, "eval"));
            daemons += n + (daemons[n] == ' ');
        }
}

/* Headers that may be longer, each for a reason; the list may only shrink. */
static const struct {
    const char *path;
    int lines;
} longer[] = {
    {"proto/msg.h", 300},            /* every message of the protocol, in one place */
    {"compute/cpu/q8_lanes.h", 400}, /* kernels, built once an instruction set */
    {"compute/cuda/kernels.h", 451}, /* every CUDA operator, with its shapes, in one place */
};

static void test_sizes(void **state)
{
    (void)state;
    int bad = 0;
    for (int f = 0; f < file_count; f++) {
        /* Headers below tests/ hold code that several test binaries share. */
        bool short_one = is_header(&files[f]) && !in_folder(&files[f], "tests");
        int lines = 0, most = short_one ? HEADER_LINES_MAX : SOURCE_LINES_MAX;
        for (size_t i = 0; i < sizeof longer / sizeof *longer; i++)
            if (!strcmp(files[f].path, longer[i].path))
                most = longer[i].lines;
        for (const char *at = files[f].text; *at; at++)
            lines += *at == '\n';
        if (lines > most) {
            print_error("%s: %d lines, at most %d\n", files[f].path, lines, most);
            bad++;
        }
    }
    assert_int_equal(bad, 0);
}

static void test_columns(void **state)
{
    (void)state;
    int bad = 0;
    for (int f = 0; f < file_count; f++)
        for (const char *line = files[f].text; *line;) {
            size_t n = strcspn(line, "\n");
            if (n > COLUMNS_MAX) {
                print_error("%s:%d: %zu columns, at most %d\n", files[f].path, line_of(files[f].text, line),
                            n, COLUMNS_MAX);
                bad++;
            }
            line += n + (line[n] == '\n');
        }
    assert_int_equal(bad, 0);
}

static void test_top_comments(void **state)
{
    (void)state;
    int bad = 0;
    for (int f = 0; f < file_count; f++) {
        if (!strncmp(files[f].text, "/*", 2))
            continue;
        print_error("%s: does not begin with a comment\n", files[f].path);
        bad++;
    }
    assert_int_equal(bad, 0);
}

/* A call of `name`: the word, then '('. */
static const char *find_call(const char *text, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = text; (at = strstr(at, name)); at++) {
        bool begins = at == text || (!isalnum((unsigned char)at[-1]) && at[-1] != '_' && at[-1] != '"');
        if (begins && at[n] == '(')
            return at;
    }
    return NULL;
}

static int count_calls(const char *folder, const char *const *names, const char *why)
{
    int bad = 0;
    for (int f = 0; f < file_count; f++)
        for (const char *const *name = names; in_folder(&files[f], folder) && *name; name++) {
            const char *at = find_call(files[f].text, *name);
            if (!at)
                continue;
            print_error("%s:%d: %s(): %s\n", files[f].path, line_of(files[f].text, at), *name, why);
            bad++;
        }
    return bad;
}

/* The name of the function whose body opens at `brace`, if others can see it; 0 bytes: none. */
static const char *function_at(const char *text, const char *brace, size_t *ret_bytes)
{
    const char *begin = brace, *at;
    *ret_bytes = 0;
    while (begin > text && strncmp(begin, "\n\n", 2) && strncmp(begin, "*/\n", 3))
        begin--;
    for (at = begin; at < brace; at++)
        if (!strncmp(at, "static ", 7))
            return NULL;
    begin += 2;
    const char *end = memchr(begin, '(', (size_t)(brace - begin));
    if (!end)
        return NULL; /* a table or a struct */
    for (at = end; at > begin && (isalnum((unsigned char)at[-1]) || at[-1] == '_');)
        at--;
    *ret_bytes = (size_t)(end - at);
    return at;
}

/* Of a library or a daemon. Tests, benches and tools have a main each. */
static bool is_ours(const struct file *file)
{
    size_t n = strlen(file->path);
    return !strcmp(file->path + n - 2, ".c") && !in_folder(file, "tests") && !in_folder(file, "bench") &&
           !in_folder(file, "tools") && (n < 7 || strcmp(file->path + n - 7, "/main.c"));
}

struct function {
    const char *name; /* of `bytes`, within a file's text */
    size_t bytes;
    const struct file *file;
};

static int by_name(const void *a, const void *b)
{
    const struct function *x = a, *y = b;
    size_t n = x->bytes < y->bytes ? x->bytes : y->bytes;
    int order = memcmp(x->name, y->name, n);
    return order ? order : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* A linker takes the first of two from archives and says nothing: tests link all daemons. */
static void test_functions_are_defined_once(void **state)
{
    (void)state;
    int bad = 0;
    size_t found = 0, room = 256;
    struct function *functions = mem_alloc(room, sizeof *functions);
    for (int i = 0; i < file_count; i++)
        for (const char *at = files[i].text; is_ours(&files[i]) && (at = strstr(at, "\n{\n")); at++) {
            if (found == room)
                functions = mem_resize(functions, room *= 2, sizeof *functions);
            struct function *f = &functions[found];
            *f = (struct function){.file = &files[i]};
            f->name = function_at(files[i].text, at, &f->bytes);
            found += f->bytes > 0;
        }
    qsort(functions, found, sizeof *functions, by_name);
    for (size_t i = 1; i < found; i++)
        if (!by_name(&functions[i - 1], &functions[i])) {
            print_error("%s: %.*s: defined in %s too\n", functions[i].file->path, (int)functions[i].bytes,
                        functions[i].name, functions[i - 1].file->path);
            bad++;
        }
    mem_free(&functions);
    assert_true(found > 100);
    assert_int_equal(bad, 0);
}

static void test_banned_calls(void **state)
{
    (void)state;
    static const char *const unbounded[] = {"sprintf", "vsprintf", "strcpy", "strcat", "gets",
                                            "atoi",    "atol",     "atof",   "system", NULL};
    static const char *const named[] = {"shm_open", "sem_open", "shmget", NULL};
    static const char *const sleeps[] = {"sleep", "usleep", "nanosleep", "clock_nanosleep", NULL};
    int bad = 0;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        bad += count_calls(folders[i].folder, unbounded, "checks nothing") +
               count_calls(folders[i].folder, named, "has a name that may be left behind");
    bad += count_calls("tests", sleeps, "tests wait for conditions");
    assert_int_equal(bad, 0);
}

static void test_no_marks_of_unfinished_work(void **state)
{
    (void)state;
    static const char *const marks[] = {"TO"
                                        "DO",
                                        "FIX"
                                        "ME",
                                        "XX"
                                        "X:",
                                        "HA"
                                        "CK"};
    int bad = 0;
    for (int f = 0; f < file_count; f++)
        for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
            const char *at = strstr(files[f].text, marks[i]);
            if (!at)
                continue;
            print_error("%s:%d: %s\n", files[f].path, line_of(files[f].text, at), marks[i]);
            bad++;
        }
    assert_int_equal(bad, 0);
}

/* Enumerators "PREFIX_NAME" between `begin` and the next "};" must stand in the document, without the prefix.
 * COUNT is the number of them, not one. */
static int undocumented(const char *header, const char *begin, const char *prefix, const char *document)
{
    char *text = read_text(header), *page = read_text(document);
    assert_non_null(text);
    assert_non_null(page);
    const char *at = strstr(text, begin), *end = at ? strstr(at, "};") : NULL;
    assert_non_null(end);
    int bad = 0, seen = 0;
    size_t n = strlen(prefix);
    for (at += strlen(begin); (at = strstr(at, prefix)) && at < end; at += n) {
        if (isalnum((unsigned char)at[-1]) || at[-1] == '_')
            continue;
        char name[64];
        size_t length = strspn(at + n, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
        snprintf(name, sizeof name, "%.*s", (int)length, at + n);
        seen++;
        if (strcmp(name, "COUNT") && !strstr(page, name)) {
            print_error("%s: %s%s does not stand in %s\n", header, prefix, name, document);
            bad++;
        }
    }
    mem_free(&text);
    mem_free(&page);
    assert_true(seen > 5); /* the pattern still finds what it is there for */
    return bad;
}

static void test_documents_name_everything(void **state)
{
    (void)state;
    int bad = undocumented("proto/msg.h", "enum msg_kind {", "MSG_", "PROTOCOL.md");
    bad += undocumented("proto/control.h", "enum control_flag_index {", "FLAG_", "SHARED-MEMORY.md");
    assert_int_equal(bad, 0);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_includes),
        cmocka_unit_test(test_eval_takes_computation_alone),
        cmocka_unit_test(test_table_of_folders_keeps_daemons_apart),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_columns),
        cmocka_unit_test(test_top_comments),
        cmocka_unit_test(test_functions_are_defined_once),
        cmocka_unit_test(test_banned_calls),
        cmocka_unit_test(test_no_marks_of_unfinished_work),
        cmocka_unit_test(test_documents_name_everything),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
