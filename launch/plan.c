/* `specontext plan`: prints the thresholds of proto/memory.h for a model and a load, as a table or as JSON.
 * Single-threaded, touches nothing but the model file's header. */
#include "launch/plan.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "compute/gpu.h"
#include "launch/gpu_memory.h"
#include "launch/gpu_probe.h"
#include "launch/head_cache.h"
#include "model/head.h"
#include "model/model.h"
#include "proto/memory.h"

struct plan {
    const char *model_path, *head_path;
    const char *device;           /* whose context is measured; NULL: an allowance */
    const char *retriever_device; /* NULL: the same card */
    uint32_t keys;                /* enum compute_keys */
    enum { PLAN_EXACT, PLAN_PAPER } kind;
    bool json;
    uint64_t memory_bytes;   /* exact: of the KV cache */
    uint64_t gpu_bytes;      /* of the whole card; 0: not given */
    uint64_t prefix_bytes;   /* that the retriever may keep keys of beginnings in */
    uint64_t prefix_block;   /* of one block of them; 0: it keeps none */
    struct gpu_memory terms; /* exact, with gpu_bytes */
    uint32_t requests, budget, context, slots;
    struct memory_through through;       /* exact */
    uint32_t ctx_size, sequence_context; /* given, 0: not; in force */
    uint64_t model_bytes, head_bytes;
    uint32_t layers, q_heads, kv_heads, head_dim;
};

#define AT(field) .at = offsetof(struct plan, field)

#define LOAD   "Load"
#define SHAPE  "Model"
#define OUTPUT "Output"

/* A table reads best as rows. */
/* clang-format off */
static const struct option_entry table[] = {
    {.name = "device-memory", .kind = OPTION_SIZE, AT(memory_bytes), .argument = "SIZE", .group = LOAD,
     .text = "memory to plan for; exact: KV memory, paper: the whole GPU"},
    {.name = "gpu-memory", .kind = OPTION_SIZE, AT(gpu_bytes), .argument = "SIZE", .group = LOAD,
     .text = "the whole GPU; exact (with -m): less what everything else takes on it"},
    {.name = "device", .kind = OPTION_TEXT, AT(device), .argument = "NAME", .group = LOAD,
     .text = "ask this GPU what a process takes on it (default: an allowance)"},
    {.name = "retriever-device", .kind = OPTION_TEXT, AT(retriever_device), .argument = "NAME", .group = LOAD,
     .text = "where the retriever is: cpu or another GPU takes it off this one"},
    {.name = "key-type", .kind = OPTION_CHOICE, AT(keys), .argument = "KIND", .initial = "auto",
     .choices = COMPUTE_KEYS_CHOICES, .group = LOAD, .text = "the retriever's keys, as given to run"},
    {.name = "requests", .kind = OPTION_UINT, AT(requests), .argument = "R", .initial = "1", .least = 1,
     .most = 1 << 20, .group = LOAD, .text = "concurrent requests"},
    {.name = "budget", .kind = OPTION_UINT, AT(budget), .argument = "B", .initial = "2048", .least = 1,
     .most = LIMIT_CONTEXT, .group = LOAD, .text = "positions attended"},
    {.name = "context", .kind = OPTION_UINT, AT(context), .argument = "S", .least = 1, .most = LIMIT_CONTEXT,
     .group = LOAD, .text = "positions a request will have, marked in the table (default: the model's)"},
    {.name = "ctx-size", .letter = 'c', .kind = OPTION_UINT, AT(ctx_size), .argument = "N", .least = 1,
     .most = LIMIT_CONTEXT, .group = LOAD,
     .text = "positions that a sequence may have, as given to run (default: the model's)"},
    {.name = "slots", .kind = OPTION_UINT, AT(slots), .argument = "N", .least = 1, .most = LIMIT_SLOTS,
     .group = LOAD, .text = "slots a row head (default: 1.5 budgets; exact only)"},
    {.name = "offload-layers", .kind = OPTION_UINT, AT(through.offload_layers), .argument = "N",
     .initial = "0", .most = LIMIT_LAYERS, .group = LOAD,
     .text = "as given to run, for --write-through (exact only)"},
    {.name = "write-through", .kind = OPTION_CHOICE, AT(through.write_through), .argument = "LAYERS",
     .initial = "all", .choices = WRITE_THROUGH_CHOICES, .group = LOAD,
     .text = "host memory has all layers, or only those that are ever offloaded (exact only)"},
    {.name = "prefix-memory", .kind = OPTION_SIZE, AT(prefix_bytes), .argument = "SIZE", .initial = "256M",
     .group = LOAD, .text = "as given to run: for keys of beginnings, with a head that reads hidden states"},
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(model_path), .argument = "FILE", .group = SHAPE,
     .text = "shape and bytes from a model file, else by hand:"},
    {.name = "layers", .kind = OPTION_UINT, AT(layers), .argument = "N", .least = 1, .most = LIMIT_LAYERS,
     .group = SHAPE, .text = "layers"},
    {.name = "heads", .kind = OPTION_UINT, AT(q_heads), .argument = "N", .least = 1, .most = 1024,
     .group = SHAPE, .text = "query heads"},
    {.name = "kv-heads", .kind = OPTION_UINT, AT(kv_heads), .argument = "N", .least = 1,
     .most = LIMIT_ROW_HEADS, .group = SHAPE, .text = "KV heads"},
    {.name = "head-dim", .kind = OPTION_UINT, AT(head_dim), .argument = "N", .least = 1, .most = 1024,
     .group = SHAPE, .text = "dimensions of a head"},
    {.name = "model-bytes", .kind = OPTION_SIZE, AT(model_bytes), .argument = "SIZE", .group = SHAPE,
     .text = "weights (paper only)"},
    {.name = "head-bytes", .kind = OPTION_SIZE, AT(head_bytes), .argument = "SIZE", .group = SHAPE,
     .text = "the retrieval head (paper only)"},
    {.name = "head", .letter = 'H', .kind = OPTION_TEXT, AT(head_path), .argument = "FILE", .group = SHAPE,
     .text = "the retrieval head's file (default: as run takes it; exact only)"},
    {.name = "memory-model", .kind = OPTION_CHOICE, AT(kind), .argument = "KIND", .initial = "exact",
     .choices = "exact|paper", .group = OUTPUT,
     .text = "what our processes allocate, or the paper's formula"},
    {.name = "json", .kind = OPTION_FLAG, AT(json), .group = OUTPUT, .text = "JSON instead of a table"},
    {0}};
