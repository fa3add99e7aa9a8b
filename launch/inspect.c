/* `specontext inspect`: opens a model, checks it, says what it is. Single-threaded; reads headers, samples
 * and the tokenizer, never all weights. */
#include "launch/inspect.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/options.h"
#include "launch/head_cache.h"
#include "link/figures.h"
#include "model/chat.h"
#include "model/head.h"
#include "model/model.h"
#include "model/tokenizer.h"
#include "model/vocab.h"

#define KV_BYTES 2u /* of an element: the store keeps float16 */

struct inspect_options {
    const char *model;
    struct option_words words;
    uint64_t memory;
    bool json;
};

#define AT(field) .at = offsetof(struct inspect_options, field)

/* A table reads best as rows. */
/* clang-format off */
static const struct option_entry table[] = {
    {.name = "", .kind = OPTION_WORDS, AT(words)},
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(model), .argument = "MODEL"}, /* as the word */
    {.name = "memory", .kind = OPTION_SIZE, AT(memory), .argument = "SIZE", .initial = "0",
     .group = "Options",
     .text = "exit code 1 when weights and KV of one full context do not fit; 0: not asked"},
    {.name = "json", .kind = OPTION_FLAG, AT(json), .group = "Options", .text = "a JSON object"},
    {0}};
/* clang-format on */

struct facts {
    const struct model *model;
    const struct model_config *config;
    struct tokenizer *tokenizer; /* NULL: none, or not known; `tokenizer_why` says which */
    struct err tokenizer_why;
    const char *chat; /* name of the template, or NULL */
    struct err chat_why;
    struct head *head; /* that comes along for the model, or NULL */
    const struct head_config *head_config;
    struct model_type_use types[DTYPE_MAX];
    uint64_t weight_bytes, kv_token_bytes, memory;
};

static void gather(struct facts *f)
{
    const struct model *m = f->model;
    f->config = model_config(m);
    const struct model_config *c = f->config;
    model_weight_types(m, f->types);
    f->weight_bytes = model_weight_bytes(m);
    f->kv_token_bytes = (uint64_t)2 * c->layers * c->kv_heads * c->head_dim * KV_BYTES;
    if (tokenizer_create(m, &f->tokenizer, &f->tokenizer_why) == 0)
        (void)chat_check(f->tokenizer, &f->chat, &f->chat_why); /* what it lacks is part of the output */
    char path[PATH_MAX];
    if (head_cache_shipped(m, path) && head_open(path, m, &f->head, NULL) == 0)
        f->head_config = head_config(f->head);
}

static const char *attention_kind(const struct model_config *c)
{
    return c->kv_heads == c->q_heads ? "MHA" : c->kv_heads == 1 ? "MQA" : "GQA";
}

static const char *scaling_kind(const struct model_rope *r)
{
    static const char *const names[] = {[MODEL_ROPE_SCALING_NONE] = "none",
                                        [MODEL_ROPE_SCALING_LINEAR] = "linear",
                                        [MODEL_ROPE_SCALING_YARN] = "yarn"};
    return r->freq_factors ? "llama3" : names[r->scaling];
}

static const char *tokenizer_kind(const struct vocab *v)
{
    return v->kind == VOCAB_KIND_BPE ? "byte-level BPE" : "SentencePiece BPE";
}

static uint64_t full_bytes(const struct facts *f)
{
    return f->weight_bytes + f->kv_token_bytes * f->config->context_max; /* below 2^63: ranges are checked */
}

/* The longest context whose KV fits beside the weights. */
static uint64_t fitting_context(const struct facts *f)
{
    if (f->memory < f->weight_bytes)
        return 0;
    uint64_t positions = (f->memory - f->weight_bytes) / f->kv_token_bytes;
    return positions < f->config->context_max ? positions : f->config->context_max;
}

static void print_bytes(const char *label, uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    unsigned unit = 0;
    for (; value >= 1024 && unit < 4; unit++)
        value /= 1024;
    printf("%-18s%" PRIu64 " (%.*f %s)\n", label, bytes, unit ? 1 : 0, value, units[unit]);
}

static void print_hash(const char *label, struct hash128 h)
{
    printf("%-18s%016" PRIx64 "%016" PRIx64 "\n", label, h.hi, h.lo);
}

