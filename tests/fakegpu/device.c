/* The double's cards and its table of functions. */
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "tests/fakegpu/fakegpu.h"

enum { CONTEXT_BYTES = 8 << 20, LIBRARY_BYTES = 1 << 20 };

static const char *const uuids[FAKEGPU_CARDS] = {"GPU-fa4e0000-0000-4000-8000-000000000000",
                                                 "GPU-fa4e0000-0000-4000-8000-000000000001"};

/* Cards in the order that the process sees them. */
static int visible(int ret_cards[FAKEGPU_CARDS])
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    if (!list) {
        for (int i = 0; i < FAKEGPU_CARDS; i++)
            ret_cards[i] = i;
        return FAKEGPU_CARDS;
    }
    while (*list && count < FAKEGPU_CARDS) {
        size_t n = strcspn(list, ",");
        int card = -1;
        for (int i = 0; i < FAKEGPU_CARDS; i++)
            if ((n == 1 && list[0] == '0' + i) || (n == strlen(uuids[i]) && !strncmp(list, uuids[i], n)))
                card = i;
        if (card < 0) /* CUDA ends its list at the first name that is none */
            break;
        ret_cards[count++] = card;
        list += n + (list[n] == ',');
    }
    return count;
}

static int find_card(const char *device, int *ret_ordinal, int *ret_card, struct err *err)
{
    int cards[FAKEGPU_CARDS], count = visible(cards);
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "cuda:%d", i);
        if (!strcmp(device, name) || !strcmp(device, uuids[cards[i]]) ||
            (i == 0 && !strcmp(device, "cuda"))) {
            *ret_ordinal = i;
            *ret_card = cards[i];
            return 0;
        }
    }
    return err_set(err, -ENODEV, "%s: no such GPU: %d visible (CUDA_VISIBLE_DEVICES %s)", device, count,
                   getenv("CUDA_VISIBLE_DEVICES") ? getenv("CUDA_VISIBLE_DEVICES") : "not set");
}

static uint64_t card_bytes(void)
{
    const char *text = getenv("SPECONTEXT_FAKEGPU_BYTES");
    return text && text[0] ? strtoull(text, NULL, 10) : UINT64_C(2) << 30;
}

static int device_open(const char *device, struct gpu **ret_gpu, struct err *err)
{
    int ordinal = 0, card = 0, r = find_card(device, &ordinal, &card, err);
    if (r < 0)
        return r;
    struct gpu *gpu = mem_alloc(1, sizeof *gpu);
    pthread_mutex_init(&gpu->mutex, NULL);
    gpu->card = card;
    gpu->info = (struct gpu_info){.ordinal = ordinal,
                                  .multiprocessors = 132,
                                  .hopper = 1,
                                  .bytes_total = card_bytes(),
                                  .context_bytes = CONTEXT_BYTES};
    snprintf(gpu->info.name, sizeof gpu->info.name, "double of a GPU");
    snprintf(gpu->info.uuid, sizeof gpu->info.uuid, "%s", uuids[card]);
    r = fakegpu_take(gpu, CONTEXT_BYTES, &gpu->context_fd, err);
    if (r < 0) {
        mem_free(&gpu);
        return r;
    }
    gpu->context_bytes = CONTEXT_BYTES;
    *ret_gpu = gpu;
    return 0;
}

static void device_close(struct gpu **address)
{
    struct gpu *gpu = *address;
    if (!gpu)
        return;
    for (size_t i = 0; i < gpu->range_count; i++)
        fprintf(stderr, "fakegpu: close: %llu bytes at %p (kind %d) are not freed\n",
                (unsigned long long)gpu->ranges[i].bytes, (void *)gpu->ranges[i].at,
                (int)gpu->ranges[i].kind);
    if (gpu->range_count)
        abort();
    close(gpu->context_fd);
    pthread_mutex_destroy(&gpu->mutex);
    mem_free(&gpu->ranges);
    mem_free(&gpu->shapes);
    mem_free(address);
}

static const struct gpu_info *device_info(const struct gpu *gpu)
{
    return &gpu->info;
}

static int memory_free(struct gpu *gpu, uint64_t *ret_bytes)
{
    uint64_t used = fakegpu_used(gpu);
    *ret_bytes = gpu->info.bytes_total > used ? gpu->info.bytes_total - used : 0;
    return 0;
}

