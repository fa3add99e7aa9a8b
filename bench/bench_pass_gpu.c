/* The decoder's pass of a decode step on a GPU (decoder/pass_gpu.c) at the shape of Llama-3.1-8B, with random
 * weights, pages and lists: what a step takes when nothing has to be waited for, captured into a graph as the
 * decoder does. Tables are copied from the host in layer 0, and each run of layers begins with a wait for a
 * flag that is there already. Then the same step without one part after the other (its launches left out),
 * and each part alone: what a part costs in company, and what it costs by itself.
 *
 *   bench_pass_gpu [--device cuda:0] [--requests 32] [--context 16384] [--budget 2048] [--layers 32]
 *
 * The floor: bytes of the weights (embedding left out) and of the rows attended over the rate of a copy
 * measured in the same run. Without a GPU nothing is run. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/options.h"
#include "decoder/pass_gpu.h"

enum { PAGE = 64, HEADS = 8, DIM = 128, PIECE = 4 * DIM, PAGE_BYTES = HEADS * PAGE * PIECE };
enum { ATTENTION = 1, PRODUCTS = 2, SMALL = 4, SAMPLING = 8, TABLES = 16, EVERYTHING = 31 };
enum { RUN = 4, FLAGS_MAX = 128 };
enum { RUNS = 15, COPIES = 4, BLOCK_BYTES = 64 << 20, COPY_BYTES = 1 << 30 };

struct settings {
    const char *device;
    uint32_t requests, context, budget, layers;
};

#define NUMBER(field, first, low, high, what)                                                         \
    {                                                                                                 \
        .name = #field, .kind = OPTION_UINT, .at = offsetof(struct settings, field), .argument = "N", \
        .initial = first, .least = low, .most = high, .group = "Options", .text = what                \
    }

static const struct option_entry options[] = {{.name = "device",
                                               .kind = OPTION_TEXT,
                                               .at = offsetof(struct settings, device),
                                               .argument = "NAME",
                                               .initial = "cuda:0",
                                               .group = "Options",
                                               .text = "the GPU"},
                                              NUMBER(requests, "32", 1, 256, "sequences"),
                                              NUMBER(context, "16384", PAGE, 1 << 20, "positions of each"),
                                              NUMBER(budget, "2048", 1, 1 << 17, "positions attended"),
                                              NUMBER(layers, "32", 1, 128, "layers"),
                                              {0}};

struct table {
    void *device, *host; /* pinned */
    uint64_t bytes;
};

struct rig {
    struct settings o;
    struct gpu_device *device;
    const struct gpu_api *api; /* whole */
    struct gpu_api partial;    /* with launches left out */
    struct model_config config;
    struct weights_gpu weights;
    struct pass_gpu *pass;
    struct gpu_event *begin, *end;
    uint8_t *block, *pool; /* random bf16 */
    uint64_t pool_bytes;
    struct cuda_kv_view view;
    struct pass_gpu_batch batch;
    struct pass_gpu_sampling sampling;
    uint32_t *items, *counts;
    struct table tables[2]; /* lists, pages */
    uint32_t *flag;
    int parts;
    double copy_rate;
};

static void must(int r, const struct err *err)
{
    if (r == 0)
        return;
    fprintf(stderr, "%s\n", err->code ? err->text : strerror(-r));
    exit(1);
}

static uint32_t next_random(void)
{
    static uint64_t x = 88172645463325252u;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return (uint32_t)(x >> 32);
}

static void *allocate(struct rig *g, enum gpu_device_use use, uint64_t bytes)
{
    struct err err = {0};
    void *at = NULL;
    must(gpu_device_alloc(g->device, use, bytes, &at, &err), &err);
    return at;
}

static void *upload(struct rig *g, const void *data, uint64_t bytes)
{
    struct err err = {0};
    void *at = allocate(g, GPU_DEVICE_TABLES, bytes);
    must(g->api->copy(at, data, bytes, g->device->stream), &err);
    must(g->api->stream_sync(g->device->stream), &err);
    return at;
}

