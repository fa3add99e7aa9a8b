/* EAGLE-3 draft models: what a head made of one picks is what a float64 reference picks
 * (tools/eagle_vectors.py), for every layout, both containers, with and without a stretch; and what cannot
 * be a head is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>

#include "base/alloc.h"
#include "base/check.h"
#include "launch/head.h"
#include "model/eagle.h"
#include "model/safetensors.h"
#include "retriever/projection.h"
#include "tests/lib/temp.h"
#include "tests/unit/eagle_reference.h"
#include "tests/unit/tiny_model.h"

#define VECTORS "tests/vectors/eagle"

enum {
    RECORDS_MAX = 32,
    KV_MAX = 8,
    TENSORS_MAX = 32,
    TRUE_HIDDEN = 4096,
    TRUE_Q_ROWS = 4096,
    TRUE_K_ROWS = 1024
};

static const struct tiny_model true_model = {.vocab = 96,
                                             .hidden = 64,
                                             .q_heads = 8,
                                             .kv_heads = 8,
                                             .head_dim = 8,
                                             .layers = 2,
                                             .context = 32768,
                                             .seed = 3,
                                             .rope_base = 10000};

struct record {
    char name[33];
    uint32_t context, count, kv_heads, k[KV_MAX];
    const uint32_t *tokens;
    const float *weights[KV_MAX];
    const uint32_t *top[KV_MAX];
};

struct fixture {
    char dir[PATH_MAX], head_path[PATH_MAX + 16];
    uint32_t *expected; /* the file, in words */
    struct record records[RECORDS_MAX];
    uint32_t record_count;
    struct model *model;
};

static uint32_t *read_words(const char *path, size_t *ret_count)
{
    struct stat st;
    FILE *f = fopen(path, "rbe");
    if (!f || fstat(fileno(f), &st) < 0)
        fail_msg("%s: cannot be read", path);
    uint32_t *words = mem_alloc((size_t)st.st_size, 1);
    *ret_count = (size_t)st.st_size / 4;
    assert_int_equal(fread(words, 4, *ret_count, f), *ret_count);
    fclose(f);
    return words;
}

static int setup(void **state)
{
    struct fixture *f = mem_alloc(1, sizeof *f);
    size_t count, at = 2;
    struct err err = {0};
    temp_make(f->dir);
    snprintf(f->head_path, sizeof f->head_path, "%s/head", f->dir);
    f->expected = read_words(VECTORS "/expected.bin", &count);
    assert_memory_equal(f->expected, "EVEC", 4);
    for (uint32_t i = 0; i < f->expected[1]; i++) {
        struct record *r = &f->records[f->record_count++];
        memcpy(r->name, f->expected + at, 32);
        r->context = f->expected[at + 8];
        r->count = f->expected[at + 9];
        r->kv_heads = f->expected[at + 10];
        memcpy(r->k, f->expected + at + 11, r->kv_heads * sizeof *r->k);
        at += 11 + r->kv_heads;
        r->tokens = f->expected + at;
        at += r->count;
        for (uint32_t h = 0; h < r->kv_heads; h++) {
            r->weights[h] = (const float *)(const void *)(f->expected + at);
            r->top[h] = f->expected + at + r->count;
            at += r->count + r->k[h];
        }
    }
    assert_int_equal(at, count);
    if (model_open(VECTORS "/model", &f->model, &err) < 0) {
        print_error("%s\n", err.text);
        return -1;
    }
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    model_free(&f->model);
    temp_remove(f->dir);
    mem_free(&f->expected);
    mem_free(&f);
    return 0;
}

/* Makes a head out of the folder. */
static int import(const struct fixture *f, const char *folder, const struct model *model,
                  const struct eagle_options *options, struct err *err)
{
    struct eagle *e = NULL;
    int rc = eagle_open(folder, &e, err);
    if (rc == 0)
        rc = eagle_write(e, model, options, f->head_path, err);
    eagle_free(&e);
    return rc;
}

/* ---- what is picked ----------------------------------------------------------------------------------- */

