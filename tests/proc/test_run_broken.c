/* Broken model files, one after another, through `specontext inspect` as a user runs it: a generator cuts
 * sound files at each boundary and changes counts, shapes, offsets and names. What cannot be right is
 * refused; whatever the file, the program says one line, ends by itself, and stays under a second of
 * processor and 64 MiB. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "tests/lib/ggufgen.h"
#include "tests/lib/ggufgen_arch.h"
#include "tests/lib/proc.h"
#include "tests/lib/temp.h"

enum { SECONDS_MAX = 1, KIB_MAX = 64 << 10, TEXT_BYTES = 2048 };

static unsigned files; /* checked so far */
static long kib_most;
static double seconds_most;

/* Runs `specontext inspect PATH`: its exit code; lines of standard error, and how they begin. */
static int inspect(const char *path, unsigned *ret_lines, char ret_text[TEXT_BYTES], struct rusage *ret_usage)
{
    char program[PATH_MAX];
    int ends[2], status;
    snprintf(program, sizeof program, "%s", proc_program("specontext"));
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        alarm(60); /* ends by a signal, which no file may do */
        if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(ends[1], 2) < 0)
            _exit(126);
        execl(program, program, "inspect", path, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    size_t bytes = 0;
    ssize_t n;
    char more[512];
    while ((n = read(ends[0], more, sizeof more)) > 0) {
        size_t room = TEXT_BYTES - 1 - bytes, take = (size_t)n < room ? (size_t)n : room;
        memcpy(ret_text + bytes, more, take);
        bytes += take;
    }
    ret_text[bytes] = '\0';
    close(ends[0]);
    *ret_lines = 0;
    for (size_t i = 0; i < bytes; i++)
        *ret_lines += ret_text[i] == '\n';
    assert_int_equal(wait4(pid, &status, 0, ret_usage), pid);
    if (!WIFEXITED(status))
        fail_msg("%s: ended by signal %d: %s", path, WTERMSIG(status), ret_text);
    return WEXITSTATUS(status);
}

static double seconds_of(struct timeval t)
{
    return (double)t.tv_sec + (double)t.tv_usec * 1e-6;
}

/* `refused`: 1: must be; 0: must not; -1: either, since what was changed may be without meaning. */
static void check(const char *path, const char *what, int refused)
{
    unsigned lines;
    char text[TEXT_BYTES];
    struct rusage usage;
    int code = inspect(path, &lines, text, &usage);
    double seconds = seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
    if (code > 1 || (refused == 1 && code == 0) || (refused == 0 && code == 1))
        fail_msg("%s: exit code %d, expected %d: %s", what, code, refused, text);
    if (code == 1 && lines != 1)
        fail_msg("%s: refused with %u lines: %s", what, lines, text);
    if (code == 1 && !strstr(text, path))
        fail_msg("%s: the file is not named: %s", what, text);
#if !defined(__SANITIZE_ADDRESS__)
    if (seconds >= SECONDS_MAX || usage.ru_maxrss >= KIB_MAX)
        fail_msg("%s: %.2f s, %ld KiB", what, seconds, usage.ru_maxrss);
#endif
    files++;
    kib_most = usage.ru_maxrss > kib_most ? usage.ru_maxrss : kib_most;
    seconds_most = seconds > seconds_most ? seconds : seconds_most;
}

static char place[PATH_MAX];

static int set_up(void **state)
{
    (void)state;
    temp_make(place);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    temp_remove(place);
    print_message("%u files, at most %.3f s of processor and %ld KiB\n", files, seconds_most, kib_most);
    return 0;
}

static void write_bytes(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wbe");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static const uint64_t wrong_numbers[] = {0,
                                         1,
                                         0xffff,
                                         UINT64_C(1) << 31,
                                         UINT64_C(1) << 32,
                                         UINT64_C(1) << 61,
                                         UINT64_C(1) << 63,
                                         UINT64_MAX - 31,
                                         UINT64_MAX};
#define WRONG_NUMBERS (sizeof wrong_numbers / sizeof *wrong_numbers)

/* ---- GGUF ---- */

static const struct ggufgen_llama small = {.layers = 1,
                                           .hidden = 64,
                                           .q_heads = 2,
                                           .kv_heads = 1,
                                           .head_dim = 32,
                                           .ffn = 64,
                                           .vocab = 64,
                                           .context = 128,
                                           .type = DTYPE_Q4_0};

static const char *gguf_path(void)
{
    static char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/broken.gguf", place);
    return path;
}

static void check_gguf(const void *data, size_t bytes, const char *what, int refused)
{
    write_bytes(gguf_path(), data, bytes);
    check(gguf_path(), what, refused);
}

