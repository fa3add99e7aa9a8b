/* Movement: KV pieces, and copies between mapped host memory and the device. */
#include <cuda_runtime_api.h>
#include <errno.h>

#include "tests/gpu/gpu_test.h"

enum {
    HEADS = 3,
    DIM = 64,
    PIECE = 4 * DIM,
    PAGE = 64,
    PAGES = 4,
    ROWS = 2,
    SLOTS = 100,
    UNITS = 128,
    SLABS = 3
};
enum { LAYERS = 4 };

/* Tables of [ROWS][LAYERS][PAGES] offsets that do not overlap. */
static uint64_t *tables(uint32_t entries, uint32_t entry_bytes)
{
    uint64_t *at = gpu_host((size_t)ROWS * LAYERS * entries * 8);
    for (uint32_t i = 0; i < ROWS * LAYERS * entries; i++)
        at[i] = (uint64_t)(i * 37 % (ROWS * LAYERS * entries)) * entry_bytes + 16;
    return at;
}

static struct cuda_kv_view make_view(bool slotted, enum dtype type, uint64_t **ret_at)
{
    uint32_t entries = slotted ? SLABS : PAGES, bytes = slotted ? UNITS * PIECE : HEADS * PAGE * PIECE;
    *ret_at = tables(entries, bytes);
    size_t memory = (size_t)ROWS * LAYERS * entries * bytes + 32;
    struct cuda_kv_view kv = {.base = gpu_alloc(memory),
                              .device_bytes = memory,
                              .row_stride = LAYERS * entries,
                              .layer_stride = entries,
                              .at_count = entries,
                              .slotted = slotted,
                              .page_tokens = PAGE,
                              .slots = SLOTS,
                              .units_per_slab = UNITS,
                              .piece_bytes = PIECE,
                              .type = type};
    kv.at = gpu_upload(*ret_at, (size_t)ROWS * LAYERS * entries * 8);
    return kv;
}

static struct kv_view cpu_view(const struct cuda_kv_view *kv, uint8_t *base, const uint64_t *at)
{
    return (struct kv_view){
        base, at, kv->slotted, kv->page_tokens, kv->slots, kv->units_per_slab, kv->piece_bytes, kv->type};
}

static void test_kv_write(void)
{
    enum { N = 7, STRIDE = 3 * HEADS * DIM };
    static const uint32_t paged[N] = {0, 1, 63, 64, 65, 255, 256}, rows[N] = {0, 1, 0, 1, 0, 1, 0};
    for (int variant = 0; variant < 4; variant++) {
        bool slotted = variant & 1;
        uint64_t *at;
        struct cuda_kv_view kv = make_view(slotted, variant & 2 ? DTYPE_F16 : DTYPE_BF16, &at);
        float *x = gpu_normals(N * STRIDE, 1), *device = gpu_upload(x, N * STRIDE * 4);
        uint32_t slots[ROWS * HEADS] = {5, 99, 0, 17, 100, 64}; /* slot 100 is past the end: not written */
        struct cuda_kv_write write = {.kv = kv,
                                      .k = device,
                                      .v = device + HEADS * DIM,
                                      .stride = STRIDE,
                                      .rows = gpu_upload(rows, sizeof rows),
                                      .item_stride = HEADS,
                                      .head_items = slotted,
                                      .row_count = ROWS,
                                      .n = slotted ? 2 : N,
                                      .kv_heads = HEADS,
                                      .head_dim = DIM};
        write.items = slotted ? gpu_upload(slots, sizeof slots) : gpu_upload(paged, sizeof paged);
        EXPECT(cuda_kv_write(&write, NULL) == 0);
        uint8_t *ref = gpu_host(kv.device_bytes);
        memset(ref, 0xff, kv.device_bytes);
        for (uint32_t t = 0; t < write.n; t++)
            for (uint32_t h = 0; h < HEADS; h++) {
                uint32_t item = slotted ? slots[rows[t] * HEADS + h] : paged[t];
                struct kv_view view = cpu_view(&kv, ref, at + rows[t] * kv.row_stride);
                if (item >= (slotted ? SLOTS : PAGES * PAGE))
                    continue;
                /* The CPU writes all heads of a place: into a copy, of which one head is kept. */
                uint8_t *copy = gpu_host(kv.device_bytes);
                view.base = copy;
                struct kv_place place = {&view, &item, 1};
                compute_kv_write(gpu_compute, &place, x + t * STRIDE, x + t * STRIDE + HEADS * DIM, 1, HEADS,
                                 DIM);
                uint64_t unit = h * SLOTS + item;
                uint64_t offset = slotted ? view.at[unit / UNITS] + unit % UNITS * PIECE
                                          : view.at[item / PAGE] + (h * PAGE + item % PAGE) * PIECE;
                memcpy(ref + offset, copy + offset, PIECE);
            }
        gpu_equal("kv_write", gpu_download(kv.base, kv.device_bytes), ref, kv.device_bytes);
    }
}