static void compare(const struct record *r, const float *weights, size_t stride)
{
    uint32_t *top = mem_alloc(r->count, sizeof *top), *scratch = mem_alloc(r->count, sizeof *scratch);
    for (uint32_t h = 0; h < r->kv_heads; h++) {
        const float *w = weights + h * stride;
        float most = 0, off = 0;
        for (uint32_t i = 0; i < r->count; i++) {
            most = fmaxf(most, r->weights[h][i]);
            off = fmaxf(off, fabsf(w[i] - r->weights[h][i]));
        }
        if (!(off <= 1e-3f * most))
            fail_msg("%s, context %u, head %u: off by %g of %g", r->name, r->context, h, (double)off,
                     (double)most);
        assert_int_equal(compute_topk(top, NULL, w, r->count, r->k[h], scratch), r->k[h]);
        assert_memory_equal(top, r->top[h], r->k[h] * sizeof *top);
    }
    mem_free(&top);
    mem_free(&scratch);
}

static void check_head(const struct fixture *f, const struct model *model, const struct record *r)
{
    struct err err = {0};
    struct head *head = NULL;
    struct compute *c = NULL;
    struct projection *p = NULL;
    if (head_open(f->head_path, model, &head, &err) < 0 ||
        compute_create("cpu", 1, COMPUTE_ISA_AUTO, &c, &err) < 0 ||
        projection_create(model, head, r->context, 1, c, &p, &err) < 0)
        fail_msg("%s", err.text);
    const struct head_config *h = head_config(head);
    assert_int_equal(h->pool, HEAD_POOL_MAX);
    struct keys keys;
    keys_init(&keys, 1, h->kv_heads, h->head_dim);
    struct projection_part part = {.keys = &keys, .tokens = r->tokens, .count = r->count, .query = true};
    projection_run(p, &part, 1);
    struct key_view view = keys_view(&keys, 0, r->count);
    size_t stride = (r->count + 15) & ~15u;
    float *weights = mem_alloc_aligned(stride * h->kv_heads, sizeof *weights);
    compute_retrieval_weights(c, weights, stride, projection_query(p, 0, 0), &view, (int)h->q_heads,
                              (int)h->kv_heads, (int)h->head_dim, (float)(1 / sqrt((double)h->head_dim)),
                              POOL_MAX);
    compare(r, weights, stride);
    mem_free(&weights);
    keys_free(&keys);
    projection_free(&p);
    compute_free(&c);
    head_free(&head);
}

static void a_head_picks_what_the_reference_picks(void **state)
{
    static const char *const containers[] = {"safetensors", "bin"};
    struct fixture *f = *state;
    uint32_t checked = 0;
    for (uint32_t i = 0; i < f->record_count; i++)
        for (unsigned c = 0; c < 2 && strcmp(f->records[i].name, "true-shape") != 0; c++, checked++) {
            char folder[128];
            struct err err = {0};
            struct eagle_options o = {.pool = HEAD_POOL_MAX};
            snprintf(folder, sizeof folder, VECTORS "/%s-%s", f->records[i].name, containers[c]);
            if (import(f, folder, f->model, &o, &err) < 0)
                fail_msg("%s", err.text);
            check_head(f, f->model, &f->records[i]);
        }
    assert_int_equal(checked, 16); /* four layouts, two containers, two contexts */
}

/* As `hashed` in the script. */
static void hashed(uint16_t *to, uint32_t seed, uint32_t count, float scale)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t x = i + seed * 0x9e3779b9u;
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        x ^= x >> 16;
        to[i] = dtype_f32_to_f16(((float)(x >> 8) / 8388608.0f - 1.0f) * scale);
    }
}