static void test_gguf_truncated(void **state)
{
    (void)state;
    struct ggufgen gen;
    size_t bytes, sections[4];
    ggufgen_init(&gen);
    ggufgen_llama(&gen, &small);
    uint8_t *data = ggufgen_finish(&gen, &bytes, sections);
    check_gguf(data, bytes, "sound", 0);
    for (unsigned s = 0; s < 3; s++)
        for (size_t cut = sections[s] - 2; cut <= sections[s] + 2; cut++)
            check_gguf(data, cut, "cut at a section", 1);
    for (size_t cut = 0; cut < 32; cut++)
        check_gguf(data, cut, "cut in the header", 1);
    for (size_t cut = 32; cut < sections[2]; cut += 37)
        check_gguf(data, cut, "cut in the directory", 1);
    for (size_t cut = sections[2]; cut + 64 < bytes; cut += (bytes - sections[2]) / 16)
        check_gguf(data, cut, "cut in the data", 1);
    mem_free(&data);
    ggufgen_free(&gen);
}

/* Numbers of eight bytes written over every part of header, keys and directory. */
static void test_gguf_numbers(void **state)
{
    (void)state;
    struct ggufgen gen;
    size_t bytes, sections[4];
    ggufgen_init(&gen);
    ggufgen_llama(&gen, &small);
    uint8_t *data = ggufgen_finish(&gen, &bytes, sections);
    for (size_t at = 0; at + 8 <= sections[2]; at += at < 24 ? 4 : 13) {
        uint8_t right[8];
        memcpy(right, data + at, 8);
        memcpy(data + at, &wrong_numbers[(at / 4) % WRONG_NUMBERS], 8);
        check_gguf(data, bytes, "a number over the directory", -1);
        memcpy(data + at, right, 8);
    }
    for (size_t field = 8; field <= 16; field += 8) /* counts of tensors and keys */
        for (unsigned i = 0; i < WRONG_NUMBERS; i++) {
            uint8_t right[8];
            memcpy(right, data + field, 8);
            memcpy(data + field, &wrong_numbers[i], 8);
            check_gguf(data, bytes, "a count", 1);
            memcpy(data + field, right, 8);
        }
    mem_free(&data);
    ggufgen_free(&gen);
}

/* One more tensor in a sound file's directory. */
static void check_info(const char *name, uint32_t dims, const uint64_t *shape, uint32_t type, uint64_t offset,
                       const char *what)
{
    struct ggufgen gen;
    size_t bytes;
    ggufgen_init(&gen);
    ggufgen_llama(&gen, &small);
    ggufgen_info(&gen, name, dims, shape, type, offset);
    uint8_t *data = ggufgen_finish(&gen, &bytes, NULL);
    check_gguf(data, bytes, what, 1);
    mem_free(&data);
    ggufgen_free(&gen);
}

static void test_gguf_tensors(void **state)
{
    (void)state;
    const uint64_t one[5] = {32, 1, 1, 1, 1}, zero[1] = {0}, far = UINT64_C(1) << 40;
    check_info("token_embd.weight", 1, one, DTYPE_F32, far, "a name twice, behind the end");
    check_info("x", 1, one, DTYPE_F32, 0, "overlapping the first tensor");
    check_info("x", 1, one, DTYPE_F32, 7, "not aligned");
    check_info("x", 1, one, DTYPE_F32, far, "behind the end");
    check_info("x", 5, one, DTYPE_F32, 0, "five dimensions");
    check_info("x", 1, one, 9999, 0, "an unknown type");
    check_info("x", 1, zero, DTYPE_F32, 0, "a dimension of nothing");
    for (unsigned i = 3; i < WRONG_NUMBERS; i++) {
        const uint64_t shape[4] = {wrong_numbers[i], wrong_numbers[i], 4, 4};
        for (uint32_t dims = 1; dims <= 4; dims++)
            check_info("x", dims, shape, DTYPE_F32, 0, "a product that wraps or is huge");
        check_info("x", 1, one, DTYPE_F32, wrong_numbers[i], "an offset that wraps or is huge");
    }
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n";
    check_gguf(lfs, sizeof lfs - 1, "a Git-LFS pointer", 1);
    check_gguf("GGUF", 4, "only the magic", 1);
    check_gguf("<!doctype html>", 15, "a page of the web", 1);
}

/* ---- a folder with safetensors ---- */

struct folder {
    char *path;
    char weights[PATH_MAX];
    uint8_t *data; /* of the weights' file */
    size_t bytes, header_bytes;
};

static void open_folder(struct folder *f)
{
    ggufgen_arch_folder("llama-gqa", 1, NULL, &f->path);
    snprintf(f->weights, sizeof f->weights, "%s/model.safetensors", f->path);
    FILE *file = fopen(f->weights, "rbe");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    f->bytes = (size_t)ftell(file);
    rewind(file);
    f->data = mem_alloc(f->bytes, 1);
    assert_int_equal(fread(f->data, 1, f->bytes, file), f->bytes);
    fclose(file);
    uint64_t header;
    memcpy(&header, f->data, 8);
    f->header_bytes = (size_t)header;
}

static void close_folder(struct folder *f)
{
    mem_free(&f->data);
    ggufgen_arch_remove(&f->path);
}

static void check_weights(const struct folder *f, const void *data, size_t bytes, const char *what,
                          int refused)
{
    write_bytes(f->weights, data, bytes);
    check(f->path, what, refused);
}