/* clang-format on */

/* What a process takes there, and whether the retriever is one of them. Without a GPU to ask, names tell. */
static int ask_card(const struct plan *p, struct gpu_memory_load *load, struct err *err)
{
    const char *device = p->device ? p->device : "cuda:0",
               *retriever = p->retriever_device ? p->retriever_device : device;
    struct gpu_probe card;
    load->with_retriever = !strcmp(retriever, device);
    if (!p->device)
        return 0;
    int r = gpu_probe(device, &card, err);
    if (r == 0)
        r = gpu_probe_same(&card, device, retriever, &load->with_retriever, err);
    if (r < 0)
        return r;
    load->context_bytes = card.info.context_bytes;
    load->mps = card.info.mps;
    return 0;
}

/* The KV cache's share of the card. What it is divided for is what requests will have, unless the layers that
 * never leave are to be told: those are fewer the more a sequence may have. */
static int divide_card(struct plan *p, const struct model *model, const struct head *head, struct err *err)
{
    bool longest = p->ctx_size || !p->context || p->through.write_through != WRITE_THROUGH_ALL;
    int r = 0;
    struct gpu_memory_load load = {.model = model,
                                   .head = head,
                                   .context = longest ? p->sequence_context : p->context,
                                   .sequences = p->requests,
                                   .budget = p->budget,
                                   .slots = p->slots,
                                   .kv_bytes = p->memory_bytes,
                                   .through = p->through,
                                   .keys_int8 = p->keys != COMPUTE_KEYS_F16};
    if (p->requests > LIMIT_SEQUENCES)
        r = err_set(err, -EINVAL, "--requests: found %u, expected at most %u with --gpu-memory", p->requests,
                    LIMIT_SEQUENCES);
    if (r == 0)
        r = ask_card(p, &load, err);
    if (r == 0)
        gpu_memory_plan(&load, p->gpu_bytes, &p->terms);
    if (r == 0)
        r = gpu_memory_check(&p->terms, p->memory_bytes ? p->memory_bytes : 1, err);
    if (r == 0 && p->memory_bytes) { /* the KV cache's share by hand, as run takes it */
        p->terms.store -= p->terms.kv - p->memory_bytes;
        p->terms.kv = p->memory_bytes;
    }
    p->memory_bytes = p->terms.kv;
    return r;
}

/* A block of keys, as the card or the CPU has them, beside the row of its last position, as the decoder
 * writes it. */