/* Both launches in one give what they give one after the other: queries and pieces. */
static void test_rope_write(void)
{
    enum { N = 7, QUERIES = 5, STRIDE = (QUERIES + 2 * HEADS) * DIM };
    static const uint32_t items[N] = {0, 1, 63, 64, 65, 255, 256}, rows[N] = {0, 1, 0, 1, 0, 1, 0};
    for (int variant = 0; variant < 6; variant++) {
        uint64_t *at;
        struct cuda_kv_view kv = make_view(false, variant & 1 ? DTYPE_F16 : DTYPE_BF16, &at);
        float *x = gpu_normals(N * STRIDE, 1), *device[2];
        uint32_t dims = variant < 4 ? DIM : DIM / 2; /* where a part of a head is left alone: two launches */
        float *table = gpu_upload(gpu_normals(N * DIM, 1), N * DIM * 4);
        uint8_t *memory[2];
        for (int joined = 0; joined < 2; joined++) {
            device[joined] = gpu_upload(x, N * STRIDE * 4);
            struct cuda_rope rope = {device[joined],  DTYPE_F32, STRIDE, table,           N,
                                     QUERIES + HEADS, DIM,       dims,   variant >> 1 & 1};
            struct cuda_kv_write write = {.kv = kv,
                                          .k = device[joined] + QUERIES * DIM,
                                          .v = device[joined] + (QUERIES + HEADS) * DIM,
                                          .stride = STRIDE,
                                          .rows = gpu_upload(rows, sizeof rows),
                                          .items = gpu_upload(items, sizeof items),
                                          .row_count = ROWS,
                                          .n = N,
                                          .kv_heads = HEADS,
                                          .head_dim = DIM};
            EXPECT(cudaMemset(kv.base, 0xff, kv.device_bytes) == cudaSuccess);
            if (joined)
                EXPECT(cuda_rope_write(&rope, &write, NULL) == 0);
            else
                EXPECT(cuda_rope(&rope, NULL) == 0 && cuda_kv_write(&write, NULL) == 0);
            memory[joined] = gpu_download(kv.base, kv.device_bytes);
            device[joined] = gpu_download(device[joined], N * STRIDE * 4);
        }
        gpu_equal("pieces", memory[1], memory[0], kv.device_bytes);
        for (int t = 0; t < N; t++)
            gpu_equal("queries", device[1] + t * STRIDE, device[0] + t * STRIDE, QUERIES * DIM * 4);
    }
}

/* Where a piece lies, of a layer counted from 0. */
static uint64_t offset_of(const struct cuda_kv_view *kv, const uint64_t *at, uint32_t row, uint32_t layer,
                          uint32_t head, uint32_t item)
{
    const uint64_t *list = at + row * kv->row_stride + layer * kv->layer_stride;
    uint64_t unit = (uint64_t)head * SLOTS + item;
    return kv->slotted ? list[unit / UNITS] + unit % UNITS * PIECE
                       : list[item / PAGE] + (head * PAGE + item % PAGE) * PIECE;
}

