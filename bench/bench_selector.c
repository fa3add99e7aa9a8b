/* The retriever's step without sockets: from the tokens of a batch to what TOPK carries, keys appended,
 * scores, Top-K and changes included. Random ids, so the keys are noise; of a head with features the rows,
 * too. Prefill: of the first sequence, without a selection.
 *
 *   bench_selector MODEL HEAD DEVICE [SEQUENCES [DEPTH [BUDGET [STEPS [KEYS]]]]]
 *
 * Unless given: 32, 32768, 2048, 100, auto. KEYS: auto, f16, int8.
 *
 * Floor: the keys read once, at the rate of a copy in this device's memory; on the CPU none is printed. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "link/segment.h"
#include "proto/features.h"
#include "retriever/rows.h"
#include "retriever/selector.h"

enum { SINKS = 4, WINDOW = 64, STEPS_MAX = 1000, COPY_BYTES = 1 << 28, COPIES = 8 };

struct bench {
    struct selector *selector;
    struct selector_result result;
    uint32_t sequences, depth, budget, steps, vocab;
    uint64_t random;
    uint32_t step;
    double prefill_ms;              /* of the first sequence */
    uint32_t rows[LIMIT_SEQUENCES]; /* of features that each entry of a step names: the first ones */
};

/* Rows of random numbers, where the head reads any. */
static int give_features(struct bench *b, const struct head_config *head, const char *device, struct err *err)
{
    struct layout_features wanted = rows_features(head);
    struct features_params params = {.decoder_epoch = 1,
                                     .retriever_epoch = 2,
                                     .wanted = &wanted,
                                     .chunk = LIMIT_STEP_TOKENS,
                                     .type = gpu_named(device) ? DTYPE_BF16 : DTYPE_F32};
    struct selector_peers peers = {1, 2};
    struct features_header h;
    struct segment segment;
    if (!selector_reads_features(b->selector))
        return 0;
    features_header_init(&h, &params);
    int rc = segment_create("bench-features", h.total_bytes, &segment, err);
    if (rc < 0)
        return rc;
    memcpy(segment.at, &h, sizeof h);
    uint8_t *at = (uint8_t *)segment.at + h.rows_at;
    for (uint64_t i = 0; i < (uint64_t)h.rows * h.layers * h.hidden; i++) {
        float x = (float)(hash_bytes(7, &i, sizeof i).lo % 2001) / 1000 - 1;
        if (params.type == DTYPE_F32)
            ((float *)at)[i] = x;
        else
            ((uint16_t *)at)[i] = dtype_f32_to_bf16(x);
    }
    rc = selector_take_features(b->selector, dup(segment.fd), &peers, err);
    segment_close(&segment);
    return rc;
}

static struct msg_step step_of(struct bench *b, const struct msg_step_entry *entries, uint32_t entry_count,
                               const uint32_t *tokens, uint32_t count)
{
    uint32_t rows = selector_reads_features(b->selector) ? entry_count : 0;
    return (struct msg_step){entries, entry_count, {tokens, count}, {b->rows, rows}, b->step};
}