static void print_shape(const struct facts *f)
{
    const struct model_config *c = f->config;
    const struct model_rope *r = &c->rope;
    printf("%-18s%s\n", "model", model_name(f->model));
    printf("%-18s%s, %s\n", "format", model_format(f->model), model_arch_name(c->arch));
    printf("%-18s%" PRIu32 " layers, hidden %" PRIu32 ", ffn %" PRIu32 "\n", "size", c->layers, c->hidden,
           c->ffn);
    printf("%-18s%s, %" PRIu32 " query, %" PRIu32 " KV heads of %" PRIu32 "%s%s\n", "attention",
           attention_kind(c), c->q_heads, c->kv_heads, c->head_dim, c->qkv_bias ? ", biases" : "",
           c->qk_norm ? ", norms of query and key" : "");
    printf("%-18s%" PRIu32 ", output %s\n", "vocabulary", c->vocab, c->tied ? "tied" : "untied");
    printf("%-18s%" PRIu32 "\n", "context", c->context_max);
    printf("%-18sbase %g, %" PRIu32 " dimensions in %s, scaling %s", "rope", (double)r->base, r->dims,
           r->halves ? "halves" : "pairs", scaling_kind(r));
    if (r->scaling != MODEL_ROPE_SCALING_NONE)
        printf(" x%g", (double)r->factor);
    if (r->scaling == MODEL_ROPE_SCALING_YARN)
        printf(" from %" PRIu32, r->original_context);
    putchar('\n');
}

static void print_tokenizer(const struct facts *f)
{
    const struct vocab *v = model_vocab(f->model);
    if (v)
        printf("%-18s%s, %.*s, %" PRIu32 " tokens, %" PRIu32 " merges\n", "tokenizer", tokenizer_kind(v),
               v->pre.bytes ? (int)v->pre.bytes : INT_MAX, v->pre.bytes ? v->pre.text : "no pre-tokenizer",
               v->count, v->merge_count);
    if (!f->tokenizer)
        printf("%-18s%s\n", v ? "" : "tokenizer", f->tokenizer_why.text);
    else
        printf("%-18s%s\n", "chat template", f->chat ? f->chat : f->chat_why.text);
}

/* The head that `run` takes without --head. */
static void print_head(const struct facts *f)
{
    if (!f->head)
        printf("%-18s%s\n", "head", "none comes along: one is cut from the model's first layer, 1 group");
    else
        printf("%-18s%s, %" PRIu32 " group%s, features %s\n", "head", head_path(f->head),
               f->head_config->groups, f->head_config->groups == 1 ? "" : "s",
               head_features_name(f->head_config->features));
}

static int print_table(const struct facts *f)
{
    print_shape(f);
    print_bytes("weights", f->weight_bytes);
    for (unsigned i = 0; i < DTYPE_MAX; i++)
        if (f->types[i].tensors) {
            char label[32];
            snprintf(label, sizeof label, "  %s x%" PRIu32, dtype_info(i)->name, f->types[i].tensors);
            print_bytes(label, f->types[i].bytes);
        }
    print_bytes("KV per token", f->kv_token_bytes);
    print_bytes("KV, full context", f->kv_token_bytes * f->config->context_max);
    print_tokenizer(f);
    print_head(f);
    print_hash("fingerprint", model_fingerprint(f->model));
    print_hash("  tokenizer", model_tokenizer_fingerprint(f->model));
    if (!f->memory)
        return 0;
    bool fits = full_bytes(f) <= f->memory;
    print_bytes("memory", f->memory);
    printf(
        "%-18s%s; context up to %" PRIu64 " with all KV on the device; weights with all layers' KV in host "
        "memory %s\n",
        "fits", fits ? "yes" : "no", fitting_context(f), f->weight_bytes <= f->memory ? "fit" : "do not fit");
    return !fits;
}

static void put_hash(json_t *object, const char *key, struct hash128 h)
{
    char text[40];
    snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, h.hi, h.lo);
    figures_text(object, key, text);
}

static void put_shape(json_t *top, const struct facts *f)
{
    const struct model_config *c = f->config;
    figures_text(top, "name", model_name(f->model));
    figures_text(top, "format", model_format(f->model));
    figures_text(top, "architecture", model_arch_name(c->arch));
    figures_count(top, "layers", c->layers);
    figures_count(top, "hidden", c->hidden);
    figures_count(top, "ffn", c->ffn);
    figures_count(top, "query_heads", c->q_heads);
    figures_count(top, "kv_heads", c->kv_heads);
    figures_count(top, "head_dim", c->head_dim);
    figures_count(top, "vocab", c->vocab);
    figures_count(top, "context", c->context_max);
    figures_text(top, "attention", attention_kind(c));
    figures_bool(top, "tied", c->tied);
    figures_bool(top, "qkv_bias", c->qkv_bias);
    figures_bool(top, "qk_norm", c->qk_norm);
    figures_real(top, "rms_eps", (double)c->rms_eps);
}

