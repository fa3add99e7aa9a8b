/* The GGUF reader: sound files, and every way of being wrong that has broken readers elsewhere. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/gguf.h"
#include "tests/lib/ggufgen.h"

static int open_bytes(const void *data, size_t bytes, struct gguf **ret, struct err *err)
{
    char *path;
    ggufgen_save(data, bytes, &path);
    *err = (struct err){0};
    *ret = NULL;
    int rc = gguf_open(path, ret, err);
    ggufgen_remove(&path);
    return rc;
}

static int open_gen(const struct ggufgen *gen, struct gguf **ret, struct err *err)
{
    size_t bytes;
    uint8_t *data = ggufgen_finish(gen, &bytes, NULL);
    int rc = open_bytes(data, bytes, ret, err);
    mem_free(&data);
    return rc;
}

/* Opens a file that must be refused with this code and with these words in the error. */
static void refuse_bytes(const void *data, size_t bytes, int code, const char *words)
{
    struct gguf *g;
    struct err err;
    int rc = open_bytes(data, bytes, &g, &err);
    if (rc != code || !strstr(err.text, words))
        fail_msg("found %d \"%s\", expected %d \"%s\"", rc, err.text, code, words);
    assert_null(g);
    assert_int_equal(err.code, code);
}

static void refuse(struct ggufgen *gen, int code, const char *words)
{
    size_t bytes;
    uint8_t *data = ggufgen_finish(gen, &bytes, NULL);
    refuse_bytes(data, bytes, code, words);
    mem_free(&data);
    ggufgen_free(gen);
}

static void make_small(struct ggufgen *gen)
{
    static const char *const texts[] = {"a", "", "ccc"};
    static const int32_t ints[] = {1, -2, 3};
    static const float floats[] = {0.5f, -1, 2};
    ggufgen_init(gen);
    ggufgen_string(gen, "general.architecture", "llama");
    ggufgen_strings(gen, "texts", texts, 3);
    ggufgen_i32s(gen, "ints", ints, 3);
    ggufgen_f32s(gen, "floats", floats, 3);
    ggufgen_bool(gen, "yes", 1);
    ggufgen_f32(gen, "f", 0.25f);
    ggufgen_u32(gen, "u", 7);
    ggufgen_tensor(gen, "first", DTYPE_F32, 3, 5, 1);
    ggufgen_tensor(gen, "second", DTYPE_Q4_1, 2, 64, 1);
    ggufgen_tensor(gen, "third", DTYPE_F32, 0, 1, 0);
}

static void test_sound(void **state)
{
    (void)state;
    struct ggufgen gen;
    struct gguf *g;
    struct err err;
    make_small(&gen);
    assert_int_equal(open_gen(&gen, &g, &err), 0);
    assert_int_equal(gguf_tensors(g), 3);
    struct name text;
    assert_int_equal(gguf_string(g, "general.architecture", &text, &err), 0);
    assert_true(name_is(text, "llama"));
    struct gguf_array a;
    assert_int_equal(gguf_strings(g, "texts", &a, &err), 0);
    const uint8_t *cursor = a.data;
    assert_int_equal(a.count, 3);
    assert_true(name_is(gguf_array_next(&cursor), "a"));
    assert_true(name_is(gguf_array_next(&cursor), ""));
    assert_true(name_is(gguf_array_next(&cursor), "ccc"));
    assert_int_equal(gguf_i32s(g, "ints", &a, &err), 0);
    assert_int_equal(gguf_array_i32(&a, 1), -2);
    assert_int_equal(gguf_f32s(g, "floats", &a, &err), 0);
    assert_true(gguf_array_f32(&a, 2) == 2);
    const struct gguf_tensor *t = gguf_tensor(g, "second");
    assert_non_null(t);
    assert_int_equal(t->type, DTYPE_Q4_1);
    assert_int_equal(t->bytes, 80);
    assert_memory_equal(t->data, gen.weights.data + 64, 80);
    assert_int_equal(gguf_tensor(g, "third")->shape[0], 1);
    assert_null(gguf_tensor(g, "fourth"));
    uint64_t bytes;
    assert_non_null(gguf_file(g, &bytes));
    assert_true(gguf_head_bytes(g) < bytes);
    gguf_free(&g);
    assert_null(g);
    gguf_free(&g);
    gen.version = 2;
    assert_int_equal(open_gen(&gen, &g, &err), 0);
    gguf_free(&g);
    ggufgen_free(&gen);
}