/* ---- what the pass reads ---- */

static void keep_table(struct rig *g, struct table *t, const void *device, const void *data, uint64_t bytes)
{
    struct err err = {0};
    void *mapped;
    must(g->api->alloc_host(g->device->gpu, bytes, &t->host, &mapped, &err), &err);
    memcpy(t->host, data, bytes);
    t->device = (void *)(uintptr_t)device;
    t->bytes = bytes;
}

/* bf16 numbers of magnitude 2^-8 .. 2^-4: never zeros, which products are faster on. */
static void make_block(struct rig *g)
{
    uint16_t *data = mem_alloc(BLOCK_BYTES, 1);
    for (uint32_t i = 0; i < BLOCK_BYTES / 2; i++) {
        uint32_t x = next_random();
        data[i] = (uint16_t)((x & 0x807f) | (119 + (x >> 20 & 3)) << 7);
    }
    g->block = upload(g, data, BLOCK_BYTES);
    mem_free(&data);
}

static void *random_memory(struct rig *g, enum gpu_device_use use, uint64_t bytes)
{
    struct err err = {0};
    uint8_t *at = allocate(g, use, bytes);
    for (uint64_t done = 0; done < bytes; done += BLOCK_BYTES)
        must(g->api->copy(at + done, g->block, bytes - done < BLOCK_BYTES ? bytes - done : BLOCK_BYTES,
                          g->device->stream),
             &err);
    return at;
}

static const void *matrix(struct rig *g, uint64_t rows, uint64_t cols)
{
    return random_memory(g, GPU_DEVICE_WEIGHTS, rows * cols * 2);
}

static const float *ones(struct rig *g, uint32_t count)
{
    float *one = mem_alloc(count, sizeof *one);
    for (uint32_t i = 0; i < count; i++)
        one[i] = 1;
    const float *at = upload(g, one, count * sizeof *one);
    mem_free(&one);
    return at;
}

static void make_weights(struct rig *g)
{
    struct model_config *c = &g->config;
    *c = (struct model_config){.layers = g->o.layers,
                               .hidden = 4096,
                               .q_heads = 32,
                               .kv_heads = HEADS,
                               .head_dim = DIM,
                               .ffn = 14336,
                               .vocab = 128256,
                               .rms_eps = 1e-5f,
                               .rope = {.base = 5e5f, .dims = DIM, .halves = true, .factor = 1}};
    float inv_freq[DIM / 2];
    struct weights_gpu *w = &g->weights;
    CHECK(model_rope_frequencies(&c->rope, inv_freq, &w->rope_scale) == 0);
    w->device = g->device;
    w->layers = mem_alloc(c->layers, sizeof *w->layers);
    w->embedding = matrix(g, c->vocab, c->hidden);
    w->output = matrix(g, c->vocab, c->hidden);
    w->output_norm = ones(g, c->hidden);
    w->inv_freq = upload(g, inv_freq, sizeof inv_freq);
    for (uint32_t l = 0; l < c->layers; l++)
        w->layers[l] = (struct weights_gpu_layer){.attn_norm = w->output_norm,
                                                  .qkv = matrix(g, 6144, c->hidden),
                                                  .wo = matrix(g, c->hidden, 4096),
                                                  .ffn_norm = w->output_norm,
                                                  .gate_up = matrix(g, 2 * (uint64_t)c->ffn, c->hidden),
                                                  .down = matrix(g, c->hidden, c->ffn)};
}