static void test_gather_scatter(void)
{
    enum { COUNT = 150, RUN = 3 * PIECE, HOST = 512 * RUN };
    void *mapped;
    uint8_t *host = gpu_mapped(HOST, &mapped);
    for (int i = 0; i < HOST; i++)
        host[i] = (uint8_t)gpu_random();
    for (int slotted = 0; slotted < 2; slotted++) {
        uint64_t *at;
        struct cuda_kv_view kv = make_view(slotted, DTYPE_F16, &at);
        struct cuda_move moves[COUNT];
        uint8_t *ref = gpu_host(kv.device_bytes), *initial = gpu_host(HOST);
        memset(ref, 0xff, kv.device_bytes);
        memcpy(initial, host, HOST);
        for (uint32_t i = 0; i < COUNT; i++) {
            struct cuda_move m = {(uint64_t)(i * 3) * RUN, i % 90, (uint16_t)(i % HEADS), (uint16_t)(i / 90)};
            m.host = i == 20 ? HOST - 16 : i == 21 ? UINT64_MAX - 15 : m.host;
            m.item = i == 22 ? UINT32_MAX : m.item;
            m.row = i == 23 ? ROWS : m.row;
            m.head = i == 24 ? HEADS : m.head;
            moves[i] = m;
            for (uint32_t layer = 0; layer < 3 && (i < 20 || i > 24); layer++) {
                uint64_t offset = offset_of(&kv, at, m.row, 1 + layer, m.head, m.item);
                memcpy(ref + offset, host + m.host + layer * PIECE, PIECE);
            }
        }
        struct cuda_moves gather = {kv,   mapped, HOST, gpu_upload(moves, sizeof moves), COUNT, 1, 3,
                                    ROWS, HEADS,  0};
        EXPECT(cuda_gather(&gather, NULL) == 0);
        gpu_equal("gather", gpu_download(kv.base, kv.device_bytes), ref, kv.device_bytes);
        memset(host, 0, HOST);
        gather.blocks = 3;
        EXPECT(cuda_scatter(&gather, NULL) == 0);
        EXPECT(cudaDeviceSynchronize() == cudaSuccess);
        for (uint32_t i = 0; i < 512; i++)
            if (i % 3 || i >= 3 * COUNT || (i >= 60 && i <= 72))
                memset(initial + (size_t)i * RUN, 0, RUN);
        gpu_equal("scatter", host, initial, HOST);
        for (int i = 0; i < HOST; i++)
            host[i] = (uint8_t)gpu_random();
    }
}

/* From pages to slots, and back. */
static void test_copy_pieces(void)
{
    enum { COUNT = 150, FIRST = 1, RUN_LAYERS = 3 };
    for (int back = 0; back < 2; back++) {
        uint64_t *from_at, *to_at;
        struct cuda_kv_view from = make_view(back, DTYPE_F16, &from_at);
        struct cuda_kv_view to = make_view(!back, DTYPE_F16, &to_at);
        uint8_t *source = gpu_host(from.device_bytes), *ref = gpu_host(to.device_bytes);
        for (uint64_t i = 0; i < from.device_bytes; i++)
            source[i] = (uint8_t)gpu_random();
        EXPECT(cudaMemcpy(from.base, source, from.device_bytes, cudaMemcpyHostToDevice) == cudaSuccess);
        memset(ref, 0xff, to.device_bytes);
        struct cuda_copy copies[COUNT];
        for (uint32_t i = 0; i < COUNT; i++) {
            uint32_t number = i % 90 / HEADS, slot = number * 3 + 1, position = (number * 37 + 5) % 256;
            struct cuda_copy c = {back ? slot : position, back ? position : slot, (uint16_t)(i % HEADS),
                                  (uint16_t)(i / 90)};
            c.from = i == 20 ? UINT32_MAX : i == 21 ? (back ? SLOTS : PAGES * PAGE) : c.from;
            c.to = i == 22 ? UINT32_MAX : i == 23 ? (back ? PAGES * PAGE : SLOTS) : c.to;
            c.row = i == 24 ? ROWS : c.row;
            c.head = i == 25 ? HEADS : c.head;
            copies[i] = c;
            for (uint32_t layer = FIRST; layer < FIRST + RUN_LAYERS && (i < 20 || i > 25); layer++)
                memcpy(ref + offset_of(&to, to_at, c.row, layer, c.head, c.to),
                       source + offset_of(&from, from_at, c.row, layer, c.head, c.from), PIECE);
        }
        struct cuda_copies all = {.from = from,
                                  .to = to,
                                  .copies = gpu_upload(copies, sizeof copies),
                                  .count = COUNT,
                                  .first_layer = FIRST,
                                  .layers = RUN_LAYERS,
                                  .row_count = ROWS,
                                  .heads = HEADS};
        EXPECT(cuda_copy_pieces(&all, NULL) == 0);
        gpu_equal("copy_pieces", gpu_download(to.base, to.device_bytes), ref, to.device_bytes);
        gpu_equal("copy_pieces source", gpu_download(from.base, from.device_bytes), source,
                  from.device_bytes);
        all.to.piece_bytes *= 2;
        EXPECT(cuda_copy_pieces(&all, NULL) == -EINVAL);
    }
}

