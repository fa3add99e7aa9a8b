/* Reads EAGLE-3 draft models; see eagle.h. What the layouts share is one: names of the tensors behind a
 * prefix, shapes, an embedding half before a feature half. They differ in where the configuration stands
 * and in how layers of features are counted. Weights that a retrieval head does not need are named one by
 * one and passed over; a weight that nobody knows is refused, since it may change what the projections
 * mean. */
#include "model/eagle.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "model/json_file.h"
#include "model/rope_config.h"
#include "model/weights.h"

enum { NAME_BYTES = 96, OWNED_MAX = 8 };

struct eagle {
    char *folder, *torch_path;
    const char *prefix; /* of the layer's tensors */
    struct weights weights;
    struct eagle_config config;
    float factors[MODEL_HEAD_DIM_MAX / 2];
    void *owned[OWNED_MAX];
    uint32_t owned_count;
};

static const struct {
    const char *class_name, *name;
} layouts[] = {
    [EAGLE_LAYOUT_EAGLE] = {"LlamaForCausalLM", "EAGLE"},
    [EAGLE_LAYOUT_SPECFORGE] = {"LlamaForCausalLMEagle3", "SpecForge"},
    [EAGLE_LAYOUT_ANGELSLIM] = {"Eagle3LlamaForCausalLM", "AngelSlim"},
    [EAGLE_LAYOUT_SPECULATORS] = {NULL, "speculators"}, /* known by speculators_model_type */
};

static const char *const prefixes[] = {"midlayer.", "layers.0."};

/* What the draft model needs for its own tokens, and this program does not. `*` stands for the layer's
 * prefix. */
static const char *const passed_over[] = {
    "*self_attn.v_proj.weight",
    "*self_attn.o_proj.weight",
    "*self_attn.rotary_emb.inv_freq",
    "*post_attention_layernorm.weight",
    "*mlp.gate_proj.weight",
    "*mlp.up_proj.weight",
    "*mlp.down_proj.weight",
    "norm.weight",
    "lm_head.weight",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
    "d2t",
    "t2d",
};

const struct eagle_config *eagle_config(const struct eagle *eagle)
{
    return &eagle->config;
}

const char *eagle_layout_name(enum eagle_layout layout)
{
    return layouts[layout].name;
}

static int refuse_value(const struct json_doc *d, const char *key, const char *found, const char *expected,
                        struct err *err)
{
    return err_set(err, -ENOTSUP, "%.200s: %s%s: found %.60s, expected %s", d->path, d->where, key, found,
                   expected);
}

/* The layout, and the object that has the layer's configuration. */
static int read_layout(struct eagle *e, const struct json_doc *d, struct json_doc *ret_layer, struct err *err)
{
    const char *type = NULL;
    int rc = json_optional(json_text(d, "speculators_model_type", &type, err));
    *ret_layer = *d;
    if (rc < 0)
        return rc;
    if (type) {
        if (strcmp(type, "eagle3"))
            return refuse_value(d, "speculators_model_type", type, "eagle3", err);
        e->config.layout = EAGLE_LAYOUT_SPECULATORS;
        ret_layer->root = json_object_get(d->root, "transformer_layer_config");
        ret_layer->where = "transformer_layer_config.";
        if (!json_is_object(ret_layer->root))
            return err_set(err, -EBADMSG, "%.200s: transformer_layer_config: found %s, expected an object",
                           d->path, json_kind(ret_layer->root));
        return 0;
    }
    const json_t *classes = json_object_get(d->root, "architectures");
    const char *name = json_string_value(json_array_get(classes, 0));
    unsigned i = 0;
    while (i < EAGLE_LAYOUT_SPECULATORS && (!name || strcmp(name, layouts[i].class_name)))
        i++;
    if (i == EAGLE_LAYOUT_SPECULATORS)
        return refuse_value(d, "architectures", name ? name : "no name",
                            "LlamaForCausalLM, LlamaForCausalLMEagle3 or Eagle3LlamaForCausalLM", err);
    if (!json_object_get(d->root, "draft_vocab_size"))
        return refuse_value(d, "draft_vocab_size", "no such field", "it, as every EAGLE-3 draft model has it",
                            err);
    e->config.layout = (enum eagle_layout)i;
    return 0;
}

