/* Head files: round trip, every fault by name, the rotation past the trained context, bootstrapping. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <unistd.h>

#include "base/alloc.h"
#include "launch/head.h"
#include "model/head.h"
#include "model/safetensors.h"
#include "tests/unit/tiny_model.h"

enum { HIDDEN = 16, Q_ROWS = 32, KV_ROWS = 16, PAIRS_MAX = 40, TENSORS_MAX = 8 };

static const struct tiny_model tiny = {.vocab = 32,
                                       .hidden = HIDDEN,
                                       .q_heads = 4,
                                       .kv_heads = 2,
                                       .head_dim = 8,
                                       .layers = 6,
                                       .context = 2048,
                                       .seed = 1,
                                       .rope_base = 10000};

struct fixture {
    char dir[32], model_path[64], other_path[64], head_path[64];
    struct model *model, *other;
    char model_hash[33], tokenizer_hash[33];
    float weights[Q_ROWS * HIDDEN];
    uint16_t halves[2 * Q_ROWS * HIDDEN];
};

/* A head file in the making: a sound one, until a test changes it. */
struct parts {
    struct safetensors_pair pairs[PAIRS_MAX];
    struct safetensors_entry tensors[TENSORS_MAX];
    uint32_t pair_count, tensor_count;
};

static void print_hash(char *text, struct hash128 h)
{
    snprintf(text, 33, "%016" PRIx64 "%016" PRIx64, h.hi, h.lo);
}

static int setup(void **state)
{
    struct fixture *f = mem_alloc(1, sizeof *f);
    struct err err = {0};
    uint32_t seed = 7;
    snprintf(f->dir, sizeof f->dir, "/tmp/test_head.XXXXXX");
    if (!mkdtemp(f->dir))
        return -1;
    snprintf(f->model_path, sizeof f->model_path, "%s/model.gguf", f->dir);
    snprintf(f->other_path, sizeof f->other_path, "%s/other.gguf", f->dir);
    snprintf(f->head_path, sizeof f->head_path, "%s/head.safetensors", f->dir);
    struct tiny_model other = tiny;
    other.seed = 2;
    tiny_model_write(&tiny, f->model_path);
    tiny_model_write(&other, f->other_path);
    if (model_open(f->model_path, &f->model, &err) < 0 || model_open(f->other_path, &f->other, &err) < 0) {
        print_error("%s\n", err.text);
        return -1;
    }
    print_hash(f->model_hash, model_fingerprint(f->model));
    print_hash(f->tokenizer_hash, model_tokenizer_fingerprint(f->model));
    for (int i = 0; i < Q_ROWS * HIDDEN; i++) {
        f->weights[i] = tiny_uniform(&seed);
        f->halves[i] = f->halves[i + Q_ROWS * HIDDEN] = dtype_f32_to_f16(f->weights[i]);
    }
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    model_free(&f->model);
    model_free(&f->other);
    unlink(f->model_path);
    unlink(f->other_path);
    unlink(f->head_path);
    rmdir(f->dir);
    mem_free(&f);
    return 0;
}