/* Both units, both directions, one thread's worth and more than all threads hold, and rows; what lies around
 * stays. */
static void test_copy_mapped(void)
{
    enum { ALL = 3 << 20, SIZES = 6 };
    static const size_t bytes[SIZES] = {4, 12, 4096, 18 << 10, 1 << 20, (2 << 20) + 20};
    uint8_t *host, *mapped, *device = gpu_alloc(ALL), *ref = gpu_host(ALL);
    EXPECT(cudaHostAlloc((void **)&host, ALL, cudaHostAllocMapped) == cudaSuccess);
    EXPECT(cudaHostGetDevicePointer((void **)&mapped, host, 0) == cudaSuccess);
    for (int i = 0; i < SIZES * 4; i++) {
        size_t n = bytes[i / 4], at = i % 2 ? 4 : 16;
        bool to_device = i % 4 < 2;
        for (size_t b = 0; b < ALL; b++)
            host[b] = (uint8_t)gpu_random();
        memcpy(ref, host, ALL);
        EXPECT(cudaMemset(device, 0x5a, ALL) == cudaSuccess);
        struct cuda_mapped_copy copy = {to_device ? device + at : mapped + at,
                                        to_device ? mapped + 64 + at : device + 64 + at, n, 0, 1};
        EXPECT(cuda_copy_mapped(&copy, 1, NULL) == 0);
        EXPECT(cudaDeviceSynchronize() == cudaSuccess);
        if (to_device) {
            memset(host, 0x5a, ALL);
            memcpy(host + at, ref + 64 + at, n);
            gpu_equal("copy_mapped to the device", gpu_download(device, ALL), host, ALL);
        } else {
            memset(ref + at, 0x5a, n);
            gpu_equal("copy_mapped to the host", host, ref, ALL);
        }
    }
    /* Several at once, of rows with room between them. */
    struct cuda_mapped_copy copies[CUDA_MAPPED_COPIES + 1] = {{device, mapped, 96, 4096, 32},
                                                              {device + 128, mapped + 128, 36, 4096, 32},
                                                              {device + (1 << 20), mapped, 1 << 20, 0, 1},
                                                              {device + 64, mapped, 0, 0, 1},
                                                              {device + 64, mapped, 16, 16, 0},
                                                              {device + (2 << 20), mapped + 4, 52, 52, 999},
                                                              {device, mapped, 4, 4, 1}};
    for (size_t b = 0; b < ALL; b++)
        host[b] = (uint8_t)gpu_random();
    memset(ref, 0x5a, ALL);
    for (int i = 0; i < CUDA_MAPPED_COPIES; i++)
        for (uint32_t row = 0; row < copies[i].rows; row++)
            memcpy(ref + ((uint8_t *)copies[i].to - device) + row * copies[i].stride,
                   host + ((const uint8_t *)copies[i].from - mapped) + row * copies[i].stride,
                   copies[i].bytes);
    EXPECT(cudaMemset(device, 0x5a, ALL) == cudaSuccess);
    EXPECT(cuda_copy_mapped(copies, CUDA_MAPPED_COPIES, NULL) == 0);
    gpu_equal("copy_mapped of several", gpu_download(device, ALL), ref, ALL);
    EXPECT(cuda_copy_mapped(copies, CUDA_MAPPED_COPIES + 1, NULL) == -EINVAL);
    EXPECT(cuda_copy_mapped(copies, 0, NULL) == 0);
    static const struct cuda_mapped_copy wrong[] = {
        {NULL, NULL, 6, 0, 1},      {(void *)2, NULL, 4, 0, 1},
        {NULL, (void *)1, 4, 0, 1}, {NULL, NULL, 16, 12, 2},
        {NULL, NULL, 16, 18, 2},    {NULL, NULL, UINT64_MAX / 4 + 1, UINT64_MAX / 4 + 1, 4}};
    for (int i = 0; i < COUNT_OF(wrong); i++)
        EXPECT(cuda_copy_mapped(&wrong[i], 1, NULL) == -EINVAL);
    EXPECT(cudaFreeHost(host) == cudaSuccess);
}

