/* The next token of every sequence: what model/sampler.c chooses, without the logits leaving the GPU.
 *
 * One block a row. The CPU walks candidates in descending order; here the walk's end is found by radix
 * selection: by count for top_k, by mass for top_p and for the draw. The first digit is the distance from
 * the best logit in steps of 1/64, which spreads a vocabulary evenly over the bins; the others are those of
 * the keys. Masses are integers (units of 2^-42 of the best token's), so their sums depend on no order;
 * they are kept as three limbs of 14 bits that shared memory adds up without carries. Stateless. */
#include "compute/cuda/random.cuh"
#include "compute/cuda/select.cuh"

enum { LIMB_BITS = 14, LIMBS = 3, PENALTY_THREADS = 256, PASSES = 1 + SELECT_PASSES, LIST = 2048 };

#define MASS_ONE ((1ull << (LIMB_BITS * LIMBS)) - 1)

/* What may be chosen and how much it weighs. */
struct candidates {
    const float *logits;
    uint32_t vocab;
    float best;
    double least;       /* logits below weigh nothing (min_p) */
    double inverse;     /* 1 / temperature of the weights */
    uint32_t cut, ties; /* keys above `cut`, and the first `ties` of exactly this key; cut 0: all */
};

/* The search: by count, or by mass up to a share of the total. */
enum goal_kind { GOAL_COUNT, GOAL_MASS, GOAL_TOP_P, GOAL_DRAW };

struct goal {
    enum goal_kind kind;
    double share;   /* top_p, or the random number */
    uint64_t units; /* COUNT, MASS: what to reach */
};

struct found {
    uint32_t key;
    uint64_t nth; /* the walk ends at the nth candidate of exactly this key, from 1 */
};

struct select_memory {
    uint32_t bins[LIMBS][SELECT_BINS];
    uint64_t scan[2][SELECT_WARPS];
    struct select_found found;
    uint32_t id;
    uint64_t best;
    float list[LIST]; /* the logits that a first digit left, in order of ids */
    uint32_t list_id[LIST];
};

__device__ __forceinline__ uint64_t mass_of(const struct candidates &c, float logit)
{
    /* e^-30 is less than half a unit: much of a vocabulary needs no exponential. */
    double x = ((double)logit - c.best) * c.inverse;
    if (!(x > -30.0) || logit < c.least)
        return 0;
    uint64_t mass = (uint64_t)__double2ll_rn(exp(x) * 0x1p42);
    return mass < MASS_ONE ? mass : MASS_ONE;
}

__device__ __forceinline__ void add_mass(struct select_memory *m, uint32_t bin, uint64_t mass)
{
    for (int l = 0; l < LIMBS && mass; l++, mass >>= LIMB_BITS) {
        uint32_t limb = (uint32_t)mass & ((1u << LIMB_BITS) - 1);
        if (limb)
            atomicAdd(&m->bins[l][bin], limb);
    }
}

__device__ __forceinline__ uint64_t bin_total(const struct select_memory *m, uint32_t bin)
{
    uint64_t total = 0;
    for (int l = 0; l < LIMBS; l++)
        total += (uint64_t)m->bins[l][bin] << (LIMB_BITS * l);
    return total;
}

/* The digits found so far. */
struct prefix {
    uint32_t linear, key;
};

/* Ascends with the logit; the last bin takes all that is 32 and more below the best. */
__device__ __forceinline__ uint32_t linear_bin(const struct candidates &c, float logit)
{
    float steps = fminf((c.best - logit) * 64.0f, (float)(SELECT_BINS - 1));
    return SELECT_BINS - 1 - (uint32_t)steps;
}

/* Pass 0 is the linear digit, 1 to 3 are the key's; false where an earlier digit differs. */
__device__ __forceinline__ bool digit_of(const struct candidates &c, float logit, struct prefix prefix,
                                         int pass, uint32_t *ret_bin)
{
    uint32_t linear = linear_bin(c, logit), key;
    *ret_bin = linear;
    if (pass == 0)
        return true;
    if (linear != prefix.linear)
        return false;
    key = key_of(logit);
    *ret_bin = key >> select_shift(pass - 1) & select_mask(pass - 1);
    return select_matches(key, prefix.key, pass - 1);
}

__device__ __forceinline__ void add_candidate(struct select_memory *m, const struct candidates &c,
                                              enum goal_kind kind, struct prefix prefix, int pass,
                                              float logit)
{
    uint32_t bin;
    if (!digit_of(c, logit, prefix, pass, &bin) || (c.cut && key_of(logit) <= c.cut))
        return;
    if (kind == GOAL_COUNT)
        atomicAdd(&m->bins[0][bin], 1u);
    else
        add_mass(m, bin, mass_of(c, logit));
}