static void sound(const struct fixture *f, struct parts *p)
{
    const struct safetensors_pair pairs[] = {{"format", "specontext-head"},
                                             {"version", "1"},
                                             {"model", f->model_hash},
                                             {"tokenizer", f->tokenizer_hash},
                                             {"embedding", "model"},
                                             {"vocab", "32"},
                                             {"hidden", "16"},
                                             {"q_heads", "4"},
                                             {"kv_heads", "2"},
                                             {"head_dim", "8"},
                                             {"layers", "6"},
                                             {"groups", "2"},
                                             {"group_first_layer", "0,2,6"},
                                             {"rms_eps", "1e-05"},
                                             {"rope_base", "10000"},
                                             {"rope_dims", "8"},
                                             {"rope_pairs", "adjacent"},
                                             {"rope_scaling", "none"},
                                             {"rope_factor", "1"},
                                             {"rope_original_context", "2048"},
                                             {"trained_context", "2048"},
                                             {"features", "none"},
                                             {"pool", "mean"},
                                             {"source", "a test"},
                                             {"a later field", "is ignored"}};
    const struct safetensors_entry tensors[] = {
        {"norm.weight", SAFETENSORS_F32, 1, {HIDDEN}, f->weights},
        {"groups.0.q.weight", SAFETENSORS_F32, 2, {Q_ROWS, HIDDEN}, f->weights},
        {"groups.0.k.weight", SAFETENSORS_F16, 2, {KV_ROWS, HIDDEN}, f->halves},
        {"groups.1.q.weight", SAFETENSORS_BF16, 2, {Q_ROWS, HIDDEN}, f->halves},
        {"groups.1.k.weight", SAFETENSORS_F16, 2, {KV_ROWS, HIDDEN}, f->halves + HIDDEN},
        {"groups.1.norm.weight", SAFETENSORS_F32, 1, {HIDDEN}, f->weights + HIDDEN},
    };
    memcpy(p->pairs, pairs, sizeof pairs);
    memcpy(p->tensors, tensors, sizeof tensors);
    p->pair_count = sizeof pairs / sizeof *pairs;
    p->tensor_count = sizeof tensors / sizeof *tensors;
}

static void write_parts(const struct fixture *f, const struct parts *p)
{
    struct err err = {0};
    struct safetensors_content content = {p->tensors, p->tensor_count, p->pairs, p->pair_count};
    if (safetensors_write(f->head_path, &content, &err) < 0)
        fail_msg("%s", err.text);
}

/* Sets a pair, takes it away (NULL), or adds it. */
static void set_pair(struct parts *p, const char *key, const char *value)
{
    uint32_t i = 0;
    while (i < p->pair_count && strcmp(p->pairs[i].key, key) != 0)
        i++;
    if (!value)
        p->pairs[i] = p->pairs[--p->pair_count];
    else
        p->pairs[i] = (struct safetensors_pair){key, value};
    if (i == p->pair_count && value)
        p->pair_count++;
}

static struct safetensors_entry *tensor(struct parts *p, const char *name)
{
    for (uint32_t i = 0; i < p->tensor_count; i++)
        if (!strcmp(p->tensors[i].name, name))
            return &p->tensors[i];
    fail();
    return NULL;
}

/* The file must be refused with `code`, by a line that holds the texts. */
static void must_refuse(const struct fixture *f, const struct model *model, int code, const char *text,
                        const char *more)
{
    struct err err = {0};
    struct head *head = NULL;
    int rc = head_open(f->head_path, model, &head, &err);
    if (rc != code || !strstr(err.text, text) || !strstr(err.text, more) || !strstr(err.text, f->head_path))
        fail_msg("expected %d with '%s' and '%s', found %d: %s", code, text, more, rc, err.text);
    assert_null(head);
}

static void a_sound_head_opens(void **state)
{
    struct fixture *f = *state;
    struct parts p;
    struct err err = {0};
    struct head *head = NULL;
    sound(f, &p);
    write_parts(f, &p);
    if (head_open(f->head_path, f->model, &head, &err) < 0)
        fail_msg("%s", err.text);
    const struct head_config *c = head_config(head);
    assert_int_equal(c->vocab, 32);
    assert_int_equal(c->groups, 2);
    assert_int_equal(c->group_first_layer[1], 2);
    assert_int_equal(c->group_first_layer[2], 6);
    assert_int_equal(c->pool, HEAD_POOL_MEAN);
    assert_false(c->rope.halves);
    assert_string_equal(c->source, "a test");
    assert_true(hash_equal(c->model, model_fingerprint(f->model)));
    const struct head_group *g = head_groups(head);
    assert_memory_equal(g[0].norm.data, f->weights, HIDDEN * 4);
    assert_memory_equal(g[1].norm.data, f->weights + HIDDEN, HIDDEN * 4);
    assert_int_equal(g[0].q.type, DTYPE_F32);
    assert_int_equal(g[1].q.type, DTYPE_BF16);
    assert_int_equal(g[1].k.rows, KV_ROWS);
    assert_memory_equal(g[1].k.data, f->halves + HIDDEN, KV_ROWS * HIDDEN * 2);
    head_free(&head);
    head_free(&head);
    assert_int_equal(head_open(f->head_path, NULL, &head, &err), 0);
    head_free(&head);
}

