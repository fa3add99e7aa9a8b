/* Attention of decode steps and of prompts, over pages and slots. */
#include "bench/lab/bench_cuda.cuh"

#include <stdio.h>
#include <stdlib.h>

#include "compute/cuda/kernels.h"

struct attn {
    struct cuda_attn a[SETS_MAX];
    int sets;
};

static int launch_attn(void *arg, int index)
{
    struct attn *b = (struct attn *)arg;
    return cuda_attn(&b->a[index % b->sets], lab_stream);
}

/* Lists of `budget` ascending entries out of `capacity`, evenly jittered. */
static uint32_t *spread_lists(uint64_t lists, uint32_t budget, uint32_t capacity)
{
    uint32_t *items = (uint32_t *)malloc(lists * budget * 4), x = 2463534242u;
    for (uint64_t l = 0; l < lists; l++)
        for (uint32_t i = 0; i < budget; i++) {
            x ^= x << 13, x ^= x >> 17, x ^= x << 5;
            uint64_t low = (uint64_t)i * capacity / budget, high = (uint64_t)(i + 1) * capacity / budget;
            items[l * budget + i] = (uint32_t)(low + x % (high - low));
        }
    return items;
}

/* Sequences of `capacity` positions; lists of `budget` (0: identity over the first `used`). Layers rotate. */
static void attn_of(const char *shape, uint32_t n, uint32_t capacity, uint32_t budget, bool slotted,
                    uint32_t used)
{
    static struct attn b;
    uint32_t pages = capacity / PAGE, list = budget ? budget : capacity;
    uint64_t page_bytes = (uint64_t)KV_HEADS * PAGE * PIECE, moved = (uint64_t)n * KV_HEADS * used * PIECE;
    uint64_t one = n * (uint64_t)pages * page_bytes, sets = (1ull << 30) / moved + 1;
    b.sets = (int)(sets < SETS_MAX && sets * one < (40ull << 30) ? sets : (40ull << 30) / one + 1);
    b.sets = b.sets < SETS_MAX ? b.sets : SETS_MAX;
    uint8_t *pool = (uint8_t *)lab_bf16(one * b.sets / 2);
    uint64_t *at = lab_permuted(n * (uint64_t)pages * b.sets, page_bytes);
    uint64_t *device_at = (uint64_t *)lab_upload(at, n * (uint64_t)pages * b.sets * 8);
    uint32_t *items = budget ? spread_lists((uint64_t)n * KV_HEADS, budget, capacity) : NULL;
    uint32_t *counts = (uint32_t *)malloc(n * KV_HEADS * 4);
    for (uint32_t i = 0; i < n * KV_HEADS; i++)
        counts[i] = used;
    struct cuda_attn a = {};
    a.kv.base = pool;
    a.kv.device_bytes = one * b.sets;
    a.kv.row_stride = a.kv.at_count = pages;
    a.kv.page_tokens = PAGE;
    a.kv.slotted = slotted;
    a.kv.slots = capacity;
    a.kv.units_per_slab = KV_HEADS * PAGE;
    a.kv.piece_bytes = PIECE;
    a.kv.type = DTYPE_BF16;
    a.out = lab_device(n * Q_HEADS * DIM * 2);
    a.out_type = DTYPE_BF16;
    a.q = lab_floats(n * Q_HEADS * DIM, 1);
    a.q_stride = Q_HEADS * DIM;
    a.counts = (uint32_t *)lab_upload(counts, n * KV_HEADS * 4);
    a.count_stride = KV_HEADS;
    a.items = items ? (uint32_t *)lab_upload(items, (uint64_t)n * KV_HEADS * list * 4) : NULL;
    a.item_stride = (uint64_t)KV_HEADS * list;
    a.row_count = n;
    a.settled = 1;
    a.list_max = list;
    a.n = n, a.q_heads = Q_HEADS, a.kv_heads = KV_HEADS, a.head_dim = DIM;
    a.scale = 0.0884f;
    a.work = (float *)lab_device(cuda_attn_work_bytes(n, Q_HEADS, DIM, list));
    for (int s = 0; s < b.sets; s++) {
        b.a[s] = a;
        b.a[s].kv.at = device_at + (uint64_t)s * n * pages;
    }
    lab_report("attn", shape, lab_seconds(launch_attn, &b, LAUNCHES), (double)moved / copy_rate);
    cudaFree(pool), cudaFree(device_at), cudaFree(a.out), cudaFree((void *)a.q), cudaFree((void *)a.counts);
    cudaFree((void *)a.items), cudaFree(a.work);
    free(at), free(items), free(counts);
}

