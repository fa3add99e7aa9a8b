/* Row-wise operators: embedding, sums of embeddings, norms, rotation, SwiGLU, conversions.
 *
 * All are bound by memory or, in a decode step, by the launch; so they are plain: a block a row, 16 bytes a
 * thread. Activations are f32; outputs that feed a product may be bf16. Stateless; queues on the caller's
 * stream. */
#include "compute/cuda/launch.cuh"

enum { THREADS = 256, MIX_THREADS = 128, EARLY_ROWS = 256 };

/* Four neighbours at index i of a row of f32 or bf16. */
__device__ __forceinline__ void store4(void *out, bool bf16, uint64_t i, float4 v)
{
    if (bf16)
        *(uint2 *)((uint16_t *)out + i) = make_uint2(pack<true>(v.x, v.y), pack<true>(v.z, v.w));
    else
        *(float4 *)((float *)out + i) = v;
}

__device__ __forceinline__ float4 load4(const void *in, bool bf16, uint64_t i)
{
    if (!bf16)
        return *(const float4 *)((const float *)in + i);
    uint2 raw = *(const uint2 *)((const uint16_t *)in + i);
    float2 a = unpack<true>(raw.x), b = unpack<true>(raw.y);
    return make_float4(a.x, a.y, b.x, b.y);
}

__global__ void __launch_bounds__(THREADS) embed_kernel(struct cuda_embed e)
{
    launch_next();
    launch_wait();
    uint32_t t = blockIdx.x, id = e.ids[t];
    id = id < e.rows ? id : e.rows - 1;
    const uint16_t *row = (const uint16_t *)e.table + (uint64_t)id * e.cols;
    for (uint32_t i = threadIdx.x * 4; i < e.cols; i += THREADS * 4)
        store4(e.out, e.out_type == DTYPE_BF16, (uint64_t)t * e.cols + i, load4(row, true, i));
}

int cuda_embed(const struct cuda_embed *e, struct CUstream_st *stream)
{
    if ((e->out_type != DTYPE_F32 && e->out_type != DTYPE_BF16) || e->cols == 0 || e->cols % 8 ||
        e->rows == 0 || !is_aligned(e->out, 16) || !is_aligned(e->table, 16))
        return -EINVAL;
    if (e->n == 0)
        return 0;
    return launch_early(embed_kernel, dim3(e->n), THREADS, stream, *e);
}

/* Each thread keeps its part of the row between the two passes: rows to KEEP * 4 * THREADS floats stay in
 * registers, the rest is read again (from the cache). With EARLY the weights are read before the launch
 * before has ended; they take registers then, which costs a large batch more than it gains. */
template <bool EARLY> __global__ void __launch_bounds__(THREADS) rmsnorm_kernel(struct cuda_rmsnorm r)
{
    enum { KEEP = 8 };
    __shared__ float shared[32];
    uint64_t row = (uint64_t)blockIdx.x * r.dim;
    bool out_bf16 = r.out_type == DTYPE_BF16, w_bf16 = r.weight_type == DTYPE_BF16;
    float4 kept[KEEP], weight[EARLY ? KEEP : 1];
    float sum = 0;
    int k = 0;
    launch_next();
#pragma unroll
    for (k = 0; k < KEEP; k++) {
        uint32_t i = (k * THREADS + threadIdx.x) * 4;
        if (EARLY && i < r.dim)
            weight[EARLY ? k : 0] = load4(r.weight, w_bf16, i);
    }
    launch_wait();
#pragma unroll
    for (k = 0; k < KEEP; k++) {
        uint32_t i = (k * THREADS + threadIdx.x) * 4;
        if (i >= r.dim)
            continue;
        float4 v = *(const float4 *)(r.x + row + i);
        if (r.add) {
            float4 a = *(const float4 *)(r.add + row + i);
            v = make_float4(v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w);
            *(float4 *)(r.x + row + i) = v;
        }
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        kept[k] = v;
    }
    for (uint32_t i = (KEEP * THREADS + threadIdx.x) * 4; i < r.dim; i += THREADS * 4) {
        float4 v = *(const float4 *)(r.x + row + i);
        if (r.add) {
            float4 a = *(const float4 *)(r.add + row + i);
            v = make_float4(v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w);
            *(float4 *)(r.x + row + i) = v;
        }
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    float factor = 1.0f / sqrtf(block_sum(sum, shared) / (float)r.dim + r.eps);
#pragma unroll
    for (k = 0; k < KEEP; k++) {
        uint32_t i = (k * THREADS + threadIdx.x) * 4;
        if (i >= r.dim)
            continue;
        float4 v = kept[k], w = EARLY ? weight[EARLY ? k : 0] : load4(r.weight, w_bf16, i);
        store4(r.out, out_bf16, row + i,
               make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w));
    }
    for (uint32_t i = (KEEP * THREADS + threadIdx.x) * 4; i < r.dim; i += THREADS * 4) {
        float4 v = *(const float4 *)(r.x + row + i), w = load4(r.weight, w_bf16, i);
        store4(r.out, out_bf16, row + i,
               make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w));
    }
}