void fakegpu_break(struct gpu *gpu, const char *format, ...)
{
    va_list list;
    pthread_mutex_lock(&gpu->mutex);
    if (!gpu->error.code) {
        va_start(list, format);
        vsnprintf(gpu->error.text, sizeof gpu->error.text, format, list);
        va_end(list);
        __atomic_store_n(&gpu->error.code, -EIO, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&gpu->mutex);
}

/* Asked before each piece of work: without the lock. */
int fakegpu_sound(struct gpu *gpu)
{
    return __atomic_load_n(&gpu->error.code, __ATOMIC_SEQ_CST);
}

static int check(struct gpu *gpu, struct err *err)
{
    int r = fakegpu_sound(gpu);
    return r < 0 ? err_set(err, r, "%s", gpu->error.text) : 0;
}

static uint64_t library_bytes(const struct gpu *gpu)
{
    (void)gpu;
    return LIBRARY_BYTES;
}

static const struct gpu_api table = {
    .version = GPU_API_VERSION,
    .open = device_open,
    .close = device_close,
    .info = device_info,
    .memory_free = memory_free,
    .check = check,
    .alloc = fakegpu_alloc,
    .free = fakegpu_free,
    .alloc_host = fakegpu_alloc_host,
    .free_host = fakegpu_free_host,
    .host_register = fakegpu_host_register,
    .host_unregister = fakegpu_host_unregister,
    .ipc_export = fakegpu_ipc_export,
    .ipc_open = fakegpu_ipc_open,
    .ipc_close = fakegpu_ipc_close,
    .stream_create = fakegpu_stream_create,
    .stream_free = fakegpu_stream_free,
    .stream_follow = fakegpu_stream_follow,
    .stream_sync = fakegpu_stream_sync,
    .stream_done = fakegpu_stream_done,
    .copy = fakegpu_copy,
    .copy_rows = fakegpu_copy_rows,
    .fill = fakegpu_fill,
    .host_call = fakegpu_host_call,
    .event_create = fakegpu_event_create,
    .event_free = fakegpu_event_free,
    .event_record = fakegpu_event_record,
    .event_elapsed = fakegpu_event_elapsed,
    .flag_write = fakegpu_flag_write,
    .flag_wait = fakegpu_flag_wait,
    .capture_begin = fakegpu_capture_begin,
    .capture_end = fakegpu_capture_end,
    .graph_flags = fakegpu_graph_flags,
    .graph_launch = fakegpu_graph_launch,
    .graph_set = fakegpu_graph_set,
    .graph_free = fakegpu_graph_free,
    .matmul_prepare = fakegpu_matmul_prepare,
    .matmul = fakegpu_matmul,
    .product = fakegpu_product,
    .product_blocks = fakegpu_product_blocks,
    .library_bytes = library_bytes,
    .embed = fakegpu_embed,
    .mix = fakegpu_mix,
    .rmsnorm = fakegpu_rmsnorm,
    .headnorm = fakegpu_headnorm,
    .swiglu = fakegpu_swiglu,
    .narrow = fakegpu_narrow,
    .put_rows = fakegpu_put_rows,
    .rope_angles = fakegpu_rope_angles,
    .rope = fakegpu_rope,
    .rope_write = fakegpu_rope_write,
    .gather = fakegpu_gather,
    .scatter = fakegpu_scatter,
    .copy_pieces = fakegpu_copy_pieces,
    .copy_mapped = fakegpu_copy_mapped,
    .attn_work_bytes = fakegpu_attn_work_bytes,
    .attn = fakegpu_attn,
    .prefill = fakegpu_prefill,
    .keys_append = fakegpu_keys_append,
    .retrieval_work_bytes = fakegpu_retrieval_work_bytes,
    .retrieval = fakegpu_retrieval,
    .topk = fakegpu_topk,
    .sets_mark = fakegpu_sets_mark,
    .sets_changes = fakegpu_sets_changes,
    .sample = fakegpu_sample,
    .penalties = fakegpu_penalties,
};

const struct gpu_api *specontext_gpu_api(void);

__attribute__((visibility("default"))) const struct gpu_api *specontext_gpu_api(void)
{
    return &table;
}