static uint64_t prefix_block(const struct plan *p, const struct head *head)
{
    struct memory_gpu_head sizes = head_sizes(head);
    bool on_gpu = p->gpu_bytes || p->device || (p->retriever_device && gpu_named(p->retriever_device));
    if (!sizes.features)
        return 0;
    /* The CPU keeps what it rounded to 8 bits in 16. */
    sizes.keys_int8 =
        (p->retriever_device ? gpu_named(p->retriever_device) : on_gpu) && p->keys != COMPUTE_KEYS_F16;
    return memory_prefix_bytes(&sizes, dtype_row_bytes(on_gpu ? DTYPE_BF16 : DTYPE_F32, sizes.features));
}

/* What only the exact memory model asks of the head that run would take. */
static int take_head(struct plan *p, const struct model *model, struct err *err)
{
    struct head *head = NULL;
    char shipped[PATH_MAX];
    const char *path = p->head_path ? p->head_path : head_cache_shipped(model, shipped) ? shipped : NULL;
    int r = path ? head_open(path, model, &head, err) : 0;
    if (head)
        p->prefix_block = prefix_block(p, head);
    if (r == 0 && p->gpu_bytes)
        r = divide_card(p, model, head, err);
    head_free(&head);
    return r;
}

static int take_model(struct plan *p)
{
    struct err err;
    struct model *model;
    if (model_open(p->model_path, &model, &err) < 0) {
        fprintf(stderr, "specontext plan: %s\n", err.text);
        return 1;
    }
    const struct model_config *c = model_config(model);
    p->layers = c->layers;
    p->q_heads = c->q_heads;
    p->kv_heads = c->kv_heads;
    p->head_dim = c->head_dim;
    p->sequence_context = p->ctx_size ? p->ctx_size : c->context_max;
    p->model_bytes = model_weight_bytes(model);
    int r = p->kind == PLAN_EXACT ? take_head(p, model, &err) : 0;
    model_free(&model);
    if (r < 0)
        fprintf(stderr, "specontext plan: %s\n", err.text);
    return r < 0;
}

static int complete(struct plan *p)
{
    if (p->gpu_bytes && p->kind == PLAN_PAPER)
        p->memory_bytes = p->gpu_bytes;
    if (p->gpu_bytes && p->kind == PLAN_EXACT && !p->model_path) {
        fprintf(stderr, "specontext plan: --gpu-memory with the exact memory model: -m is missing\n");
        return 2;
    }
    if (p->model_path) {
        int code = take_model(p);
        if (code)
            return code;
    }
    const char *missing = !p->layers         ? "-m or --layers"
                          : !p->q_heads      ? "--heads"
                          : !p->kv_heads     ? "--kv-heads"
                          : !p->head_dim     ? "--head-dim"
                          : !p->memory_bytes ? "--device-memory"
                                             : NULL;
    if (missing) {
        fprintf(stderr, "specontext plan: %s is missing; see specontext plan --help\n", missing);
        return 2;
    }
    if (p->q_heads % p->kv_heads) {
        fprintf(stderr, "specontext plan: --heads: found %u, expected a multiple of --kv-heads %u\n",
                p->q_heads, p->kv_heads);
        return 2;
    }
    if (!p->sequence_context)
        p->sequence_context = p->ctx_size ? p->ctx_size : LIMIT_CONTEXT;
    if (!p->context)
        p->context = p->sequence_context;
    if (!p->slots)
        p->slots = memory_slots(p->budget + p->budget / 2, p->sequence_context);
    return 0;
}

static struct kv_layout plan_layout(const struct plan *p)
{
    struct kv_layout layout;
    memset(&layout, 0, sizeof layout);
    layout.layers = p->layers;
    layout.row_heads = layout.selection_heads = p->kv_heads;
    layout.piece_bytes = p->head_dim * 4; /* K and V, 16 bits an element */
    layout.context_max = p->sequence_context;
    layout_set_groups(&layout, 1);
    uint32_t kept = memory_runs_kept(&layout, p->requests, p->slots, p->memory_bytes, &p->through);
    layout.host_first_layer = p->kind == PLAN_EXACT ? layout_run_first(&layout, kept) : 0;
    return layout;
}

static struct memory_load plan_load(const struct plan *p, const struct kv_layout *layout)
{
    return (struct memory_load){.requests = p->requests,
                                .slots = p->slots,
                                .staging_tokens = memory_staging_tokens(layout, p->memory_bytes, p->slots)};
}

