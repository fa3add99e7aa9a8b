/* The parts of bench_cuda, each a few lines of its table, and the rates that floors go by. */
#ifndef BENCH_LAB_BENCH_CUDA_CUH
#define BENCH_LAB_BENCH_CUDA_CUH

#include "bench/lab/lab.cuh"

/* Cuts of an 8B model; a piece: K and V of one position and KV head in bf16; a page: positions. */
enum { KV_HEADS = 8, Q_HEADS = 32, DIM = 128, PIECE = 512, PAGE = 64 };

enum { LAUNCHES = 8, SETS_MAX = 16 };

/* Bytes a second: a copy on the device, read and written; over the link from the host, to the host. */
extern double copy_rate, link_rate, link_back_rate;

void bench_attn(void);
void bench_prefill(void);
void bench_products(void);
void bench_rows(void);
void bench_retrieval(void); /* Top-K of what it scored and the sets made of that, too */
void bench_sample(void);
void bench_moves(void);

#endif