static int read_sizes(struct eagle *e, const struct json_doc *d, struct err *err)
{
    struct eagle_config *c = &e->config;
    uint32_t layers = 1;
    float rotary = 1;
    const struct {
        const char *key;
        uint32_t most, *to;
    } required[] = {
        {"hidden_size", 1 << 17, &c->hidden},
        {"num_attention_heads", 4096, &c->q_heads},
        {"vocab_size", 1 << 24, &c->vocab},
        {"max_position_embeddings", HEAD_CONTEXT_MAX, &c->position_max},
    };
    int rc;
    for (unsigned i = 0; i < sizeof required / sizeof *required; i++)
        if ((rc = json_u32(d, required[i].key, 1, required[i].most, required[i].to, err)) < 0)
            return json_required(rc, err);
    c->kv_heads = c->q_heads;
    c->head_dim = c->hidden / c->q_heads;
    if ((rc = json_required(json_f32(d, "rms_norm_eps", 0.1f, &c->rms_eps, err), err)) < 0 ||
        (rc = json_optional(json_u32(d, "num_key_value_heads", 1, 4096, &c->kv_heads, err))) < 0 ||
        (rc = json_optional(json_u32(d, "head_dim", 2, MODEL_HEAD_DIM_MAX, &c->head_dim, err))) < 0 ||
        (rc = json_optional(json_u32(d, "num_hidden_layers", 0, UINT32_MAX, &layers, err))) < 0 ||
        (rc = json_optional(json_f32(d, "partial_rotary_factor", 1, &rotary, err))) < 0)
        return rc;
    if (layers != 1)
        return err_set(err, -ENOTSUP, "%.200s: %snum_hidden_layers: found %" PRIu32 ", expected 1", d->path,
                       d->where, layers);
    if (rotary < 1)
        return refuse_value(d, "partial_rotary_factor", "less than 1", "1", err);
    if (c->head_dim < 2 || c->head_dim % 2 || c->head_dim > MODEL_HEAD_DIM_MAX || c->q_heads % c->kv_heads)
        return err_set(err, -EBADMSG,
                       "%.200s: %snum_attention_heads: found %" PRIu32 " heads of %" PRIu32 " for %" PRIu32
                       " key heads, expected a multiple and an even width",
                       d->path, d->where, c->q_heads, c->head_dim, c->kv_heads);
    return 0;
}

/* `after`: the file names layers by what leaves them, which is what enters the next. */
static int read_layer_ids(struct eagle *e, const struct json_doc *d, bool after, struct err *err)
{
    struct eagle_config *c = &e->config;
    const json_t *ids = json_object_get(d->root, "eagle_aux_hidden_state_layer_ids");
    json_int_t id;
    if (!ids || json_is_null(ids) || (json_is_array(ids) && json_array_size(ids) == 0))
        return 0;
    size_t count = json_is_array(ids) ? json_array_size(ids) : 0;
    if (count == 0 || count > HEAD_FEATURE_LAYERS_MAX)
        return err_set(err, -EBADMSG,
                       "%.200s: %seagle_aux_hidden_state_layer_ids: found %s of %zu, expected 1 to %u",
                       d->path, d->where, json_kind(ids), count, HEAD_FEATURE_LAYERS_MAX);
    for (size_t i = 0; i < count; i++) {
        if (!json_whole(json_array_get(ids, i), &id) || id < 0 || id >= MODEL_LAYERS_MAX)
            return err_set(
                err, -EBADMSG,
                "%.200s: %seagle_aux_hidden_state_layer_ids: found %s at place %zu, expected a layer",
                d->path, d->where, json_kind(json_array_get(ids, i)), i);
        c->feature_layers[i] = (uint32_t)id + after;
    }
    c->feature_layer_count = (uint32_t)count;
    return 0;
}

static int read_features(struct eagle *e, const struct json_doc *d, struct err *err)
{
    struct json_doc inner = {json_object_get(d->root, "eagle_config"), d->path, "eagle_config."};
    e->config.target_hidden = e->config.hidden;
    int rc = json_optional(json_u32(d, "target_hidden_size", 1, 1 << 17, &e->config.target_hidden, err));
    if (rc == 0)
        rc = read_layer_ids(e, d, false, err);
    if (rc == 0 && json_is_object(inner.root))
        rc = read_layer_ids(e, &inner, true, err);
    return rc;
}