static uint32_t random_token(struct bench *b)
{
    b->random = b->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((b->random >> 32) * b->vocab >> 32);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* `count` tokens of sequence s from `position` on; a selection for the last one. */
static void prefill(struct bench *b, uint32_t s)
{
    uint32_t *tokens = mem_alloc(LIMIT_STEP_TOKENS, sizeof *tokens);
    int64_t begin = clock_now_ns();
    for (uint32_t at = 0; at < b->depth;) {
        uint32_t n = b->depth - at < LIMIT_STEP_TOKENS ? b->depth - at : LIMIT_STEP_TOKENS;
        struct msg_step_entry entry = {s + 1, s, at, n, 0};
        for (uint32_t i = 0; i < n; i++)
            tokens[i] = random_token(b);
        struct msg_step msg = step_of(b, &entry, 1, tokens, n);
        selector_step(b->selector, ++b->step, &msg, &b->result);
        CHECK(b->result.refusal_count == 0);
        at += n;
    }
    b->prefill_ms = s ? b->prefill_ms : (double)(clock_now_ns() - begin) / 1e6;
    mem_free(&tokens);
}

/* One token for every sequence. Returns its time in ms. */
static double decode(struct bench *b, uint32_t position)
{
    struct msg_step_entry entries[LIMIT_SEQUENCES];
    uint32_t tokens[LIMIT_SEQUENCES];
    for (uint32_t s = 0; s < b->sequences; s++) {
        entries[s] = (struct msg_step_entry){s + 1, s, position, 1, STEP_ENTRY_SELECT};
        tokens[s] = random_token(b);
    }
    struct msg_step msg = step_of(b, entries, b->sequences, tokens, b->sequences);
    int64_t begin = clock_now_ns();
    selector_step(b->selector, ++b->step, &msg, &b->result);
    double ms = (double)(clock_now_ns() - begin) / 1e6;
    CHECK(b->result.refusal_count == 0 && b->result.entry_count == b->sequences);
    return ms;
}

/* Bytes a second, read and written. */
static double copy_rate(const char *device)
{
    const struct gpu_api *api;
    struct gpu *gpu = NULL;
    struct CUstream_st *stream = NULL;
    struct gpu_event *from = NULL, *to = NULL;
    void *at = NULL;
    float ms = 0;
    CHECK(gpu_load(&api, NULL) == 0 && api->open(device, &gpu, NULL) == 0);
    CHECK(api->stream_create(gpu, GPU_PRIORITY_NORMAL, &stream, NULL) == 0);
    CHECK(api->alloc(gpu, 2 * (uint64_t)COPY_BYTES, &at, NULL) == 0);
    CHECK(api->event_create(gpu, &from, NULL) == 0 && api->event_create(gpu, &to, NULL) == 0);
    for (int i = 0; i <= COPIES; i++) { /* the first is not counted */
        if (i == 1)
            api->event_record(from, stream);
        api->copy((uint8_t *)at + COPY_BYTES, at, COPY_BYTES, stream);
    }
    api->event_record(to, stream);
    CHECK(api->stream_sync(stream) == 0 && api->event_elapsed(from, to, &ms) == 0);
    api->event_free(&from);
    api->event_free(&to);
    api->free(gpu, at);
    api->stream_free(gpu, &stream);
    api->close(&gpu);
    return 2.0 * COPIES * COPY_BYTES / (double)ms * 1e3;
}

static void report(struct bench *b, const struct head_config *h, const char *device)
{
    double ms[STEPS_MAX];
    struct selector_stats before, after;
    uint64_t changed = 0;
    for (uint32_t i = 0; i < 4; i++) /* loads code, captures */
        decode(b, b->depth + i);
    selector_stats(b->selector, &before);
    for (uint32_t i = 0; i < b->steps; i++) {
        ms[i] = decode(b, b->depth + 4 + i);
        changed += b->result.first[b->result.entry_count];
    }
    selector_stats(b->selector, &after);
    qsort(ms, b->steps, sizeof ms[0], compare);
    printf("%s: %" PRIu32 " sequences of %" PRIu32 ", %" PRIu32 " groups of %" PRIu32
           " lists, budget %" PRIu32 ", keys of %d bits\n",
           selector_backend(b->selector), b->sequences, b->depth, h->groups, h->kv_heads, b->budget,
           selector_keys_int8(b->selector) ? 8 : 16);
    printf("step: median %.3f ms, best %.3f, p99 %.3f; %.2f MB of changes; %" PRIu64 " of %" PRIu32
           " as a graph\n",
           ms[b->steps / 2], ms[0], ms[(size_t)b->steps * 99 / 100], (double)changed / b->steps * 4 / 1e6,
           after.graph_steps - before.graph_steps, b->steps);

    printf("of which: append (on a GPU: queue) %.3f ms, score (until the results are there) %.3f, topk %.3f, "
           "handing on %.3f; prefill %.1f ms\n",
           (double)(after.sum.append_ns - before.sum.append_ns) / b->steps / 1e6,
           (double)(after.sum.score_ns - before.sum.score_ns) / b->steps / 1e6,
           (double)(after.sum.topk_ns - before.sum.topk_ns) / b->steps / 1e6,
           (double)(after.sum.encode_ns - before.sum.encode_ns) / b->steps / 1e6, b->prefill_ms);
    if (!gpu_named(device))
        return;
    double bytes =
        (double)card_key_bytes(selector_card(b->selector)) * b->sequences * (b->depth + b->steps / 2.0);
    double rate = copy_rate(device);
    printf("floor: %.2f GB of keys at %.0f GB/s: %.3f ms\n", bytes / 1e9, rate / 1e9, bytes / rate * 1e3);
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: %s MODEL HEAD DEVICE [SEQUENCES [DEPTH [BUDGET [STEPS [KEYS]]]]]\n", argv[0]);
        return 2;
    }
    struct err err = {0};
    struct model *model = NULL;
    struct head *head = NULL;
    uint32_t numbers[] = {32, 32768, 2048, 100};
    for (int i = 4; i < argc && i < 8; i++)
        numbers[i - 4] = (uint32_t)strtoul(argv[i], NULL, 10);
    const char *keys = argc > 8 ? argv[8] : "auto";
    struct bench b = {
        .sequences = numbers[0], .depth = numbers[1], .budget = numbers[2], .steps = numbers[3]};
    if (b.sequences < 1 || b.sequences > LIMIT_SEQUENCES || b.steps < 1 || b.steps > STEPS_MAX ||
        b.depth < 1 || b.budget < SINKS + WINDOW + 1) {
        fprintf(stderr, "%s: numbers out of range\n", argv[0]);
        return 2;
    }
    if (strcmp(keys, "auto") != 0 && strcmp(keys, "f16") != 0 && strcmp(keys, "int8") != 0) {
        fprintf(stderr, "%s: KEYS: found %s, expected auto, f16 or int8\n", argv[0], keys);
        return 2;
    }
    int rc = model_open(argv[1], &model, &err);
    if (rc == 0)
        rc = head_open(argv[2], model, &head, &err);
    if (rc == 0) {
        struct selector_options o = {.device = argv[3],
                                     .model = model,
                                     .head = head,
                                     .pool = head_config(head)->pool,
                                     .context = b.depth + b.steps + 8,
                                     .sequences = b.sequences,
                                     .keys = !strcmp(keys, "int8")  ? COMPUTE_KEYS_INT8
                                             : !strcmp(keys, "f16") ? COMPUTE_KEYS_F16
                                                                    : COMPUTE_KEYS_AUTO,
                                     .threads = (int)(sysconf(_SC_NPROCESSORS_ONLN) + 1) / 2};
        b.vocab = head_config(head)->vocab;
        rc = selector_create(&o, &b.selector, &err);
        if (rc == 0)
            rc = give_features(&b, head_config(head), argv[3], &err);
    }
    for (uint32_t s = 0; rc == 0 && s < b.sequences; s++) {
        struct msg_open open = {.sequence = s + 1,
                                .capacity = b.depth + b.steps + 8,
                                .budget = b.budget,
                                .sinks = SINKS,
                                .window = WINDOW};
        rc = selector_open(b.selector, &open, &err);
        if (rc == 0)
            prefill(&b, s);
    }
    if (rc == 0)
        report(&b, head_config(head), argv[3]);
    else
        fprintf(stderr, "%s: %s\n", argv[0], err.text);
    selector_result_free(&b.result);
    selector_free(&b.selector);
    head_free(&head);
    model_free(&model);
    return rc == 0 ? 0 : 1;
}