/* Totals of one pass's digits. Rows that begin on 16 bytes are read four at a time. */
__device__ __forceinline__ void fill_bins(struct select_memory *m, const struct candidates &c,
                                          enum goal_kind kind, struct prefix prefix, int pass)
{
    for (uint32_t i = threadIdx.x; i < LIMBS * SELECT_BINS; i += SELECT_THREADS)
        (&m->bins[0][0])[i] = 0;
    __syncthreads();
    uint32_t quads = ((uintptr_t)c.logits & 15) == 0 ? c.vocab / 4 : 0;
#pragma unroll 2
    for (uint32_t i = threadIdx.x; i < quads; i += SELECT_THREADS) {
        float4 v = ((const float4 *)c.logits)[i];
        add_candidate(m, c, kind, prefix, pass, v.x);
        add_candidate(m, c, kind, prefix, pass, v.y);
        add_candidate(m, c, kind, prefix, pass, v.z);
        add_candidate(m, c, kind, prefix, pass, v.w);
    }
    for (uint32_t i = quads * 4 + threadIdx.x; i < c.vocab; i += SELECT_THREADS)
        add_candidate(m, c, kind, prefix, pass, c.logits[i]);
    __syncthreads();
    /* Those of the cut's own key, of which only some are candidates, all weigh the same. */
    uint32_t bin;
    if (threadIdx.x == 0 && c.cut && digit_of(c, value_of(c.cut), prefix, pass, &bin)) {
        uint64_t mass = mass_of(c, value_of(c.cut));
        for (int l = 0; l < LIMBS; l++, mass >>= LIMB_BITS)
            m->bins[l][bin] += ((uint32_t)mass & ((1u << LIMB_BITS) - 1)) * c.ties;
    }
    __syncthreads();
}

/* share * total, share in [0, 1), rounded down or up without an error on the way: a share that falls on the
 * edge of a candidate must not slip to the next. */
__device__ __forceinline__ uint64_t share_of(double share, uint64_t total, bool up)
{
    int exponent;
    uint64_t mantissa = (uint64_t)ldexp(frexp(share, &exponent), 53);
    int shift = 53 - exponent; /* >= 53 */
    uint64_t low = mantissa * total, high = __umul64hi(mantissa, total), units, rest;
    if (shift < 64) {
        units = high << (64 - shift) | low >> shift;
        rest = low << (64 - shift);
    } else {
        units = shift < 128 ? high >> (shift - 64) : 0;
        rest = low | (shift < 128 && shift > 64 ? high << (128 - shift) : shift >= 128 ? high : 0);
    }
    return units + (up && rest ? 1 : 0);
}

__device__ __forceinline__ uint64_t goal_of(const struct goal &goal, uint64_t total)
{
    if (goal.kind == GOAL_COUNT || goal.kind == GOAL_MASS)
        return goal.units;
    uint64_t units = share_of(goal.share, total, goal.kind == GOAL_TOP_P) + (goal.kind == GOAL_DRAW);
    return units < 1 ? 1 : units < total ? units : total;
}

/* One digit: the bin in which the goal is reached, and the total of the bins above. *ret_total: of all
 * candidates. */
__device__ struct select_found select_digit(struct select_memory *m, const struct candidates &c,
                                            const struct goal &goal, struct prefix prefix, int pass,
                                            uint64_t *want)
{
    fill_bins(m, c, goal.kind, prefix, pass);
    uint32_t high = SELECT_BINS - 1 - 2 * threadIdx.x;
    uint64_t a = bin_total(m, high), b = bin_total(m, high - 1), total;
    uint64_t before = block_scan(a + b, m->scan[pass & 1], &total);
    if (pass == 0)
        *want = goal_of(goal, total);
    if (before < *want && *want <= before + a)
        m->found = {high, before};
    else if (before + a < *want && *want <= before + a + b)
        m->found = {high - 1, before + a};
    __syncthreads();
    struct select_found found = m->found;
    __syncthreads();
    return found;
}

/* Where the descending walk over the candidates first reaches the goal. */
__device__ struct found select_walk(struct select_memory *m, const struct candidates &c, struct goal goal)
{
    struct prefix prefix = {0, 0};
    uint64_t want = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        struct select_found found = select_digit(m, c, goal, prefix, pass, &want);
        if (pass == 0)
            prefix.linear = found.bin;
        else
            prefix.key |= found.bin << select_shift(pass - 1);
        want -= found.above;
    }
    uint64_t unit = goal.kind == GOAL_COUNT ? 1 : mass_of(c, value_of(prefix.key));
    struct found found = {prefix.key, unit ? (want + unit - 1) / unit : 1};
    return found;
}

