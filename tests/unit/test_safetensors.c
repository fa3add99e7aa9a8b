/* safetensors: what the writer writes the reader reads; files that are wrong in each known way are
 * refused. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "model/safetensors.h"
#include "tests/lib/ggufgen.h"

/* A file of header length, header and `data_bytes` zeros. */
static uint8_t *make_file(uint64_t length, const char *header, size_t data_bytes, size_t *ret_bytes)
{
    size_t header_bytes = strlen(header);
    uint8_t *file = mem_alloc(8 + header_bytes + data_bytes, 1);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, header_bytes);
    *ret_bytes = 8 + header_bytes + data_bytes;
    return file;
}

static int open_bytes(const void *data, size_t bytes, struct safetensors **ret, struct err *err)
{
    char *path;
    ggufgen_save(data, bytes, &path);
    *err = (struct err){0};
    *ret = NULL;
    int rc = safetensors_open(path, ret, err);
    ggufgen_remove(&path);
    return rc;
}

static void refuse_bytes(const void *data, size_t bytes, int code, const char *words)
{
    struct safetensors *s;
    struct err err;
    int rc = open_bytes(data, bytes, &s, &err);
    if (rc != code || !strstr(err.text, words))
        fail_msg("found %d \"%s\", expected %d \"%s\"", rc, err.text, code, words);
    assert_null(s);
}

static void refuse(const char *header, size_t data_bytes, int code, const char *words)
{
    size_t bytes;
    uint8_t *file = make_file(strlen(header), header, data_bytes, &bytes);
    refuse_bytes(file, bytes, code, words);
    mem_free(&file);
}

