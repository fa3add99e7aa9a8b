/* Rotation of a config.json: rope_theta and rope_scaling, or rope_parameters, which holds both since
 * transformers 5. Stateless. */
#include "model/rope_config.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "model/model_private.h"

struct target {
    struct model_rope *rope;
    uint32_t *context;
    float *factors;
};

/* The scaling's name; both spellings of its key may be there, with one meaning. */
static int read_scaling_type(const struct json_doc *d, const char **ret, struct err *err)
{
    const char *type = NULL, *rope_type = NULL;
    int rc;
    if ((rc = json_optional(json_text(d, "type", &type, err))) < 0 ||
        (rc = json_optional(json_text(d, "rope_type", &rope_type, err))) < 0)
        return rc;
    if (type && rope_type && strcmp(type, rope_type))
        return err_set(err, -EBADMSG, "%.200s: %srope_type: found %.40s, expected %.40s as type says",
                       d->path, d->where, rope_type, type);
    *ret = rope_type ? rope_type : type;
    if (!*ret)
        return err_set(err, -EBADMSG, "%.200s: %srope_type: found no such field, expected it", d->path,
                       d->where);
    return 0;
}

/* Larger contexts than the one in training stretch what max_position_embeddings says. */
static void stretch_context(const struct target *t, uint32_t original)
{
    double stretched = (double)original * (double)t->rope->factor;
    if (stretched > *t->context)
        *t->context = stretched < (double)(1u << 31) ? (uint32_t)stretched : 1u << 31;
}

/* What YaRN multiplies cos and sin by, relative to its own 0.1 ln s + 1. */
static int read_yarn_magnitude(struct model_rope *r, const struct json_doc *d, struct err *err)
{
    float said = 0, scale = 0, scale_all = 0;
    double own = 0.1 * log((double)r->factor) + 1;
    int rc;
    if ((rc = json_optional(json_f32(d, "attention_factor", 1e4f, &said, err))) < 0 ||
        (rc = json_optional(json_f32(d, "mscale", 1e4f, &scale, err))) < 0 ||
        (rc = json_optional(json_f32(d, "mscale_all_dim", 1e4f, &scale_all, err))) < 0)
        return rc;
    if (r->factor <= 1)
        own = 1;
    if (said > 0)
        r->attn_factor = (float)((double)said / own);
    else if (scale > 0 && scale_all > 0 && r->factor > 1)
        r->attn_factor = (float)((0.1 * (double)scale * log((double)r->factor) + 1) /
                                 (0.1 * (double)scale_all * log((double)r->factor) + 1) / own);
    return 0;
}

static int read_yarn(const struct target *t, const struct json_doc *d, struct err *err)
{
    struct model_rope *r = t->rope;
    r->scaling = MODEL_ROPE_SCALING_YARN;
    int rc = json_u32(d, "original_max_position_embeddings", 1, 1u << 31, &r->original_context, err);
    if (rc < 0)
        return json_required(rc, err);
    if ((rc = json_optional(json_f32(d, "beta_fast", 1e6f, &r->beta_fast, err))) < 0 ||
        (rc = json_optional(json_f32(d, "beta_slow", 1e6f, &r->beta_slow, err))) < 0 ||
        (rc = read_yarn_magnitude(r, d, err)) < 0)
        return rc;
    stretch_context(t, r->original_context);
    return 0;
}

static int read_llama3(const struct target *t, const struct json_doc *d, struct err *err)
{
    struct model_rope *r = t->rope;
    struct model_llama3 s = {.factor = r->factor};
    int rc;
    if ((rc = json_f32(d, "low_freq_factor", 1e6f, &s.low, err)) < 0 ||
        (rc = json_f32(d, "high_freq_factor", 1e6f, &s.high, err)) < 0 ||
        (rc = json_u32(d, "original_max_position_embeddings", 1, 1u << 31, &s.original_context, err)) < 0)
        return json_required(rc, err);
    if (s.high <= s.low)
        return err_set(err, -EBADMSG, "%.200s: %shigh_freq_factor: found %g, expected more than %g", d->path,
                       d->where, (double)s.high, (double)s.low);
    model_llama3_factors(r, &s, t->factors);
    r->freq_factors = t->factors;
    r->factor = 1; /* all of it is in the divisors */
    return 0;
}

static int read_scaling(const struct target *t, const struct json_doc *d, struct err *err)
{
    const char *type = NULL;
    int rc = read_scaling_type(d, &type, err);
    if (rc < 0 || !strcmp(type, "default"))
        return rc;
    bool linear = !strcmp(type, "linear"), yarn = !strcmp(type, "yarn"), llama3 = !strcmp(type, "llama3");
    if (!linear && !yarn && !llama3)
        return err_set(err, -ENOTSUP,
                       "%.200s: %srope_type: found %.60s, expected default, linear, yarn or llama3", d->path,
                       d->where, type);
    if ((rc = json_f32(d, "factor", 65536, &t->rope->factor, err)) < 0)
        return json_required(rc, err);
    if (yarn)
        return read_yarn(t, d, err);
    if (llama3)
        return read_llama3(t, d, err);
    t->rope->scaling = MODEL_ROPE_SCALING_LINEAR;
    stretch_context(t, *t->context);
    return 0;
}

int rope_config_read(const struct json_doc *d, uint32_t head_dim, uint32_t *context, float *factors,
                     struct model_rope *ret, struct err *err)
{
    const struct target target = {ret, context, factors}, *t = &target;
    struct model_rope *r = ret;
    *r = (struct model_rope){.base = 10000,
                             .dims = head_dim,
                             .halves = true,
                             .factor = 1,
                             .beta_fast = 32,
                             .beta_slow = 1,
                             .attn_factor = 1};
    struct json_doc both = {json_object_get(d->root, "rope_parameters"), d->path, "rope_parameters."};
    struct json_doc scaling = {json_object_get(d->root, "rope_scaling"), d->path, "rope_scaling."};
    bool merged = json_is_object(both.root);
    if (scaling.root && !json_is_object(scaling.root) && !json_is_null(scaling.root))
        return err_set(err, -EBADMSG, "%.200s: rope_scaling: found %s, expected an object or null", d->path,
                       json_kind(scaling.root));
    int rc = json_optional(json_f32(d, "rope_theta", 1e12f, &r->base, err));
    if (!rc && merged)
        rc = json_optional(json_f32(&both, "rope_theta", 1e12f, &r->base, err));
    if (rc < 0)
        return rc;
    if (r->base <= 1)
        return err_set(err, -EBADMSG, "%.200s: rope_theta: found %g, expected more than 1", d->path,
                       (double)r->base);
    if (merged)
        return read_scaling(t, &both, err);
    return json_is_object(scaling.root) ? read_scaling(t, &scaling, err) : 0;
}
