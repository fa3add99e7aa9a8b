/* Flags by stream memory operations, and graphs whose flag values are given anew at each launch.
 *
 * A flag operation that is captured becomes a node of its own (a batch of one memory operation). The node is
 * found as the stream's last dependency right after it was captured, and its value is set in the
 * instantiated graph before each launch, or ahead of it (gpu_graph_set). State: the capture that goes on in
 * this thread. */
#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "compute/cuda/gpu_cuda.h"

enum { FLAGS_MAX = 512 };

struct flag_node {
    CUgraphNode node;
    CUDA_BATCH_MEM_OP_NODE_PARAMS params;
    CUstreamBatchMemOpParams op;
    int set; /* the instance has op's value */
};

struct gpu_graph {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    uint32_t count;
    struct flag_node flags[]; /* [FLAGS_MAX] while captured */
};

static _Thread_local struct gpu_graph *capture;

/* Keeps the node that the last operation became. */
static int keep_node(struct CUstream_st *stream)
{
    enum cudaStreamCaptureStatus status;
    const cudaGraphNode_t *last;
    size_t count = 0;
    if (!capture)
        return 0;
    if (cudaStreamGetCaptureInfo(stream, &status, NULL, NULL, &last, NULL, &count) != cudaSuccess)
        return -EIO;
    if (status == cudaStreamCaptureStatusNone) /* another stream, that does not follow the captured one */
        return 0;
    if (status != cudaStreamCaptureStatusActive || count != 1)
        return -EIO;
    if (capture->count == FLAGS_MAX)
        return -E2BIG;
    struct flag_node *f = &capture->flags[capture->count];
    f->node = last[0];
    if (gpu_driver.node_get(f->node, &f->params) != CUDA_SUCCESS || f->params.count != 1)
        return -EIO;
    f->op = f->params.paramArray[0]; /* the array is the graph's: kept here */
    capture->count++;
    return 0;
}

int gpu_flag_write(uint32_t *flag, uint32_t value, struct CUstream_st *stream)
{
    if (gpu_driver.write_value(stream, (CUdeviceptr)(uintptr_t)flag, value, CU_STREAM_WRITE_VALUE_DEFAULT))
        return -EIO;
    return keep_node(stream);
}

int gpu_flag_wait(uint32_t *flag, uint32_t value, struct CUstream_st *stream)
{
    if (gpu_driver.wait_value(stream, (CUdeviceptr)(uintptr_t)flag, value, CU_STREAM_WAIT_VALUE_GEQ))
        return -EIO;
    return keep_node(stream);
}

int gpu_capture_begin(struct CUstream_st *stream, struct err *err)
{
    if (capture)
        return err_set(err, -EBUSY, "GPU: a capture goes on in this thread");
    cudaError_t status = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (status != cudaSuccess)
        return gpu_fail(err, status, "capture");
    capture = mem_alloc(1, sizeof *capture + FLAGS_MAX * sizeof *capture->flags);
    return 0;
}

int gpu_capture_end(struct gpu *gpu, struct CUstream_st *stream, struct gpu_graph **ret_graph,
                    struct err *err)
{
    (void)gpu;
    struct gpu_graph *g = capture;
    capture = NULL;
    *ret_graph = NULL;
    if (!g)
        return err_set(err, -EINVAL, "GPU: no capture goes on in this thread");
    cudaGraph_t graph = NULL;
    cudaError_t status = cudaStreamEndCapture(stream, &graph);
    if (status == cudaSuccess)
        status = cudaGraphInstantiate(&g->exec, graph, 0);
    /* The nodes name places in the graph they were captured into: it stays as long as the instance. */
    if (status != cudaSuccess) {
        if (graph)
            cudaGraphDestroy(graph);
        mem_free(&g);
        return gpu_fail(err, status, "graph");
    }
    g->graph = graph;
    *ret_graph = g;
    return 0;
}

uint32_t gpu_graph_flags(const struct gpu_graph *graph)
{
    return graph->count;
}

static int set_value(struct gpu_graph *graph, struct flag_node *f, uint32_t value)
{
    int writes = f->op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32;
    if (f->set && value == (writes ? f->op.writeValue.value : f->op.waitValue.value))
        return 0;
    if (writes)
        f->op.writeValue.value = value;
    else
        f->op.waitValue.value = value;
    f->params.paramArray = &f->op;
    f->set = gpu_driver.exec_node_set((CUgraphExec)graph->exec, f->node, &f->params) == CUDA_SUCCESS;
    return f->set ? 0 : -EIO;
}

int gpu_graph_set(struct gpu_graph *graph, const uint32_t *values)
{
    int r = 0;
    for (uint32_t i = 0; i < graph->count && r == 0; i++)
        r = set_value(graph, &graph->flags[i], values[i]);
    return r;
}

int gpu_graph_launch(struct gpu_graph *graph, const uint32_t *values, struct CUstream_st *stream)
{
    int r = gpu_graph_set(graph, values);
    return r < 0 ? r : gpu_status(cudaGraphLaunch(graph->exec, stream));
}

void gpu_graph_free(struct gpu_graph **graph)
{
    struct gpu_graph *g = *graph;
    if (!g)
        return;
    if (g->exec)
        cudaGraphExecDestroy(g->exec);
    if (g->graph)
        cudaGraphDestroy(g->graph);
    mem_free(graph);
}