static void what_is_written_is_read(void **state)
{
    struct fixture *f = *state;
    struct parts p;
    struct err err = {0};
    struct head *head = NULL, *again = NULL;
    float freqs[4] = {1, 1, 2, 8};
    sound(f, &p);
    set_pair(&p, "rope_scaling", "yarn");
    set_pair(&p, "rope_factor", "4.5");
    set_pair(&p, "rope_original_context", "455");
    set_pair(&p, "rope_beta_fast", "31.25");
    set_pair(&p, "calibration", "0:0,0.30000001:1e-05,0.97:0.88,1:1");
    p.tensors[p.tensor_count++] =
        (struct safetensors_entry){"rope_freqs.weight", SAFETENSORS_F32, 1, {4}, freqs};
    write_parts(f, &p);
    assert_int_equal(head_open(f->head_path, f->model, &head, &err), 0);
    char path[80];
    snprintf(path, sizeof path, "%s.copy", f->head_path);
    if (head_write(path, head_config(head), head_shared(head), head_groups(head), &err) < 0)
        fail_msg("%s", err.text);
    if (head_open(path, f->model, &again, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(hash_equal(head_fingerprint(head), head_fingerprint(again)));
    assert_true(head_config(again)->rope.beta_fast == 31.25f);
    assert_true(head_config(again)->rope.factor == 4.5f);
    assert_memory_equal(head_config(again)->rope.freq_factors, freqs, sizeof freqs);
    assert_string_equal(head_config(again)->source, "a test");
    assert_memory_equal(&head_config(again)->calibration, &head_config(head)->calibration,
                        sizeof(struct calibration));
    struct head_config bad = *head_config(head);
    bad.q_heads = 3;
    assert_int_equal(head_write(path, &bad, head_shared(head), head_groups(head), &err), -EBADMSG);
    assert_non_null(strstr(err.text, "q_heads"));
    bad = *head_config(head);
    bad.head_dim = 16;
    assert_int_equal(head_write(path, &bad, head_shared(head), head_groups(head), &err), -EBADMSG);
    assert_non_null(strstr(err.text, "groups.0.q.weight"));
    bad = *head_config(head);
    bad.calibration.own[1] = 2;
    assert_int_equal(head_write(path, &bad, NULL, head_groups(head), &err), -EBADMSG);
    assert_non_null(strstr(err.text, "calibration"));
    head_free(&again);
    head_free(&head);
    unlink(path);
}

/* A head with all that a head can have. */
static void rich(const struct fixture *f, struct parts *p)
{
    sound(f, p);
    set_pair(p, "embedding", "own");
    set_pair(p, "features", "target");
    set_pair(p, "feature_layers", "2,3");
    set_pair(p, "feature_hidden", "16");
    set_pair(p, "groups", "1");
    set_pair(p, "group_first_layer", "0,6");
    const struct safetensors_entry tensors[] = {
        {"norm.weight", SAFETENSORS_F32, 1, {HIDDEN}, f->weights},
        {"groups.0.q.weight", SAFETENSORS_F16, 2, {Q_ROWS, 2 * HIDDEN}, f->halves},
        {"groups.0.k.weight", SAFETENSORS_F16, 2, {KV_ROWS, 2 * HIDDEN}, f->halves},
        {"groups.0.q_norm.weight", SAFETENSORS_F32, 1, {8}, f->weights},
        {"groups.0.k_norm.weight", SAFETENSORS_F32, 1, {8}, f->weights + 8},
        {"embedding.weight", SAFETENSORS_BF16, 2, {32, HIDDEN}, f->halves},
        {"features.fc.weight", SAFETENSORS_BF16, 2, {HIDDEN, 2 * HIDDEN}, f->halves},
        {"features.norm.weight", SAFETENSORS_F32, 1, {HIDDEN}, f->weights + 1},
    };
    memcpy(p->tensors, tensors, sizeof tensors);
    p->tensor_count = sizeof tensors / sizeof *tensors;
}

static void features_and_an_own_embedding_are_kept(void **state)
{
    static const struct {
        const char *key, *value;
        int code;
        const char *expected;
    } cases[] = {
        {"feature_layers", NULL, -EBADMSG, "feature_layers"},
        {"feature_layers", "2;3", -EBADMSG, "commas"},
        {"feature_layers", "3,2", -EBADMSG, "ascending"},
        {"feature_layers", "2,7", -EBADMSG, "up to 6"},
        {"feature_layers", "1,2,3", -EBADMSG, "features.fc.weight"},
        {"feature_layers", "0,1,2,3,4,5,6,7,8", -EBADMSG, "commas"},
        {"feature_hidden", "8", -EXDEV, "found 8, expected 16"},
        {"feature_hidden", "0", -EBADMSG, "feature_hidden"},
        {"features", "none", -EBADMSG, "groups.0.q.weight"},
        {"embedding", "model", -ENOTSUP, "embedding.weight"},
    };
    struct fixture *f = *state;
    struct parts p;
    struct err err = {0};
    struct head *head = NULL, *again = NULL;
    rich(f, &p);
    write_parts(f, &p);
    if (head_open(f->head_path, f->model, &head, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(head_config(head)->feature_layers[1], 3);
    assert_int_equal(head_config(head)->feature_layer_count, 2);
    assert_int_equal(head_groups(head)[0].q.cols, 2 * HIDDEN);
    assert_memory_equal(head_groups(head)[0].k_norm.data, f->weights + 8, 32);
    assert_memory_equal(head_shared(head)->embedding.data, f->halves, 32 * HIDDEN * 2);
    assert_memory_equal(head_shared(head)->feature_norm.data, f->weights + 1, HIDDEN * 4);
    assert_null(head_shared(head)->feature_input_norm.data);
    char path[80];
    snprintf(path, sizeof path, "%s.copy", f->head_path);
    if (head_write(path, head_config(head), head_shared(head), head_groups(head), &err) < 0 ||
        head_open(path, f->model, &again, &err) < 0)
        fail_msg("%s", err.text);
    assert_true(hash_equal(head_fingerprint(head), head_fingerprint(again)));
    head_free(&again);
    head_free(&head);
    unlink(path);
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        rich(f, &p);
        set_pair(&p, cases[i].key, cases[i].value);
        write_parts(f, &p);
        must_refuse(f, f->model, cases[i].code, cases[i].expected, "");
    }
    rich(f, &p);
    p.tensors[4] = p.tensors[--p.tensor_count];
    write_parts(f, &p);
    must_refuse(f, f->model, -EBADMSG, "groups.0.q_norm.weight", "alone");
}

static void the_fingerprint_follows_what_is_used(void **state)
{
    struct fixture *f = *state;
    struct hash128 hashes[6];
    for (int i = 0; i < 6; i++) {
        struct parts p;
        struct head *head = NULL;
        struct err err = {0};
        float changed[HIDDEN];
        sound(f, &p);
        memcpy(changed, f->weights, sizeof changed);
        changed[HIDDEN - 1] += 1;
        if (i == 1)
            set_pair(&p, "source", "another remark");
        if (i == 2)
            set_pair(&p, "trained_context", "2049");
        if (i == 3)
            tensor(&p, "norm.weight")->data = changed;
        if (i == 4)
            set_pair(&p, "group_first_layer", "0,3,6");
        if (i == 5)
            set_pair(&p, "calibration", "0:0,1:1");
        write_parts(f, &p);
        assert_int_equal(head_open(f->head_path, f->model, &head, &err), 0);
        hashes[i] = head_fingerprint(head);
        head_free(&head);
    }
    assert_true(hash_equal(hashes[0], hashes[1]));
    for (int i = 2; i < 6; i++)
        assert_false(hash_equal(hashes[0], hashes[i]));
}

static void bad_metadata_is_named(void **state)
{
    static const struct {
        const char *key, *value;
        int code;
        const char *expected;
    } cases[] = {
        {"format", "pt", -EBADMSG, "specontext-head"},
        {"format", NULL, -EBADMSG, "no such metadata"},
        {"version", "2", -ENOTSUP, "\"1\""},
        {"features", "target", -EBADMSG, "feature_layers"},
        {"features", "both", -ENOTSUP, "expected none, target or context"},
        {"embedding", "own", -EBADMSG, "tensor embedding.weight"},
        {"features", "context", -EBADMSG, "views"},
        {"embedding", "other", -ENOTSUP, "expected model or own"},
        {"model", "12", -EBADMSG, "32 hexadecimal"},
        {"model", "0123456789abcdef0123456789abcdeg", -EBADMSG, "32 hexadecimal"},
        {"tokenizer", "00000000000000000000000000000001", -EXDEV, "00000000000000000000000000000001"},
        {"vocab", "33", -EXDEV, "found 33, expected 32"},
        {"vocab", "31", -EXDEV, "found 31, expected 32"},
        {"hidden", "24", -EXDEV, "found 24, expected 16"},
        {"layers", "7", -EBADMSG, "group_first_layer"},
        {"kv_heads", "4", -EXDEV, "found 4, expected 2"},
        {"kv_heads", "3", -EBADMSG, "q_heads"},
        {"q_heads", "0", -EBADMSG, "found 0"},
        {"head_dim", "7", -EBADMSG, "even"},
        {"head_dim", "514", -EBADMSG, "2 to 512"},
        {"groups", "17", -EBADMSG, "groups"},
        {"groups", "0", -EBADMSG, "group"},
        {"groups", "4294967295", -EBADMSG, "group"},
        {"groups", "4294967296", -EBADMSG, "32 bits"},
        {"groups", "-1", -EBADMSG, "whole number"},
        {"groups", "2 ", -EBADMSG, "whole number"},
        {"groups", "", -EBADMSG, "whole number"},
        {"group_first_layer", "0,6", -EBADMSG, "3 numbers"},
        {"group_first_layer", "0,2,6,", -EBADMSG, "3 numbers"},
        {"group_first_layer", "0,2,7", -EBADMSG, "found 7"},
        {"group_first_layer", "1,2,6", -EBADMSG, "found 1"},
        {"group_first_layer", "0,0,6", -EBADMSG, "found 0"},
        {"group_first_layer", "0;2;6", -EBADMSG, "3 numbers"},
        {"rms_eps", "0", -EBADMSG, "rms_eps"},
        {"rms_eps", "nan", -EBADMSG, "decimal"},
        {"rope_base", "inf", -EBADMSG, "decimal"},
        {"rope_base", "1", -EBADMSG, "rope_base"},
        {"rope_base", "1e40", -EBADMSG, "rope_base"},
        {"rope_dims", "10", -EBADMSG, "up to 8"},
        {"rope_dims", "7", -EBADMSG, "even"},
        {"rope_pairs", "both", -ENOTSUP, "expected adjacent or halves"},
        {"rope_scaling", "llama3", -ENOTSUP, "expected none, linear or yarn"},
        {"rope_factor", "2", -EBADMSG, "without scaling"},
        {"rope_original_context", "0", -EBADMSG, "rope_original_context"},
        {"rope_beta_fast", "x", -EBADMSG, "decimal"},
        {"trained_context", "0", -EBADMSG, "trained_context"},
        {"trained_context", NULL, -EBADMSG, "no such metadata"},
        {"pool", "min", -ENOTSUP, "expected max or mean"},
        {"calibration", "", -EBADMSG, "calibration: found \"\", expected pairs"},
        {"calibration", "0:0,1", -EBADMSG, "own:measured"},
        {"calibration", "0:0,1:1,", -EBADMSG, "own:measured"},
        {"calibration", "0:0,1:1;", -EBADMSG, "own:measured"},
        {"calibration", "0:0, 1:1", -EBADMSG, "own:measured"},
        {"calibration", "0:0,0x1:1", -EBADMSG, "own:measured"},
        {"calibration", "0:0,nan:0.5,1:1", -EBADMSG, "own:measured"},
        {"calibration", "0:0,-0.5:0,1:1", -EBADMSG, "own:measured"},
        {"calibration", "0:0,0.5:1.5,1:1", -EBADMSG, "found 0.5:1.5, expected shares"},
        {"calibration", "1:1", -EBADMSG, "found 1 pairs"},
        {"calibration", "0:0,0.5:0.5,0.5:0.6,1:1", -EBADMSG, "found 0.5:0.6 behind 0.5:0.5"},
        {"calibration", "0:0,0.5:0.5,0.6:0.4,1:1", -EBADMSG, "ascend"},
        {"calibration", "0.1:0,1:1", -EBADMSG, "first own of 0"},
        {"calibration", "0:0,1:0.9", -EBADMSG, "last pair 1:1"},
    };
    struct fixture *f = *state;
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct parts p;
        sound(f, &p);
        set_pair(&p, cases[i].key, cases[i].value);
        write_parts(f, &p);
        must_refuse(f, f->model, cases[i].code, cases[i].expected, "");
    }
}

static void every_field_is_needed(void **state)
{
    struct fixture *f = *state;
    struct parts all, p;
    sound(f, &all);
    for (uint32_t i = 0; i < all.pair_count; i++) {
        const char *key = all.pairs[i].key;
        if (!strcmp(key, "source") || !strcmp(key, "a later field"))
            continue;
        sound(f, &p);
        set_pair(&p, key, NULL);
        write_parts(f, &p);
        must_refuse(f, f->model, -EBADMSG, key, "no such metadata");
    }
}

static void a_head_of_another_model_is_named(void **state)
{
    struct fixture *f = *state;
    struct parts p;
    char other[33];
    sound(f, &p);
    write_parts(f, &p);
    print_hash(other, model_fingerprint(f->other));
    must_refuse(f, f->other, -EXDEV, f->model_hash, other);
}

static void bad_tensors_are_named(void **state)
{
    struct fixture *f = *state;
    struct parts all, p;
    sound(f, &all);
    for (uint32_t i = 0; i < all.tensor_count; i++) {
        sound(f, &p);
        p.tensors[i] = p.tensors[--p.tensor_count];
        write_parts(f, &p);
        if (strcmp(all.tensors[i].name, "groups.1.norm.weight") != 0) { /* which may be absent */
            must_refuse(f, f->model, -EBADMSG, all.tensors[i].name, "no such tensor");
        }
        sound(f, &p);
        p.tensors[i].shape[0]--;
        write_parts(f, &p);
        must_refuse(f, f->model, -EBADMSG, all.tensors[i].name, "shape");
        sound(f, &p);
        p.tensors[i].dims = p.tensors[i].dims == 1 ? 2 : 1;
        p.tensors[i].shape[1] = 1;
        write_parts(f, &p);
        must_refuse(f, f->model, -EBADMSG, all.tensors[i].name, "shape");
        sound(f, &p);
        p.tensors[i].dims = 0;
        write_parts(f, &p);
        must_refuse(f, f->model, -EBADMSG, all.tensors[i].name, "shape");
        sound(f, &p);
        p.tensors[i].type = p.tensors[i].dims == 1 ? SAFETENSORS_F16 : SAFETENSORS_I8;
        write_parts(f, &p);
        must_refuse(f, f->model, -ENOTSUP, all.tensors[i].name, "type");
        static float bad[Q_ROWS * HIDDEN];
        sound(f, &p);
        memcpy(bad, p.tensors[i].data, Q_ROWS * HIDDEN * 2); /* as much as all have */
        size_t element = p.tensors[i].type == SAFETENSORS_F32 ? 4 : 2;
        memset((char *)bad + 5 * element, 0xff, element);
        p.tensors[i].data = bad;
        write_parts(f, &p);
        must_refuse(f, f->model, -EBADMSG, all.tensors[i].name, "found a value that is not finite at 5");
    }
    sound(f, &p);
    p.tensors[p.tensor_count++] =
        (struct safetensors_entry){"groups.2.q.weight", SAFETENSORS_F32, 1, {1}, f->weights};
    write_parts(f, &p);
    must_refuse(f, f->model, -ENOTSUP, "groups.2.q.weight", "2 groups");
    float freqs[4] = {1, 1, 0, 1};
    sound(f, &p);
    p.tensors[p.tensor_count++] =
        (struct safetensors_entry){"rope_freqs.weight", SAFETENSORS_F32, 1, {4}, freqs};
    write_parts(f, &p);
    must_refuse(f, f->model, -EBADMSG, "rope", "frequencies");
}

static void unaligned_tensors_are_usable(void **state)
{
    struct fixture *f = *state;
    struct parts p;
    struct head *head = NULL;
    struct err err = {0};
    sound(f, &p);
    static const char *const small[][2] = {
        {"hidden", "3"},    {"q_heads", "1"}, {"kv_heads", "1"}, {"head_dim", "2"},
        {"rope_dims", "2"}, {"groups", "1"},  {"layers", "1"},   {"group_first_layer", "0,1"}};
    for (unsigned i = 0; i < sizeof small / sizeof *small; i++)
        set_pair(&p, small[i][0], small[i][1]);
    p.tensor_count = 3;
    p.tensors[0].shape[0] = 3;
    for (int i = 1; i < 3; i++) {
        p.tensors[i].type = SAFETENSORS_F16;
        p.tensors[i].shape[0] = 2;
        p.tensors[i].shape[1] = 3;
        p.tensors[i].data = f->halves + i;
    }
    write_parts(f, &p);
    if (head_open(f->head_path, NULL, &head, &err) < 0)
        fail_msg("%s", err.text);
    const struct head_group *g = head_groups(head);
    assert_memory_equal(g->q.data, f->halves + 1, 12);
    assert_memory_equal(g->k.data, f->halves + 2, 12);
    assert_int_equal((uintptr_t)g->q.data % 8, 0);
    assert_int_equal((uintptr_t)g->k.data % 8, 0);
    head_free(&head);
}

static void the_rotation_is_stretched_and_says_so(void **state)
{
    static const struct {
        const char *scaling, *factor, *original;
        uint32_t context;
        float expected;
        uint32_t expected_original;
        const char *text;
    } cases[] = {
        {"none", "1", "2048", 2047, 0, 0, "none"},
        {"none", "1", "2048", 2048, 0, 0, "none"},
        {"none", "1", "2048", 2049, 2, 2048, "yarn, factor 2 over 2048"},
        {"none", "1", "77", 8192, 4, 2048, "yarn, factor 4 over 2048"},
        {"none", "1", "2048", 8193, 5, 2048, "yarn, factor 5 over 2048"},
        {"yarn", "4", "512", 2048, 4, 512, "yarn, factor 4 over 512"},
        {"yarn", "4", "512", 4096, 8, 512, "yarn, factor 8 over 512"},
        {"linear", "2", "1024", 2048, 2, 1024, "linear, factor 2"},
    };
    struct fixture *f = *state;
    struct err err = {0};
    struct model_rope rope;
    char text[256];
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct parts p;
        struct head *head = NULL;
        sound(f, &p);
        set_pair(&p, "rope_scaling", cases[i].scaling);
        set_pair(&p, "rope_factor", cases[i].factor);
        set_pair(&p, "rope_original_context", cases[i].original);
        write_parts(f, &p);
        assert_int_equal(head_open(f->head_path, f->model, &head, &err), 0);
        assert_int_equal(head_rope(head, cases[i].context, &rope, &err), 0);
        head_rope_text(&rope, text, sizeof text);
        if (cases[i].expected != 0.0f) {
            assert_true(rope.factor == cases[i].expected);
            assert_int_equal(rope.original_context, cases[i].expected_original);
        }
        if (strncmp(text, cases[i].text, strlen(cases[i].text)) != 0)
            fail_msg("found '%s', expected '%s'", text, cases[i].text);
        if (!strcmp(cases[i].scaling, "linear")) {
            assert_int_equal(head_rope(head, 2049, &rope, &err), -ENOTSUP);
            assert_non_null(strstr(err.text, "2049"));
        }
        head_free(&head);
    }
}

static void check_bootstrap(const struct fixture *f, uint32_t layer, unsigned groups)
{
    struct err err = {0};
    struct head *head = NULL;
    if (head_bootstrap(f->model_path, f->head_path, layer, groups, &err) < 0 ||
        head_open(f->head_path, f->model, &head, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(head_config(head)->groups, groups);
    assert_int_equal(head_config(head)->trained_context, 2048);
    for (unsigned g = 0; g < groups; g++) {
        const struct head_group *to = &head_groups(head)[g];
        const struct model_layer *from = &model_layers(f->model)[layer];
        const struct model_tensor *pairs[][2] = {{&to->q, &from->wq}, {&to->k, &from->wk}};
        assert_memory_equal(to->norm.data, from->attn_norm.data, HIDDEN * 4);
        for (int i = 0; i < 2; i++)
            for (uint32_t e = 0; e < pairs[i][0]->rows * HIDDEN; e++)
                assert_int_equal(((const uint16_t *)pairs[i][0]->data)[e],
                                 dtype_f32_to_f16(((const float *)pairs[i][1]->data)[e]));
    }
    head_free(&head);
}

static void a_head_is_made_of_the_model(void **state)
{
    struct fixture *f = *state;
    struct err err = {0};
    check_bootstrap(f, 0, 1);
    check_bootstrap(f, 5, 1);
    check_bootstrap(f, 0, 3);
    check_bootstrap(f, 5, 4);
    assert_int_equal(head_bootstrap(f->model_path, f->head_path, 6, 1, &err), -EINVAL);
    assert_int_equal(head_bootstrap(f->model_path, f->head_path, 0, 7, &err), -EINVAL);
    assert_int_equal(head_bootstrap(f->model_path, f->head_path, 0, 0, &err), -EINVAL);
    assert_int_equal(head_bootstrap("/nonexistent", f->head_path, 0, 1, &err), -ENOENT);
}

/* Runs the sub-command with up to 15 words. */
static int run_main(const char *const *words)
{
    char *copies[16] = {NULL};
    int count = 0;
    for (; words[count]; count++)
        copies[count] = mem_strdup(words[count]);
    int code = head_main(count, copies);
    for (int i = 0; i < count; i++)
        mem_free(&copies[i]);
    return code;
}

#define WORDS(...)                \
    (const char *const[])         \
    {                             \
        "head", __VA_ARGS__, NULL \
    }

static void the_command_line_ends_as_promised(void **state)
{
    struct fixture *f = *state;
    unlink(f->head_path);
    assert_int_equal(run_main((const char *const[]){"head", NULL}), 2);
    assert_int_equal(run_main(WORDS("make")), 2);
    assert_int_equal(run_main(WORDS("bootstrap", "-m", "x")), 2);
    assert_int_equal(run_main(WORDS("bootstrap", "--groups", "0")), 2);
    assert_int_equal(run_main(WORDS("bootstrap", "--layer", "1x")), 2);
    assert_int_equal(run_main(WORDS("bootstrap", "--pool", "min")), 2);
    assert_int_equal(run_main(WORDS("inspect")), 2);
    assert_int_equal(run_main(WORDS("inspect", "a", "b")), 2);
    assert_int_equal(run_main(WORDS("--frobnicate")), 2);
    assert_int_equal(run_main(WORDS("inspect", f->head_path)), 1);
    assert_int_equal(run_main(WORDS("bootstrap", "-m", f->model_path, "-o", f->head_path, "--pool", "mean")),
                     0);
    assert_int_equal(run_main(WORDS("inspect", "-m", f->model_path, f->head_path)), 0);
    assert_int_equal(run_main(WORDS("inspect", "-m", f->other_path, f->head_path)), 1);
    assert_int_equal(run_main(WORDS("--help")), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_sound_head_opens),
        cmocka_unit_test(what_is_written_is_read),
        cmocka_unit_test(features_and_an_own_embedding_are_kept),
        cmocka_unit_test(the_fingerprint_follows_what_is_used),
        cmocka_unit_test(bad_metadata_is_named),
        cmocka_unit_test(every_field_is_needed),
        cmocka_unit_test(a_head_of_another_model_is_named),
        cmocka_unit_test(bad_tensors_are_named),
        cmocka_unit_test(unaligned_tensors_are_usable),
        cmocka_unit_test(the_rotation_is_stretched_and_says_so),
        cmocka_unit_test(a_head_is_made_of_the_model),
        cmocka_unit_test(the_command_line_ends_as_promised),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
