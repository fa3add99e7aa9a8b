/* Birth and death of a compute object: picks the kernels once, owns the pool and all scratch memory.
 *
 * Owner: the thread that created it. Operators never allocate; what they need is made here. The choice of
 * kernels must not change in the life of a process, since results of two paths differ in the last bits. */
#include "compute/compute.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/pool.h"
#include "compute/cpu/kernels.h"

enum { THREADS_MAX = 1024 };

#if defined(__x86_64__)
static int has_avx2(void)
{
    unsigned a, b, c, d; /* clang 14 has no name for F16C */
    int has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

static const struct kernels *choose(enum compute_isa isa)
{
#if defined(__x86_64__)
    if ((isa == COMPUTE_ISA_AUTO || isa == COMPUTE_ISA_AVX512) && has_avx512())
        return &kernels_avx512;
    if ((isa == COMPUTE_ISA_AUTO || isa == COMPUTE_ISA_AVX2) && has_avx2())
        return &kernels_avx2;
#endif
    return isa == COMPUTE_ISA_AUTO || isa == COMPUTE_ISA_REFERENCE ? &kernels_reference : NULL;
}

static const char *const isa_names[] = {
    [COMPUTE_ISA_AUTO] = "auto",
    [COMPUTE_ISA_REFERENCE] = "reference",
    [COMPUTE_ISA_AVX2] = "avx2",
    [COMPUTE_ISA_AVX512] = "avx512",
};

int compute_create_with(const struct compute_options *o, struct compute **ret_compute, struct err *err)
{
    if (strcmp(o->device, "cpu") != 0)
        return err_set(err, -ENODEV, "compute: device '%s': this build has only 'cpu'", o->device);
    if (o->threads < 1 || o->threads > THREADS_MAX)
        return err_set(err, -EINVAL, "compute: %d threads, expected 1 to %d", o->threads, THREADS_MAX);
    const struct kernels *kernels = choose(o->isa);
    if (!kernels)
        return err_set(err, -ENODEV, "compute: this processor lacks what '%s' needs (%s)", isa_names[o->isa],
                       o->isa == COMPUTE_ISA_AVX2 ? "avx2, fma, f16c" : "avx512 f, bw, vl, dq, vnni");
    struct compute *c = mem_alloc(1, sizeof *c);
    c->threads = o->threads;
    c->kernels = kernels;
    c->activations = o->activations;
    snprintf(c->name, sizeof c->name, "cpu %s%s", kernels->name,
             o->activations == COMPUTE_ACTIVATIONS_Q8 ? " q8" : "");
    c->pool = pool_create(o->threads, "compute");
    c->scratch = mem_alloc_aligned((size_t)o->threads, sizeof *c->scratch);
    c->rope = mem_alloc(1, sizeof *c->rope);
    c->shared = mem_alloc(SHARED_FLOATS, sizeof *c->shared);
    *ret_compute = c;
    return 0;
}

int compute_create(const char *device, int threads, enum compute_isa isa, struct compute **ret_compute,
                   struct err *err)
{
    struct compute_options options = {
        .device = device, .threads = threads, .isa = isa, .activations = COMPUTE_ACTIVATIONS_F32};
    return compute_create_with(&options, ret_compute, err);
}

void compute_free(struct compute **compute)
{
    struct compute *c = *compute;
    if (!c)
        return;
    pool_free(&c->pool);
    mem_free(&c->scratch);
    mem_free(&c->rope);
    mem_free(&c->shared);
    mem_free(compute);
}

const char *compute_name(const struct compute *compute)
{
    return compute->name;
}

struct pool *compute_pool(struct compute *c)
{
    return c->pool;
}
