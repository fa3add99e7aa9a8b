/* The forward pass on the double of a GPU against the CPU's: every architecture, a prompt by spans and single
 * tokens by lists. Weights and what goes into products are bf16 there, which is what is left of the
 * difference. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "decoder/pass.h"
#include "decoder/pass_gpu.h"
#include "proto/limits.h"
#include "tests/lib/fakegpu.h"
#include "tests/lib/ggufgen_arch.h"
#include "tests/unit/decoder_model.h"

enum { PROMPT = 70, TOKENS = 90, PAGES = 2, HEAD_DIM = 64 };
#define TOLERANCE 2e-2

struct both {
    struct model *model;
    const struct model_config *config;
    struct pass *cpu;
    struct gpu_device *device;
    struct weights_gpu *weights;
    struct pass_gpu *gpu;
    uint64_t page_bytes, kv_bytes;
    uint8_t *kv, *kv_gpu;
    uint64_t *at, *at_gpu;  /* [layer][page] */
    uint32_t *input;        /* device: ids, positions, counts, rows [TOKENS] each */
    struct cuda_span *span; /* device */
};

static void *device_of(struct both *b, const void *from, uint64_t bytes)
{
    void *at;
    assert_int_equal(b->device->api->alloc(b->device->gpu, bytes, &at, NULL), 0);
    if (from)
        memcpy(at, from, bytes); /* the double's memory can be written by the CPU */
    return at;
}

static void both_open(struct both *b, const char *path)
{
    struct err err = {0};
    memset(b, 0, sizeof *b);
    fakegpu_use(NULL);
    if (model_open(path, &b->model, &err) < 0)
        fail_msg("%s", err.text);
    b->config = model_config(b->model);
    struct pass_options options = {.threads = 1, .tokens_max = TOKENS, .entries_max = 1, .logits_max = 1};
    struct pass_gpu_options gpu_options = {TOKENS, 1, TOKENS, TOKENS};
    if (pass_create(b->model, &options, &b->cpu, &err) < 0 || gpu_device_open("cuda", &b->device, &err) < 0 ||
        weights_gpu_create(b->device, b->model, 2, NULL, &b->weights, &err) < 0 ||
        pass_gpu_create(b->device, model_config(b->model), b->weights, &gpu_options, &b->gpu, &err) < 0)
        fail_msg("%s", err.text);
    uint32_t pages = b->config->layers * PAGES;
    b->page_bytes = (uint64_t)BLOCK_TOKENS * b->config->kv_heads * 4 * b->config->head_dim;
    b->kv_bytes = pages * b->page_bytes;
    b->kv = mem_alloc_aligned(1, b->kv_bytes);
    memset(b->kv, 0xff, b->kv_bytes); /* NaN: what was never written must not be read */
    b->at = mem_alloc(pages, sizeof *b->at);
    for (uint32_t i = 0; i < pages; i++)
        b->at[i] = (pages - 1 - i) * b->page_bytes;
    b->kv_gpu = device_of(b, b->kv, b->kv_bytes);
    b->at_gpu = device_of(b, b->at, pages * sizeof *b->at);
    b->input = device_of(b, NULL, 4 * TOKENS * sizeof *b->input);
    b->span = device_of(b, NULL, sizeof *b->span);
}

static void both_close(struct both *b)
{
    void *const all[] = {b->kv_gpu, b->at_gpu, b->input, b->span};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        b->device->api->free(b->device->gpu, all[i]);
    pass_gpu_free(&b->gpu);
    weights_gpu_free(&b->weights);
    gpu_device_free(&b->device);
    pass_free(&b->cpu);
    model_free(&b->model);
    mem_free(&b->kv);
    mem_free(&b->at);
}

static int aim_cpu(void *arg, uint32_t layer, struct pass_kv *kv, struct err *err)
{
    struct both *b = arg;
    (void)err;
    kv->view = (struct kv_view){.base = b->kv,
                                .at = b->at + layer * PAGES,
                                .page_tokens = BLOCK_TOKENS,
                                .piece_bytes = 4 * b->config->head_dim,
                                .type = DTYPE_F16};
    return 0;
}

static int aim_gpu(void *arg, uint32_t layer, struct pass_gpu_kv *kv, struct err *err)
{
    struct both *b = arg;
    (void)err;
    kv->view = (struct cuda_kv_view){.base = b->kv_gpu,
                                     .device_bytes = b->kv_bytes,
                                     .at = b->at_gpu + layer * PAGES,
                                     .row_stride = PAGES,
                                     .at_count = PAGES,
                                     .page_tokens = BLOCK_TOKENS,
                                     .piece_bytes = 4 * b->config->head_dim,
                                     .type = DTYPE_F16};
    kv->write = b->input + TOKENS;
    return 0;
}