/* Pages of all sequences and layers, in random order. */
static void make_pages(struct rig *g)
{
    uint64_t pages = g->o.context / PAGE, entries = (uint64_t)g->o.requests * g->o.layers * pages;
    uint64_t *at = mem_alloc(entries, sizeof *at);
    for (uint64_t i = 0; i < entries; i++)
        at[i] = i * PAGE_BYTES;
    for (uint64_t i = entries; i-- > 1;) {
        uint64_t j = next_random() % (i + 1), swap = at[i];
        at[i] = at[j], at[j] = swap;
    }
    g->pool_bytes = entries * PAGE_BYTES;
    g->pool = random_memory(g, GPU_DEVICE_ACTIVATIONS, g->pool_bytes);
    g->view = (struct cuda_kv_view){.base = g->pool,
                                    .device_bytes = g->pool_bytes,
                                    .at = upload(g, at, entries * sizeof *at),
                                    .row_stride = g->o.layers * pages,
                                    .layer_stride = pages,
                                    .at_count = (uint32_t)pages,
                                    .page_tokens = PAGE,
                                    .piece_bytes = PIECE,
                                    .type = DTYPE_BF16};
    keep_table(g, &g->tables[1], g->view.at, at, entries * sizeof *at);
    mem_free(&at);
}

