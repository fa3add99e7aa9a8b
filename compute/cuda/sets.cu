/* Selections as sets of bits; see sets.h.
 *
 * One block a list. Differences are two passes: cuda_sets_mark counts while it writes a set,
 * cuda_sets_changes adds up the counts before its list and writes positions in order. They go to device
 * memory first, since single words that are written over the link take a packet each; a last kernel sends
 * them in wide ones. Stateless. */
#include "compute/cuda/select.cuh"
#include "compute/cuda/sets.h"

enum { MARK_THREADS = 256, SEND_THREADS = 256, SEND_BLOCKS = 32 };

__device__ __forceinline__ uint32_t *set_at(const struct cuda_sets &s, uint32_t place, uint32_t list,
                                            uint32_t which)
{
    return s.bits + (((uint64_t)place * s.lists + list) * 2 + which) * s.words;
}

/* Index of a list's two counts. */
__device__ __forceinline__ uint64_t count_at(const struct cuda_sets &s, uint32_t query, uint32_t list)
{
    return ((uint64_t)query * s.lists + list) * 2;
}

__global__ void __launch_bounds__(MARK_THREADS) mark_kernel(struct cuda_sets_mark m)
{
    extern __shared__ uint32_t bits[];
    __shared__ uint32_t changed[2];
    const struct cuda_sets &s = m.sets;
    uint32_t r = blockIdx.x, query = m.first_query + r / m.heads, list = m.first_list + r % m.heads;
    uint32_t place = s.place[query], how = s.how[query], second = how & CUDA_SETS_SECOND;
    for (uint32_t i = threadIdx.x; i < s.words; i += MARK_THREADS)
        bits[i] = 0;
    if (threadIdx.x < 2)
        changed[threadIdx.x] = 0;
    __syncthreads();
    uint32_t positions = place < s.place_count ? min((uint64_t)m.row_count[r], m.index_stride) : 0;
    for (uint32_t i = threadIdx.x; i < positions; i += MARK_THREADS) {
        uint32_t p = m.index[r * m.index_stride + i];
        if (p / 32 < s.words)
            atomicOr(&bits[p / 32], 1u << p % 32);
    }
    __syncthreads();
    uint32_t added = 0, removed = 0;
    for (uint32_t i = threadIdx.x; i < s.words && place < s.place_count; i += MARK_THREADS) {
        uint32_t now = bits[i], before = how & CUDA_SETS_DIFFER ? set_at(s, place, list, !second)[i] : 0;
        set_at(s, place, list, second)[i] = now;
        added += __popc(now & ~before);
        removed += __popc(before & ~now);
    }
    added = __reduce_add_sync(FULL_WARP, added);
    removed = __reduce_add_sync(FULL_WARP, removed);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&changed[0], added);
        atomicAdd(&changed[1], removed);
    }
    __syncthreads();
    if (threadIdx.x < 2)
        s.count[count_at(s, query, list) + threadIdx.x] = changed[threadIdx.x];
}

__device__ __forceinline__ void write_positions(uint32_t *out, uint64_t at, uint64_t room, uint32_t bits,
                                                uint32_t first)
{
    for (; bits; bits &= bits - 1, at++)
        if (at < room)
            out[at] = first + __ffs(bits) - 1;
}

__global__ void __launch_bounds__(SELECT_THREADS) changes_kernel(struct cuda_sets_changes c)
{
    __shared__ uint64_t scan[2][SELECT_WARPS];
    const struct cuda_sets &s = c.sets;
    uint32_t list = blockIdx.x, query = c.first + blockIdx.y, place = s.place[query], how = s.how[query];
    uint64_t begin = count_at(s, c.first, 0), own = count_at(s, query, list), mine = 0, before;
    for (uint64_t i = begin + threadIdx.x; i < own; i += SELECT_THREADS)
        mine += s.count[i];
    block_scan(mine, scan[0], &before);
    uint64_t added_at = before, removed_at = before + s.count[own];
    if (threadIdx.x == 0 && list == s.lists - 1 && blockIdx.y == gridDim.y - 1)
        *c.total = (uint32_t)min(removed_at + s.count[own + 1], c.room);
    if (place >= s.place_count || (s.count[own] | s.count[own + 1]) == 0)
        return;
    const uint32_t *now = set_at(s, place, list, how & CUDA_SETS_SECOND);
    const uint32_t *old = set_at(s, place, list, !(how & CUDA_SETS_SECOND));
    int parity = 1;
    for (uint32_t base = 0; base < s.words; base += SELECT_THREADS, parity ^= 1) {
        uint32_t i = base + threadIdx.x, n = i < s.words ? now[i] : 0;
        uint32_t o = i < s.words && how & CUDA_SETS_DIFFER ? old[i] : 0;
        uint32_t added = n & ~o, removed = o & ~n;
        uint64_t all, ahead = block_scan(__popc(added) | (uint64_t)__popc(removed) << 32, scan[parity], &all);
        write_positions(c.work, added_at + (uint32_t)ahead, c.room, added, i * 32);
        write_positions(c.work, removed_at + (ahead >> 32), c.room, removed, i * 32);
        added_at += (uint32_t)all;
        removed_at += all >> 32;
    }
}

__global__ void __launch_bounds__(SEND_THREADS) send_kernel(struct cuda_sets_changes c)
{
    uint32_t quads = (*c.total + 3) / 4;
    for (uint32_t i = blockIdx.x * SEND_THREADS + threadIdx.x; i < quads; i += SEND_BLOCKS * SEND_THREADS)
        ((uint4 *)c.out)[i] = ((const uint4 *)c.work)[i];
}

static bool sets_are_valid(const struct cuda_sets *s)
{
    return s->words && s->words <= CUDA_SETS_WORDS_MAX && s->lists && s->place_count && s->bits && s->count &&
           s->place && s->how;
}

int cuda_sets_mark(const struct cuda_sets_mark *m, struct CUstream_st *stream)
{
    if (!sets_are_valid(&m->sets) || m->heads == 0 || m->first_list > m->sets.lists ||
        m->heads > m->sets.lists - m->first_list)
        return -EINVAL;
    if (m->rows == 0)
        return 0;
    mark_kernel<<<m->rows, MARK_THREADS, m->sets.words * sizeof(uint32_t), stream>>>(*m);
    return launch_status();
}

int cuda_sets_changes(const struct cuda_sets_changes *c, struct CUstream_st *stream)
{
    if (!sets_are_valid(&c->sets) || c->room % 4 || c->room > UINT32_MAX - 3 || c->n > 65535 || !c->total ||
        !is_aligned(c->work, 16) || !is_aligned(c->out, 16))
        return -EINVAL;
    if (c->n == 0)
        return 0;
    dim3 grid(c->sets.lists, c->n);
    changes_kernel<<<grid, SELECT_THREADS, 0, stream>>>(*c);
    send_kernel<<<SEND_BLOCKS, SEND_THREADS, 0, stream>>>(*c);
    return launch_status();
}