static int read_config(struct eagle *e, struct err *err)
{
    struct json_doc d, layer;
    struct eagle_config *c = &e->config;
    int rc = json_doc_open(&d, e->folder, "config.json", err);
    if (rc == 0)
        rc = read_layout(e, &d, &layer, err);
    if (rc == 0)
        rc = read_sizes(e, &layer, err);
    if (rc == 0)
        rc = rope_config_read(&layer, c->head_dim, &c->position_max, e->factors, &c->rope, err);
    if (rc == 0)
        rc = read_features(e, &d, err);
    json_doc_free(&d);
    return rc;
}

/* safetensors first: what both have is the same, and it needs no pickle. */
static int open_weights(struct eagle *e, struct err *err)
{
    int rc = weights_open_folder(&e->weights, e->folder, err);
    if (rc != -ENOENT)
        return rc;
    size_t room = strlen(e->folder) + sizeof "/pytorch_model.bin";
    e->torch_path = mem_alloc(room, 1);
    snprintf(e->torch_path, room, "%s/pytorch_model.bin", e->folder);
    rc = weights_open_torch(&e->weights, e->torch_path, err);
    if (rc == -ENOENT)
        err_set(err, rc,
                "%.200s: found neither model.safetensors nor pytorch_model.bin, expected one of them",
                e->folder);
    return rc;
}

static const char *name_of_layer(const struct eagle *e, const char *name, char ret[NAME_BYTES])
{
    bool layered = name[0] == '*';
    snprintf(ret, NAME_BYTES, "%s%s", layered ? e->prefix : "", name + layered);
    return ret;
}

static const struct weight *use(struct eagle *e, const char *name)
{
    char full[NAME_BYTES];
    return weights_use(&e->weights, name_of_layer(e, name, full));
}

static int refuse_tensor(const struct weight *t, int code, const char *what, struct err *err)
{
    return err_set(err, code, "%.200s: tensor %.*s: %s", t->path,
                   (int)(t->name.bytes < 80 ? t->name.bytes : 80), t->name.text, what);
}

/* A tensor that must be there, rows x cols (rows 0: a vector), of floats. */
static int take(struct eagle *e, const char *name, uint64_t rows, uint64_t cols, const struct weight **ret,
                struct err *err)
{
    char full[NAME_BYTES], what[160];
    const struct weight *t = use(e, name);
    *ret = t;
    if (!t)
        return err_set(err, -EBADMSG, "%.200s: tensor %s: found no such tensor, expected it", e->folder,
                       name_of_layer(e, name, full));
    if (t->dims != (rows ? 2 : 1) || t->rows != (rows ? rows : 1) || t->cols != cols) {
        snprintf(what, sizeof what,
                 "shape: found %" PRIu64 " x %" PRIu64 " (%" PRIu32 " dimensions), expected %" PRIu64
                 " x %" PRIu64,
                 t->rows, t->cols, t->dims, rows ? rows : 1, cols);
        return refuse_tensor(t, -EBADMSG, what, err);
    }
    if (t->type == DTYPE_MAX) {
        snprintf(what, sizeof what, "type: found %s, expected F32, F16 or BF16", t->type_name);
        return refuse_tensor(t, -ENOTSUP, what, err);
    }
    return 0;
}

static int find_prefix(struct eagle *e, struct err *err)
{
    for (unsigned i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        e->prefix = prefixes[i];
        if (use(e, "*self_attn.q_proj.weight"))
            return 0;
    }
    return err_set(
        err, -ENOTSUP,
        "%.200s: tensor midlayer.self_attn.q_proj.weight: found neither it nor layers.0.self_attn.q_proj"
        ".weight, expected one of them",
        e->folder);
}