/* Ascending lists of budget positions, one from each of as many equal parts of the context. */
static void make_batch(struct rig *g)
{
    uint32_t n = g->o.requests, budget = g->o.budget, context = g->o.context;
    uint32_t *items = mem_alloc((size_t)n * HEADS * budget, sizeof *items), all[4][256], *at[4],
             counts[256 * HEADS];
    struct cuda_sample_params params[256];
    for (uint32_t l = 0; l < n * HEADS; l++) {
        counts[l] = budget;
        for (uint32_t i = 0; i < budget; i++) {
            uint32_t low = (uint32_t)((uint64_t)i * context / budget);
            uint32_t high = (uint32_t)((uint64_t)(i + 1) * context / budget);
            items[l * budget + i] = low + next_random() % (high - low);
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        all[0][i] = next_random() % g->config.vocab;
        all[1][i] = context - 1;
        all[2][i] = i;
        all[3][i] = context;
        params[i] = (struct cuda_sample_params){0};
    }
    for (int i = 0; i < 4; i++)
        at[i] = upload(g, all[i], n * sizeof **at);
    g->items = upload(g, items, (uint64_t)n * HEADS * budget * sizeof *items);
    keep_table(g, &g->tables[0], g->items, items, (uint64_t)n * HEADS * budget * sizeof *items);
    g->counts = upload(g, counts, n * HEADS * sizeof *counts);
    g->batch = (struct pass_gpu_batch){.n = n,
                                       .ids = at[0],
                                       .positions = at[1],
                                       .rows = at[2],
                                       .row_count = n,
                                       .counts = at[3],
                                       .count_max = context,
                                       .logits = n};
    g->sampling.params = upload(g, params, n * sizeof *params);
    g->sampling.ret_ids = allocate(g, GPU_DEVICE_TABLES, n * sizeof *g->sampling.ret_ids);
    mem_free(&items);
}

static int give_layer(void *arg, uint32_t layer, struct pass_gpu_kv *kv, struct err *err)
{
    struct rig *g = arg;
    (void)err;
    *kv = (struct pass_gpu_kv){.view = g->view,
                               .write = g->batch.positions,
                               .items = g->items,
                               .counts = g->counts,
                               .item_stride = (uint64_t)HEADS * g->o.budget,
                               .count_stride = HEADS};
    kv->view.at += layer * g->view.layer_stride;
    int r = 0;
    for (int i = 0; i < 2 && r == 0 && layer == 0 && g->parts & TABLES; i++)
        r = g->api->copy(g->tables[i].device, g->tables[i].host, g->tables[i].bytes, g->device->stream);
    return r < 0 || layer % RUN || !(g->parts & TABLES) ? r
                                                        : g->api->flag_wait(g->flag, 0, g->device->stream);
}

/* ---- leaving out ---- */

static int no_attn(const struct cuda_attn *a, struct CUstream_st *s)
{
    (void)a, (void)s;
    return 0;
}

static int no_matmul(struct gpu *g, const struct cuda_matmul_shape *shape, const struct cuda_matmul *m,
                     struct CUstream_st *s)
{
    (void)g, (void)shape, (void)m, (void)s;
    return 0;
}

static int no_product(const struct cuda_product *p, struct CUstream_st *s)
{
    (void)p, (void)s;
    return 0;
}

static int no_rmsnorm(const struct cuda_rmsnorm *n, struct CUstream_st *s)
{
    (void)n, (void)s;
    return 0;
}

static int no_swiglu(const struct cuda_swiglu *n, struct CUstream_st *s)
{
    (void)n, (void)s;
    return 0;
}

static int no_rope_write(const struct cuda_rope *r, const struct cuda_kv_write *w, struct CUstream_st *s)
{
    (void)r, (void)w, (void)s;
    return 0;
}

static int no_sample(const struct cuda_sample *n, struct CUstream_st *s)
{
    (void)n, (void)s;
    return 0;
}

static void keep_parts(struct rig *g, int parts)
{
    g->partial = *g->api;
    g->parts = parts;
    if (!(parts & ATTENTION))
        g->partial.attn = no_attn;
    if (!(parts & PRODUCTS))
        g->partial.matmul = no_matmul, g->partial.product = no_product;
    if (!(parts & SAMPLING))
        g->partial.sample = no_sample;
    if (parts & SMALL)
        return;
    g->partial.rmsnorm = no_rmsnorm;
    g->partial.swiglu = no_swiglu;
    g->partial.rope_write = no_rope_write;
}

/* ---- times ---- */

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static int queue(struct rig *g, struct err *err)
{
    struct pass_gpu_source source = {.layer = give_layer, .arg = g};
    int r = pass_gpu_queue(g->pass, &g->batch, &source, err);
    return r < 0 ? r : pass_gpu_sample(g->pass, g->batch.logits, &g->sampling, err);
}

/* Median milliseconds of what `launch` queues, after two that do not count. */
static double median_ms(struct rig *g, void (*launch)(struct rig *g, struct gpu_graph *graph),
                        struct gpu_graph *graph)
{
    struct err err = {0};
    float ms[RUNS];
    for (int i = -2; i < RUNS; i++) {
        float last = 0;
        must(g->api->event_record(g->begin, g->device->stream), &err);
        launch(g, graph);
        must(g->api->event_record(g->end, g->device->stream), &err);
        must(g->api->stream_sync(g->device->stream), &err);
        must(g->api->event_elapsed(g->begin, g->end, &last), &err);
        if (i >= 0)
            ms[i] = last;
    }
    qsort(ms, RUNS, sizeof *ms, by_value);
    return (double)ms[RUNS / 2];
}

static void launch_graph(struct rig *g, struct gpu_graph *graph)
{
    const uint32_t values[FLAGS_MAX] = {0};
    CHECK(g->api->graph_flags(graph) <= FLAGS_MAX);
    must(g->api->graph_launch(graph, values, g->device->stream), &(struct err){0});
}

static double time_parts(struct rig *g, int parts)
{
    struct err err = {0};
    struct gpu_graph *graph = NULL;
    keep_parts(g, parts);
    must(queue(g, &err), &err); /* loads code */
    must(g->api->stream_sync(g->device->stream), &err);
    must(g->api->capture_begin(g->device->stream, &err), &err);
    int r = queue(g, &err);
    must(g->api->capture_end(g->device->gpu, g->device->stream, &graph, &err), &err);
    must(r, &err);
    double ms = median_ms(g, launch_graph, graph);
    g->api->graph_free(&graph);
    return ms;
}

/* Half of the pool, 1 GiB at most, from its other half. */
static uint64_t copy_bytes(const struct rig *g)
{
    return g->pool_bytes / 2 < COPY_BYTES ? g->pool_bytes / 2 : COPY_BYTES;
}

static void launch_copies(struct rig *g, struct gpu_graph *graph)
{
    (void)graph;
    for (int i = 0; i < COPIES; i++)
        must(g->api->copy(g->pool, g->pool + g->pool_bytes / 2, copy_bytes(g), g->device->stream),
             &(struct err){0});
}

static void measure_copy(struct rig *g)
{
    double seconds = median_ms(g, launch_copies, NULL) * 1e-3;
    g->copy_rate = 2.0 * COPIES * (double)copy_bytes(g) / seconds;
}

static void report(struct rig *g)
{
    static const struct {
        const char *name;
        int part;
    } parts[] = {{"attention", ATTENTION},
                 {"products", PRODUCTS},
                 {"small operators", SMALL},
                 {"sampling", SAMPLING},
                 {"tables and waits", TABLES}};
    uint64_t layer = (6144ull + 4096) * 4096 + 3ull * 14336 * 4096;
    double weights = 2.0 * (double)(g->o.layers * layer + 128256ull * 4096);
    double rows = (double)g->o.requests * HEADS * g->o.budget * PIECE * g->o.layers;
    double floor = (weights + rows) / g->copy_rate * 1e3, all = time_parts(g, EVERYTHING);
    printf("%u sequences of %u, budget %u: copy %.2f TB/s, floor %.3f ms (weights %.3f, rows %.3f)\n",
           g->o.requests, g->o.context, g->o.budget, g->copy_rate * 1e-12, floor,
           weights / g->copy_rate * 1e3, rows / g->copy_rate * 1e3);
    printf("%-22s %8.3f ms  %.2f x floor\n", "step", all, all / floor);
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++) {
        double without = time_parts(g, EVERYTHING & ~parts[i].part), alone = time_parts(g, parts[i].part);
        printf("%-22s %8.3f ms in company, %8.3f ms alone\n", parts[i].name, all - without, alone);
        fflush(stdout);
    }
    printf("%-22s %8.3f ms\n", "nothing but begin", time_parts(g, 0));
}