/* Copies the candidates from linear bin `least` up to the list; false where they are too many. */
__device__ bool fill_list(struct select_memory *m, const struct candidates &c, uint32_t least,
                          uint32_t *ret_count)
{
    enum { EACH = 4 };
    uint64_t used = 0;
    int parity = 0;
    for (uint32_t base = 0; base < c.vocab && used <= LIST; base += SELECT_THREADS * EACH, parity ^= 1) {
        uint32_t first = base + threadIdx.x * EACH, mine = 0;
        float logit[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            logit[e] = first + e < c.vocab ? c.logits[first + e] : -INFINITY;
            mine += first + e < c.vocab && linear_bin(c, logit[e]) >= least;
        }
        uint64_t all, at = used + block_scan(mine, m->scan[parity], &all);
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (first + e < c.vocab && linear_bin(c, logit[e]) >= least) {
                if (at < LIST) {
                    m->list[at] = logit[e];
                    m->list_id[at] = first + e;
                }
                at++;
            }
        used += all;
    }
    __syncthreads();
    *ret_count = (uint32_t)used;
    return used <= LIST;
}

/* The first digit leaves few candidates of a vocabulary that is not flat: the rest of the work is theirs
 * alone. */
__device__ void narrow(struct select_memory *m, struct candidates *c, struct goal *goal)
{
    struct prefix none = {0, 0};
    uint64_t want = 0;
    struct select_found found = select_digit(m, *c, *goal, none, 0, &want);
    uint32_t count;
    if (!fill_list(m, *c, found.bin, &count))
        return;
    c->logits = m->list;
    c->vocab = count;
    if (goal->kind == GOAL_TOP_P)
        *goal = {GOAL_MASS, 0, want};
}

/* Id of the nth logit of exactly this key, in order of ids. */
__device__ uint32_t nth_of_key(struct select_memory *m, const struct candidates &c, struct found found)
{
    uint64_t seen = 0;
    int parity = 0;
    if (threadIdx.x == 0)
        m->id = 0;
    __syncthreads();
    for (uint32_t base = 0; base < c.vocab && seen < found.nth; base += SELECT_THREADS, parity ^= 1) {
        uint32_t i = base + threadIdx.x;
        uint64_t mine = i < c.vocab && key_of(c.logits[i]) == found.key, all;
        uint64_t before = seen + block_scan(mine, m->scan[parity], &all);
        if (mine && before + 1 == found.nth)
            m->id = i;
        seen += all;
    }
    __syncthreads();
    return m->id;
}

/* The draw from the whole vocabulary: the CPU walks it from the highest id down. A thread takes a range. */
__device__ uint32_t draw_by_id(struct select_memory *m, const struct candidates &c, double unit)
{
    uint32_t span = (c.vocab + SELECT_THREADS - 1) / SELECT_THREADS;
    uint32_t from = min(threadIdx.x * span, c.vocab), to = min(from + span, c.vocab);
    uint64_t mass = 0, total;
    for (uint32_t i = from; i < to; i++)
        mass += mass_of(c, c.logits[c.vocab - 1 - i]);
    uint64_t before = block_scan(mass, m->scan[0], &total);
    struct goal goal = {GOAL_DRAW, unit, 0};
    uint64_t want = goal_of(goal, total);
    if (before < want && want <= before + mass) {
        uint64_t sum = before;
        uint32_t i = from;
        for (; i < to; i++) {
            sum += mass_of(c, c.logits[c.vocab - 1 - i]);
            if (sum >= want)
                break;
        }
        m->id = c.vocab - 1 - i;
    }
    __syncthreads();
    return m->id;
}