static void write_true_shape(const char *folder)
{
    uint16_t *table = mem_alloc(96u * TRUE_HIDDEN, 2), *q = mem_alloc(TRUE_Q_ROWS * 2u * TRUE_HIDDEN, 2),
             *k = mem_alloc(TRUE_K_ROWS * 2u * TRUE_HIDDEN, 2), *norm = mem_alloc(TRUE_HIDDEN, 2);
    float *norm32 = mem_alloc(TRUE_HIDDEN, sizeof *norm32);
    char path[PATH_MAX + 32];
    struct err err = {0};
    hashed(table, 1, 96 * TRUE_HIDDEN, 1);
    hashed(norm, 2, TRUE_HIDDEN, .5f);
    hashed(q, 3, TRUE_Q_ROWS * 2 * TRUE_HIDDEN, 1 / 32.0f);
    hashed(k, 4, TRUE_K_ROWS * 2 * TRUE_HIDDEN, 1 / 32.0f);
    for (int i = 0; i < TRUE_HIDDEN; i++)
        norm32[i] = 1 + dtype_f16_to_f32(norm[i]);
    const struct safetensors_entry tensors[] = {
        {"embed_tokens.weight", SAFETENSORS_F16, 2, {96, TRUE_HIDDEN}, table},
        {"midlayer.self_attn.q_proj.weight", SAFETENSORS_F16, 2, {TRUE_Q_ROWS, 2 * TRUE_HIDDEN}, q},
        {"midlayer.self_attn.k_proj.weight", SAFETENSORS_F16, 2, {TRUE_K_ROWS, 2 * TRUE_HIDDEN}, k},
        {"midlayer.input_layernorm.weight", SAFETENSORS_F32, 1, {TRUE_HIDDEN}, norm32},
        {"midlayer.hidden_norm.weight", SAFETENSORS_F32, 1, {TRUE_HIDDEN}, norm32},
    };
    struct safetensors_content content = {tensors, sizeof tensors / sizeof *tensors, NULL, 0};
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    if (safetensors_write(path, &content, &err) < 0)
        fail_msg("%s", err.text);
    snprintf(path, sizeof path, "%s/config.json", folder);
    temp_write(
        path,
        "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 4096, \"num_attention_heads\": 32, "
        "\"num_key_value_heads\": 8, \"num_hidden_layers\": 1, \"max_position_embeddings\": 2048, "
        "\"rms_norm_eps\": 1e-05, \"vocab_size\": 96, \"draft_vocab_size\": 32}");
    mem_free(&table);
    mem_free(&q);
    mem_free(&k);
    mem_free(&norm);
    mem_free(&norm32);
}

static void the_shapes_of_a_large_model_work(void **state)
{
    struct fixture *f = *state;
    struct err err = {0};
    struct model *model = NULL;
    struct eagle_options o = {.pool = HEAD_POOL_MAX};
    char path[PATH_MAX + 32];
    uint32_t checked = 0;
    write_true_shape(f->dir);
    snprintf(path, sizeof path, "%s/model.gguf", f->dir);
    tiny_model_write(&true_model, path);
    if (model_open(path, &model, &err) < 0 || import(f, f->dir, model, &o, &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < f->record_count; i++)
        if (!strcmp(f->records[i].name, "true-shape")) {
            check_head(f, model, &f->records[i]);
            checked++;
        }
    assert_int_equal(checked, 2);
    model_free(&model);
}

/* Pairs up to `low` keep their frequency, from `high` on they are slowed by the whole factor. */
static void yarn_begins_and_ends_where_it_should(void **state)
{
    static const struct {
        float base;
        uint32_t original, low, high;
    } cases[] = {{1e4f, 2048, 16, 41}, {5e5f, 2048, 11, 29}, {1e6f, 2048, 10, 27}, {1e6f, 4096, 13, 31}};
    (void)state;
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_rope plain = {.base = cases[i].base, .dims = 128, .factor = 1}, yarn = plain;
        float before[64], after[64], scale;
        yarn.scaling = MODEL_ROPE_SCALING_YARN;
        yarn.factor = 16;
        yarn.original_context = cases[i].original;
        yarn.beta_fast = 32;
        yarn.beta_slow = yarn.attn_factor = 1;
        assert_int_equal(model_rope_frequencies(&plain, before, &scale), 0);
        assert_int_equal(model_rope_frequencies(&yarn, after, &scale), 0);
        assert_true(fabs((double)scale - (0.1 * log(16) + 1)) < 1e-6);
        for (uint32_t j = 0; j < 64; j++) {
            double share = (double)after[j] / (double)before[j];
            if (j <= cases[i].low)
                assert_true(fabs(share - 1) < 1e-6);
            else if (j >= cases[i].high)
                assert_true(fabs(share * 16 - 1) < 1e-6);
            else
                assert_true(share < 1 - 1e-3 && share * 16 > 1 + 1e-3);
        }
    }
}