static void open_rig(struct rig *g)
{
    struct err err = {0};
    if (gpu_device_open(g->o.device, &g->device, &err) < 0) {
        printf("bench_pass_gpu: not run: %s\n", err.text);
        exit(0);
    }
    g->api = g->device->api;
    g->partial = *g->api;
    g->device->api = &g->partial;
    must(g->api->event_create(g->device->gpu, &g->begin, &err), &err);
    must(g->api->event_create(g->device->gpu, &g->end, &err), &err);
    void *flag, *mapped;
    must(g->api->alloc_host(g->device->gpu, sizeof(uint32_t), &flag, &mapped, &err), &err);
    *(uint32_t *)flag = 1;
    g->flag = mapped;
    make_block(g);
    make_weights(g);
    make_pages(g);
    make_batch(g);
    const struct pass_gpu_options with = {g->o.requests, g->o.requests, g->o.budget, g->o.context};
    must(pass_gpu_create(g->device, &g->config, &g->weights, &with, &g->pass, &err), &err);
    must(pass_gpu_prepare(g->pass, g->o.requests, g->o.requests, &err), &err);
}

int main(int argc, char **argv)
{
    static struct rig g; /* memory and device go with the process */
    struct err err = {0};
    int r = options_parse(options, argc, argv, &g.o, &err);
    if (r == 0 && g.o.budget > g.o.context)
        r = err_set(&err, -EINVAL, "--budget: found %u, expected at most the context of %u", g.o.budget,
                    g.o.context);
    if (r < 0)
        fprintf(stderr, "%s: %s\n", argv[0], err.text);
    else if (r > 0)
        options_help(options, stdout);
    if (r != 0)
        return r < 0 ? 2 : 0;
    open_rig(&g);
    measure_copy(&g);
    report(&g);
    return 0;
}