int cuda_rmsnorm(const struct cuda_rmsnorm *r, struct CUstream_st *stream)
{
    if ((r->out_type != DTYPE_F32 && r->out_type != DTYPE_BF16) ||
        (r->weight_type != DTYPE_F32 && r->weight_type != DTYPE_BF16) || r->dim == 0 || r->dim % 4 ||
        !is_aligned(r->x, 16) || !is_aligned(r->add, 16) || !is_aligned(r->out, 16) ||
        !is_aligned(r->weight, 16))
        return -EINVAL;
    if (r->n == 0)
        return 0;
    if (r->n <= EARLY_ROWS)
        return launch_early(rmsnorm_kernel<true>, dim3(r->n), THREADS, stream, *r);
    return launch_early(rmsnorm_kernel<false>, dim3(r->n), THREADS, stream, *r);
}

/* A block takes MIX_THREADS * 4 columns of a token; a thread keeps the sums of all views of its four. Views
 * are filled up with weights of zero to a number known to the compiler. */
template <int VIEWS> __global__ void __launch_bounds__(MIX_THREADS) mix_kernel(struct cuda_mix m)
{
    __shared__ uint32_t rows[CUDA_MIX_TAPS_MAX];
    __shared__ float weights[CUDA_MIX_TAPS_MAX * VIEWS]; /* [lag][view] */
    uint32_t t = blockIdx.x, at = min(m.at[t], m.id_count - 1);
    uint32_t lags = min(m.tap_count, min(m.positions[t], at) + 1);
    for (uint32_t i = threadIdx.x; i < lags * VIEWS; i += MIX_THREADS) {
        uint32_t lag = i / VIEWS, view = i % VIEWS, row = min(m.ids[at - lag], m.rows - 1);
        weights[i] = view < m.views ? m.taps[view * m.tap_count + lag] * m.row_scale[row] : 0;
        if (view == 0)
            rows[lag] = row;
    }
    __syncthreads();
    uint32_t column = (blockIdx.y * MIX_THREADS + threadIdx.x) * 4;
    if (column >= m.dim)
        return;
    float4 sum[VIEWS] = {};
#pragma unroll 8
    for (uint32_t lag = 0; lag < lags; lag++) {
        float4 x = load4(m.table, true, (uint64_t)rows[lag] * m.dim + column);
#pragma unroll
        for (int v = 0; v < VIEWS; v++) {
            float w = weights[lag * VIEWS + v];
            sum[v].x += w * x.x;
            sum[v].y += w * x.y;
            sum[v].z += w * x.z;
            sum[v].w += w * x.w;
        }
    }
    float4 norm = load4(m.weight, false, column);
#pragma unroll
    for (int v = 0; v < VIEWS; v++)
        if (v < (int)m.views)
            store4(m.out, true, ((uint64_t)t * m.views + v) * m.dim + column,
                   make_float4(sum[v].x * norm.x, sum[v].y * norm.y, sum[v].z * norm.z, sum[v].w * norm.w));
}

