/* Reads, checks and writes retrieval heads. struct head owns the mapped file and copies of tensors that lie
 * unaligned in it; it is built by one thread, then read only. One table of fields serves reading, checking
 * and writing. Nothing here computes: the weights are handed out where they are mapped. */
#include "model/head.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/parse.h"
#include "model/head_private.h"
#include "model/safetensors.h"

enum {
    PARTS = 4,
    TENSORS_MAX = PARTS * HEAD_GROUPS_MAX + 2,
    ALIGNMENT = 8,
    VALUE_BYTES = 320,
    NAME_BYTES = 40
};

#define SHARED_NORM "norm.weight"

struct head {
    char *path;
    struct safetensors *file;
    struct head_config config;
    struct head_group groups[HEAD_GROUPS_MAX];
    struct model_tensor freqs;
    void *copies[TENSORS_MAX]; /* of unaligned tensors */
    unsigned copy_count;
    struct hash128 fingerprint;
};

/* Metadata whose value has one form only. */
static const struct {
    const char *key, *value;
} fixed[] = {{"format", "specontext-head"}, {"version", "1"}, {"embedding", "model"}};

static const struct number_field {
    const char *key;
    size_t at;                       /* of a uint32_t in struct head_config */
    uint32_t least, most, otherwise; /* its value when it is not said; 0: it must be */
} numbers[] = {
    {"vocab", offsetof(struct head_config, vocab), 1, 1 << 24, 0},
    {"hidden", offsetof(struct head_config, hidden), 1, 1 << 17, 0},
    {"q_heads", offsetof(struct head_config, q_heads), 1, 4096, 0},
    {"kv_heads", offsetof(struct head_config, kv_heads), 1, 4096, 0},
    {"head_dim", offsetof(struct head_config, head_dim), 2, MODEL_HEAD_DIM_MAX, 0},
    {"views", offsetof(struct head_config, views), 1, HEAD_VIEWS_MAX, 1},
    {"taps", offsetof(struct head_config, taps), 1, HEAD_TAPS_MAX, 1},
    {"layers", offsetof(struct head_config, layers), 1, MODEL_LAYERS_MAX, 0},
    {"groups", offsetof(struct head_config, groups), 1, HEAD_GROUPS_MAX, 0},
    {"rope_dims", offsetof(struct head_config, rope.dims), 2, MODEL_HEAD_DIM_MAX, 0},
    {"rope_original_context", offsetof(struct head_config, rope.original_context), 1, HEAD_CONTEXT_MAX, 0},
    {"trained_context", offsetof(struct head_config, trained_context), 1, HEAD_CONTEXT_MAX, 0},
};

static const struct real_field {
    const char *key;
    size_t at; /* of a float in struct head_config */
    float above, most;
    int optional;
} reals[] = {
    {"rms_eps", offsetof(struct head_config, rms_eps), 0, 0.1f, 0},
    {"rope_base", offsetof(struct head_config, rope.base), 1, 1e12f, 0},
    {"rope_factor", offsetof(struct head_config, rope.factor), 0, 65536, 0},
    {"rope_beta_fast", offsetof(struct head_config, rope.beta_fast), 0, 1e6f, 1},
    {"rope_beta_slow", offsetof(struct head_config, rope.beta_slow), 0, 1e6f, 1},
    {"rope_attn_factor", offsetof(struct head_config, rope.attn_factor), 0, 1e4f, 1},
};

static const char *const features_names[] = {"none", "context", NULL};
static const char *const pairs_names[] = {"adjacent", "halves", NULL};
static const char *const scaling_names[] = {"none", "linear", "yarn", NULL}; /* enum model_rope_scaling */
static const char *const pool_names[] = {"max", "mean", NULL};               /* enum head_pool */

#define COUNT(array)            (sizeof(array) / sizeof *(array))
#define FIELD(type, config, at) (*(type *)((char *)(config) + (at))) /* of the tables above */

