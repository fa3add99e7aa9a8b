/* Movement of KV pieces: new ones into pages and slots, rows between mapped host memory and the device.
 *
 * The moves are bound by the link, so they use few blocks and keep many loads of 16 bytes in flight; the
 * rest of the chip belongs to whoever computes. Nothing here interprets a row, except that cuda_kv_write
 * rounds K and V to the pieces' type. A number out of range means that nothing is written. Stateless. */
#include "compute/cuda/launch.cuh"

enum { WRITE_THREADS = 256, MOVE_THREADS = 512, MOVE_BLOCKS = 8, MOVE_BLOCKS_MAX = 64, UNROLL = 4 };
enum { MAPPED_THREADS = 256, MAPPED_BLOCKS_MAX = 64 };
#define MAPPED_BYTES_MAX (UINT64_C(1) << 32)
enum { COPY_BATCH = 4 }; /* of a warp, 64 of a block: a sequence's 24,576 copies are 384 blocks */

/* A thread takes 8 elements of K or V. */
template <bool BF16> __global__ void __launch_bounds__(WRITE_THREADS) kv_write_kernel(struct cuda_kv_write w)
{
    launch_next();
    launch_wait();
    uint32_t units = 2 * (w.head_dim / 8);
    uint64_t i = (uint64_t)blockIdx.x * WRITE_THREADS + threadIdx.x;
    if (i >= (uint64_t)w.n * w.kv_heads * units)
        return;
    uint32_t unit = i % units, head = i / units % w.kv_heads, t = (uint32_t)(i / units / w.kv_heads);
    uint32_t row = w.rows ? w.rows[t] : t;
    if (row >= w.row_count)
        return;
    uint32_t item = w.head_items ? w.items[row * w.item_stride + head] : w.items[t];
    bool valid;
    uint64_t offset = piece_offset(w.kv, w.kv.at + row * w.kv.row_stride, head, item, &valid);
    if (!valid)
        return;
    bool is_v = unit >= units / 2;
    const float *from = (is_v ? w.v : w.k) + t * w.stride + (uint64_t)head * w.head_dim +
                        (is_v ? unit - units / 2 : unit) * 8;
    float4 a = *(const float4 *)from, b = *(const float4 *)(from + 4);
    *(uint4 *)(w.kv.base + offset + unit * 16) =
        make_uint4(pack<BF16>(a.x, a.y), pack<BF16>(a.z, a.w), pack<BF16>(b.x, b.y), pack<BF16>(b.z, b.w));
}

int cuda_kv_write(const struct cuda_kv_write *w, struct CUstream_st *stream)
{
    if (!view_is_valid(&w->kv) || w->kv_heads == 0 || w->head_dim == 0 || w->head_dim % 8 || w->stride % 4 ||
        w->kv.piece_bytes < 4 * w->head_dim || !is_aligned(w->k, 16) || !is_aligned(w->v, 16) || !w->items)
        return -EINVAL;
    if (w->n == 0)
        return 0;
    unsigned blocks = ceil_div((uint64_t)w->n * w->kv_heads * 2 * (w->head_dim / 8), WRITE_THREADS);
    if (w->kv.type == DTYPE_BF16)
        return launch_early(kv_write_kernel<true>, dim3(blocks), WRITE_THREADS, stream, *w);
    return launch_early(kv_write_kernel<false>, dim3(blocks), WRITE_THREADS, stream, *w);
}

struct rope_write {
    struct cuda_rope rope;
    struct cuda_kv_write write;
};