/* The same data behind another header. */
static void check_header(const struct folder *f, const char *header, const char *what)
{
    size_t length = strlen(header), tail = f->bytes - 8 - f->header_bytes, bytes = 8 + length + tail;
    uint8_t *data = mem_alloc(bytes, 1);
    uint64_t field = length;
    memcpy(data, &field, 8);
    memcpy(data + 8, header, length);
    memcpy(data + 8 + length, f->data + 8 + f->header_bytes, tail);
    check_weights(f, data, bytes, what, 1);
    mem_free(&data);
}

static void test_safetensors_truncated(void **state)
{
    (void)state;
    struct folder f;
    open_folder(&f);
    check_weights(&f, f.data, f.bytes, "sound", 0);
    for (size_t cut = 0; cut <= 16; cut++)
        check_weights(&f, f.data, cut, "cut in the length", 1);
    for (size_t cut = 16; cut < 8 + f.header_bytes; cut += 97)
        check_weights(&f, f.data, cut, "cut in the header", 1);
    for (size_t cut = 8 + f.header_bytes; cut < f.bytes; cut += (f.bytes - 8 - f.header_bytes) / 8)
        check_weights(&f, f.data, cut, "cut in the data", 1);
    check_weights(&f, f.data, f.bytes - 1, "a byte short", 1);
    for (unsigned i = 0; i < WRONG_NUMBERS; i++) {
        uint8_t right[8];
        memcpy(right, f.data, 8);
        memcpy(f.data, &wrong_numbers[i], 8);
        check_weights(&f, f.data, f.bytes, "the header's length", 1);
        memcpy(f.data, right, 8);
    }
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n";
    check_weights(&f, lfs, sizeof lfs - 1, "a Git-LFS pointer", 1);
    close_folder(&f);
}

/* One field of the tensor "model.norm.weight" replaced by a JSON text. */
static void check_field(const struct folder *f, const json_t *header, const char *field, const char *json,
                        const char *what)
{
    json_t *changed = json_deep_copy(header), *value = json_loads(json, JSON_DECODE_ANY, NULL);
    assert_non_null(value);
    assert_int_equal(json_object_set_new(json_object_get(changed, "model.norm.weight"), field, value), 0);
    char *text = json_dumps(changed, JSON_COMPACT);
    check_header(f, text, what);
    free(text);
    json_decref(changed);
}

static void test_safetensors_tensors(void **state)
{
    (void)state;
    struct folder f;
    open_folder(&f);
    json_t *header = json_loadb((const char *)f.data + 8, f.header_bytes, 0, NULL);
    assert_non_null(json_object_get(header, "model.norm.weight"));
    const char *const offsets[] = {"[0,4]",   "[-1,255]", "[4,0]",
                                   "[0]",     "[0,1,2]",  "{}",
                                   "[0.5,1]", "[0,1e30]", "[9223372036854775000,9223372036854775807]"};
    for (unsigned i = 0; i < sizeof offsets / sizeof *offsets; i++)
        check_field(&f, header, "data_offsets", offsets[i], "offsets that overlap, wrap or are none");
    const char *const shapes[] = {
        "[]",         "[0]", "[-64]",   "[4294967296,4294967296]", "[9223372036854775807,2]", "[1,1]",
        "[64,64,64]", "64",  "[\"64\"]"};
    for (unsigned i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_field(&f, header, "shape", shapes[i], "a shape that wraps, is huge or none");
    check_field(&f, header, "dtype", "\"F1\"", "an unknown type");
    check_field(&f, header, "dtype", "7", "a type that is a number");
    json_object_del(header, "model.norm.weight");
    char *gap = json_dumps(header, JSON_COMPACT);
    check_header(&f, gap, "a gap where a tensor was");
    free(gap);
    json_decref(header);
    check_header(&f,
                 "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                 "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
                 "a name twice");
    char *deep = mem_alloc(100001, 1);
    memset(deep, '[', 100000);
    check_header(&f, deep, "a hundred thousand brackets");
    mem_free(&deep);
    close_folder(&f);
}

static void test_folder_files(void **state)
{
    (void)state;
    static const char *const contents[] = {
        "",
        "{",
        "[]",
        "null",
        "\xff\xfe",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":1e300}",
        "{\"architectures\":[\"LlamaForCausalLM\"],\"num_hidden_layers\":99999999999999999999}"};
    struct folder f;
    open_folder(&f);
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/config.json", f.path);
    for (unsigned i = 0; i < sizeof contents / sizeof *contents; i++) {
        temp_write(path, contents[i]);
        check(f.path, "a broken config.json", 1);
    }
    close_folder(&f);
    open_folder(&f);
    snprintf(path, sizeof path, "%s/tokenizer.json", f.path);
    for (unsigned i = 0; i < 6; i++) {
        temp_write(path, contents[i]);
        check(f.path, "a broken tokenizer.json", 1);
    }
    close_folder(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gguf_truncated),      cmocka_unit_test(test_gguf_numbers),
        cmocka_unit_test(test_gguf_tensors),        cmocka_unit_test(test_safetensors_truncated),
        cmocka_unit_test(test_safetensors_tensors), cmocka_unit_test(test_folder_files),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
