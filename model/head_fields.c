/* The metadata of retrieval heads: one table of fields serves reading, checking and writing. Stateless. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/parse.h"
#include "model/head_private.h"

enum { HIDDEN_MAX = 1 << 17 };

/* Metadata whose value has one form only. */
static const struct {
    const char *key, *value;
} fixed[] = {{"format", "specontext-head"}, {"version", "1"}};

static const struct number_field {
    const char *key;
    size_t at; /* of a uint32_t in struct head_config */
    uint32_t least, most;
} numbers[] = {
    {"vocab", offsetof(struct head_config, vocab), 1, 1 << 24},
    {"hidden", offsetof(struct head_config, hidden), 1, HIDDEN_MAX},
    {"q_heads", offsetof(struct head_config, q_heads), 1, 4096},
    {"kv_heads", offsetof(struct head_config, kv_heads), 1, 4096},
    {"head_dim", offsetof(struct head_config, head_dim), 2, MODEL_HEAD_DIM_MAX},
    {"layers", offsetof(struct head_config, layers), 1, MODEL_LAYERS_MAX},
    {"groups", offsetof(struct head_config, groups), 1, HEAD_GROUPS_MAX},
    {"rope_dims", offsetof(struct head_config, rope.dims), 2, MODEL_HEAD_DIM_MAX},
    {"rope_original_context", offsetof(struct head_config, rope.original_context), 1, HEAD_CONTEXT_MAX},
    {"trained_context", offsetof(struct head_config, trained_context), 1, HEAD_CONTEXT_MAX},
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

static const char *const pairs_names[] = {"adjacent", "halves", NULL};
static const char *const scaling_names[] = {"none", "linear", "yarn", NULL};     /* enum model_rope_scaling */
static const char *const pool_names[] = {"max", "mean", NULL};                   /* enum head_pool */
static const char *const embedding_names[] = {"model", "own", NULL};             /* enum head_embedding */
static const char *const features_names[] = {"none", "target", "context", NULL}; /* enum head_features */

/* What the readers share. */
struct source {
    const struct safetensors *file;
    const char *path;
    struct head_config *config;
};

#define COUNT(array) (sizeof(array) / sizeof *(array))
/* Of the tables above. */
#define FIELD(type, config, at)       (*(type *)((char *)(config) + (at)))
#define FIELD_CONST(type, config, at) (*(const type *)((const char *)(config) + (at)))

int head_refuse(const char *path, struct err *err, int code, const char *fmt, ...)
{
    char detail[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(detail, sizeof detail, fmt, ap);
    va_end(ap);
    return err_set(err, code, "%.200s: %s", path, detail);
}

/* The value of a key that must be there. */
static int read_text(const struct source *h, const char *key, const char **ret, struct err *err)
{
    *ret = safetensors_metadata(h->file, key);
    if (*ret)
        return 0;
    return head_refuse(h->path, err, -EBADMSG, "%s: found no such metadata, expected it", key);
}

int head_fields_form(const struct safetensors *file, const char *path, struct err *err)
{
    const struct source source = {file, path, NULL}, *h = &source;
    for (unsigned i = 0; i < COUNT(fixed); i++) {
        const char *found;
        int rc = read_text(h, fixed[i].key, &found, err);
        if (rc < 0)
            return rc;
        if (strcmp(found, fixed[i].value) != 0)
            return head_refuse(h->path, err, i == 0 ? -EBADMSG : -ENOTSUP,
                               "%s: found \"%.60s\", expected \"%s\"", fixed[i].key, found, fixed[i].value);
    }
    return 0;
}

int head_fields_hash(const struct safetensors *file, const char *path, const char *key, struct hash128 *ret,
                     struct err *err)
{
    const struct source source = {file, path, NULL}, *h = &source;
    const char *text;
    int rc = read_text(h, key, &text, err);
    if (rc < 0)
        return rc;
    if (strlen(text) != 32 || strspn(text, "0123456789abcdef") != 32)
        return head_refuse(h->path, err, -EBADMSG, "%s: found \"%.60s\", expected 32 hexadecimal digits", key,
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

static int read_numbers(const struct source *h, struct err *err)
{
    for (unsigned i = 0; i < COUNT(numbers); i++) {
        const char *text;
        int rc = read_text(h, numbers[i].key, &text, err);
        if (rc < 0)
            return rc;
        if (parse_u32(text, 0, UINT32_MAX, &FIELD(uint32_t, h->config, numbers[i].at)) < 0)
            return head_refuse(h->path, err, -EBADMSG,
                               "%s: found \"%.60s\", expected a whole number of 32 bits", numbers[i].key,
                               text);
    }
    return 0;
}

static int read_reals(const struct source *h, struct err *err)
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
            return head_refuse(h->path, err, -EBADMSG, "%s: found \"%.60s\", expected a decimal number",
                               reals[i].key, text);
        FIELD(float, h->config, reals[i].at) = value;
    }
    return 0;
}

/* The place of the value among `names`. */
static int read_choice(const struct source *h, const char *key, const char *const *names, unsigned *ret,
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
    return head_refuse(h->path, err, -ENOTSUP, "%s: found \"%.60s\", expected %s%s%s%s%s", key, text,
                       names[0], names[2] ? ", " : " or ", names[1], names[2] ? " or " : "",
                       names[2] ? names[2] : "");
}

/* Numbers with commas between; `least` to `most` of them, their count in *ret_count. */
static int read_list(const struct source *h, const char *key, uint32_t least, uint32_t most, uint32_t *ret,
                     uint32_t *ret_count, struct err *err)
{
    const char *text, *at;
    uint32_t count = 0;
    int rc = read_text(h, key, &text, err);
    if (rc < 0)
        return rc;
    for (at = text; count < most; count++) {
        uint64_t value = 0;
        if (count && *at != ',')
            break;
        at += count > 0;
        if (parse_number(&at, &value) < 0)
            break;
        ret[count] = (uint32_t)value;
    }
    *ret_count = count;
    if (*at || count < least)
        return head_refuse(h->path, err, -EBADMSG,
                           "%s: found \"%.80s\", expected %" PRIu32 " numbers with commas between", key, text,
                           least);
    return 0;
}

static int read_group_layers(const struct source *h, struct err *err)
{
    uint32_t count = h->config->groups + 1;
    return read_list(h, "group_first_layer", count, count, h->config->group_first_layer, &count, err);
}

static int read_context(const struct source *h, struct err *err)
{
    const struct {
        const char *key;
        uint32_t most, *to;
    } fields[] = {{"views", HEAD_VIEWS_MAX, &h->config->views}, {"taps", HEAD_TAPS_MAX, &h->config->taps}};
    for (unsigned i = 0; i < COUNT(fields); i++) {
        const char *text;
        int rc = read_text(h, fields[i].key, &text, err);
        if (rc < 0)
            return rc;
        if (parse_u32(text, 1, fields[i].most, fields[i].to) < 0)
            return head_refuse(h->path, err, -EBADMSG, "%s: found \"%.60s\", expected 1 to %" PRIu32,
                               fields[i].key, text, fields[i].most);
    }
    return 0;
}

static int read_features(const struct source *h, struct err *err)
{
    struct head_config *c = h->config;
    const char *text;
    int rc;
    if (c->features == HEAD_FEATURES_CONTEXT)
        return read_context(h, err);
    if (c->features == HEAD_FEATURES_NONE)
        return 0;
    if ((rc = read_list(h, "feature_layers", 1, HEAD_FEATURE_LAYERS_MAX, c->feature_layers,
                        &c->feature_layer_count, err)) < 0 ||
        (rc = read_text(h, "feature_hidden", &text, err)) < 0)
        return rc;
    if (parse_u32(text, 1, HIDDEN_MAX, &c->feature_hidden) < 0)
        return head_refuse(h->path, err, -EBADMSG, "feature_hidden: found \"%.60s\", expected 1 to %d", text,
                           HIDDEN_MAX);
    return 0;
}

/* What reader and writer both demand of single fields. */
static int check_ranges(const char *path, const struct head_config *c, struct err *err)
{
    for (unsigned i = 0; i < COUNT(numbers); i++) {
        uint32_t value = FIELD_CONST(uint32_t, c, numbers[i].at);
        if (value < numbers[i].least || value > numbers[i].most)
            return head_refuse(path, err, -EBADMSG, "%s: found %" PRIu32 ", expected %" PRIu32 " to %" PRIu32,
                               numbers[i].key, value, numbers[i].least, numbers[i].most);
    }
    for (unsigned i = 0; i < COUNT(reals); i++) {
        float value = FIELD_CONST(float, c, reals[i].at);
        if (!(value > reals[i].above && value <= reals[i].most))
            return head_refuse(path, err, -EBADMSG, "%s: found %g, expected more than %g, at most %g",
                               reals[i].key, (double)value, (double)reals[i].above, (double)reals[i].most);
    }
    return 0;
}

/* ... and of fields against each other. */
static int check_relations(const char *path, const struct head_config *c, struct err *err)
{
    if (c->q_heads % c->kv_heads)
        return head_refuse(path, err, -EBADMSG,
                           "q_heads: found %" PRIu32 ", expected a multiple of kv_heads %" PRIu32, c->q_heads,
                           c->kv_heads);
    if (c->head_dim % 2)
        return head_refuse(path, err, -EBADMSG, "head_dim: found %" PRIu32 ", expected an even number",
                           c->head_dim);
    if (c->rope.dims % 2 || c->rope.dims > c->head_dim)
        return head_refuse(path, err, -EBADMSG,
                           "rope_dims: found %" PRIu32 ", expected an even number up to %" PRIu32,
                           c->rope.dims, c->head_dim);
    if (c->rope.scaling == MODEL_ROPE_SCALING_NONE && c->rope.factor != 1)
        return head_refuse(path, err, -EBADMSG, "rope_factor: found %g, expected 1 without scaling",
                           (double)c->rope.factor);
    for (uint32_t i = 0; i < c->feature_layer_count; i++)
        if (c->feature_layers[i] > c->layers || (i && c->feature_layers[i] <= c->feature_layers[i - 1]))
            return head_refuse(path, err, -EBADMSG,
                               "feature_layers: found %" PRIu32 " at place %" PRIu32
                               ", expected ascending numbers up to %" PRIu32,
                               c->feature_layers[i], i, c->layers);
    bool context = c->features == HEAD_FEATURES_CONTEXT;
    if (context && (c->views < 1 || c->views > HEAD_VIEWS_MAX || c->taps < 1 || c->taps > HEAD_TAPS_MAX))
        return head_refuse(path, err, -EBADMSG,
                           "views, taps: found %" PRIu32 ", %" PRIu32 ", expected 1 to %u, 1 to %u", c->views,
                           c->taps, HEAD_VIEWS_MAX, HEAD_TAPS_MAX);
    int rc = calibration_check(&c->calibration, err);
    if (rc < 0)
        return err_prefix(err, rc, "%.200s: calibration", path);
    const uint32_t *first = c->group_first_layer;
    for (uint32_t g = 0; g <= c->groups; g++) {
        int end = g == c->groups;
        if ((g == 0 && first[g] != 0) || (g && first[g] <= first[g - 1]) || (end && first[g] != c->layers))
            return head_refuse(path, err, -EBADMSG,
                               "group_first_layer: found %" PRIu32 " at place %" PRIu32
                               ", expected ascending numbers from 0 to %" PRIu32,
                               first[g], g, c->layers);
    }
    return 0;
}

int head_fields_check(const char *path, const struct head_config *config, struct err *err)
{
    int rc = check_ranges(path, config, err);
    return rc < 0 ? rc : check_relations(path, config, err);
}

static int read_choices(const struct source *h, struct err *err)
{
    struct head_config *c = h->config;
    unsigned halves = 0, scaling = 0, pool = 0, embedding = 0, features = 0;
    int rc;
    if ((rc = read_choice(h, "rope_pairs", pairs_names, &halves, err)) < 0 ||
        (rc = read_choice(h, "rope_scaling", scaling_names, &scaling, err)) < 0 ||
        (rc = read_choice(h, "pool", pool_names, &pool, err)) < 0 ||
        (rc = read_choice(h, "embedding", embedding_names, &embedding, err)) < 0 ||
        (rc = read_choice(h, "features", features_names, &features, err)) < 0)
        return rc;
    c->rope.halves = halves == 1;
    c->rope.scaling = (enum model_rope_scaling)scaling;
    c->pool = (enum head_pool)pool;
    c->embedding = (enum head_embedding)embedding;
    c->features = (enum head_features)features;
    return 0;
}

int head_fields_read(const struct safetensors *file, const char *path, struct head_config *config,
                     struct err *err)
{
    const struct source source = {file, path, config}, *h = &source;
    struct head_config *c = config;
    c->rope = (struct model_rope){.beta_fast = 32, .beta_slow = 1, .attn_factor = 1};
    int rc;
    if ((rc = read_numbers(h, err)) < 0 || (rc = read_reals(h, err)) < 0 ||
        (rc = check_ranges(h->path, c, err)) < 0 || (rc = read_choices(h, err)) < 0 ||
        (rc = read_group_layers(h, err)) < 0 || (rc = read_features(h, err)) < 0)
        return rc;
    const char *text = safetensors_metadata(h->file, "source");
    snprintf(c->source, sizeof c->source, "%s", text ? text : "");
    const char *calibration = safetensors_metadata(h->file, "calibration");
    if (calibration && (rc = calibration_parse(calibration, &c->calibration, err)) < 0)
        return err_prefix(err, rc, "%.200s: calibration", h->path);
    return check_relations(h->path, c, err);
}

static void put_text(struct head_metadata *m, const char *key, const char *value)
{
    CHECK(m->pair_count < HEAD_PAIRS_MAX);
    m->pairs[m->pair_count++] = (struct safetensors_pair){key, value};
}

__attribute__((format(printf, 3, 4))) static void put_format(struct head_metadata *m, const char *key,
                                                             const char *fmt, ...)
{
    CHECK(m->text_count < HEAD_PAIRS_MAX);
    char *text = m->texts[m->text_count++];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, HEAD_VALUE_BYTES, fmt, ap);
    va_end(ap);
    put_text(m, key, text);
}

static void put_list(struct head_metadata *m, const char *key, const uint32_t *values, uint32_t count)
{
    char text[HEAD_VALUE_BYTES] = "";
    for (uint32_t i = 0, at = 0; i < count; i++)
        at += (uint32_t)snprintf(text + at, sizeof text - at, i ? ",%" PRIu32 : "%" PRIu32, values[i]);
    put_format(m, key, "%s", text);
}

void head_fields_put(struct head_metadata *m, const struct head_config *c)
{
    for (unsigned i = 0; i < COUNT(fixed); i++)
        put_text(m, fixed[i].key, fixed[i].value);
    put_format(m, "model", "%016" PRIx64 "%016" PRIx64, c->model.hi, c->model.lo);
    put_format(m, "tokenizer", "%016" PRIx64 "%016" PRIx64, c->tokenizer.hi, c->tokenizer.lo);
    for (unsigned i = 0; i < COUNT(numbers); i++)
        put_format(m, numbers[i].key, "%" PRIu32, FIELD_CONST(uint32_t, c, numbers[i].at));
    for (unsigned i = 0; i < COUNT(reals); i++)
        put_format(m, reals[i].key, "%.9g", (double)FIELD_CONST(float, c, reals[i].at));
    put_list(m, "group_first_layer", c->group_first_layer, c->groups + 1);
    put_text(m, "rope_pairs", pairs_names[c->rope.halves]);
    put_text(m, "rope_scaling", scaling_names[c->rope.scaling]);
    put_text(m, "pool", pool_names[c->pool]);
    put_text(m, "embedding", embedding_names[c->embedding]);
    put_text(m, "features", features_names[c->features]);
    if (c->features == HEAD_FEATURES_TARGET) {
        put_list(m, "feature_layers", c->feature_layers, c->feature_layer_count);
        put_format(m, "feature_hidden", "%" PRIu32, c->feature_hidden);
    }
    if (c->features == HEAD_FEATURES_CONTEXT) {
        put_format(m, "views", "%" PRIu32, c->views);
        put_format(m, "taps", "%" PRIu32, c->taps);
    }
    if (*c->source)
        put_text(m, "source", c->source);
    if (c->calibration.count) {
        calibration_text(&c->calibration, m->calibration);
        put_text(m, "calibration", m->calibration);
    }
}

const char *head_pool_name(enum head_pool pool)
{
    return pool_names[pool];
}

const char *head_features_name(enum head_features features)
{
    return features_names[features];
}