/* A thread takes a pair of a query or key, or two neighbours of a value. */
template <bool BF16> __global__ void __launch_bounds__(WRITE_THREADS) rope_write_kernel(struct rope_write a)
{
    const struct cuda_kv_write &w = a.write;
    uint32_t half = w.head_dim / 2, all = a.rope.heads + w.kv_heads, queries = a.rope.heads - w.kv_heads;
    uint64_t i = (uint64_t)blockIdx.x * WRITE_THREADS + threadIdx.x;
    uint32_t j = i % half, h = i / half % all, t = (uint32_t)(i / half / all);
    bool real = t < w.n, valid = false;
    uint64_t offset = 0;
    launch_next();
    if (real && h >= queries) {
        uint32_t head = (h - queries) % w.kv_heads, row = w.rows ? w.rows[t] : t;
        if (row < w.row_count)
            offset = piece_offset(w.kv, w.kv.at + row * w.kv.row_stride, head,
                                  w.head_items ? w.items[row * w.item_stride + head] : w.items[t], &valid);
        real = valid;
    }
    launch_wait();
    if (!real)
        return;
    uint16_t *piece = (uint16_t *)(w.kv.base + offset);
    if (h >= a.rope.heads) {
        const float *v = w.v + t * w.stride + (uint64_t)(h - a.rope.heads) * w.head_dim + 2 * j;
        *(uint32_t *)(piece + w.head_dim + 2 * j) = pack<BF16>(v[0], v[1]);
        return;
    }
    float2 angle = *(const float2 *)(a.rope.table + ((uint64_t)t * half + j) * 2);
    uint32_t first = a.rope.adjacent ? 2 * j : j, second = a.rope.adjacent ? first + 1 : first + half;
    float *x = (float *)a.rope.x + t * a.rope.stride + (uint64_t)h * w.head_dim;
    float p = x[first], q = x[second], r = p * angle.x - q * angle.y, s = p * angle.y + q * angle.x;
    if (h < queries) {
        x[first] = r;
        x[second] = s;
    } else {
        piece[first] = (uint16_t)pack<BF16>(r, 0);
        piece[second] = (uint16_t)pack<BF16>(s, 0);
    }
}

int cuda_rope_write(const struct cuda_rope *rope, const struct cuda_kv_write *w, struct CUstream_st *stream)
{
    bool joined = rope->type == DTYPE_F32 && rope->dims == w->head_dim && rope->head_dim == w->head_dim &&
                  rope->n == w->n && rope->stride == w->stride && rope->heads >= w->kv_heads &&
                  w->k == (float *)rope->x + (uint64_t)(rope->heads - w->kv_heads) * w->head_dim;
    if (!joined) {
        int r = cuda_rope(rope, stream);
        return r < 0 ? r : cuda_kv_write(w, stream);
    }
    if (!view_is_valid(&w->kv) || w->kv_heads == 0 || w->head_dim == 0 || w->head_dim % 8 || w->stride % 4 ||
        w->kv.piece_bytes < 4 * w->head_dim || !is_aligned(w->k, 16) || !is_aligned(w->v, 16) || !w->items ||
        !is_aligned(rope->table, 8))
        return -EINVAL;
    if (w->n == 0)
        return 0;
    const struct rope_write both = {*rope, *w};
    uint64_t threads = (uint64_t)w->n * (rope->heads + w->kv_heads) * (w->head_dim / 2);
    dim3 grid(ceil_div(threads, WRITE_THREADS));
    if (w->kv.type == DTYPE_BF16)
        return launch_early(rope_write_kernel<true>, grid, WRITE_THREADS, stream, both);
    return launch_early(rope_write_kernel<false>, grid, WRITE_THREADS, stream, both);
}

/* Where 16 bytes of a move lie on the device; NULL where the piece is out of range. */
__device__ __forceinline__ uint4 *unit_address(const struct cuda_moves &m, const struct cuda_move &move,
                                               uint32_t unit, uint32_t piece_units)
{
    uint32_t layer = unit / piece_units;
    bool valid;
    const uint64_t *at = m.kv.at + move.row * m.kv.row_stride + (m.first_layer + layer) * m.kv.layer_stride;
    uint64_t offset = piece_offset(m.kv, at, move.head, move.item, &valid);
    return valid ? (uint4 *)(m.kv.base + offset) + (unit - layer * piece_units) : NULL;
}