/* ---- what is kept ------------------------------------------------------------------------------------- */

static void options_decide_what_is_kept(void **state)
{
    struct fixture *f = *state;
    struct err err = {0};
    struct head *head = NULL;
    struct eagle_options o = {.pool = HEAD_POOL_MEAN, .trained_context = 3000};
    assert_int_equal(import(f, VECTORS "/specforge-safetensors", f->model, &o, &err), 0);
    assert_int_equal(head_open(f->head_path, f->model, &head, &err), 0);
    assert_int_equal(head_config(head)->embedding, HEAD_EMBEDDING_OWN);
    assert_int_equal(head_config(head)->trained_context, 3000);
    assert_int_equal(head_config(head)->pool, HEAD_POOL_MEAN);
    assert_int_equal(head_groups(head)[0].q.cols, 64);
    head_free(&head);
    o.embedding = EAGLE_EMBEDDING_MODEL;
    assert_int_equal(import(f, VECTORS "/specforge-bin", f->model, &o, &err), 0);
    assert_int_equal(head_open(f->head_path, f->model, &head, &err), 0);
    assert_int_equal(head_config(head)->embedding, HEAD_EMBEDDING_MODEL);
    head_free(&head);
    o.embedding = EAGLE_EMBEDDING_AUTO; /* the same values as the model's */
    assert_int_equal(import(f, VECTORS "/angelslim-bin", f->model, &o, &err), 0);
    assert_int_equal(head_open(f->head_path, f->model, &head, &err), 0);
    assert_int_equal(head_config(head)->embedding, HEAD_EMBEDDING_MODEL);
    head_free(&head);
    o.embedding = EAGLE_EMBEDDING_OWN;
    assert_int_equal(import(f, VECTORS "/eagle-bin", f->model, &o, &err), -ENOENT);
    assert_non_null(strstr(err.text, "embed_tokens.weight"));
}

/* ---- with the model's features ------------------------------------------------------------------------- */

static void check_features(const struct fixture *f, const struct head *head)
{
    const struct head_config *h = head_config(head);
    uint32_t row = h->feature_layer_count * h->feature_hidden, seed = 77, tokens[FEATURE_TOKENS];
    size_t stride = 64;
    float *hidden = mem_alloc((size_t)FEATURE_TOKENS * row, sizeof *hidden),
          *weights = mem_alloc_aligned(stride * h->kv_heads, sizeof *weights);
    double *expected = mem_alloc((size_t)h->kv_heads * FEATURE_TOKENS, sizeof *expected);
    struct compute *c = NULL;
    struct projection *p = NULL;
    struct err err = {0};
    for (uint32_t i = 0; i < FEATURE_TOKENS; i++)
        tokens[i] = tiny_random(&seed) % h->vocab;
    for (uint32_t i = 0; i < FEATURE_TOKENS * row; i++)
        hidden[i] = 3 * tiny_uniform(&seed);
    if (compute_create("cpu", 1, COMPUTE_ISA_AUTO, &c, &err) < 0 ||
        projection_create(f->model, head, FEATURE_TOKENS, 1, c, &p, &err) < 0)
        fail_msg("%s", err.text);
    struct keys keys;
    keys_init(&keys, 1, h->kv_heads, h->head_dim);
    struct projection_part part = {.keys = &keys,
                                   .tokens = tokens,
                                   .count = FEATURE_TOKENS,
                                   .query = true,
                                   .features = hidden,
                                   .features_type = DTYPE_F32};
    projection_run(p, &part, 1);
    struct key_view view = keys_view(&keys, 0, FEATURE_TOKENS);
    compute_retrieval_weights(c, weights, stride, projection_query(p, 0, 0), &view, (int)h->q_heads,
                              (int)h->kv_heads, (int)h->head_dim, (float)(1 / sqrt((double)h->head_dim)),
                              POOL_MAX);
    reference_weights(head, f->model, tokens, hidden, expected);
    for (uint32_t kv = 0; kv < h->kv_heads; kv++) {
        double most = 0, off = 0;
        for (uint32_t i = 0; i < FEATURE_TOKENS; i++) {
            double want = expected[kv * FEATURE_TOKENS + i];
            most = fmax(most, want);
            off = fmax(off, fabs((double)weights[kv * stride + i] - want));
        }
        if (!(off <= 2e-3 * most)) /* keys are kept in 16 bits */
            fail_msg("head %u: off by %g of %g", kv, off, most);
    }
    keys_free(&keys);
    projection_free(&p);
    compute_free(&c);
    mem_free(&hidden);
    mem_free(&weights);
    mem_free(&expected);
}