static void test_getters(void **state)
{
    (void)state;
    struct ggufgen gen;
    struct gguf *g;
    struct err err;
    ggufgen_init(&gen);
    const int8_t i8 = -1;
    const uint16_t u16 = 65535;
    const int64_t i64 = INT64_C(1) << 40, small = 9;
    const double f64 = 0.5, nan64 = NAN;
    const uint8_t two = 2;
    ggufgen_raw(&gen, "i8", 1, &i8, 1);
    ggufgen_raw(&gen, "u16", 2, &u16, 2);
    ggufgen_raw(&gen, "i64", 11, &i64, 8);
    ggufgen_raw(&gen, "small", 11, &small, 8);
    ggufgen_raw(&gen, "f64", 12, &f64, 8);
    ggufgen_raw(&gen, "nan", 12, &nan64, 8);
    ggufgen_raw(&gen, "two", 7, &two, 1);
    ggufgen_string(&gen, "s", "x");
    ggufgen_f32s(&gen, "floats", (const float[]){1}, 1);
    assert_int_equal(open_gen(&gen, &g, &err), 0);
    uint32_t u = 1;
    uint64_t w = 1;
    float f = 1;
    bool b = true;
    struct name s;
    struct gguf_array a;
    assert_int_equal(gguf_u32(g, "u16", &u, &err), 0);
    assert_int_equal(u, 65535);
    assert_int_equal(gguf_u32(g, "small", &u, &err), 0);
    assert_int_equal(u, 9);
    assert_int_equal(gguf_u64(g, "i64", &w, &err), 0);
    assert_true(w == UINT64_C(1) << 40);
    assert_int_equal(gguf_f32(g, "f64", &f, &err), 0);
    assert_true(f == 0.5f);
    assert_int_equal(gguf_u32(g, "i8", &u, &err), -EBADMSG);
    assert_int_equal(gguf_u32(g, "i64", &u, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "1099511627776"));
    assert_int_equal(u, 9); /* untouched */
    assert_int_equal(gguf_u32(g, "s", &u, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "s: found string"));
    assert_int_equal(gguf_u32(g, "absent", &u, &err), -ENOENT);
    assert_non_null(strstr(err.text, "absent"));
    assert_int_equal(gguf_f32(g, "u16", &f, &err), -EBADMSG);
    assert_int_equal(gguf_f32(g, "nan", &f, &err), -EBADMSG);
    assert_int_equal(gguf_bool(g, "two", &b, &err), -EBADMSG);
    assert_int_equal(gguf_string(g, "u16", &s, &err), -EBADMSG);
    assert_int_equal(gguf_strings(g, "floats", &a, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "found an array of f32, expected an array of string"));
    assert_int_equal(gguf_i32s(g, "floats", &a, &err), -EBADMSG);
    assert_int_equal(gguf_f32s(g, "s", &a, NULL), -EBADMSG);
    gguf_free(&g);
    ggufgen_free(&gen);
}