__device__ __forceinline__ uint4 load_relaxed(const uint4 *p)
{
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* A warp a move; its lanes take neighbouring 16 bytes of the run, UNROLL of them in flight each. Host
 * memory is read past all caches, since the host writes it between launches. */
template <bool TO_DEVICE> __global__ void __launch_bounds__(MOVE_THREADS) move_kernel(struct cuda_moves m)
{
    uint32_t lane = threadIdx.x % 32, warps = gridDim.x * (MOVE_THREADS / 32);
    uint32_t piece_units = m.kv.piece_bytes / 16, units = m.layers * piece_units;
    uint64_t run_bytes = (uint64_t)units * 16;
    for (uint32_t i = blockIdx.x * (MOVE_THREADS / 32) + threadIdx.x / 32; i < m.count; i += warps) {
        struct cuda_move move = m.moves[i];
        if (move.row >= m.row_count || move.head >= m.heads || move.host % 16 || move.host > m.host_bytes ||
            m.host_bytes - move.host < run_bytes)
            continue;
        uint4 *host = (uint4 *)(m.host_base + move.host);
        for (uint32_t first = lane; first < units; first += 32 * UNROLL) {
            uint4 v[UNROLL], *device[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                uint32_t unit = first + 32 * u;
                if (TO_DEVICE && unit < units)
                    v[u] = load_relaxed(host + unit);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                uint32_t unit = first + 32 * u;
                device[u] = unit < units ? unit_address(m, move, unit, piece_units) : NULL;
                if (!TO_DEVICE && device[u])
                    v[u] = *device[u];
            }
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (device[u])
                    *(TO_DEVICE ? device[u] : host + first + 32 * u) = v[u];
        }
    }
}

static int launch_moves(const struct cuda_moves *m, bool to_device, struct CUstream_st *stream)
{
    if (!view_is_valid(&m->kv) || m->layers == 0 || m->blocks > MOVE_BLOCKS_MAX ||
        !is_aligned(m->host_base, 16) || !is_aligned(m->moves, 16))
        return -EINVAL;
    if (m->count == 0)
        return 0;
    unsigned blocks = m->blocks ? m->blocks : (unsigned)MOVE_BLOCKS;
    if (to_device)
        move_kernel<true><<<blocks, MOVE_THREADS, 0, stream>>>(*m);
    else
        move_kernel<false><<<blocks, MOVE_THREADS, 0, stream>>>(*m);
    return launch_status();
}

int cuda_gather(const struct cuda_moves *moves, struct CUstream_st *stream)
{
    return launch_moves(moves, true, stream);
}

int cuda_scatter(const struct cuda_moves *moves, struct CUstream_st *stream)
{
    return launch_moves(moves, false, stream);
}

/* Pieces of up to UNROLL layers of one copy, all of them in flight before the first is stored. */
__device__ __forceinline__ void copy_layers(const struct cuda_copies &c, const struct cuda_copy &copy,
                                            uint32_t first, uint32_t lane)
{
    uint32_t units = c.from.piece_bytes / 16;
    const uint4 *from[UNROLL];
    uint4 *to[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        uint64_t layer = c.first_layer + first + u;
        bool from_valid = false, to_valid = false;
        uint64_t from_at = 0, to_at = 0;
        if (first + u < c.layers) {
            from_at =
                piece_offset(c.from, c.from.at + copy.row * c.from.row_stride + layer * c.from.layer_stride,
                             copy.head, copy.from, &from_valid);
            to_at = piece_offset(c.to, c.to.at + copy.row * c.to.row_stride + layer * c.to.layer_stride,
                                 copy.head, copy.to, &to_valid);
        }
        from[u] = (const uint4 *)(c.from.base + from_at);
        to[u] = from_valid && to_valid ? (uint4 *)(c.to.base + to_at) : NULL;
    }
    for (uint32_t unit = lane; unit < units; unit += 32) {
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (to[u])
                v[u] = from[u][unit];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (to[u])
                to[u][unit] = v[u];
    }
}

/* A warp reads COPY_BATCH copies at once, as they may lie in host memory, and makes one after the other. */
__global__ void __launch_bounds__(MOVE_THREADS) copy_kernel(struct cuda_copies c)
{
    uint32_t lane = threadIdx.x % 32, warps = gridDim.x * (MOVE_THREADS / 32);
    uint64_t warp = blockIdx.x * (MOVE_THREADS / 32) + threadIdx.x / 32;
    for (uint64_t base = warp * COPY_BATCH; base < c.count; base += (uint64_t)COPY_BATCH * warps) {
        uint32_t left = (uint32_t)(c.count - base < COPY_BATCH ? c.count - base : COPY_BATCH);
        struct cuda_copy mine = c.copies[base + (lane < left ? lane : 0)];
        for (uint32_t i = 0; i < left; i++) {
            struct cuda_copy copy;
            copy.from = __shfl_sync(FULL_WARP, mine.from, i);
            copy.to = __shfl_sync(FULL_WARP, mine.to, i);
            copy.head = (uint16_t)__shfl_sync(FULL_WARP, (uint32_t)mine.head, i);
            copy.row = (uint16_t)__shfl_sync(FULL_WARP, (uint32_t)mine.row, i);
            for (uint32_t first = 0; copy.row < c.row_count && copy.head < c.heads && first < c.layers;
                 first += UNROLL)
                copy_layers(c, copy, first, lane);
        }
    }
}

int cuda_copy_pieces(const struct cuda_copies *c, struct CUstream_st *stream)
{
    if (!view_is_valid(&c->from) || !view_is_valid(&c->to) || c->from.piece_bytes != c->to.piece_bytes ||
        c->layers == 0 || !is_aligned(c->copies, 4))
        return -EINVAL;
    if (c->count == 0)
        return 0;
    unsigned blocks = ceil_div(c->count, COPY_BATCH * (MOVE_THREADS / 32)), most = 8192;
    copy_kernel<<<blocks < most ? blocks : most, MOVE_THREADS, 0, stream>>>(*c);
    return launch_status();
}

struct mapped_copies {
    struct cuda_mapped_copy copy[CUDA_MAPPED_COPIES];
    bool wide[CUDA_MAPPED_COPIES]; /* on 16 bytes */
};

template <class UNIT> __device__ __forceinline__ void copy_units(const struct cuda_mapped_copy &c)
{
    uint32_t of_row = (uint32_t)(c.bytes / sizeof(UNIT)), units = of_row * c.rows;
    uint32_t threads = gridDim.x * MAPPED_THREADS;
    for (uint32_t i = blockIdx.x * MAPPED_THREADS + threadIdx.x; i < units; i += UNROLL * threads) {
        UNIT v[UNROLL];
        uint64_t at[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            uint32_t unit = i + u * threads, row = unit / of_row;
            at[u] = row * c.stride + (unit - row * of_row) * (uint32_t)sizeof(UNIT);
            if (unit < units)
                v[u] = load_relaxed((const UNIT *)((const uint8_t *)c.from + at[u]));
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * threads < units)
                *(UNIT *)((uint8_t *)c.to + at[u]) = v[u];
    }
}

/* Both units in one kernel: a step's first copy has then loaded the code of all. */
__global__ void __launch_bounds__(MAPPED_THREADS)
    copy_mapped_kernel(const __grid_constant__ struct mapped_copies all)
{
    if (all.wide[blockIdx.y])
        copy_units<uint4>(all.copy[blockIdx.y]);
    else
        copy_units<uint32_t>(all.copy[blockIdx.y]);
    __threadfence_system(); /* a launch that begins early reads it when this has ended, flushed or not */
}

int cuda_copy_mapped(const struct cuda_mapped_copy *copies, uint32_t count, struct CUstream_st *stream)
{
    struct mapped_copies all = {};
    uint64_t most = 0;
    if (count > CUDA_MAPPED_COPIES)
        return -EINVAL;
    for (uint32_t i = 0; i < count; i++) {
        const struct cuda_mapped_copy &c = copies[i];
        uint64_t stride = c.rows > 1 ? c.stride : 0, numbers = c.bytes | stride;
        if (!is_aligned(c.to, 4) || !is_aligned(c.from, 4) || numbers % 4 ||
            (c.rows > 1 && stride < c.bytes) || c.bytes > MAPPED_BYTES_MAX ||
            c.bytes * c.rows > MAPPED_BYTES_MAX)
            return -EINVAL;
        all.copy[i] = c;
        all.wide[i] = is_aligned(c.to, 16) && is_aligned(c.from, 16) && numbers % 16 == 0;
        uint64_t units = c.bytes * c.rows / (all.wide[i] ? 16 : 4);
        most = units > most ? units : most;
    }
    if (most == 0)
        return 0;
    unsigned blocks = ceil_div(most, MAPPED_THREADS), limit = MAPPED_BLOCKS_MAX;
    copy_mapped_kernel<<<dim3(blocks < limit ? blocks : limit, count), MAPPED_THREADS, 0, stream>>>(all);
    return launch_status();
}