static void features_are_kept_and_used(void **state)
{
    static const struct {
        const char *folder;
        uint32_t layers[3];
        bool input_norm;
    } cases[] = {{VECTORS "/eagle-bin", {2, 4, 5}, false},
                 {VECTORS "/specforge-safetensors", {2, 4, 5}, false},
                 {VECTORS "/speculators-bin", {2, 4, 5}, true}};
    struct fixture *f = *state;
    struct eagle_options o = {.features = HEAD_FEATURES_TARGET, .pool = HEAD_POOL_MAX};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err err = {0};
        struct head *head = NULL;
        if (import(f, cases[i].folder, f->model, &o, &err) < 0 ||
            head_open(f->head_path, f->model, &head, &err) < 0)
            fail_msg("%s", err.text);
        const struct head_config *h = head_config(head);
        assert_int_equal(h->features, HEAD_FEATURES_TARGET);
        assert_int_equal(h->feature_layer_count, 3);
        assert_memory_equal(h->feature_layers, cases[i].layers, sizeof cases[i].layers);
        assert_int_equal(head_groups(head)[0].q.cols, 128);
        assert_int_equal(head_shared(head)->fc.cols, 192);
        assert_int_equal(head_shared(head)->feature_input_norm.data != NULL, cases[i].input_norm);
        check_features(f, head);
        head_free(&head);
    }
}

/* ---- what is refused ---------------------------------------------------------------------------------- */

/* A copy of the EAGLE case in the fixture's folder, with one change to the configuration and one to a
 * tensor. */
static void write_changed(const struct fixture *f, const char *from, const char *to,
                          void (*change)(struct safetensors_entry *tensors, uint32_t *count))
{
    struct safetensors *s = NULL;
    struct safetensors_entry tensors[TENSORS_MAX];
    struct err err = {0};
    char text[2048] = "", path[PATH_MAX + 32];
    FILE *config = fopen(VECTORS "/eagle-safetensors/config.json", "re");
    assert_non_null(config);
    assert_true(fread(text, 1, sizeof text - 1, config) > 0);
    fclose(config);
    char *at = from ? strstr(text, from) : NULL, changed[4096];
    assert_true(!from || at);
    snprintf(changed, sizeof changed, "%.*s%s%s", at ? (int)(at - text) : (int)strlen(text), text,
             at ? to : "", at ? at + strlen(from) : "");
    snprintf(path, sizeof path, "%s/config.json", f->dir);
    temp_write(path, changed);
    assert_int_equal(safetensors_open(VECTORS "/eagle-safetensors/model.safetensors", &s, &err), 0);
    uint32_t count = safetensors_count(s);
    assert_true(count < TENSORS_MAX - 2);
    for (uint32_t i = 0; i < count; i++) {
        const struct safetensors_tensor *t = safetensors_at(s, i);
        tensors[i] =
            (struct safetensors_entry){t->name.text, t->type, t->dims, {t->shape[0], t->shape[1]}, t->data};
    }
    if (change)
        change(tensors, &count);
    struct safetensors_content content = {tensors, count, NULL, 0};
    snprintf(path, sizeof path, "%s/model.safetensors", f->dir);
    if (safetensors_write(path, &content, &err) < 0)
        fail_msg("%s", err.text);
    safetensors_free(&s);
}

static struct safetensors_entry *find(struct safetensors_entry *tensors, const char *name)
{
    for (uint32_t i = 0; i < TENSORS_MAX; i++)
        if (!strcmp(tensors[i].name, name))
            return &tensors[i];
    return NULL;
}