/* Every shorter file is refused: at each byte of a small file, so at each section boundary and around it. */
static void test_truncated(void **state)
{
    (void)state;
    struct ggufgen gen;
    struct gguf *g;
    struct err err;
    size_t bytes, sections[4];
    make_small(&gen);
    uint8_t *data = ggufgen_finish(&gen, &bytes, sections);
    size_t needed = bytes - 28; /* padding after the last tensor may be missing */
    for (size_t cut = 0; cut < bytes; cut++) {
        int rc = open_bytes(data, cut, &g, &err);
        if (cut < needed ? rc != -EBADMSG : rc != 0)
            fail_msg("cut at %zu of %zu: %d \"%s\"", cut, bytes, rc, err.text);
        gguf_free(&g);
    }
    refuse_bytes(data, sections[0] - 1, -EBADMSG, "key count");
    refuse_bytes(data, sections[1] - 1, -EBADMSG, "metadata u value");
    refuse_bytes(data, sections[3] - 29, -EBADMSG, "tensor third data");
    mem_free(&data);
    ggufgen_free(&gen);
}

static void test_header(void **state)
{
    (void)state;
    struct ggufgen gen;
    size_t bytes;
    make_small(&gen);
    uint8_t *data = ggufgen_finish(&gen, &bytes, NULL);
    const uint64_t counts[] = {UINT64_C(1) << 32, UINT64_C(1) << 63, UINT64_MAX, bytes, 100};
    for (unsigned field = 8; field <= 16; field += 8) {
        uint64_t right;
        memcpy(&right, data + field, 8);
        for (unsigned i = 0; i < sizeof counts / sizeof *counts; i++) {
            memcpy(data + field, &counts[i], 8);
            refuse_bytes(data, bytes, -EBADMSG,
                         field == 8         ? "tensor count"
                         : counts[i] == 100 ? ""
                                            : "key count");
        }
        memcpy(data + field, &right, 8);
    }
    const struct {
        uint8_t version[4];
        const char *words;
    } versions[] = {{{0, 0, 0, 3}, "big-endian"},
                    {{1, 0, 0, 0}, "version (offset 4): found 1"},
                    {{4, 0, 0, 0}, "found 4"},
                    {{0, 0, 0, 0}, "found 0"}};
    for (unsigned i = 0; i < sizeof versions / sizeof *versions; i++) {
        memcpy(data + 4, versions[i].version, 4);
        refuse_bytes(data, bytes, -ENOTSUP, versions[i].words);
    }
    memcpy(data, "GGML", 4);
    refuse_bytes(data, bytes, -EBADMSG, "expected \"GGUF\"");
    mem_free(&data);
    ggufgen_free(&gen);
    const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    refuse_bytes(lfs, sizeof lfs - 1, -EBADMSG, "Git-LFS pointer");
}

static void test_metadata(void **state)
{
    (void)state;
    struct ggufgen gen;
    const uint32_t bad_alignments[] = {0, 3, 4, 48, UINT32_MAX};
    for (unsigned i = 0; i < sizeof bad_alignments / sizeof *bad_alignments; i++) {
        make_small(&gen);
        ggufgen_u32(&gen, "general.alignment", bad_alignments[i]);
        refuse(&gen, -EBADMSG, "general.alignment");
    }
    make_small(&gen);
    ggufgen_string(&gen, "general.alignment", "32");
    refuse(&gen, -EBADMSG, "general.alignment: found string");
    make_small(&gen);
    ggufgen_u32(&gen, "u", 8);
    refuse(&gen, -EBADMSG, "metadata u key");
    make_small(&gen);
    ggufgen_u32(&gen, "", 8);
    refuse(&gen, -EBADMSG, "metadata 7 key");
    make_small(&gen);
    ggufgen_raw(&gen, "odd", 13, "", 0);
    refuse(&gen, -EBADMSG, "value type");
    const struct {
        uint32_t type;
        uint64_t count;
        int code;
    } arrays[] = {{9, 1, -ENOTSUP},
                  {13, 1, -EBADMSG},
                  {4, UINT64_C(1) << 32, -EBADMSG},
                  {4, UINT64_C(1) << 62, -EBADMSG},
                  {10, UINT64_C(1) << 61, -EBADMSG},
                  {8, UINT64_C(1) << 63, -EBADMSG},
                  {0, UINT64_MAX, -EBADMSG}};
    for (unsigned i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        uint8_t value[12];
        memcpy(value, &arrays[i].type, 4);
        memcpy(value + 4, &arrays[i].count, 8);
        make_small(&gen);
        ggufgen_raw(&gen, "odd", 9, value, sizeof value);
        refuse(&gen, arrays[i].code, "metadata odd array");
    }
    const uint64_t lengths[] = {UINT64_C(1) << 60, UINT64_MAX, UINT64_MAX - 7};
    for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        make_small(&gen);
        ggufgen_raw(&gen, "long", 8, &lengths[i], 8);
        refuse(&gen, -EBADMSG, "metadata long string");
    }
}