static const float *run_gpu(struct both *b, const uint32_t *ids, uint32_t position, uint32_t n)
{
    struct err err = {0};
    for (uint32_t i = 0; i < n; i++) {
        b->input[i] = ids[i];
        b->input[TOKENS + i] = position + i;
        b->input[2 * TOKENS + i] = position + i + 1;
        b->input[3 * TOKENS + i] = 0;
    }
    *b->span = (struct cuda_span){0, 0, n, position};
    uint32_t wanted = n - 1;
    struct pass_gpu_batch batch = {.n = n,
                                   .ids = b->input,
                                   .positions = b->input + TOKENS,
                                   .rows = b->input + 3 * TOKENS,
                                   .row_count = 1,
                                   .counts = b->input + 2 * TOKENS,
                                   .count_max = position + n,
                                   .spans = n > 1 ? b->span : NULL,
                                   .span_count = 1,
                                   .span_max = n,
                                   .logits = 1,
                                   .wanted = &wanted};
    struct pass_gpu_source source = {.layer = aim_gpu, .arg = b};
    if (pass_gpu_prepare(b->gpu, n, 1, &err) < 0 || pass_gpu_queue(b->gpu, &batch, &source, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(b->device->api->stream_sync(b->device->stream), 0);
    return pass_gpu_logits(b->gpu);
}

static const float *run_cpu(struct both *b, const uint32_t *ids, uint32_t position, uint32_t n)
{
    struct pass_entry entry = {ids, position, n, 1};
    struct pass_source source = {.layer = aim_cpu, .arg = b};
    assert_int_equal(pass_run(b->cpu, &entry, 1, &source, NULL), 0);
    return pass_logits(b->cpu, 0);
}

/* Largest difference of logits over the largest logit. */
static double error_of(const char *path)
{
    static struct both b;
    uint32_t ids[TOKENS];
    double error = 0, largest = 0;
    both_open(&b, path);
    for (uint32_t i = 0; i < TOKENS; i++)
        ids[i] = (i * 7919u + i * i * 31u + 5) % b.config->vocab;
    for (uint32_t at = 0; at < TOKENS;) {
        uint32_t n = at == 0 ? PROMPT : 1;
        const float *want = run_cpu(&b, ids + at, at, n), *have = run_gpu(&b, ids + at, at, n);
        for (uint32_t i = 0; i < b.config->vocab; i++) {
            assert_true(isfinite(have[i]));
            error = fmax(error, fabs((double)have[i] - (double)want[i]));
            largest = fmax(largest, fabs((double)want[i]));
        }
        at += n;
    }
    both_close(&b);
    return error / largest;
}

static void test_architectures(void **state)
{
    (void)state;
    for (const char *const *name = ggufgen_arch_names; *name; name++) {
        char *folder;
        ggufgen_arch_folder_heads(*name, HEAD_DIM, &folder);
        double error = error_of(folder);
        print_message("%s: %.1e\n", *name, error);
        ggufgen_arch_remove(&folder);
        assert_true(error <= TOLERANCE);
    }
}

/* Matrices small enough for rounding not to be blown up by layer after layer. */
static float tame_weight(const struct tiny_model *m, const char *name, uint32_t row, uint32_t col)
{
    uint32_t state = m->seed + row * 7919u + col * 104729u + (uint32_t)strlen(name) * 31u + (uint8_t)name[4];
    tiny_random(&state);
    return strstr(name, "norm") ? 1 + 0.2f * tiny_uniform(&state) : 0.2f * tiny_uniform(&state);
}

/* As GGUF has it: rotated pairs are neighbours. */
static void test_gguf(void **state)
{
    (void)state;
    char path[] = "/tmp/specontext-model-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    struct tiny_model m = {.vocab = 300,
                           .hidden = 64,
                           .q_heads = 6,
                           .kv_heads = 2,
                           .head_dim = 128,
                           .layers = 6,
                           .context = 256,
                           .seed = 3,
                           .rope_base = 10000,
                           .weight = tame_weight};
    tiny_model_write(&m, path);
    double error = error_of(path);
    print_message("GGUF: %.1e\n", error);
    unlink(path);
    assert_true(error <= TOLERANCE);
}

/* Heads that no kernel serves are refused by name, before anything is computed. */
static void test_refused(void **state)
{
    (void)state;
    struct err err = {0};
    struct model *model;
    struct gpu_device *device;
    struct weights_gpu *weights;
    struct pass_gpu *pass = NULL;
    struct pass_gpu_options options = {8, 1, 8, 8};
    fakegpu_use(NULL);
    assert_int_equal(model_open(decoder_model(), &model, &err), 0);
    assert_int_equal(gpu_device_open("cuda:1", &device, &err), 0);
    assert_int_equal(weights_gpu_create(device, model, 1, NULL, &weights, &err), 0);
    assert_int_equal(pass_gpu_create(device, model_config(model), weights, &options, &pass, &err), -ENOTSUP);
    assert_non_null(strstr(err.text, "heads of 64 or 128"));
    atomic_int stop = 1;
    weights_gpu_free(&weights);
    assert_int_equal(weights_gpu_create(device, model, 1, &stop, &weights, &err), -ECANCELED);
    gpu_device_free(&device);
    assert_int_equal(gpu_device_open("cuda:7", &device, &err), -ENODEV);
    model_free(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_architectures), cmocka_unit_test(test_gguf),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