static uint64_t threshold(const struct plan *p, const struct kv_layout *layout, uint32_t offloaded)
{
    if (p->kind == PLAN_PAPER) {
        struct memory_paper paper = {
            .memory_bytes = (double)p->memory_bytes,
            .model_bytes = (double)p->model_bytes,
            .head_bytes = (double)p->head_bytes,
            .layers = p->layers,
            .kv_heads = p->kv_heads,
            .head_dim = p->head_dim,
            .query_groups = p->q_heads / p->kv_heads,
            .requests = p->requests,
            .budget = p->budget,
        };
        return memory_paper_threshold(&paper, offloaded);
    }
    struct memory_load load = plan_load(p, layout);
    return memory_exact_threshold(layout, &load, p->memory_bytes, p->layers - offloaded);
}

/* Of the context asked for. */
static uint64_t device_bytes(const struct plan *p, const struct kv_layout *layout, uint32_t offloaded)
{
    struct memory_load load = plan_load(p, layout);
    return layout_slab_bytes(layout) * memory_device_slabs(layout, &load, p->context, p->layers - offloaded);
}

static json_t *terms_json(const struct gpu_memory *t)
{
    const struct {
        const char *name;
        uint64_t bytes;
    } terms[] = {{"cap_bytes", t->cap},
                 {"contexts_bytes", t->contexts},
                 {"libraries_bytes", t->libraries},
                 {"mapping_bytes", t->mapping},
                 {"weights_bytes", t->weights},
                 {"activations_bytes", t->activations},
                 {"features_bytes", t->features},
                 {"workspace_bytes", t->workspace},
                 {"tables_bytes", t->tables},
                 {"retriever_weights_bytes", t->retriever_weights},
                 {"retriever_keys_bytes", t->retriever_keys},
                 {"retriever_workspace_bytes", t->retriever_workspace},
                 {"kv_bytes", t->kv},
                 {"kvstore_process_bytes", t->store},
                 {"retriever_process_bytes", t->retriever},
                 {"decoder_process_bytes", t->decoder}};
    json_t *o = json_object();
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
        json_object_set_new(o, terms[i].name, json_integer((json_int_t)terms[i].bytes));
    return o;
}

static json_t *plan_json(const struct plan *p, const struct kv_layout *layout)
{
    json_t *rows = json_array();
    for (uint32_t runs = layout_runs(layout), i = 0; i <= runs; i++) {
        uint32_t offloaded = p->layers - layout_run_first(layout, runs - i);
        if (offloaded > p->layers - layout->host_first_layer)
            break; /* those never leave */
        json_t *row = json_pack("{s:I, s:I}", "layers_offloaded", (json_int_t)offloaded, "context",
                                (json_int_t)threshold(p, layout, offloaded));
        if (p->kind == PLAN_EXACT)
            json_object_set_new(row, "device_bytes",
                                json_integer((json_int_t)device_bytes(p, layout, offloaded)));
        json_array_append_new(rows, row);
    }
    json_t *out =
        json_pack("{s:s, s:I, s:I, s:I, s:I, s:o}", "memory_model", p->kind == PLAN_EXACT ? "exact" : "paper",
                  "memory_bytes", (json_int_t)p->memory_bytes, "requests", (json_int_t)p->requests, "budget",
                  (json_int_t)p->budget, "context", (json_int_t)p->context, "thresholds", rows);
    if (p->kind == PLAN_EXACT && p->gpu_bytes)
        json_object_set_new(out, "gpu", terms_json(&p->terms));
    if (p->prefix_block) {
        uint64_t blocks = p->prefix_bytes / p->prefix_block;
        json_object_set_new(out, "prefix_tokens", json_integer((json_int_t)(blocks * BLOCK_TOKENS)));
        json_object_set_new(out, "prefix_bytes", json_integer((json_int_t)(blocks * p->prefix_block)));
    }
    if (p->kind == PLAN_EXACT) {
        json_object_set_new(out, "slots", json_integer(p->slots));
        json_object_set_new(
            out, "kv_bytes_per_token",
            json_integer((json_int_t)layout->layers * layout->piece_bytes * layout->row_heads));
        json_object_set_new(out, "write_through", json_string(memory_through_name(p->through.write_through)));
        json_object_set_new(out, "layers", json_integer(layout->layers));
        json_object_set_new(out, "host_layers", json_integer(layout->layers - layout->host_first_layer));
        json_object_set_new(out, "host_bytes",
                            json_integer((json_int_t)memory_host_bytes(layout, p->requests, p->context)));
        json_object_set_new(out, "device_bytes_all_resident",
                            json_integer((json_int_t)device_bytes(p, layout, 0)));
        json_object_set_new(out, "device_bytes_all_offloaded",
                            json_integer((json_int_t)device_bytes(p, layout, p->layers)));
    }
    return out;
}