/* Everything that is in the file must be known, whether this program uses it or not. */
static int check_tensors(struct eagle *e, struct err *err)
{
    const struct eagle_config *c = &e->config;
    const struct weight *t;
    int rc;
    if ((rc = take(e, "*self_attn.q_proj.weight", (uint64_t)c->q_heads * c->head_dim, 2ull * c->hidden, &t,
                   err)) < 0 ||
        (rc = take(e, "*self_attn.k_proj.weight", (uint64_t)c->kv_heads * c->head_dim, 2ull * c->hidden, &t,
                   err)) < 0 ||
        (rc = take(e, "*input_layernorm.weight", 0, c->hidden, &t, err)) < 0 ||
        (rc = take(e, "*hidden_norm.weight", 0, c->hidden, &t, err)) < 0)
        return rc;
    e->config.head_norms = use(e, "*self_attn.q_norm.weight") != NULL;
    if (e->config.head_norms && ((rc = take(e, "*self_attn.q_norm.weight", 0, c->head_dim, &t, err)) < 0 ||
                                 (rc = take(e, "*self_attn.k_norm.weight", 0, c->head_dim, &t, err)) < 0))
        return rc;
    if ((t = use(e, "embed_tokens.weight"))) {
        if ((rc = take(e, "embed_tokens.weight", t->rows ? t->rows : 1, c->hidden, &t, err)) < 0)
            return rc;
        e->config.own_embedding = true;
    }
    for (unsigned i = 0; i < sizeof passed_over / sizeof *passed_over; i++)
        use(e, passed_over[i]);
    use(e, "fc.weight"); /* of the feature half, held against its shape when that is wanted */
    use(e, "input_norm.weight");
    for (uint32_t i = 0; i < HEAD_FEATURE_LAYERS_MAX; i++) {
        char name[NAME_BYTES];
        snprintf(name, sizeof name, "fc_norm.%" PRIu32 ".weight", i);
        use(e, name);
    }
    t = weights_unused(&e->weights);
    return t ? refuse_tensor(t, -ENOTSUP, "found, expected no such tensor in an EAGLE-3 draft model", err)
             : 0;
}

int eagle_open(const char *folder, struct eagle **ret_eagle, struct err *err)
{
    struct eagle *e = mem_alloc(1, sizeof *e);
    e->folder = mem_strdup(folder);
    int rc = read_config(e, err);
    if (rc == 0)
        rc = open_weights(e, err);
    if (rc == 0)
        rc = find_prefix(e, err);
    if (rc == 0)
        rc = check_tensors(e, err);
    if (rc < 0)
        eagle_free(&e);
    else
        *ret_eagle = e;
    return rc;
}

void eagle_free(struct eagle **eagle)
{
    struct eagle *e = *eagle;
    if (!e)
        return;
    for (uint32_t i = 0; i < e->owned_count; i++)
        mem_free(&e->owned[i]);
    weights_free(&e->weights);
    mem_free(&e->torch_path);
    mem_free(&e->folder);
    mem_free(eagle);
}

const char *eagle_weights_path(const struct eagle *eagle)
{
    char full[NAME_BYTES];
    return weights_find(&eagle->weights, name_of_layer(eagle, "*self_attn.q_proj.weight", full))->path;
}

/* ---- the head ----------------------------------------------------------------------------------------- */

static float element(enum dtype type, const uint8_t *at)
{
    uint16_t half;
    float value;
    if (type == DTYPE_F32) {
        memcpy(&value, at, sizeof value);
        return value;
    }
    memcpy(&half, at, sizeof half);
    return type == DTYPE_F16 ? dtype_f16_to_f32(half) : dtype_bf16_to_f32(half);
}

static void *own(struct eagle *e, uint64_t bytes)
{
    CHECK(e->owned_count < OWNED_MAX);
    return e->owned[e->owned_count++] = mem_alloc_aligned(bytes, 1);
}

static int take_vector(struct eagle *e, const char *name, uint32_t cols, struct model_tensor *ret,
                       struct err *err)
{
    const struct weight *t;
    int rc = take(e, name, 0, cols, &t, err);
    if (rc < 0)
        return rc;
    float *to = own(e, cols * sizeof *to);
    size_t width = dtype_row_bytes(t->type, 1);
    for (uint32_t i = 0; i < cols; i++)
        to[i] = element(t->type, (const uint8_t *)t->data + i * width);
    *ret = (struct model_tensor){DTYPE_F32, 1, cols, to, cols * sizeof *to};
    return 0;
}

/* A projection: the embedding half of its inputs, or all. */
static int take_projection(struct eagle *e, const char *name, uint32_t rows, bool all,
                           struct model_tensor *ret, struct err *err)
{
    const struct weight *t;
    uint32_t inputs = 2 * e->config.hidden, cols = all ? inputs : e->config.hidden;
    int rc = take(e, name, rows, inputs, &t, err);
    if (rc < 0)
        return rc;
    size_t from_bytes = dtype_row_bytes(t->type, inputs), to_bytes = dtype_row_bytes(t->type, cols);
    *ret = (struct model_tensor){t->type, rows, cols, t->data, rows * to_bytes};
    if (all)
        return 0;
    uint8_t *to = own(e, rows * to_bytes);
    for (uint32_t r = 0; r < rows; r++)
        memcpy(to + r * to_bytes, (const uint8_t *)t->data + r * from_bytes, to_bytes);
    ret->data = to;
    return 0;
}