void bench_attn(void)
{
    attn_of("32 seq, 2048 of 32K, paged", 32, 32768, 2048, false, 2048);
    attn_of("32 seq, 2048 of 3072 slots", 32, 3072, 2048, true, 2048);
    attn_of("8 seq, 2048 of 16K, paged", 8, 16384, 2048, false, 2048);
    attn_of("1 seq, 2048 of 32K, paged", 1, 32768, 2048, false, 2048);
    attn_of("32 seq, full 8K", 32, 8192, 0, false, 8192);
    attn_of("1 seq, full 128K", 1, 131072, 0, false, 131072);
    attn_of("32 seq, full 2K, sized for 32K", 32, 32768, 0, false, 2048);
}

static int launch_prefill(void *arg, int index)
{
    (void)index;
    return cuda_prefill((struct cuda_prefill *)arg, lab_stream);
}

void bench_prefill(void)
{
    static const uint32_t shapes[][3] = {{8192, 0, 1}, {2048, 30720, 1}, {2048, 0, 4}, {32768, 0, 1}};
    for (int i = 0; i < 4; i++) {
        uint32_t tokens = shapes[i][0], before = shapes[i][1], spans = shapes[i][2];
        uint32_t pages = (tokens + before) / PAGE;
        uint64_t page_bytes = (uint64_t)KV_HEADS * PAGE * PIECE;
        struct cuda_span span[4];
        for (uint32_t s = 0; s < spans; s++)
            span[s] = {s, s * tokens, tokens, before};
        struct cuda_prefill p = {};
        uint64_t *at = lab_permuted((uint64_t)spans * pages, page_bytes);
        p.kv.base = (uint8_t *)lab_bf16(spans * pages * page_bytes / 2);
        p.kv.device_bytes = spans * pages * page_bytes;
        p.kv.at = (uint64_t *)lab_upload(at, (uint64_t)spans * pages * 8);
        p.kv.row_stride = p.kv.at_count = pages;
        p.kv.page_tokens = PAGE;
        p.kv.piece_bytes = PIECE;
        p.kv.type = DTYPE_BF16;
        p.out = lab_device((uint64_t)spans * tokens * Q_HEADS * DIM * 2);
        p.out_type = DTYPE_BF16;
        p.q = lab_floats((uint64_t)spans * tokens * Q_HEADS * DIM, 1);
        p.q_stride = Q_HEADS * DIM;
        p.spans = (struct cuda_span *)lab_upload(span, sizeof span);
        p.span_count = spans, p.span_max = tokens, p.row_count = spans;
        p.q_heads = Q_HEADS, p.kv_heads = KV_HEADS, p.head_dim = DIM;
        p.scale = 0.0884f;
        double pairs = (double)tokens * before + 0.5 * (double)tokens * (tokens + 1.0);
        double flop = 4.0 * DIM * Q_HEADS * pairs * spans;
        for (p.hopper = 0; p.hopper <= cuda_prefill_hopper(0); p.hopper++) {
            double seconds = lab_seconds(launch_prefill, &p, 1);
            printf("prefill%s  %u x %u tokens after %u: %.3f ms, %.0f TFLOP/s\n",
                   p.hopper ? " hopper" : "       ", spans, tokens, before, seconds * 1e3,
                   flop / seconds / 1e12);
        }
        cudaFree(p.kv.base), cudaFree((void *)p.kv.at), cudaFree(p.out), cudaFree((void *)p.q);
        cudaFree((void *)p.spans);
        free(at);
    }
}