static void add_bias(struct safetensors_entry *tensors, uint32_t *count)
{
    tensors[(*count)++] = (struct safetensors_entry){
        "midlayer.self_attn.q_proj.bias", SAFETENSORS_F16, 1, {64}, tensors[0].data};
}

static void drop_norm(struct safetensors_entry *tensors, uint32_t *count)
{
    *find(tensors, "midlayer.hidden_norm.weight") = tensors[--*count];
}

static void halve_query(struct safetensors_entry *tensors, uint32_t *count)
{
    (void)count;
    find(tensors, "midlayer.self_attn.q_proj.weight")->shape[1] /= 2;
}

static void retype_key(struct safetensors_entry *tensors, uint32_t *count)
{
    (void)count;
    find(tensors, "midlayer.self_attn.k_proj.weight")->type = SAFETENSORS_I16;
}

static void rename_query(struct safetensors_entry *tensors, uint32_t *count)
{
    (void)count;
    find(tensors, "midlayer.self_attn.q_proj.weight")->name = "layers.1.self_attn.q_proj.weight";
}

static void add_query_norm(struct safetensors_entry *tensors, uint32_t *count)
{
    tensors[(*count)++] = (struct safetensors_entry){
        "midlayer.self_attn.q_norm.weight", SAFETENSORS_F16, 1, {16}, tensors[0].data};
}

static void add_feature_norm(struct safetensors_entry *tensors, uint32_t *count)
{
    tensors[(*count)++] =
        (struct safetensors_entry){"fc_norm.0.weight", SAFETENSORS_F16, 1, {64}, tensors[0].data};
}

static void what_is_no_such_draft_model_is_named(void **state)
{
    static const struct {
        const char *from, *to;
        void (*change)(struct safetensors_entry *tensors, uint32_t *count);
        int code;
        const char *expected;
    } cases[] = {
        {"LlamaForCausalLM", "GPT2LMHeadModel", NULL, -ENOTSUP, "architectures: found GPT2LMHeadModel"},
        {"\"draft_vocab_size\"", "\"other\"", NULL, -ENOTSUP, "draft_vocab_size: found no such field"},
        {"\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2", NULL, -ENOTSUP,
         "num_hidden_layers: found 2"},
        {"\"hidden_size\": 64", "\"hidden_size\": \"64\"", NULL, -EBADMSG, "hidden_size"},
        {"\"hidden_size\": 64", "\"hidden_size\": 32", NULL, -EBADMSG, "q_proj.weight: shape"},
        {"\"hidden_size\": 64", "\"wide\": 64", NULL, -EBADMSG, "hidden_size"},
        {"\"head_dim\": 16", "\"head_dim\": 15", NULL, -EBADMSG, "even width"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", NULL, -EBADMSG, "3 key heads"},
        {"\"vocab_size\": 96", "\"vocab_size\": 97", NULL, -EXDEV, "vocab_size: found 97, expected 96"},
        {"\"torch_dtype\"", "\"rope_scaling\": {\"rope_type\": \"dynamic\"}, \"x\"", NULL, -ENOTSUP,
         "found dynamic"},
        {"\"torch_dtype\"", "\"speculators_model_type\": \"eagle\", \"x\"", NULL, -ENOTSUP,
         "found eagle, expected"},
        {"\"torch_dtype\"", "\"speculators_model_type\": \"eagle3\", \"x\"", NULL, -EBADMSG,
         "transformer_layer_config"},
        {"\"torch_dtype\"", "\"eagle_aux_hidden_state_layer_ids\": [1, -1], \"x\"", NULL, -EBADMSG,
         "at place 1"},
        {NULL, NULL, add_bias, -ENOTSUP, "q_proj.bias: found"},
        {NULL, NULL, drop_norm, -EBADMSG, "hidden_norm.weight: found no such tensor"},
        {NULL, NULL, halve_query, -EBADMSG, "shape: found 128 x 64 (2 dimensions), expected 128 x 128"},
        {NULL, NULL, retype_key, -ENOTSUP, "k_proj.weight: type: found I16"},
        {NULL, NULL, rename_query, -ENOTSUP, "found neither it nor layers.0"},
        {NULL, NULL, add_query_norm, -EBADMSG, "k_norm.weight: found no such tensor"},
        {NULL, NULL, add_feature_norm, -ENOTSUP, "fc_norm.0.weight"},
    };
    struct fixture *f = *state;
    struct eagle_options o = {.features = HEAD_FEATURES_TARGET};
    struct err err = {0};
    write_changed(f, NULL, NULL, NULL);
    if (import(f, f->dir, f->model, &o, &err) < 0) /* unchanged it is sound */
        fail_msg("%s", err.text);
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_changed(f, cases[i].from, cases[i].to, cases[i].change);
        int rc = import(f, f->dir, f->model, &o, &err);
        if (rc != cases[i].code || !strstr(err.text, cases[i].expected) || !strstr(err.text, f->dir))
            fail_msg("case %u: expected %d with '%s', found %d: %s", i, cases[i].code, cases[i].expected, rc,
                     err.text);
    }
}