__attribute__((format(printf, 4, 5))) static int refuse(const char *path, struct err *err, int code,
                                                        const char *fmt, ...)
{
    char detail[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(detail, sizeof detail, fmt, ap);
    va_end(ap);
    return err_set(err, code, "%.200s: %s", path, detail);
}

/* The tensors of a group: 0 norm, 1 q, 2 k, 3 taps. */
static void name_part(char name[NAME_BYTES], uint32_t group, unsigned part)
{
    static const char *const parts[PARTS] = {"norm", "q", "k", "taps"};
    snprintf(name, NAME_BYTES, "groups.%" PRIu32 ".%s.weight", group, parts[part]);
}

/* The value of a key that must be there. */
static int read_text(const struct head *h, const char *key, const char **ret, struct err *err)
{
    *ret = safetensors_metadata(h->file, key);
    if (*ret)
        return 0;
    return refuse(h->path, err, -EBADMSG, "%s: found no such metadata, expected it", key);
}

static int read_fixed(const struct head *h, struct err *err)
{
    for (unsigned i = 0; i < COUNT(fixed); i++) {
        const char *found;
        int rc = read_text(h, fixed[i].key, &found, err);
        if (rc < 0)
            return rc;
        if (strcmp(found, fixed[i].value) != 0)
            return refuse(h->path, err, i == 0 ? -EBADMSG : -ENOTSUP, "%s: found \"%.60s\", expected \"%s\"",
                          fixed[i].key, found, fixed[i].value);
    }
    return 0;
}

static int read_hash(const struct head *h, const char *key, struct hash128 *ret, struct err *err)
{
    const char *text;
    int rc = read_text(h, key, &text, err);
    if (rc < 0)
        return rc;
    if (strlen(text) != 32 || strspn(text, "0123456789abcdef") != 32)
        return refuse(h->path, err, -EBADMSG, "%s: found \"%.60s\", expected 32 hexadecimal digits", key,
                      text);
    sscanf(text, "%16" SCNx64 "%16" SCNx64, &ret->hi, &ret->lo);
    return 0;
}

/* Decimal digits from *text on, at most 10; moves *text behind them. */
static int parse_number(const char **text, uint64_t *ret)
{
    size_t digits = strspn(*text, "0123456789");
    if (digits == 0 || digits > 10)
        return -EINVAL;
    *ret = strtoull(*text, NULL, 10);
    *text += digits;
    return *ret > UINT32_MAX ? -ERANGE : 0;
}

static int read_numbers(struct head *h, struct err *err)
{
    for (unsigned i = 0; i < COUNT(numbers); i++) {
        const char *text = safetensors_metadata(h->file, numbers[i].key);
        FIELD(uint32_t, &h->config, numbers[i].at) = numbers[i].otherwise;
        if (!text && numbers[i].otherwise)
            continue;
        int rc = read_text(h, numbers[i].key, &text, err);
        if (rc < 0)
            return rc;
        if (parse_u32(text, 0, UINT32_MAX, &FIELD(uint32_t, &h->config, numbers[i].at)) < 0)
            return refuse(h->path, err, -EBADMSG, "%s: found \"%.60s\", expected a whole number of 32 bits",
                          numbers[i].key, text);
    }
    return 0;
}

static int read_reals(struct head *h, struct err *err)
{
    for (unsigned i = 0; i < COUNT(reals); i++) {
        const char *text = safetensors_metadata(h->file, reals[i].key);
        if (!text && reals[i].optional)
            continue;
        int rc = read_text(h, reals[i].key, &text, err);
        if (rc < 0)
            return rc;
        char *end;
        float value = strtof(text, &end);
        if (end == text || *end || strspn(text, "0123456789.eE+-") != strlen(text))
            return refuse(h->path, err, -EBADMSG, "%s: found \"%.60s\", expected a decimal number",
                          reals[i].key, text);
        FIELD(float, &h->config, reals[i].at) = value;
    }
    return 0;
}

/* The place of the value among `names`. */
static int read_choice(const struct head *h, const char *key, const char *const *names, unsigned *ret,
                       struct err *err)
{
    const char *text;
    int rc = read_text(h, key, &text, err);
    if (rc < 0)
        return rc;
    for (unsigned i = 0; names[i]; i++) {
        if (!strcmp(text, names[i])) {
            *ret = i;
            return 0;
        }
    }
    return refuse(h->path, err, -ENOTSUP, "%s: found \"%.60s\", expected %s%s%s%s%s", key, text, names[0],
                  names[2] ? ", " : " or ", names[1], names[2] ? " or " : "", names[2] ? names[2] : "");
}

static int read_group_layers(struct head *h, struct err *err)
{
    const char *text, *at;
    int rc = read_text(h, "group_first_layer", &text, err);
    if (rc < 0)
        return rc;
    at = text;
    for (uint32_t g = 0; g <= h->config.groups && g <= HEAD_GROUPS_MAX; g++) {
        uint64_t value = 0;
        if ((g && *at++ != ',') || parse_number(&at, &value) < 0)
            return refuse(h->path, err, -EBADMSG,
                          "group_first_layer: found \"%.80s\", expected %" PRIu32
                          " numbers with commas between",
                          text, h->config.groups + 1);
        h->config.group_first_layer[g] = (uint32_t)value;
    }
    if (*at)
        return refuse(h->path, err, -EBADMSG,
                      "group_first_layer: found \"%.80s\", expected %" PRIu32 " numbers", text,
                      h->config.groups + 1);
    return 0;
}

/* What reader and writer both demand of single fields. */
static int check_ranges(const char *path, struct head_config *c, struct err *err)
{
    for (unsigned i = 0; i < COUNT(numbers); i++) {
        uint32_t value = FIELD(uint32_t, c, numbers[i].at);
        if (value < numbers[i].least || value > numbers[i].most)
            return refuse(path, err, -EBADMSG, "%s: found %" PRIu32 ", expected %" PRIu32 " to %" PRIu32,
                          numbers[i].key, value, numbers[i].least, numbers[i].most);
    }
    for (unsigned i = 0; i < COUNT(reals); i++) {
        float value = FIELD(float, c, reals[i].at);
        if (!(value > reals[i].above && value <= reals[i].most))
            return refuse(path, err, -EBADMSG, "%s: found %g, expected more than %g, at most %g",
                          reals[i].key, (double)value, (double)reals[i].above, (double)reals[i].most);
    }
    return 0;
}

/* ... and of fields against each other. */
static int check_relations(const char *path, const struct head_config *c, struct err *err)
{
    if (c->q_heads % c->kv_heads)
        return refuse(path, err, -EBADMSG,
                      "q_heads: found %" PRIu32 ", expected a multiple of kv_heads %" PRIu32, c->q_heads,
                      c->kv_heads);
    if (c->head_dim % 2)
        return refuse(path, err, -EBADMSG, "head_dim: found %" PRIu32 ", expected an even number",
                      c->head_dim);
    if (c->rope.dims % 2 || c->rope.dims > c->head_dim)
        return refuse(path, err, -EBADMSG,
                      "rope_dims: found %" PRIu32 ", expected an even number up to %" PRIu32, c->rope.dims,
                      c->head_dim);
    if (c->rope.scaling == MODEL_ROPE_SCALING_NONE && c->rope.factor != 1)
        return refuse(path, err, -EBADMSG, "rope_factor: found %g, expected 1 without scaling",
                      (double)c->rope.factor);
    int rc = calibration_check(&c->calibration, err);
    if (rc < 0)
        return err_prefix(err, rc, "%.200s: calibration", path);
    const uint32_t *first = c->group_first_layer;
    for (uint32_t g = 0; g <= c->groups; g++) {
        int end = g == c->groups;
        if ((g == 0 && first[g] != 0) || (g && first[g] <= first[g - 1]) || (end && first[g] != c->layers))
            return refuse(path, err, -EBADMSG,
                          "group_first_layer: found %" PRIu32 " at place %" PRIu32
                          ", expected ascending numbers from 0 to %" PRIu32,
                          first[g], g, c->layers);
    }
    return 0;
}

static int read_config(struct head *h, struct err *err)
{
    struct head_config *c = &h->config;
    unsigned halves = 0, scaling = 0, pool = 0, features = 0;
    c->rope = (struct model_rope){.beta_fast = 32, .beta_slow = 1, .attn_factor = 1};
    int rc;
    if ((rc = read_choice(h, "features", features_names, &features, err)) < 0 ||
        (rc = read_numbers(h, err)) < 0 || (rc = read_reals(h, err)) < 0 ||
        (rc = check_ranges(h->path, c, err)) < 0 ||
        (rc = read_choice(h, "rope_pairs", pairs_names, &halves, err)) < 0 ||
        (rc = read_choice(h, "rope_scaling", scaling_names, &scaling, err)) < 0 ||
        (rc = read_choice(h, "pool", pool_names, &pool, err)) < 0 || (rc = read_group_layers(h, err)) < 0)
        return rc;
    if ((features == 1) != head_has_context(c))
        return refuse(h->path, err, -EBADMSG,
                      "features: found \"%s\" with %" PRIu32 " views and %" PRIu32
                      " taps, expected more than 1 with \"context\" alone",
                      features_names[features], c->views, c->taps);
    c->rope.halves = halves == 1;
    c->rope.scaling = (enum model_rope_scaling)scaling;
    c->pool = (enum head_pool)pool;
    const char *source = safetensors_metadata(h->file, "source");
    snprintf(c->source, sizeof c->source, "%s", source ? source : "");
    const char *calibration = safetensors_metadata(h->file, "calibration");
    if (calibration && (rc = calibration_parse(calibration, &c->calibration, err)) < 0)
        return err_prefix(err, rc, "%.200s: calibration", h->path);
    return check_relations(h->path, c, err);
}

static int check_hash(const struct head *h, const char *key, struct hash128 found, struct hash128 expected,
                      struct err *err)
{
    if (hash_equal(found, expected))
        return 0;
    return refuse(h->path, err, -EXDEV,
                  "%s: found fingerprint %016" PRIx64 "%016" PRIx64 ", expected %016" PRIx64 "%016" PRIx64
                  " (the head was made for another %s)",
                  key, found.hi, found.lo, expected.hi, expected.lo, key);
}

static int read_identity(struct head *h, const struct model *model, struct err *err)
{
    struct head_config *c = &h->config;
    int rc;
    if ((rc = read_hash(h, "model", &c->model, err)) < 0 ||
        (rc = read_hash(h, "tokenizer", &c->tokenizer, err)) < 0)
        return rc;
    if (!model)
        return 0;
    if ((rc = check_hash(h, "model", c->model, model_fingerprint(model), err)) < 0)
        return rc;
    return check_hash(h, "tokenizer", c->tokenizer, model_tokenizer_fingerprint(model), err);
}

static int check_model(const struct head *h, const struct model *model, struct err *err)
{
    const struct head_config *c = &h->config;
    const struct model_config *m = model_config(model);
    const struct {
        const char *key;
        uint32_t found, expected;
    } same[] = {
        {"vocab", c->vocab, model_token_embedding(model)->rows},
        {"hidden", c->hidden, model_token_embedding(model)->cols},
        {"kv_heads", c->kv_heads, m->kv_heads},
        {"layers", c->layers, m->layers},
    };
    for (unsigned i = 0; i < COUNT(same); i++)
        if (same[i].found != same[i].expected)
            return refuse(h->path, err, -EXDEV,
                          "%s: found %" PRIu32 ", expected %" PRIu32 " as the model has", same[i].key,
                          same[i].found, same[i].expected);
    return 0;
}

/* What a tensor must be; rows 0 stands for a vector of `cols`. */
struct want {
    char name[NAME_BYTES];
    uint32_t rows, cols;
    struct model_tensor *to;
    bool f32; /* no other type will do */
};

static const struct {
    enum safetensors_type file;
    enum dtype type;
} types[] = {{SAFETENSORS_F32, DTYPE_F32}, {SAFETENSORS_F16, DTYPE_F16}, {SAFETENSORS_BF16, DTYPE_BF16}};

static int read_tensor(struct head *h, const struct want *w, struct err *err)
{
    const struct safetensors_tensor *t = safetensors_find(h->file, w->name);
    int vector = w->rows == 0;
    uint32_t rows = vector ? 1 : w->rows;
    if (!t)
        return refuse(h->path, err, -EBADMSG, "tensor %s: found no such tensor, expected it", w->name);
    if (t->dims != (vector ? 1 : 2) || t->shape[t->dims - 1] != w->cols || (!vector && t->shape[0] != rows))
        return refuse(h->path, err, -EBADMSG,
                      "tensor %s: shape: found %" PRIu64 " x %" PRIu64 " (%" PRIu32
                      " dimensions), expected %" PRIu32 " x %" PRIu32,
                      w->name, t->dims > 1 ? t->shape[0] : 1, t->dims ? t->shape[t->dims > 1] : 1, t->dims,
                      rows, w->cols);
    unsigned i = 0, known = w->f32 ? 1 : COUNT(types); /* the first is F32 */
    while (i < known && types[i].file != t->type)
        i++;
    if (i == known)
        return refuse(h->path, err, -ENOTSUP, "tensor %s: type: found %s, expected %s", w->name,
                      safetensors_type_name(t->type), w->f32 ? "F32" : "F32, F16 or BF16");
    *w->to = (struct model_tensor){types[i].type, rows, w->cols, t->data, t->bytes};
    if ((uintptr_t)t->data % ALIGNMENT) {
        void *copy = mem_alloc_aligned(t->bytes, 1);
        memcpy(copy, t->data, t->bytes);
        w->to->data = h->copies[h->copy_count++] = copy;
    }
    return 0;
}

/* The tensors of group g; returns how many. */
static unsigned list_group(const struct head_config *c, uint32_t g, struct head_group *group,
                           struct want wants[PARTS])
{
    uint32_t width = c->views * c->hidden;
    wants[0] = (struct want){"", 0, c->hidden, &group->norm, true};
    wants[1] = (struct want){"", c->q_heads * c->head_dim, width, &group->q, false};
    wants[2] = (struct want){"", c->kv_heads * c->head_dim, width, &group->k, false};
    wants[3] = (struct want){"", c->views, c->taps, &group->taps, true};
    for (unsigned i = 0; i < PARTS; i++)
        name_part(wants[i].name, g, i);
    return head_has_context(c) ? PARTS : PARTS - 1;
}

static int read_group(struct head *h, uint32_t g, struct err *err)
{
    const struct head_config *c = &h->config;
    struct head_group *group = &h->groups[g];
    struct want wants[PARTS];
    unsigned count = list_group(c, g, group, wants);
    if (!safetensors_find(h->file, wants[0].name))
        snprintf(wants[0].name, NAME_BYTES, SHARED_NORM);
    for (unsigned i = 0; i < count; i++) {
        int rc = read_tensor(h, &wants[i], err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int read_freqs(struct head *h, struct err *err)
{
    struct model_rope *rope = &h->config.rope;
    struct want want = {"rope_freqs.weight", 0, rope->dims / 2, &h->freqs, true};
    int rc = safetensors_find(h->file, want.name) ? read_tensor(h, &want, err) : 0;
    if (rc < 0)
        return rc;
    rope->freq_factors = h->freqs.data;
    float inv_freq[MODEL_HEAD_DIM_MAX / 2], scale;
    if (model_rope_frequencies(rope, inv_freq, &scale) < 0)
        return refuse(h->path, err, -EBADMSG,
                      "rope: found values that give no frequencies, expected positive ones");
    return 0;
}

/* A weight that nobody would use makes it a head of another kind: selecting without it would be wrong. */
static int check_unknown(const struct head *h, struct err *err)
{
    for (uint32_t i = 0; i < safetensors_count(h->file); i++) {
        struct name name = safetensors_at(h->file, i)->name;
        int known = name_is(name, SHARED_NORM) || name_is(name, "rope_freqs.weight");
        for (uint32_t g = 0; g < h->config.groups && !known; g++) {
            char text[NAME_BYTES];
            for (unsigned p = 0; p < (head_has_context(&h->config) ? PARTS : PARTS - 1) && !known; p++) {
                name_part(text, g, p);
                known = name_is(name, text);
            }
        }
        if (!known)
            return refuse(h->path, err, -ENOTSUP,
                          "tensor %.*s: found, expected no such tensor in a head of %" PRIu32 " groups",
                          (int)(name.bytes < 80 ? name.bytes : 80), name.text, h->config.groups);
    }
    return 0;
}

static int read_tensors(struct head *h, struct err *err)
{
    struct model_tensor norm;
    struct want want = {SHARED_NORM, 0, h->config.hidden, &norm, true};
    int rc = read_tensor(h, &want, err);
    for (uint32_t g = 0; rc == 0 && g < h->config.groups; g++)
        rc = read_group(h, g, err);
    if (rc == 0)
        rc = read_freqs(h, err);
    return rc < 0 ? rc : check_unknown(h, err);
}

int head_open(const char *path, const struct model *model, struct head **ret_head, struct err *err)
{
    struct head *h = mem_alloc(1, sizeof *h);
    h->path = mem_strdup(path);
    int rc = safetensors_open(path, &h->file, err);
    if (rc == 0)
        rc = read_fixed(h, err);
    if (rc == 0)
        rc = read_identity(h, model, err);
    if (rc == 0)
        rc = read_config(h, err);
    if (rc == 0 && model)
        rc = check_model(h, model, err);
    if (rc == 0)
        rc = read_tensors(h, err);
    if (rc < 0) {
        head_free(&h);
        return rc;
    }
    h->fingerprint = head_hash(&h->config, h->groups);
    *ret_head = h;
    return 0;
}

void head_free(struct head **head)
{
    struct head *h = *head;
    if (!h)
        return;
    for (unsigned i = 0; i < h->copy_count; i++)
        mem_free(&h->copies[i]);
    safetensors_free(&h->file);
    mem_free(&h->path);
    mem_free(head);
}

const struct head_config *head_config(const struct head *head)
{
    return &head->config;
}

const struct head_group *head_groups(const struct head *head)
{
    return head->groups;
}

const char *head_path(const struct head *head)
{
    return head->path;
}

const char *head_pool_name(enum head_pool pool)
{
    return pool_names[pool];
}

struct hash128 head_fingerprint(const struct head *head)
{
    return head->fingerprint;
}

/* Metadata while it is put together: values of numbers rest in `texts`. */
struct metadata {
    struct safetensors_pair pairs[COUNT(fixed) + COUNT(numbers) + COUNT(reals) + 9];
    char texts[COUNT(numbers) + COUNT(reals) + 3][VALUE_BYTES];
    char calibration[CALIBRATION_TEXT_BYTES];
    unsigned pair_count, text_count;
};

static void put_text(struct metadata *m, const char *key, const char *value)
{
    m->pairs[m->pair_count++] = (struct safetensors_pair){key, value};
}

__attribute__((format(printf, 3, 4))) static void put_format(struct metadata *m, const char *key,
                                                             const char *fmt, ...)
{
    char *text = m->texts[m->text_count++];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, VALUE_BYTES, fmt, ap);
    va_end(ap);
    put_text(m, key, text);
}

static void put_config(struct metadata *m, struct head_config *c)
{
    char layers[VALUE_BYTES] = "";
    for (unsigned i = 0; i < COUNT(fixed); i++)
        put_text(m, fixed[i].key, fixed[i].value);
    put_format(m, "model", "%016" PRIx64 "%016" PRIx64, c->model.hi, c->model.lo);
    put_format(m, "tokenizer", "%016" PRIx64 "%016" PRIx64, c->tokenizer.hi, c->tokenizer.lo);
    put_text(m, "features", features_names[head_has_context(c)]);
    for (unsigned i = 0; i < COUNT(numbers); i++)
        if (FIELD(uint32_t, c, numbers[i].at) != numbers[i].otherwise)
            put_format(m, numbers[i].key, "%" PRIu32, FIELD(uint32_t, c, numbers[i].at));
    for (unsigned i = 0; i < COUNT(reals); i++)
        put_format(m, reals[i].key, "%.9g", (double)FIELD(float, c, reals[i].at));
    for (uint32_t g = 0, at = 0; g <= c->groups; g++)
        at += (uint32_t)snprintf(layers + at, sizeof layers - at, g ? ",%" PRIu32 : "%" PRIu32,
                                 c->group_first_layer[g]);
    put_format(m, "group_first_layer", "%s", layers);
    put_text(m, "rope_pairs", pairs_names[c->rope.halves]);
    put_text(m, "rope_scaling", scaling_names[c->rope.scaling]);
    put_text(m, "pool", pool_names[c->pool]);
    if (*c->source)
        put_text(m, "source", c->source);
    if (c->calibration.count) {
        calibration_text(&c->calibration, m->calibration);
        put_text(m, "calibration", m->calibration);
    }
}

/* Tensors while they are put together. */
struct tensor_list {
    struct safetensors_entry entries[TENSORS_MAX];
    char names[TENSORS_MAX][NAME_BYTES];
    uint32_t count;
};

static int put_tensor(struct tensor_list *list, const char *path, const struct want *w, struct err *err)
{
    const struct model_tensor *t = w->to;
    int vector = w->rows == 0;
    uint32_t rows = vector ? 1 : w->rows;
    if (t->rows != rows || t->cols != w->cols)
        return refuse(path, err, -EBADMSG,
                      "tensor %s: shape: found %" PRIu32 " x %" PRIu32 ", expected %" PRIu32 " x %" PRIu32,
                      w->name, t->rows, t->cols, rows, w->cols);
    unsigned i = 0, known = w->f32 ? 1 : COUNT(types);
    while (i < known && types[i].type != t->type)
        i++;
    if (i == known)
        return refuse(path, err, -ENOTSUP, "tensor %s: type: found number %d, expected %s", w->name,
                      (int)t->type, w->f32 ? "F32" : "F32, F16 or BF16");
    struct safetensors_entry *e = &list->entries[list->count];
    snprintf(list->names[list->count], sizeof list->names[0], "%s", w->name);
    *e = (struct safetensors_entry){.name = list->names[list->count++],
                                    .type = types[i].file,
                                    .dims = vector ? 1 : 2,
                                    .shape = {vector ? w->cols : rows, w->cols},
                                    .data = t->data};
    return 0;
}

static int put_group(struct tensor_list *list, const char *path, const struct head_config *c,
                     const struct head_group *groups, uint32_t g, struct err *err)
{
    struct head_group group = groups[g];
    struct want wants[PARTS];
    unsigned count = list_group(c, g, &group, wants);
    if (g == 0)
        snprintf(wants[0].name, NAME_BYTES, SHARED_NORM);
    int rc = put_tensor(list, path, &wants[0], err);
    if (rc == 0 && g && memcmp(group.norm.data, groups[0].norm.data, c->hidden * sizeof(float)) == 0)
        list->count--;
    for (unsigned i = 1; i < count && rc == 0; i++)
        rc = put_tensor(list, path, &wants[i], err);
    return rc;
}

int head_write(const char *path, const struct head_config *config, const struct head_group *groups,
               struct err *err)
{
    struct head_config c = *config;
    c.views = c.views ? c.views : 1;
    c.taps = c.taps ? c.taps : 1;
    int rc = check_ranges(path, &c, err);
    if (rc == 0)
        rc = check_relations(path, &c, err);
    if (rc < 0)
        return rc;
    struct metadata *metadata = mem_alloc(1, sizeof *metadata);
    struct tensor_list *list = mem_alloc(1, sizeof *list);
    put_config(metadata, &c);
    for (uint32_t g = 0; rc == 0 && g < c.groups; g++)
        rc = put_group(list, path, &c, groups, g, err);
    if (rc == 0 && c.rope.freq_factors) {
        struct model_tensor freqs = {DTYPE_F32, 1, c.rope.dims / 2, c.rope.freq_factors, 0};
        const struct want want = {"rope_freqs.weight", 0, c.rope.dims / 2, &freqs, true};
        rc = put_tensor(list, path, &want, err);
    }
    struct safetensors_content content = {list->entries, list->count, metadata->pairs, metadata->pair_count};
    if (rc == 0)
        rc = safetensors_write(path, &content, err);
    mem_free(&metadata);
    mem_free(&list);
    return rc;
}