static bool is_plain(enum dtype type)
{
    return type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16;
}

/* Whether the first rows of the file's embedding are the model's, value by value. */
static bool same_embedding(const struct weight *t, const struct model_tensor *m)
{
    if (!is_plain(m->type) || t->cols != m->cols || t->rows < m->rows)
        return false;
    size_t width = dtype_row_bytes(t->type, 1), model_width = dtype_row_bytes(m->type, 1);
    for (uint64_t i = 0; i < (uint64_t)m->rows * m->cols; i++)
        if (element(t->type, (const uint8_t *)t->data + i * width) !=
            element(m->type, (const uint8_t *)m->data + i * model_width))
            return false;
    return true;
}

static int choose_embedding(struct eagle *e, const struct model *model, enum eagle_embedding wish,
                            struct head_config *h, struct head_shared *shared, struct err *err)
{
    const struct model_tensor *m = model_token_embedding(model);
    const struct weight *t = weights_find(&e->weights, "embed_tokens.weight");
    if (wish == EAGLE_EMBEDDING_OWN && !t)
        return err_set(err, -ENOENT,
                       "%.200s: tensor embed_tokens.weight: found no such tensor, expected it for an own "
                       "embedding",
                       e->folder);
    bool keep = t && (wish == EAGLE_EMBEDDING_OWN || (wish == EAGLE_EMBEDDING_AUTO && !same_embedding(t, m)));
    if (!keep && e->config.hidden != m->cols)
        return err_set(err, -EXDEV,
                       "%.200s: hidden_size: found %" PRIu32 ", expected %" PRIu32
                       " to share the model's embedding",
                       e->folder, e->config.hidden, m->cols);
    if (!keep)
        return 0;
    if (t->rows < m->rows)
        return err_set(err, -EXDEV,
                       "%.200s: tensor embed_tokens.weight: found %" PRIu64 " rows, expected the %" PRIu32
                       " of the model's vocabulary",
                       t->path, t->rows, m->rows);
    h->embedding = HEAD_EMBEDDING_OWN;
    shared->embedding = (struct model_tensor){t->type, m->rows, e->config.hidden, t->data,
                                              m->rows * dtype_row_bytes(t->type, e->config.hidden)};
    return 0;
}

/* Layers that EAGLE taps when the file does not say: near the begin, in the middle, near the end. */
static void default_layers(struct head_config *h)
{
    const uint32_t layers[] = {2, h->layers / 2, h->layers - 3};
    memcpy(h->feature_layers, layers, sizeof layers);
    h->feature_layer_count = 3;
}

static int add_features(struct eagle *e, const struct model *model, struct head_config *h,
                        struct head_shared *shared, struct err *err)
{
    const struct eagle_config *c = &e->config;
    const struct weight *fc;
    int rc;
    h->features = HEAD_FEATURES_TARGET;
    h->feature_hidden = c->target_hidden;
    h->feature_layer_count = c->feature_layer_count;
    memcpy(h->feature_layers, c->feature_layers, sizeof h->feature_layers);
    if (c->target_hidden != model_config(model)->hidden)
        return err_set(err, -EXDEV, "%.200s: target_hidden_size: found %" PRIu32 ", expected %" PRIu32,
                       e->folder, c->target_hidden, model_config(model)->hidden);
    if (weights_find(&e->weights, "fc_norm.0.weight"))
        return err_set(err, -ENOTSUP,
                       "%.200s: tensor fc_norm.0.weight: found, expected no norm of single features",
                       e->folder);
    if (h->feature_layer_count == 0 && h->layers < 6)
        return err_set(err, -EXDEV,
                       "%.200s: eagle_aux_hidden_state_layer_ids: found nothing, expected it for a model "
                       "of %" PRIu32 " layers",
                       e->folder, h->layers);
    if (h->feature_layer_count == 0)
        default_layers(h);
    uint32_t inputs = h->feature_layer_count * h->feature_hidden;
    if ((rc = take(e, "fc.weight", c->hidden, inputs, &fc, err)) < 0 ||
        (rc = take_vector(e, "*hidden_norm.weight", c->hidden, &shared->feature_norm, err)) < 0)
        return rc;
    shared->fc = (struct model_tensor){fc->type, c->hidden, inputs, fc->data, fc->bytes};
    return use(e, "input_norm.weight")
               ? take_vector(e, "input_norm.weight", inputs, &shared->feature_input_norm, err)
               : 0;
}

