/* What the benches of CUDA operators share: memory with random contents, the time of a launch, a line of the
 * table. One stream; whatever fails ends the program with the line where it did. */
#ifndef BENCH_LAB_LAB_CUH
#define BENCH_LAB_LAB_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#define OK(call) lab_check((int)(call), __FILE__, __LINE__)

extern cudaStream_t lab_stream;

/* Ends the program unless the status, of CUDA, cuBLASLt or a launcher, is 0. */
void lab_check(int status, const char *file, int line);

/* Makes lab_stream. */
void lab_begin(void);

/* Device memory, for cudaFree. */
void *lab_device(uint64_t bytes);
void *lab_upload(const void *data, uint64_t bytes);

/* `count` values, never zero: bf16 of magnitude 2^-3 to 2^-1, both signs; floats, about normal with the
 * standard deviation `scale`. */
void *lab_bf16(uint64_t count);
float *lab_floats(uint64_t count, float scale);

/* Writes such floats over device memory, in lab_stream. */
void lab_fill_floats(float *out, uint64_t count, uint32_t seed, float scale);

/* The offsets i * bytes, i < entries, in random order: host memory, for free(). */
uint64_t *lab_permuted(uint64_t entries, uint64_t bytes);

/* Queues one launch into lab_stream and returns its status; `index` counts launches, for inputs that
 * rotate. */
typedef int (*lab_launch)(void *arg, int index);

/* Seconds that one launch takes: `launches` of them make a graph, which is run several times; the median. */
double lab_seconds(lab_launch launch, void *arg, int launches);

/* A line of the table: the time, its floor (both in seconds), the floor's share of it. */
void lab_report(const char *name, const char *shape, double seconds, double floor);

#endif