static void put_rope(json_t *rope, const struct model_rope *r)
{
    figures_real(rope, "base", (double)r->base);
    figures_count(rope, "dimensions", r->dims);
    figures_text(rope, "order", r->halves ? "halves" : "pairs");
    figures_text(rope, "scaling", scaling_kind(r));
    figures_real(rope, "factor", (double)r->factor);
    figures_count(rope, "original_context", r->original_context);
}

static void put_types(json_t *types, const struct facts *f)
{
    for (unsigned i = 0; i < DTYPE_MAX; i++)
        if (f->types[i].tensors) {
            json_t *type = figures_section(types, dtype_info(i)->name);
            figures_count(type, "tensors", f->types[i].tensors);
            figures_count(type, "bytes", f->types[i].bytes);
        }
}

static void put_tokenizer(json_t *top, const struct facts *f)
{
    const struct vocab *v = model_vocab(f->model);
    if (!v) {
        figures_text(top, "tokenizer", NULL);
        return;
    }
    json_t *t = figures_section(top, "tokenizer");
    char pre[128];
    snprintf(pre, sizeof pre, "%.*s", (int)(v->pre.bytes < sizeof pre ? v->pre.bytes : sizeof pre - 1),
             v->pre.bytes ? v->pre.text : "");
    figures_text(t, "kind", tokenizer_kind(v));
    figures_text(t, "pre", pre);
    figures_count(t, "tokens", v->count);
    figures_count(t, "merges", v->merge_count);
    figures_bool(t, "known", f->tokenizer != NULL);
    if (f->tokenizer)
        figures_text(t, "chat_template", f->chat);
}

static void put_head(json_t *top, const struct facts *f)
{
    if (!f->head) {
        figures_text(top, "head", NULL);
        return;
    }
    json_t *head = figures_section(top, "head");
    figures_text(head, "path", head_path(f->head));
    figures_count(head, "groups", f->head_config->groups);
    figures_text(head, "features", head_features_name(f->head_config->features));
}

static int print_json(const struct facts *f)
{
    bool fits = !f->memory || full_bytes(f) <= f->memory;
    json_t *top = json_object();
    put_shape(top, f);
    put_rope(figures_section(top, "rope"), &f->config->rope);
    figures_count(top, "weight_bytes", f->weight_bytes);
    put_types(figures_section(top, "weight_types"), f);
    figures_count(top, "kv_bytes_per_token", f->kv_token_bytes);
    put_tokenizer(top, f);
    put_head(top, f);
    put_hash(top, "fingerprint", model_fingerprint(f->model));
    put_hash(top, "tokenizer_fingerprint", model_tokenizer_fingerprint(f->model));
    if (f->memory) {
        json_t *memory = figures_section(top, "memory");
        figures_count(memory, "bytes", f->memory);
        figures_bool(memory, "fits", fits);
        figures_count(memory, "context_that_fits", fitting_context(f));
        figures_bool(memory, "fits_offloaded", f->weight_bytes <= f->memory);
    }
    int rc = json_dumpf(top, stdout, JSON_INDENT(2) | JSON_SORT_KEYS);
    putchar('\n');
    json_decref(top);
    return rc < 0 || !fits;
}

static int usage_error(const char *what)
{
    fprintf(stderr, "specontext inspect: %s\nTry `specontext inspect --help`.\n", what);
    return 2;
}

int inspect_main(int argc, char **argv)
{
    struct inspect_options o = {0};
    struct model *model = NULL;
    struct err err = {0};
    int r = options_parse(table, argc, argv, &o, &err);
    if (r == 1) {
        puts("Usage: specontext inspect MODEL [options]\n\nChecks a model (GGUF file or Hugging Face folder) "
             "and "
             "prints what it is.");
        options_help(table, stdout);
        return 0;
    }
    if (r < 0)
        return usage_error(err.text);
    const char *path = o.model ? o.model : o.words.count ? o.words.at[0] : NULL;
    if (!path || o.words.count > !o.model)
        return usage_error(path ? "found more than one model" : "MODEL is missing");
    struct facts f = {.memory = o.memory};
    if (model_open(path, &model, &err) < 0) {
        fprintf(stderr, "specontext inspect: %s\n", err.text);
        return 1;
    }
    f.model = model;
    gather(&f);
    int code = o.json ? print_json(&f) : print_table(&f);
    head_free(&f.head);
    tokenizer_free(&f.tokenizer);
    model_free(&model);
    return code;
}
