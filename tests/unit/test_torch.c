/* Files of torch.save: real ones against their safetensors twins, every damage and every foreign opcode or
 * class refused by name, nothing read outside the file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "model/torch.h"
#include "tests/lib/fuzzfile.h"
#include "tests/lib/torchgen.h"

static uint8_t file[TORCHGEN_BYTES_MAX];

static void real_files_equal_their_safetensors_twins(void **state)
{
    static const char *const layouts[] = {"eagle", "specforge", "angelslim", "speculators"};
    (void)state;
    for (unsigned i = 0; i < 4; i++) {
        char path[128];
        struct err err = {0};
        struct torch *t = NULL;
        struct safetensors *s = NULL;
        snprintf(path, sizeof path, "tests/vectors/eagle/%s-bin/pytorch_model.bin", layouts[i]);
        if (torch_open(path, &t, &err) < 0)
            fail_msg("%s", err.text);
        snprintf(path, sizeof path, "tests/vectors/eagle/%s-safetensors/model.safetensors", layouts[i]);
        if (safetensors_open(path, &s, &err) < 0)
            fail_msg("%s", err.text);
        assert_true(torch_count(t) > 10);
        assert_int_equal(torch_count(t), safetensors_count(s));
        for (uint32_t j = 0; j < torch_count(t); j++) {
            const struct safetensors_tensor *a = torch_at(t, j), *b = NULL;
            for (uint32_t k = 0; k < safetensors_count(s); k++)
                if (name_equal(a->name, safetensors_at(s, k)->name))
                    b = safetensors_at(s, k);
            assert_non_null(b);
            assert_int_equal(a->type, b->type);
            assert_int_equal(a->dims, b->dims);
            assert_memory_equal(a->shape, b->shape, sizeof a->shape);
            assert_int_equal(a->bytes, b->bytes);
            assert_memory_equal(a->data, b->data, a->bytes);
        }
        torch_free(&t);
        safetensors_free(&s);
    }
}

static void check_sound(size_t bytes)
{
    struct err err = {0};
    struct torch *t = NULL;
    if (torch_open(fuzzfile_put(file, bytes), &t, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(torch_count(t), 1);
    const struct safetensors_tensor *a = torch_at(t, 0);
    assert_true(name_is(a->name, "a"));
    assert_int_equal(a->type, SAFETENSORS_F16);
    assert_int_equal(a->dims, 1);
    assert_int_equal(a->shape[0], 3);
    assert_memory_equal(a->data, torchgen_storage, 6);
    torch_free(&t);
}

static void sound_archives_open(void **state)
{
    (void)state;
    for (int zip64 = 0; zip64 < 2; zip64++) {
        size_t bytes = torchgen_sound(file, zip64);
        check_sound(bytes);
        file[bytes - 2] = 5; /* a comment behind the end record */
        memcpy(file + bytes, "hello", 5);
        check_sound(bytes + 5);
    }
}

/* Opening must refuse, or succeed with a tensor that can be read. */
static bool opens(size_t bytes)
{
    struct err err = {0};
    struct torch *t = NULL;
    if (torch_open(fuzzfile_put(file, bytes), &t, &err) < 0) {
        assert_true(err.code < 0 && err.text[0]);
        return false;
    }
    for (uint32_t i = 0; i < torch_count(t); i++) {
        const volatile uint8_t *p = torch_at(t, i)->data;
        if (torch_at(t, i)->bytes)
            (void)(p[0] + p[torch_at(t, i)->bytes - 1]);
    }
    torch_free(&t);
    return true;
}

static void every_cut_and_every_flip_is_survived(void **state)
{
    (void)state;
    for (int zip64 = 0; zip64 < 2; zip64++) {
        size_t bytes = torchgen_sound(file, zip64);
        for (size_t cut = 0; cut < bytes; cut++)
            assert_false(opens(cut));
        for (size_t i = 0; i < bytes * 8; i++) {
            file[i / 8] ^= (uint8_t)(1 << i % 8);
            opens(bytes);
            file[i / 8] ^= (uint8_t)(1 << i % 8);
        }
        assert_true(opens(bytes));
    }
}

static void must_refuse(size_t bytes, int code, const char *text, const char *what)
{
    struct err err = {0};
    struct torch *t = NULL;
    int rc = torch_open(fuzzfile_put(file, bytes), &t, &err);
    if (rc != code || !strstr(err.text, text))
        fail_msg("%s: expected %d with '%s', found %d: %s", what, code, text, rc, err.text);
    assert_null(t);
}

/* An archive with this pickle; `bytes` of it. */
static size_t with_pickle(const void *pickle, size_t bytes)
{
    const struct torchgen_member members[] = {{"m/data.pkl", pickle, bytes, 0, 0},
                                              {"m/data/0", torchgen_storage, sizeof torchgen_storage, 0, 0}};
    return torchgen_zip(file, members, 2, false);
}

