/* What the files of the CUDA library share: the driver's functions, errors, flags and graphs. */
#ifndef COMPUTE_CUDA_GPU_CUDA_H
#define COMPUTE_CUDA_GPU_CUDA_H

#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime.h>

#include "compute/gpu.h"

struct gpu_driver { /* CUDA 12's functions; set by the first device that is opened */
    CUresult (*wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult (*write_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    CUresult (*node_get)(CUgraphNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *);
    CUresult (*exec_node_set)(CUgraphExec, CUgraphNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *);
};
extern struct gpu_driver gpu_driver;

int gpu_status(cudaError_t status); /* as a negative errno */
int gpu_fail(struct err *err, cudaError_t status, const char *what);

/* Device memory in use on a card by all processes; needs no context. -ENOENT, -ENODEV: cannot be read. */
int gpu_nvml_used(const char *uuid, uint64_t *ret_bytes);
/* Of this process alone. -ESRCH: it is not listed: no context yet, or pids are others than the driver's. One
 * thread at a time. */
int gpu_nvml_own(const char *uuid, uint64_t *ret_bytes);

int gpu_flag_write(uint32_t *flag, uint32_t value, struct CUstream_st *stream);
int gpu_flag_wait(uint32_t *flag, uint32_t value, struct CUstream_st *stream);
int gpu_capture_begin(struct CUstream_st *stream, struct err *err);
int gpu_capture_end(struct gpu *gpu, struct CUstream_st *stream, struct gpu_graph **ret_graph,
                    struct err *err);
uint32_t gpu_graph_flags(const struct gpu_graph *graph);
int gpu_graph_launch(struct gpu_graph *graph, const uint32_t *values, struct CUstream_st *stream);
int gpu_graph_set(struct gpu_graph *graph, const uint32_t *values);
void gpu_graph_free(struct gpu_graph **graph);

const struct gpu_api *specontext_gpu_api(void) __attribute__((visibility("default")));

#endif
