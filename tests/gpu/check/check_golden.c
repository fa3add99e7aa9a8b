/* The decoder's pass on a GPU against logits of the same weights in float32, teacher-forced: once with the
 * prompt's attention (spans of 512), once token by token as decoding does. Runs on whichever library
 * gpu_load finds.
 *
 *   check_golden MODEL GOLDEN [DEVICE] */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "decoder/pass_gpu.h"
#include "model/model.h"
#include "proto/limits.h"
#include "tests/lib/golden.h"

enum { CHUNK = 512, SKIPPED = 77 };

struct rig {
    struct model *model;
    const struct model_config *config;
    struct gpu_device *device;
    struct weights_gpu *weights;
    struct pass_gpu *pass;
    uint32_t pages; /* of a layer */
    uint64_t kv_bytes;
    void *kv, *at, *input, *span; /* device; input: ids, positions, counts, rows [CHUNK] each */
};

static void upload(struct rig *r, void *to, const void *from, size_t bytes)
{
    CHECK(r->device->api->copy(to, from, bytes, r->device->stream) == 0);
    CHECK(r->device->api->stream_sync(r->device->stream) == 0);
}

static int rig_open(struct rig *r, const char *path, const char *device, uint32_t positions, struct err *err)
{
    struct pass_gpu_options options = {CHUNK, CHUNK, positions, positions};
    memset(r, 0, sizeof *r);
    int rc = model_open(path, &r->model, err);
    if (rc == 0)
        rc = gpu_device_open(device, &r->device, err);
    if (rc == 0)
        rc = weights_gpu_create(r->device, r->model, 2, NULL, &r->weights, err);
    if (rc == 0)
        rc = pass_gpu_create(r->device, model_config(r->model), r->weights, &options, &r->pass, err);
    if (rc < 0)
        return rc;
    r->config = model_config(r->model);
    r->pages = (positions + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    uint64_t page_bytes = (uint64_t)BLOCK_TOKENS * r->config->kv_heads * 4 * r->config->head_dim;
    uint32_t pages = r->config->layers * r->pages;
    uint64_t *at = mem_alloc(pages, sizeof *at);
    for (uint32_t i = 0; i < pages; i++)
        at[i] = (pages - 1 - i) * page_bytes;
    r->kv_bytes = pages * page_bytes;
    const struct gpu_api *api = r->device->api;
    if ((rc = api->alloc(r->device->gpu, r->kv_bytes, &r->kv, err)) == 0 &&
        (rc = api->alloc(r->device->gpu, pages * sizeof *at, &r->at, err)) == 0 &&
        (rc = api->alloc(r->device->gpu, 4 * CHUNK * sizeof(uint32_t), &r->input, err)) == 0 &&
        (rc = api->alloc(r->device->gpu, sizeof(struct cuda_span), &r->span, err)) == 0)
        upload(r, r->at, at, pages * sizeof *at);
    mem_free(&at);
    return rc;
}

static void rig_close(struct rig *r)
{
    void *const all[] = {r->kv, r->at, r->input, r->span};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        r->device->api->free(r->device->gpu, all[i]);
    pass_gpu_free(&r->pass);
    weights_gpu_free(&r->weights);
    gpu_device_free(&r->device);
    model_free(&r->model);
}

static int aim(void *arg, uint32_t layer, struct pass_gpu_kv *kv, struct err *err)
{
    struct rig *r = arg;
    (void)err;
    kv->view = (struct cuda_kv_view){.base = r->kv,
                                     .device_bytes = r->kv_bytes,
                                     .at = (uint64_t *)r->at + layer * r->pages,
                                     .row_stride = r->pages,
                                     .at_count = r->pages,
                                     .page_tokens = BLOCK_TOKENS,
                                     .piece_bytes = 4 * r->config->head_dim,
                                     .type = DTYPE_F16};
    kv->write = (uint32_t *)r->input + CHUNK;
    return 0;
}

/* Logits of all n tokens to `rows` [n][vocab]. */
static void run(struct rig *r, const uint32_t *ids, uint32_t position, uint32_t n, float *rows)
{
    struct err err = {0};
    uint32_t input[4 * CHUNK] = {0}, *device = r->input;
    for (uint32_t i = 0; i < n; i++) {
        input[i] = ids[i];
        input[CHUNK + i] = position + i;
        input[2 * CHUNK + i] = position + i + 1;
    }
    struct cuda_span span = {0, 0, n, position};
    upload(r, r->input, input, sizeof input);
    upload(r, r->span, &span, sizeof span);
    struct pass_gpu_batch batch = {.n = n,
                                   .ids = device,
                                   .positions = device + CHUNK,
                                   .rows = device + 3 * CHUNK,
                                   .row_count = 1,
                                   .counts = device + 2 * CHUNK,
                                   .count_max = position + n,
                                   .spans = n > 1 ? r->span : NULL,
                                   .span_count = 1,
                                   .span_max = n,
                                   .logits = n};
    struct pass_gpu_source source = {.layer = aim, .arg = r};
    if (pass_gpu_prepare(r->pass, n, n, &err) < 0 || pass_gpu_queue(r->pass, &batch, &source, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    upload(r, rows, pass_gpu_logits(r->pass), (size_t)n * r->config->vocab * sizeof *rows);
}

int main(int argc, char **argv)
{
    struct err err = {0};
    struct golden g;
    struct rig r;
    if (argc < 3) {
        fprintf(stderr, "usage: check_golden MODEL GOLDEN [DEVICE]\n");
        return 2;
    }
    golden_open(&g, argv[2]);
    int rc = rig_open(&r, argv[1], argc > 3 ? argv[3] : "cuda", g.positions, &err);
    if (rc < 0) {
        printf("skipped: %s\n", err.text);
        return rc == -ENODEV || rc == -ENOENT ? SKIPPED : 1;
    }
    CHECK(g.vocab == r.config->vocab);
    float *rows = mem_alloc((size_t)CHUNK * g.vocab, sizeof *rows);
    int bad = 0;
    for (uint32_t chunk = CHUNK; chunk; chunk = chunk == CHUNK ? 1 : 0) {
        struct golden_figures f = {0};
        for (uint32_t at = 0; at < g.positions; at += chunk) {
            uint32_t n = g.positions - at < chunk ? g.positions - at : chunk;
            run(&r, g.ids + at, at, n, rows);
            for (uint32_t i = 0; i < n; i++)
                golden_compare(&f, &g, at + i, rows + (size_t)i * g.vocab);
        }
        printf("by %u: ", chunk);
        golden_print(&f);
        /* At least 98 % of the choices, gaps of at most 0.5, KL at most 2e-3. */
        bad |= f.agree < 0.98 * f.positions || f.gap_max > 0.5 || f.kl > 2e-3 * f.positions;
    }
    mem_free(&rows);
    golden_close(&g);
    rig_close(&r);
    printf("%s\n", bad ? "FAILED" : "ok");
    return bad;
}