/* What host memory lacks, and what that costs. */
static void print_through(json_t *plan)
{
    long long layers = (long long)json_integer_value(json_object_get(plan, "layers")),
              host = (long long)json_integer_value(json_object_get(plan, "host_layers"));
    const char *through = json_string_value(json_object_get(plan, "write_through"));
    if (!through || strcmp(through, "offloaded") != 0)
        return;
    if (host == layers)
        printf(
            "write-through offloaded: any of the %lld layers may have to leave, host memory has them all\n",
            layers);
    else
        printf("write-through offloaded: host memory has %lld of %lld layers, the others never leave the "
               "device: no prefix is used again, sequences end with the store or the decoder\n",
               host, layers);
}

static void print_table(json_t *plan)
{
    printf("memory model %s: %.2f GiB, %lld requests, budget %lld\n",
           json_string_value(json_object_get(plan, "memory_model")),
           (double)json_integer_value(json_object_get(plan, "memory_bytes")) / (1 << 30),
           (long long)json_integer_value(json_object_get(plan, "requests")),
           (long long)json_integer_value(json_object_get(plan, "budget")));
    static const char *const byte_rows[][2] = {
        {"host_bytes", "host memory for KV"},
        {"device_bytes_all_resident", "device memory, all layers resident"},
        {"device_bytes_all_offloaded", "device memory, all layers offloaded"}};
    long long context = (long long)json_integer_value(json_object_get(plan, "context"));
    for (size_t i = 0; i < sizeof byte_rows / sizeof *byte_rows; i++) {
        const json_t *bytes = json_object_get(plan, byte_rows[i][0]);
        if (bytes)
            printf("%s at %lld tokens a request: %.3f GiB\n", byte_rows[i][1], context,
                   (double)json_integer_value(bytes) / (1 << 30));
    }
    print_through(plan);
    const json_t *prefix = json_object_get(plan, "prefix_bytes");
    if (prefix)
        printf("host memory for keys of beginnings, up to %lld tokens: %.3f GiB\n",
               (long long)json_integer_value(json_object_get(plan, "prefix_tokens")),
               (double)json_integer_value(prefix) / (1 << 30));
    const char *name;
    json_t *term;
    json_object_foreach(json_object_get(plan, "gpu"), name, term)
    {
        printf("GPU %-28s %10.3f GiB\n", name, (double)json_integer_value(term) / (1 << 30));
    }
    printf("\n%18s  %s\n", "layers offloaded", "longest context");
    int marked = 0;
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(plan, "thresholds"), i, row)
    {
        long long s = (long long)json_integer_value(json_object_get(row, "context"));
        int fits = s >= context && !marked;
        marked |= fits;
        printf("%18lld  %lld%s\n", (long long)json_integer_value(json_object_get(row, "layers_offloaded")), s,
               fits ? "  <- the context asked for fits from here on" : "");
    }
    if (!marked)
        printf("a context of %lld does not fit, whatever is offloaded\n", context);
}

/* Rules of names. */
static int check(const struct plan *p, struct err *err)
{
    if (p->device && !gpu_named(p->device))
        return err_set(err, -EINVAL, "--device: found %s, expected cuda, cuda:N or GPU-UUID", p->device);
    if (p->retriever_device && strcmp(p->retriever_device, "cpu") != 0 && !gpu_named(p->retriever_device))
        return err_set(err, -EINVAL, "--retriever-device: found %s, expected cpu, cuda, cuda:N or GPU-UUID",
                       p->retriever_device);
    return 0;
}

int plan_main(int argc, char **argv)
{
    struct plan plan = {0};
    struct err err;
    int r = options_parse(table, argc, argv, &plan, &err);
    if (r == 1) {
        puts("Usage: specontext plan (-m MODEL | --layers N --heads N --kv-heads N --head-dim N)\n"
             "                       (--device-memory SIZE | --gpu-memory SIZE) [options]\n\n"
             "How long the context of R concurrent requests may grow before one more run of layers has to be "
             "offloaded.");
        options_help(table, stdout);
        return 0;
    }
    if (r == 0)
        r = check(&plan, &err);
    if (r < 0) {
        fprintf(stderr, "specontext plan: %s; see specontext plan --help\n", err.text);
        return 2;
    }
    int code = complete(&plan);
    if (code)
        return code;
    struct kv_layout layout = plan_layout(&plan);
    if (layout_check(&layout, &err) < 0) {
        fprintf(stderr, "specontext plan: %s\n", err.text);
        return 1;
    }
    json_t *json = plan_json(&plan, &layout);
    if (plan.json) {
        json_dumpf(json, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
        putchar('\n');
    } else {
        print_table(json);
    }
    json_decref(json);
    return 0;
}