/* What a launch that begins early reads before it waits (gemv: its weights) is there, whoever wrote it. The
 * sums are small whole numbers, exact. */
static void test_copy_mapped_before_an_early_launch(void)
{
    enum { PRODUCTS = 12, ROUNDS = 10, N_ROWS = 1024, COLS = 2048, WEIGHTS = N_ROWS * COLS };
    uint16_t *host[2], *mapped[2], *w = gpu_alloc(WEIGHTS * 2), *x = gpu_host(COLS * 2);
    float *out = gpu_alloc((size_t)PRODUCTS * N_ROWS * 4), *ref = gpu_host((size_t)PRODUCTS * N_ROWS * 4);
    for (int s = 0; s < 2; s++) {
        host[s] = gpu_mapped(WEIGHTS * 2, (void **)&mapped[s]);
        for (int i = 0; i < WEIGHTS; i++)
            host[s][i] = s ? 0x4000 : 0x3f80; /* bf16: 2, 1 */
    }
    for (int i = 0; i < COLS; i++)
        x[i] = 0x3f80;
    for (int i = 0; i < PRODUCTS * N_ROWS; i++)
        ref[i] = COLS << (i / N_ROWS % 2);
    struct cuda_gemv gemv = {.w = w, .x = gpu_upload(x, COLS * 2), .rows = N_ROWS, .cols = COLS, .n = 1};
    struct CUstream_st *stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    EXPECT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    for (int captured = 0; captured < 2; captured++) {
        EXPECT(cudaMemset(out, 0xff, (size_t)PRODUCTS * N_ROWS * 4) == cudaSuccess);
        EXPECT(cudaDeviceSynchronize() == cudaSuccess);
        if (captured)
            EXPECT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        for (int i = 0; i < PRODUCTS; i++) {
            struct cuda_mapped_copy copy = {w, mapped[i % 2], WEIGHTS * 2, 0, 1};
            gemv.out = out + (size_t)i * N_ROWS;
            EXPECT(cuda_copy_mapped(&copy, 1, stream) == 0 && cuda_gemv(&gemv, stream) == 0);
        }
        if (captured) {
            EXPECT(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
            EXPECT(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
            for (int i = 0; i < ROUNDS; i++)
                EXPECT(cudaGraphLaunch(exec, stream) == cudaSuccess);
        }
        EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);
        gpu_equal(captured ? "in a graph" : "in a stream", gpu_download(out, (size_t)PRODUCTS * N_ROWS * 4),
                  ref, (size_t)PRODUCTS * N_ROWS * 4);
    }
    EXPECT(cudaGraphExecDestroy(exec) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    EXPECT(cudaStreamDestroy(stream) == cudaSuccess);
}

/* Numbers of both signs, another row for each seed; leaves the random ones to other tests as they were. */
static float *numbers(size_t count, size_t seed)
{
    float *x = gpu_host(count * sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = (float)((i * 31 + seed * 57) % 211) / 64 - 1.5f;
    return x;
}

/* The same of what plain loads read, and read before, through caches: rope_write, its rows and its table of
 * places. Each launch writes both to where the one before did not. */
static void test_copy_mapped_before_rope_write(void)
{
    enum { N = 7, STRIDE = 3 * HEADS * DIM, LAUNCHES = 12, TABLE = ROWS * LAYERS * PAGES * 8 };
    static const uint32_t items[N] = {0, 1, 63, 64, 65, 128, 255};
    uint64_t *at, *host_at[2], *mapped_at[2];
    uint32_t *host_rows[2], *mapped_rows[2], *rows = gpu_alloc(N * 4);
    struct cuda_kv_view kv = make_view(false, DTYPE_BF16, &at);
    for (int s = 0; s < 2; s++) {
        host_rows[s] = gpu_mapped(N * 4, (void **)&mapped_rows[s]);
        host_at[s] = gpu_mapped(TABLE, (void **)&mapped_at[s]);
        memcpy(host_at[s], at, TABLE);
        for (int p = 0; p < PAGES / 2 && s; p++) { /* pages of row 1 change places */
            uint64_t *of_row = host_at[s] + LAYERS * PAGES, first = of_row[p];
            of_row[p] = of_row[PAGES - 1 - p];
            of_row[PAGES - 1 - p] = first;
        }
        for (int t = 0; t < N; t++)
            host_rows[s][t] = s;
    }
    float *table = gpu_upload(numbers(N * DIM, LAUNCHES), N * DIM * 4), *x[LAUNCHES];
    uint32_t *device_items = gpu_upload(items, sizeof items);
    for (int i = 0; i < LAUNCHES; i++)
        x[i] = gpu_upload(numbers(N * STRIDE, i), N * STRIDE * 4);
    uint8_t *memory[2];
    for (int early = 0; early < 2; early++) {
        float *copy = gpu_alloc(N * STRIDE * 4);
        EXPECT(cudaMemset(kv.base, 0xff, kv.device_bytes) == cudaSuccess);
        for (int i = 0; i < LAUNCHES; i++) {
            struct cuda_mapped_copy copies[2] = {{rows, mapped_rows[i % 2], N * 4, 0, 1},
                                                 {(void *)kv.at, mapped_at[i % 2], TABLE, 0, 1}};
            struct cuda_rope rope = {copy, DTYPE_F32, STRIDE, table, N, 2 * HEADS, DIM, DIM, 1};
            struct cuda_kv_write write = {.kv = kv,
                                          .k = copy + HEADS * DIM,
                                          .v = copy + 2 * HEADS * DIM,
                                          .stride = STRIDE,
                                          .rows = rows,
                                          .items = device_items,
                                          .row_count = ROWS,
                                          .n = N,
                                          .kv_heads = HEADS,
                                          .head_dim = DIM};
            EXPECT(cudaMemcpyAsync(copy, x[i], N * STRIDE * 4, cudaMemcpyDeviceToDevice, NULL) ==
                   cudaSuccess);
            EXPECT(cuda_copy_mapped(copies, 2, NULL) == 0);
            if (!early)
                EXPECT(cudaDeviceSynchronize() == cudaSuccess);
            EXPECT(cuda_rope_write(&rope, &write, NULL) == 0);
        }
        memory[early] = gpu_download(kv.base, kv.device_bytes);
    }
    gpu_equal("pieces", memory[1], memory[0], kv.device_bytes);
}

const struct gpu_test tests_moves[] = {{"kv_write", test_kv_write},
                                       {"rope_write", test_rope_write},
                                       {"gather_scatter", test_gather_scatter},
                                       {"copy_pieces", test_copy_pieces},
                                       {"copy_mapped", test_copy_mapped},
                                       {"copy_mapped_early", test_copy_mapped_before_an_early_launch},
                                       {"copy_mapped_tables", test_copy_mapped_before_rope_write},
                                       {NULL, NULL}};