static int add_group(struct eagle *e, bool all, struct head_group *group, struct err *err)
{
    const struct eagle_config *c = &e->config;
    int rc;
    if ((rc = take_vector(e, "*input_layernorm.weight", c->hidden, &group->norm, err)) < 0 ||
        (rc = take_projection(e, "*self_attn.q_proj.weight", c->q_heads * c->head_dim, all, &group->q, err)) <
            0 ||
        (rc = take_projection(e, "*self_attn.k_proj.weight", c->kv_heads * c->head_dim, all, &group->k,
                              err)) < 0 ||
        !c->head_norms)
        return rc;
    rc = take_vector(e, "*self_attn.q_norm.weight", c->head_dim, &group->q_norm, err);
    return rc < 0 ? rc : take_vector(e, "*self_attn.k_norm.weight", c->head_dim, &group->k_norm, err);
}

static uint32_t trained_context(const struct eagle_config *c, const struct eagle_options *o)
{
    bool scaled = c->rope.scaling != MODEL_ROPE_SCALING_NONE;
    uint32_t most = c->position_max < HEAD_CONTEXT_MAX ? c->position_max : HEAD_CONTEXT_MAX;
    if (o->trained_context)
        return o->trained_context;
    return scaled || most < EAGLE_TRAINED_CONTEXT ? most : EAGLE_TRAINED_CONTEXT;
}

static int configure(const struct eagle *e, const struct model *model, const struct eagle_options *o,
                     struct head_config *h, struct err *err)
{
    const struct eagle_config *c = &e->config;
    const struct model_config *m = model_config(model);
    if (c->kv_heads != m->kv_heads)
        return err_set(err, -EXDEV,
                       "%.200s: num_key_value_heads: found %" PRIu32 ", expected %" PRIu32
                       " as the model has",
                       e->folder, c->kv_heads, m->kv_heads);
    if (c->vocab != model_token_embedding(model)->rows)
        return err_set(err, -EXDEV,
                       "%.200s: vocab_size: found %" PRIu32 ", expected %" PRIu32 " as the model has",
                       e->folder, c->vocab, model_token_embedding(model)->rows);
    *h = (struct head_config){.model = model_fingerprint(model),
                              .tokenizer = model_tokenizer_fingerprint(model),
                              .vocab = model_token_embedding(model)->rows,
                              .hidden = c->hidden,
                              .q_heads = c->q_heads,
                              .kv_heads = c->kv_heads,
                              .head_dim = c->head_dim,
                              .layers = m->layers,
                              .groups = 1,
                              .group_first_layer = {0, m->layers},
                              .rms_eps = c->rms_eps,
                              .rope = c->rope,
                              .trained_context = trained_context(c, o),
                              .pool = o->pool};
    if (h->rope.scaling != MODEL_ROPE_SCALING_YARN)
        h->rope.original_context = h->trained_context;
    snprintf(h->source, sizeof h->source, "EAGLE-3 draft model, layout of %s, features %s",
             layouts[c->layout].name, head_features_name(o->features));
    return 0;
}

int eagle_write(struct eagle *eagle, const struct model *model, const struct eagle_options *options,
                const char *path, struct err *err)
{
    struct eagle *e = eagle;
    struct head_config h;
    struct head_shared shared = {0};
    struct head_group group = {0};
    bool all = options->features == HEAD_FEATURES_TARGET;
    int rc = configure(e, model, options, &h, err);
    if (rc == 0)
        rc = choose_embedding(e, model, options->embedding, &h, &shared, err);
    if (rc == 0)
        rc = add_group(e, all, &group, err);
    if (rc == 0 && all)
        rc = add_features(e, model, &h, &shared, err);
    if (rc == 0)
        rc = head_write(path, &h, &shared, &group, err);
    while (e->owned_count)
        mem_free(&e->owned[--e->owned_count]);
    return rc;
}