static void a_model_that_it_does_not_fit_is_named(void **state)
{
    struct fixture *f = *state;
    struct err err = {0};
    struct model *model = NULL;
    struct eagle_options o = {0};
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/model.gguf", f->dir);
    tiny_model_write(&true_model, path);
    assert_int_equal(model_open(path, &model, &err), 0);
    assert_int_equal(import(f, VECTORS "/eagle-bin", model, &o, &err), -EXDEV);
    assert_non_null(strstr(err.text, "num_key_value_heads: found 2, expected 8"));
    assert_int_equal(import(f, "/nonexistent", model, &o, &err), -ENOENT);
    model_free(&model);
    temp_remove(f->dir);
    assert_int_equal(mkdir(f->dir, 0700), 0);
    snprintf(path, sizeof path, "%s/config.json", f->dir);
    temp_write(path,
               "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 8, \"num_attention_heads\": 2, "
               "\"max_position_embeddings\": 8, \"rms_norm_eps\": 1e-05, \"vocab_size\": 96, "
               "\"draft_vocab_size\": 3}");
    assert_int_equal(import(f, f->dir, f->model, &o, &err), -ENOENT);
    assert_non_null(strstr(err.text, "neither model.safetensors nor pytorch_model.bin"));
}

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

#define WORDS(...) ((const char *const[]){"head", "import", __VA_ARGS__, NULL})

static void the_command_line_ends_as_promised(void **state)
{
    struct fixture *f = *state;
    struct head *head = NULL;
    struct err err = {0};
    const char *eagle = VECTORS "/eagle-bin", *model = VECTORS "/model";
    remove(f->head_path);
    assert_int_equal(run_main((const char *const[]){"head", "import", NULL}), 2);
    assert_int_equal(run_main(WORDS(eagle, "b")), 2);
    assert_int_equal(run_main(WORDS(eagle, "-o", f->head_path)), 2);
    assert_int_equal(run_main(WORDS(eagle, "--features", "all")), 2);
    assert_int_equal(run_main(WORDS(eagle, "--embedding", "none")), 2);
    assert_int_equal(run_main(WORDS(eagle, "--trained-context", "0")), 2);
    assert_int_equal(run_main(WORDS("/nonexistent")), 1);
    assert_int_equal(run_main(WORDS(eagle)), 0);
    assert_int_equal(run_main(WORDS(eagle, "-m", model, "-o", f->head_path, "--embedding", "own")), 1);
    assert_int_equal(head_open(f->head_path, f->model, &head, &err), -ENOENT);
    assert_int_equal(run_main(WORDS(eagle, "-m", model, "-o", f->head_path, "--features", "target")), 0);
    assert_int_equal(head_open(f->head_path, f->model, &head, &err), 0);
    assert_int_equal(head_config(head)->pool, HEAD_POOL_MAX);
    head_free(&head);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_head_picks_what_the_reference_picks),
        cmocka_unit_test(the_shapes_of_a_large_model_work),
        cmocka_unit_test(yarn_begins_and_ends_where_it_should),
        cmocka_unit_test(options_decide_what_is_kept),
        cmocka_unit_test(features_are_kept_and_used),
        cmocka_unit_test(what_is_no_such_draft_model_is_named),
        cmocka_unit_test(a_model_that_it_does_not_fit_is_named),
        cmocka_unit_test(the_command_line_ends_as_promised),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