static void a_cut_pickle_is_refused(void **state)
{
    (void)state;
    for (size_t cut = 0; cut < torchgen_pickle_bytes; cut++)
        assert_false(opens(with_pickle(torchgen_pickle, cut)));
    assert_true(opens(with_pickle(torchgen_pickle, torchgen_pickle_bytes)));
}

/* {"a": tensor} with parts of the tensor's making put in. */
#define BEGIN "\x80\x02}(X\1\0\0\0a"
#define STORAGE(type, key, count) \
    "(X\7\0\0\0storagectorch\n" type "\nX\1\0\0\0" key "X\3\0\0\0cpuK" count "tQ"
#define REBUILD "ctorch._utils\n_rebuild_tensor_v2\n("
#define HOOKS \
    "\x89"    \
    "ccollections\nOrderedDict\n)R"
#define TENSOR(first, size, stride) REBUILD STORAGE("HalfStorage", "0", "\3") first size stride HOOKS "tR"
#define END                         "u."

static void what_is_no_dict_of_tensors_is_named(void **state)
{
#define CASE(pickle, code, text)               \
    {                                          \
        pickle, sizeof(pickle) - 1, code, text \
    }
    static const struct {
        const char *pickle;
        size_t bytes;
        int code;
        const char *text;
    } cases[] = {
        CASE("\x80\x02"
             "cos\nsystem\nX\2\0\0\0id\x85R.",
             -ENOTSUP, "found os.system"),
        CASE("\x80\x02"
             "c__builtin__\neval\n)R.",
             -ENOTSUP, "found __builtin__.eval"),
        CASE("\x80\x02"
             "ctorch.hub\nload\n)R.",
             -ENOTSUP, "found torch.hub.load"),
        CASE("\x80\x02"
             "ctorch\nFloatStorage\n)R.",
             -ENOTSUP, "call of FloatStorage"),
        CASE("\x80\x02"
             "ccollections\nOrderedDict\nK\1\x85R.",
             -ENOTSUP, "call of OrderedDict"),
        CASE("\x80\x02"
             "ccollections\nOrderedDict",
             -EBADMSG, "found its end"),
        CASE("\x80\x02)\x81.", -ENOTSUP, "opcode 0x81"),
        CASE("\x80\x02\x93.", -ENOTSUP, "opcode 0x93"),
        CASE("\x80\x02(i.", -ENOTSUP, "opcode 0x69"),
        CASE("\x80\x02o.", -ENOTSUP, "opcode 0x6f"),
        CASE("\x80\x02P1\n.", -ENOTSUP, "opcode 0x50"),
        CASE("\x80\x04.", -ENOTSUP, "protocol: found 4"),
        CASE("\x80\x02.", -EBADMSG, "empty stack"),
        CASE("\x80\x02K\1.", -EBADMSG, "found an integer, expected a dict"),
        CASE("\x80\x02\x85.", -EBADMSG, "found 0 values"),
        CASE("\x80\x02(\x85.", -EBADMSG, "found a mark"),
        CASE("\x80\x02t.", -EBADMSG, "found no mark"),
        CASE("\x80\x02(u.", -EBADMSG, "found 0 values for a dict"),
        CASE("\x80\x02K\1(u.", -EBADMSG, "found an integer, expected a dict to put"),
        CASE("\x80\x02}(K\1u.", -EBADMSG, "found 1 values"),
        CASE("\x80\x02}h\0.", -EBADMSG, "memo place 0"),
        CASE("\x80\x02}q\1.", -EBADMSG, "memo place 1"),
        CASE("\x80\x02q\0.", -EBADMSG, "memo place 0"),
        CASE("\x80\x02}b.", -EBADMSG, "attributes"),
        CASE("\x80\x02\x8a\x09", -ENOTSUP, "integer of 9 bytes"),
        CASE("\x80\x02X\1\0\0\0\0.", -EBADMSG, "zero byte"),
        CASE("\x80\x02X\xff\xff\xff\xff"
             "a.",
             -EBADMSG, "expected 4294967295 more bytes"),
        CASE(BEGIN "K\1" END, -ENOTSUP, "a: found an integer, expected a tensor"),
        CASE(BEGIN "}" END, -ENOTSUP, "a: found a dict"),
        CASE("\x80\x02}(K\1K\1u.", -ENOTSUP, "found an integer as a key"),
        CASE("\x80\x02K\1Q.", -EBADMSG, "found an integer, expected a tuple"),
        CASE("\x80\x02K\1\x85Q.", -EBADMSG, "persistent id"),
        CASE(BEGIN STORAGE("HalfStorage", "1", "\3") END, -EBADMSG, "storage 1"),
        CASE(BEGIN STORAGE("HalfStorage", "0", "\4") END, -EBADMSG, "4 elements in 6 bytes"),
        CASE(BEGIN STORAGE("FloatStorage", "0", "\3") END, -EBADMSG, "3 elements in 6 bytes"),
        CASE(BEGIN STORAGE("QInt8Storage", "0", "\3") END, -ENOTSUP, "torch.QInt8Storage"),
        CASE(BEGIN TENSOR("K\1", "K\3\x85", "K\1\x85") END, -EBADMSG, "ends behind its storage"),
        CASE(BEGIN TENSOR("J\xff\xff\xff\xff", "K\3\x85", "K\1\x85") END, -EBADMSG,
             "ends behind its storage"),
        CASE(BEGIN TENSOR("K\0", "J\xff\xff\xff\xff\x85", "K\1\x85") END, -EBADMSG, "no count"),
        CASE(BEGIN TENSOR("K\0", "K\3\x85", "K\2\x85") END, -ENOTSUP, "stride 2, expected 1"),
        CASE(BEGIN TENSOR("K\0", "K\3K\1\x86", "K\1\x85") END, -ENOTSUP, "2 dimensions and 1 strides"),
        CASE(BEGIN TENSOR("K\0", "K\3\x85", "N\x85") END, -EBADMSG, "no count"),
        CASE(BEGIN TENSOR("K\0", "(K\1K\1K\1K\1K\1K\1K\1K\1K\1t", "(K\1K\1K\1K\1K\1K\1K\1K\1K\1t") END,
             -ENOTSUP, "9 dimensions"),
        CASE(BEGIN TENSOR("K\0", "\x8a\x08\0\0\0\0\0\0\0\x7f\x8a\x08\0\0\0\0\0\0\0\x7f\x86", "K\1K\1\x86")
                 END,
             -ENOTSUP, "stride"),
        CASE(BEGIN TENSOR("K\0", "\x8a\x08\0\0\0\0\0\0\0\x7f\x85", "K\1\x85") END, -EBADMSG,
             "ends behind its storage"),
        CASE(BEGIN TENSOR("N", "K\3\x85", "K\1\x85") END, -EBADMSG, "arguments of _rebuild_tensor_v2"),
        CASE(BEGIN REBUILD "tR" END, -EBADMSG, "arguments of _rebuild_tensor_v2"),
        CASE(BEGIN "ctorch._utils\n_rebuild_parameter\n)R" END, -ENOTSUP, "call of _rebuild_parameter"),
    };
#undef CASE
    (void)state;
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        char what[16];
        snprintf(what, sizeof what, "case %u", i);
        must_refuse(with_pickle(cases[i].pickle, cases[i].bytes), cases[i].code, cases[i].text, what);
    }
    /* ... and the frame that the cases share is sound. */
    static const char sound[] = BEGIN TENSOR("K\0", "K\3\x85", "K\1\x85") END;
    check_sound(with_pickle(sound, sizeof sound - 1));
    static const char parameter[] =
        BEGIN "ctorch._utils\n_rebuild_parameter\n(" TENSOR("K\0", "K\3\x85", "K\1\x85") HOOKS "tR" END;
    check_sound(with_pickle(parameter, sizeof parameter - 1));
}

