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
#endif

static const struct kernels *choose(enum compute_isa isa)
{
#if defined(__x86_64__)
    if (isa != COMPUTE_ISA_REFERENCE && has_avx2())
        return &kernels_avx2;
#endif
    return isa == COMPUTE_ISA_AVX2 ? NULL : &kernels_reference;
}

int compute_create(const char *device, int threads, enum compute_isa isa, struct compute **ret_compute,
                   struct err *err)
{
    if (strcmp(device, "cpu") != 0)
        return err_set(err, -ENODEV, "compute: device '%s': this build has only 'cpu'", device);
    if (threads < 1 || threads > THREADS_MAX)
        return err_set(err, -EINVAL, "compute: %d threads, expected 1 to %d", threads, THREADS_MAX);
    const struct kernels *kernels = choose(isa);
    if (!kernels)
        return err_set(err, -ENODEV, "compute: this processor lacks avx2, fma or f16c");
    struct compute *c = mem_alloc(1, sizeof *c);
    c->threads = threads;
    c->kernels = kernels;
    snprintf(c->name, sizeof c->name, "cpu %s", kernels->name);
    c->pool = pool_create(threads, "compute");
    c->scratch = mem_alloc_aligned((size_t)threads, sizeof *c->scratch);
    c->rope = mem_alloc(1, sizeof *c->rope);
    c->shared = mem_alloc(SHARED_FLOATS, sizeof *c->shared);
    *ret_compute = c;
    return 0;
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