static void accept(const char *header, size_t data_bytes, uint32_t tensors)
{
    size_t bytes;
    struct safetensors *s;
    struct err err;
    uint8_t *file = make_file(strlen(header), header, data_bytes, &bytes);
    if (open_bytes(file, bytes, &s, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(safetensors_count(s), tensors);
    safetensors_free(&s);
    mem_free(&file);
}

#define A "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
#define B "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[8,12]}"

static void test_sound(void **state)
{
    (void)state;
    accept("{}", 0, 0);
    accept("{}   ", 0, 0);
    accept("{\"__metadata__\":{}}", 0, 0);
    accept("{\"__metadata__\":{\"k\":\"v\"}}", 0, 0);
    accept("{" A "}", 8, 1);
    accept("{" B "," A "}", 12, 2); /* in any order */
    accept("{\"s\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}", 8, 1);
    accept("{\"e\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]}," A "}", 8, 2);
    accept("{\"e\":{\"data_offsets\":[8,8],\"shape\":[0],\"dtype\":\"I8\"}," A "}", 8, 2);
}

static void test_lengths(void **state)
{
    (void)state;
    const uint64_t lengths[] = {0, 1, 5, 100, UINT64_C(1) << 63, UINT64_MAX, SAFETENSORS_HEADER_MAX + 1};
    for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        size_t bytes;
        uint8_t *file = make_file(lengths[i], "{}  ", 0, &bytes);
        refuse_bytes(file, bytes, -EBADMSG, "header length");
        mem_free(&file);
    }
    const uint8_t seven[7] = {0};
    refuse_bytes(seven, 7, -EBADMSG, "found a file of 7 bytes");
    refuse_bytes("", 0, -EBADMSG, "found a file of 0 bytes");
    const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    refuse_bytes(lfs, sizeof lfs - 1, -EBADMSG, "Git-LFS pointer");
    size_t bytes;
    struct safetensors *s;
    struct err err;
    uint8_t *file = make_file(strlen("{" A "," B "}"), "{" A "," B "}", 12, &bytes);
    for (size_t cut = 0; cut < bytes; cut++)
        assert_int_equal(open_bytes(file, cut, &s, &err), -EBADMSG);
    assert_int_equal(open_bytes(file, bytes, &s, &err), 0);
    safetensors_free(&s);
    mem_free(&file);
}

#define ONE(fields) "{\"a\":{" fields "}}"

static void test_headers(void **state)
{
    (void)state;
    const struct {
        const char *header;
        int code;
        const char *words;
    } cases[] = {
        {"[]", -EBADMSG, "expected a JSON object"},
        {" {}", -EBADMSG, "expected a JSON object"},
        {"{}{}", -EBADMSG, "no valid JSON"},
        {"{} x", -EBADMSG, "no valid JSON"},
        {"{\"a\"", -EBADMSG, "no valid JSON"},
        {"{\"a\": tru}", -EBADMSG, "(lexical error: invalid string in json text.)"},
        {"{\"\xff\":1}", -EBADMSG, "no valid JSON"},
        {"{\"a\":1}", -EBADMSG, "tensor a: found a number, expected an object"},
        {"{\"a\":null}", -EBADMSG, "found null"},
        {"{\"a\":[]}", -EBADMSG, "found an array"},
        {"{\"\":{}}", -EBADMSG, "name of 0 bytes"},
        {"{\"a\\u0000b\":{}}", -EBADMSG, "without NUL"},
        {"{\"__metadata__\":[]}", -EBADMSG, "expected an object as __metadata__"},
        {"{\"__metadata__\":{\"k\":1}}", -EBADMSG, "expected a string as value"},
        {"{\"__metadata__\":{\"k\":{}}}", -EBADMSG, "expected a string as value"},
        {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", -EBADMSG, "k: found it twice"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", -EBADMSG, "twice"},
        {ONE("\"dtype\":\"F32\",\"shape\":[2]"), -EBADMSG, "data_offsets: found no such field"},
        {ONE("\"shape\":[2],\"data_offsets\":[0,8]"), -EBADMSG, "dtype: found no such field"},
        {ONE("\"dtype\":\"F32\",\"data_offsets\":[0,8]"), -EBADMSG, "shape: found no such field"},
        {ONE("\"dtype\":\"F32\",\"dtype\":\"F32\""), -EBADMSG, "dtype: found it twice"},
        {ONE("\"kind\":1"), -EBADMSG, "found field \"kind\""},
        {ONE("\"dtype\":4"), -EBADMSG, "expected a string as dtype"},
        {ONE("\"dtype\":\"F33\""), -ENOTSUP, "dtype: found \"F33\""},
        {ONE("\"shape\":[[2]]"), -EBADMSG, "expected a number in shape"},
        {ONE("\"shape\":[-2]"), -EBADMSG, "found -2, expected a whole number"},
        {ONE("\"shape\":[2.0]"), -EBADMSG, "whole number"},
        {ONE("\"shape\":[1e3]"), -EBADMSG, "whole number"},
        {ONE("\"shape\":[18446744073709551616]"), -EBADMSG, "whole number"},
        {ONE("\"shape\":[true]"), -EBADMSG, "found true"},
        {ONE("\"shape\":[1,1,1,1,1,1,1,1,1]"), -ENOTSUP, "more than 8 dimensions"},
        {ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8]"), -EBADMSG, "begin <= end"},
        {ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,9]"), -EBADMSG, "more than 2 numbers"},
        {ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]"), -EBADMSG, "begin <= end"},
        {ONE("\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]"), -EBADMSG,
         "found 8 bytes, expected 12"},
        {ONE("\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,7]"), -EBADMSG,
         "found 7 bytes, expected 8"},
        {ONE("\"dtype\":\"F32\",\"shape\":[4611686018427387906],\"data_offsets\":[0,8]"), -EBADMSG,
         "found 8 bytes"},
        {ONE("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]"), -EBADMSG,
         "0 bytes"},
        {ONE("\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]"), -EBADMSG, "found end 16"},
        {ONE("\"dtype\":\"I8\",\"shape\":[8],\"data_offsets\":[18446744073709551608,18446744073709551615]"),
         -EBADMSG, "data_offsets"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]"), -EBADMSG, "gap"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]"), -EBADMSG,
         "found 4 bytes after the last"},
        {"{}", -EBADMSG, "found 8 bytes after the last"},
        {"{" A "," A "}", -EBADMSG, "tensor a: found it twice"},
        {"{" A ",\"c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", -EBADMSG, "overlap"},
        {"{" A ",\"c\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", -EBADMSG, "overlap"},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
        refuse(cases[i].header, 8, cases[i].code, cases[i].words);
    char deep[4096] = "{\"a\":{\"shape\":";
    memset(deep + strlen(deep), '[', 4000);
    refuse(deep, 8, -EBADMSG, "expected a number in shape");
}