static void what_is_no_plain_archive_is_named(void **state)
{
    (void)state;
    struct torchgen_member members[] = {{"m/data.pkl", torchgen_pickle, torchgen_pickle_bytes, 0, 0},
                                        {"m/data/0", torchgen_storage, 6, 0, 0},
                                        {"m/byteorder", "big", 3, 0, 0}};
    must_refuse(torchgen_zip(file, members, 3, false), -ENOTSUP, "m/byteorder: found big", "order");
    members[1].method = 8;
    must_refuse(torchgen_zip(file, members, 2, false), -ENOTSUP, "m/data/0: found compression", "deflate");
    members[1].method = 0;
    members[1].flags = 1;
    must_refuse(torchgen_zip(file, members, 2, true), -ENOTSUP, "found encryption", "encrypted");
    members[1].flags = 0;
    members[1].name = "m/data.pkl";
    must_refuse(torchgen_zip(file, members, 2, false), -EBADMSG, "m/data.pkl: found it twice", "twice");
    must_refuse(torchgen_zip(file, members + 2, 1, false), -EBADMSG, "NAME/data.pkl", "no pickle");
    must_refuse(torchgen_zip(file, members, 0, false), -EBADMSG, "NAME/data.pkl", "empty archive");
    must_refuse(0, -EBADMSG, "found no end of a zip archive", "empty file");
    memset(file, 'a', sizeof file);
    must_refuse(sizeof file, -EBADMSG, "found no end of a zip archive", "no archive");
    struct torch *t = NULL;
    struct err err = {0};
    assert_int_equal(torch_open("/nonexistent", &t, &err), -ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(real_files_equal_their_safetensors_twins),
        cmocka_unit_test(sound_archives_open),
        cmocka_unit_test(every_cut_and_every_flip_is_survived),
        cmocka_unit_test(a_cut_pickle_is_refused),
        cmocka_unit_test(what_is_no_dict_of_tensors_is_named),
        cmocka_unit_test(what_is_no_plain_archive_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