int cuda_mix(const struct cuda_mix *m, struct CUstream_st *stream)
{
    if (m->views == 0 || m->views > CUDA_MIX_VIEWS_MAX || m->tap_count == 0 ||
        m->tap_count > CUDA_MIX_TAPS_MAX || m->dim == 0 || m->dim % 4 || m->rows == 0 || m->id_count == 0 ||
        !is_aligned(m->out, 16) || !is_aligned(m->table, 16) || !is_aligned(m->weight, 16))
        return -EINVAL;
    if (m->n == 0)
        return 0;
    dim3 grid(m->n, ceil_div(m->dim, MIX_THREADS * 4));
    if (m->views == 1)
        mix_kernel<1><<<grid, MIX_THREADS, 0, stream>>>(*m);
    else if (m->views == 2)
        mix_kernel<2><<<grid, MIX_THREADS, 0, stream>>>(*m);
    else if (m->views <= 4)
        mix_kernel<4><<<grid, MIX_THREADS, 0, stream>>>(*m);
    else if (m->views <= 8)
        mix_kernel<8><<<grid, MIX_THREADS, 0, stream>>>(*m);
    else
        mix_kernel<16><<<grid, MIX_THREADS, 0, stream>>>(*m);
    return launch_status();
}

/* A warp a head. */
__global__ void __launch_bounds__(THREADS) headnorm_kernel(struct cuda_headnorm h)
{
    launch_next();
    launch_wait();
    uint64_t item = (uint64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    uint32_t lane = threadIdx.x % 32;
    if (item >= (uint64_t)h.n * h.heads)
        return;
    float *x = h.x + item / h.heads * h.stride + item % h.heads * h.dim;
    float sum = 0;
    for (uint32_t i = lane * 4; i < h.dim; i += 128) {
        float4 v = *(const float4 *)(x + i);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    float factor = 1.0f / sqrtf(warp_sum(sum) / (float)h.dim + h.eps);
    for (uint32_t i = lane * 4; i < h.dim; i += 128) {
        float4 v = *(const float4 *)(x + i), w = load4(h.weight, h.weight_type == DTYPE_BF16, i);
        *(float4 *)(x + i) =
            make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
    }
}

int cuda_headnorm(const struct cuda_headnorm *h, struct CUstream_st *stream)
{
    if ((h->weight_type != DTYPE_F32 && h->weight_type != DTYPE_BF16) || h->dim == 0 || h->dim % 4 ||
        h->stride % 4 || h->stride < (uint64_t)h->heads * h->dim || !is_aligned(h->x, 16) ||
        !is_aligned(h->weight, 16))
        return -EINVAL;
    if (h->n == 0 || h->heads == 0)
        return 0;
    return launch_early(headnorm_kernel, dim3(ceil_div((uint64_t)h->n * h->heads, THREADS / 32)), THREADS,
                        stream, *h);
}

__global__ void __launch_bounds__(THREADS) swiglu_kernel(struct cuda_swiglu s)
{
    launch_next();
    launch_wait();
    uint32_t i = (blockIdx.x * THREADS + threadIdx.x) * 4, t = blockIdx.y;
    if (i >= s.dim)
        return;
    float4 g = *(const float4 *)(s.gate + t * s.stride + i), u = *(const float4 *)(s.up + t * s.stride + i);
    store4(
        s.out, s.out_type == DTYPE_BF16, (uint64_t)t * s.dim + i,
        make_float4(silu_times(g.x, u.x), silu_times(g.y, u.y), silu_times(g.z, u.z), silu_times(g.w, u.w)));
}

int cuda_swiglu(const struct cuda_swiglu *s, struct CUstream_st *stream)
{
    if ((s->out_type != DTYPE_F32 && s->out_type != DTYPE_BF16) || s->dim == 0 || s->dim % 4 ||
        s->stride % 4 || s->stride < s->dim || s->n > 65535 || !is_aligned(s->out, 16) ||
        !is_aligned(s->gate, 16) || !is_aligned(s->up, 16))
        return -EINVAL;
    if (s->n == 0)
        return 0;
    dim3 grid(ceil_div(s->dim, THREADS * 4), s->n);
    return launch_early(swiglu_kernel, grid, THREADS, stream, *s);
}

static unsigned grid_for(uint64_t items)
{
    uint64_t blocks = (items + THREADS - 1) / THREADS;
    return blocks < 4096 ? (unsigned)blocks : 4096;
}

template <bool BF16>
__global__ void __launch_bounds__(THREADS) narrow_kernel(uint16_t *out, const float *x, uint64_t count)
{
    uint64_t step = (uint64_t)gridDim.x * THREADS;
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step)
        out[i] = (uint16_t)pack<BF16>(x[i], 0);
}

int cuda_narrow(void *out, enum dtype out_type, const float *x, uint64_t count, struct CUstream_st *stream)
{
    if (!is_16bit(out_type))
        return -EINVAL;
    if (count == 0)
        return 0;
    if (out_type == DTYPE_BF16)
        narrow_kernel<true><<<grid_for(count), THREADS, 0, stream>>>((uint16_t *)out, x, count);
    else
        narrow_kernel<false><<<grid_for(count), THREADS, 0, stream>>>((uint16_t *)out, x, count);
    return launch_status();
}

__global__ void __launch_bounds__(THREADS) put_rows_kernel(struct cuda_put_rows p)
{
    uint32_t t = blockIdx.x, row = p.rows[t];
    if (row >= p.row_count)
        return;
    for (uint32_t i = threadIdx.x * 4; i < p.dim; i += THREADS * 4)
        store4(p.out, true, row * p.stride + i, *(const float4 *)(p.x + (uint64_t)t * p.dim + i));
}

int cuda_put_rows(const struct cuda_put_rows *p, struct CUstream_st *stream)
{
    if (p->dim == 0 || p->dim % 4 || p->stride % 4 || p->stride < p->dim || !is_aligned(p->out, 8) ||
        !is_aligned(p->x, 16))
        return -EINVAL;
    if (p->n == 0)
        return 0;
    put_rows_kernel<<<p->n, THREADS, 0, stream>>>(*p);
    return launch_status();
}

__global__ void __launch_bounds__(THREADS) angles_kernel(struct cuda_rope_angles a)
{
    launch_next();
    launch_wait();
    uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    uint32_t half = a.dims / 2;
    if (i >= (uint64_t)a.n * half)
        return;
    double sine, cosine;
    sincos((double)a.positions[i / half] * (double)a.inv_freq[i % half], &sine, &cosine);
    a.table[2 * i] = (float)(cosine * (double)a.scale);
    a.table[2 * i + 1] = (float)(sine * (double)a.scale);
}

int cuda_rope_angles(const struct cuda_rope_angles *a, struct CUstream_st *stream)
{
    if (a->dims == 0 || a->dims % 2)
        return -EINVAL;
    if (a->n == 0)
        return 0;
    return launch_early(angles_kernel, dim3(ceil_div((uint64_t)a->n * (a->dims / 2), THREADS)), THREADS,
                        stream, *a);
}

/* A thread a pair; the pairs of a head are neighbours, so both halves are read in whole lines. */
__global__ void __launch_bounds__(THREADS) rope_kernel(struct cuda_rope r)
{
    launch_next();
    launch_wait();
    uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    uint32_t half = r.dims / 2;
    if (i >= (uint64_t)r.n * r.heads * half)
        return;
    uint32_t j = i % half, h = i / half % r.heads;
    uint64_t t = i / half / r.heads, at = t * r.stride + (uint64_t)h * r.head_dim;
    float2 angle = *(const float2 *)(r.table + (t * half + j) * 2);
    uint64_t first = at + (r.adjacent ? 2 * j : j), second = r.adjacent ? first + 1 : first + half;
    float a, b;
    if (r.type == DTYPE_BF16) {
        uint16_t *x = (uint16_t *)r.x;
        a = unpack<true>(x[first]).x, b = unpack<true>(x[second]).x;
        x[first] = (uint16_t)pack<true>(a * angle.x - b * angle.y, 0);
        x[second] = (uint16_t)pack<true>(a * angle.y + b * angle.x, 0);
        return;
    }
    float *x = (float *)r.x;
    a = x[first], b = x[second];
    x[first] = a * angle.x - b * angle.y;
    x[second] = a * angle.y + b * angle.x;
}

int cuda_rope(const struct cuda_rope *r, struct CUstream_st *stream)
{
    if ((r->type != DTYPE_F32 && r->type != DTYPE_BF16) || r->dims == 0 || r->dims % 2 ||
        r->dims > r->head_dim || r->stride < (uint64_t)r->heads * r->head_dim || !is_aligned(r->table, 8))
        return -EINVAL;
    if (r->n == 0 || r->heads == 0)
        return 0;
    return launch_early(rope_kernel, dim3(ceil_div((uint64_t)r->n * r->heads * (r->dims / 2), THREADS)),
                        THREADS, stream, *r);
}