static void test_round_trip(void **state)
{
    (void)state;
    const uint8_t bytes[3] = {1, 2, 3};
    const float floats[6] = {1, 2, 3, 4, 5, 6};
    const uint16_t halves[5] = {7, 8, 9, 10, 11};
    const struct safetensors_entry tensors[] = {
        {"bytes", SAFETENSORS_U8, 1, {3}, bytes},
        {"halves \"quoted\" \xc3\xa9", SAFETENSORS_BF16, 1, {5}, halves},
        {"floats", SAFETENSORS_F32, 2, {2, 3}, floats},
        {"empty", SAFETENSORS_F32, 1, {0}, NULL},
    };
    const struct safetensors_pair metadata[] = {{"format", "pt"}, {"note", "line\nbreak"}, {"", "empty key"}};
    const struct safetensors_content content = {tensors, 4, metadata, 3};
    char folder[] = "/tmp/specontext-test-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/file.safetensors", folder);
    struct err err = {0};
    for (int round = 0; round < 2; round++) /* over an older file as well */
        if (safetensors_write(path, &content, &err) < 0)
            fail_msg("%s", err.text);
    struct safetensors *s = NULL;
    if (safetensors_open(path, &s, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(safetensors_count(s), 4);
    const struct safetensors_tensor *t = safetensors_find(s, "floats");
    assert_non_null(t);
    assert_int_equal(t->type, SAFETENSORS_F32);
    assert_int_equal(t->dims, 2);
    assert_int_equal(t->shape[1], 3);
    assert_memory_equal(t->data, floats, sizeof floats);
    assert_int_equal((uintptr_t)t->data % 4, 0);
    t = safetensors_find(s, "halves \"quoted\" \xc3\xa9");
    assert_non_null(t);
    assert_memory_equal(t->data, halves, sizeof halves);
    assert_int_equal((uintptr_t)t->data % 2, 0);
    assert_memory_equal(safetensors_find(s, "bytes")->data, bytes, 3);
    assert_int_equal(safetensors_find(s, "empty")->bytes, 0);
    assert_null(safetensors_find(s, "absent"));
    assert_string_equal(safetensors_metadata(s, "note"), "line\nbreak");
    assert_string_equal(safetensors_metadata(s, ""), "empty key");
    assert_null(safetensors_metadata(s, "absent"));
    safetensors_free(&s);
    unlink(path);
    assert_int_equal(rmdir(folder), 0); /* no temporary file was left */
}

static void test_write_refused(void **state)
{
    (void)state;
    const float one = 1;
    const struct {
        struct safetensors_entry tensors[2];
        struct safetensors_pair metadata[2];
        int code;
    } cases[] = {
        {{{"a", SAFETENSORS_F32, 1, {1}, &one}, {"a", SAFETENSORS_F32, 1, {1}, &one}},
         {{"k", "v"}, {"l", "v"}},
         -EINVAL},
        {{{"", SAFETENSORS_F32, 1, {1}, &one}, {"b", SAFETENSORS_F32, 1, {1}, &one}},
         {{"k", "v"}, {"l", "v"}},
         -EINVAL},
        {{{"__metadata__", SAFETENSORS_F32, 1, {1}, &one}, {"b", SAFETENSORS_F32, 1, {1}, &one}},
         {{"k", "v"}, {"l", "v"}},
         -EINVAL},
        {{{"\xff", SAFETENSORS_F32, 1, {1}, &one}, {"b", SAFETENSORS_F32, 1, {1}, &one}},
         {{"k", "v"}, {"l", "v"}},
         -EINVAL},
        {{{"a", SAFETENSORS_F32, 1, {1}, &one}, {"b", SAFETENSORS_F32, 1, {1}, &one}},
         {{"k", "v"}, {"k", "v"}},
         -EINVAL},
        {{{"a", SAFETENSORS_F32, 2, {UINT64_MAX, 2}, &one}, {"b", SAFETENSORS_F32, 1, {1}, &one}},
         {{"k", "v"}, {"l", "v"}},
         -EINVAL},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err err = {0};
        struct safetensors_content content = {cases[i].tensors, 2, cases[i].metadata, 2};
        assert_int_equal(safetensors_write("/tmp/specontext-test-never", &content, &err), cases[i].code);
        assert_int_equal(err.code, cases[i].code);
        assert_int_equal(access("/tmp/specontext-test-never", F_OK), -1);
    }
    struct err err = {0};
    const struct safetensors_content none = {0};
    assert_int_equal(safetensors_write("/nonexistent/x.safetensors", &none, &err), -ENOENT);
    assert_non_null(strstr(err.text, "/nonexistent/x.safetensors"));
    char place[] = "/tmp/specontext-test-XXXXXX", fifo[64];
    struct stat st;
    assert_non_null(mkdtemp(place));
    snprintf(fifo, sizeof fifo, "%s/fifo", place);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(safetensors_write(fifo, &none, &err), -EINVAL);
    assert_int_equal(safetensors_write(place, &none, &err), -EISDIR);
    assert_int_equal(lstat(fifo, &st), 0);
    assert_true(S_ISFIFO(st.st_mode)); /* what is no file stays what it is */
    unlink(fifo);
    assert_int_equal(rmdir(place), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sound),         cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_headers),       cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_write_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