/* Best logit, ties to the lower id; *ret_bad where no choice can be made. */
__device__ uint32_t find_best(struct select_memory *m, const float *logits, uint32_t vocab, bool *ret_bad)
{
    float most = -INFINITY;
    uint32_t id = UINT32_MAX;
    int bad = 0;
    if (threadIdx.x == 0)
        m->best = 0;
    uint32_t quads = ((uintptr_t)logits & 15) == 0 ? vocab / 4 : 0;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < quads; i += SELECT_THREADS) {
        float4 v = ((const float4 *)logits)[i];
        bad |= !(v.x < INFINITY && v.y < INFINITY && v.z < INFINITY && v.w < INFINITY);
        if (v.x > most)
            most = v.x, id = 4 * i;
        if (v.y > most)
            most = v.y, id = 4 * i + 1;
        if (v.z > most)
            most = v.z, id = 4 * i + 2;
        if (v.w > most)
            most = v.w, id = 4 * i + 3;
    }
    for (uint32_t i = quads * 4 + threadIdx.x; i < vocab; i += SELECT_THREADS) {
        bad |= !(logits[i] < INFINITY);
        if (logits[i] > most)
            most = logits[i], id = i;
    }
    uint64_t best = (uint64_t)key_of(most) << 32 | (uint32_t)~id;
    for (int step = 16; step; step >>= 1) {
        uint64_t other = __shfl_xor_sync(FULL_WARP, best, step);
        best = other > best ? other : best;
    }
    bad = __syncthreads_or(bad);
    if (threadIdx.x % 32 == 0)
        atomicMax((unsigned long long *)&m->best, (unsigned long long)best);
    __syncthreads();
    *ret_bad = bad || value_of((uint32_t)(m->best >> 32)) == -INFINITY;
    return ~(uint32_t)m->best;
}

__device__ uint32_t draw(struct select_memory *m, struct candidates c, const struct cuda_sample_params &p)
{
    bool limited = p.top_k && p.top_k < c.vocab;
    double unit = random_unit(p.seed, p.sequence, p.position);
    double least = p.min_p > 0 ? c.best + log((double)p.min_p) : -INFINITY;
    if (!limited && p.top_p >= 1) {
        c.least = least;
        c.inverse = 1.0 / p.temperature;
        return draw_by_id(m, c, unit);
    }
    struct goal goal = {limited ? GOAL_COUNT : GOAL_TOP_P, p.top_p, p.top_k};
    narrow(m, &c, &goal);
    struct found found = select_walk(m, c, goal);
    c.cut = found.key;
    c.ties = (uint32_t)found.nth;
    if (limited && p.top_p < 1) {
        found = select_walk(m, c, {GOAL_TOP_P, p.top_p, 0});
        c.cut = found.key;
        c.ties = (uint32_t)found.nth;
    }
    c.least = least;
    c.inverse = 1.0 / p.temperature;
    uint32_t at = nth_of_key(m, c, select_walk(m, c, {GOAL_DRAW, unit, 0}));
    return c.logits == m->list ? m->list_id[at] : at;
}

__global__ void __launch_bounds__(SELECT_THREADS) sample_kernel(struct cuda_sample s)
{
    __shared__ struct select_memory memory;
    uint32_t r = blockIdx.x;
    const float *logits = s.logits + r * s.stride;
    bool bad;
    uint32_t id = find_best(&memory, logits, s.vocab, &bad);
    struct cuda_sample_params p = s.params[r];
    if (!bad && p.temperature > 0 && p.top_k != 1) {
        struct candidates c = {logits, s.vocab, logits[id], -INFINITY, 1.0, 0, 0};
        __syncthreads();
        id = draw(&memory, c, p);
    }
    if (threadIdx.x == 0)
        s.ids[r] = bad ? -1 : (int32_t)id;
}

int cuda_sample(const struct cuda_sample *s, struct CUstream_st *stream)
{
    if (s->vocab == 0 || s->vocab > CUDA_VOCAB_MAX || s->stride < s->vocab || !s->params)
        return -EINVAL;
    if (s->n == 0)
        return 0;
    sample_kernel<<<s->n, SELECT_THREADS, 0, stream>>>(*s);
    return launch_status();
}

__global__ void __launch_bounds__(PENALTY_THREADS) penalty_kernel(struct cuda_penalties p)
{
    uint32_t t = blockIdx.x;
    float repeat = p.params[3 * t], presence = p.params[3 * t + 1], frequency = p.params[3 * t + 2];
    for (uint32_t i = p.begin[t] + threadIdx.x; i < p.begin[t + 1]; i += PENALTY_THREADS) {
        struct cuda_penalty_entry e = p.entries[i];
        if (e.id >= p.vocab)
            continue;
        float *at = p.logits + t * p.stride + e.id, logit = *at;
        logit = logit > 0 ? logit / repeat : logit * repeat;
        /* Rounded step by step, as the CPU's are. */
        *at = __fsub_rn(logit, __fadd_rn(presence, __fmul_rn((float)e.count, frequency)));
    }
}

int cuda_penalties(const struct cuda_penalties *p, struct CUstream_st *stream)
{
    if (p->vocab == 0 || p->stride < p->vocab)
        return -EINVAL;
    if (p->n == 0)
        return 0;
    penalty_kernel<<<p->n, PENALTY_THREADS, 0, stream>>>(*p);
    return launch_status();
}