static void test_tensor_info(void **state)
{
    (void)state;
    const uint64_t one[5] = {1, 1, 1, 1, 1};
    const struct {
        uint32_t dims;
        uint64_t shape[5];
        uint32_t type;
        uint64_t offset;
        int code;
        const char *words;
    } cases[] = {
        {0, {0}, 0, 0, -EBADMSG, "dimension count"},
        {5, {1, 1, 1, 1, 1}, 0, 0, -EBADMSG, "dimension count"},
        {1, {0}, 0, 0, -EBADMSG, "dimension"},
        {2, {UINT64_C(1) << 32, UINT64_C(1) << 32}, 0, 0, -EBADMSG, "shape"},
        {1, {UINT64_C(1) << 63}, 0, 0, -EBADMSG, "shape"},
        {4, {1 << 16, 1 << 16, 1 << 16, 1 << 16}, 1, 0, -EBADMSG, "shape"},
        {1, {33}, DTYPE_Q8_0, 0, -EBADMSG, "multiple of 32"},
        {1, {1}, 31, 0, -ENOTSUP, "31 (unknown)"},
        {1, {1}, 26, 0, -ENOTSUP, "26 (I32)"},
        {1, {1}, UINT32_MAX, 0, -ENOTSUP, "unknown"},
        {1, {1}, 0, 4, -EBADMSG, "multiple of 32"},
        {1, {1}, 0, UINT64_C(1) << 63, -EBADMSG, "truncated"},
        {1, {1}, 0, UINT64_MAX - 31, -EBADMSG, "truncated"},
        {1, {1}, 0, 4096, -EBADMSG, "truncated"},
        {1, {1}, 0, 0, -EBADMSG, "within first"},
        {1, {1}, 0, 32, -EBADMSG, "within first"},
    };
    struct ggufgen gen;
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        make_small(&gen);
        ggufgen_info(&gen, "odd", cases[i].dims, cases[i].shape, cases[i].type, cases[i].offset);
        refuse(&gen, cases[i].code, cases[i].words);
    }
    make_small(&gen);
    ggufgen_info(&gen, "second", 1, one, 0, 4096);
    refuse(&gen, -EBADMSG, "tensor second name");
    make_small(&gen);
    ggufgen_info(&gen, "", 1, one, 0, 4096);
    refuse(&gen, -EBADMSG, "tensor 3 name");
    char name[400];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    make_small(&gen);
    ggufgen_info(&gen, name, 1, one, 0, 4096);
    refuse(&gen, -EBADMSG, "399 bytes");
}

static void test_paths(void **state)
{
    (void)state;
    struct gguf *g = NULL;
    struct err err = {0};
    assert_int_equal(gguf_open("/nonexistent/file.gguf", &g, &err), -ENOENT);
    assert_non_null(strstr(err.text, "/nonexistent/file.gguf"));
    assert_int_equal(gguf_open("/tmp", &g, &err), -EINVAL);
    assert_int_equal(gguf_open("/dev/null", &g, &err), -EINVAL);
    assert_null(g);
    refuse_bytes("", 0, -EBADMSG, "magic");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sound),  cmocka_unit_test(test_getters),  cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_header), cmocka_unit_test(test_metadata), cmocka_unit_test(test_tensor_info),
        cmocka_unit_test(test_paths),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
