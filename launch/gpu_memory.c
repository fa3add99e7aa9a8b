/* See gpu_memory.h. No state. */
#include "launch/gpu_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "proto/memory.h"

/* Of a head that is cut from the model. */
static struct memory_gpu_head cut_sizes(const struct model_config *m)
{
    return (struct memory_gpu_head){.vocab = m->vocab,
                                    .hidden = m->hidden,
                                    .q_heads = m->q_heads,
                                    .kv_heads = m->kv_heads,
                                    .head_dim = m->head_dim,
                                    .groups = 1,
                                    .rope_dims = m->rope.dims};
}

/* The layout of the KV cache that model and head give. */
static void layout_of(const struct model *model, const struct head *head, uint32_t context,
                      struct kv_layout *ret)
{
    const struct model_config *m = model_config(model);
    memset(ret, 0, sizeof *ret);
    ret->layers = m->layers;
    ret->row_heads = ret->selection_heads = m->kv_heads;
    ret->piece_bytes = m->head_dim * 4; /* K and V, 16 bits an element */
    ret->context_max = context;
    layout_set_groups(ret, 1);
    if (!head)
        return;
    const struct head_config *h = head_config(head);
    ret->groups = h->groups;
    memcpy(ret->group_first_layer, h->group_first_layer, sizeof h->group_first_layer);
}

static uint32_t slots_of(const struct gpu_memory_load *load)
{
    return memory_slots(load->slots ? load->slots : load->budget + load->budget / 2, load->context);
}

static uint64_t arena_bytes(const struct gpu_memory_load *load, const struct kv_layout *layout)
{
    /* Where layers are left out no block outlives its sequence. */
    uint32_t requests = load->requests && !layout->host_first_layer ? load->requests : load->sequences;
    uint64_t arena = memory_host_bytes(layout, requests, load->context);
    return load->host_bytes && load->host_bytes < arena ? load->host_bytes : arena;
}

static void sum(struct gpu_memory *m)
{
    m->taken = m->contexts + m->libraries + m->mapping + m->weights + m->activations + m->features +
               m->workspace + m->tables + m->retriever_weights + m->retriever_keys + m->retriever_workspace;
    m->kv = m->cap > m->taken ? m->cap - m->taken : 0;
}

void gpu_memory_plan(const struct gpu_memory_load *load, uint64_t cap, struct gpu_memory *ret)
{
    const struct model_config *m = model_config(load->model);
    struct memory_gpu_model model = {.layers = m->layers,
                                     .hidden = m->hidden,
                                     .ffn = m->ffn,
                                     .vocab = m->vocab,
                                     .q_heads = m->q_heads,
                                     .kv_heads = m->kv_heads,
                                     .head_dim = m->head_dim,
                                     .rope_dims = m->rope.dims,
                                     .tied = m->tied};
    struct memory_gpu_load steps = {.context = load->context,
                                    .sequences = load->sequences,
                                    .budget = load->budget,
                                    .slots = slots_of(load)};
    if (load->head && load->with_retriever) {
        steps.feature_layers = head_config(load->head)->feature_layer_count;
        steps.feature_hidden = head_config(load->head)->feature_hidden;
    }
    uint64_t processes = load->with_retriever ? 3 : 2,
             context = (load->context_bytes ? load->context_bytes : MEMORY_GPU_CONTEXT) + MEMORY_GPU_ROUNDING;
    struct kv_layout layout;
    struct memory_gpu_decoder decoder;
    layout_of(load->model, load->head, load->context, &layout);
    memory_gpu_decoder(&model, &layout, &steps, &decoder);
    *ret = (struct gpu_memory){.cap = cap,
                               .mapping = arena_bytes(load, &layout) / MEMORY_GPU_MAPPING,
                               .contexts = processes * context + (load->mps ? MEMORY_GPU_MPS : 0),
                               .libraries = (processes - 1) * MEMORY_GPU_LIBRARIES,
                               .weights = decoder.weights,
                               .activations = decoder.activations,
                               .features = decoder.features,
                               .workspace = decoder.workspace,
                               .tables = decoder.tables + memory_gpu_tables(&layout, &steps)};
    if (load->with_retriever) {
        struct memory_gpu_head head = load->head ? head_sizes(load->head) : cut_sizes(m);
        struct memory_gpu_retriever retriever;
        head.keys_int8 = load->keys_int8;
        memory_gpu_retriever(&head, load->context, load->sequences, MEMORY_GPU_WORK, &retriever);
        ret->retriever_weights = retriever.weights;
        ret->retriever_keys = retriever.keys;
        ret->retriever_workspace = retriever.workspace;
    }
    sum(ret);
    /* Of the arena of fewer layers: the cache can only become larger, and those layers fewer. */
    uint32_t kept = memory_runs_kept(&layout, load->sequences, slots_of(load),
                                     load->kv_bytes ? load->kv_bytes : ret->kv, &load->through);
    layout.host_first_layer = layout_run_first(&layout, kept);
    ret->mapping = arena_bytes(load, &layout) / MEMORY_GPU_MAPPING;
    sum(ret);
    ret->store = context + memory_gpu_tables(&layout, &steps) + ret->kv;
    ret->decoder = context + MEMORY_GPU_LIBRARIES + ret->weights + ret->activations + ret->features +
                   ret->workspace + decoder.tables;
    if (load->with_retriever)
        ret->retriever = context + MEMORY_GPU_LIBRARIES + ret->retriever_weights + ret->retriever_keys +
                         ret->retriever_workspace;
}

static unsigned long long mib(uint64_t bytes)
{
    return (unsigned long long)((bytes + (1 << 20) - 1) >> 20);
}

int gpu_memory_check(const struct gpu_memory *p, uint64_t least, struct err *err)
{
    if (p->kv >= least)
        return 0;
    return err_set(err, -ENOMEM,
                   "GPU memory: of %llu MiB, contexts take %llu, libraries %llu, tables of the host's memory "
                   "%llu, weights %llu, activations %llu, "
                   "hidden states for the retriever %llu, workspace %llu, tables %llu, the retriever's "
                   "weights %llu, keys %llu and workspace %llu: "
                   "found %llu left for the KV cache, expected at least %llu (--gpu-memory, --sequences, "
                   "--ctx-size, --retriever-device)",
                   mib(p->cap), mib(p->contexts), mib(p->libraries), mib(p->mapping), mib(p->weights),
                   mib(p->activations), mib(p->features), mib(p->workspace), mib(p->tables),
                   mib(p->retriever_weights), mib(p->retriever_keys), mib(p->retriever_workspace),
                   (unsigned long long)(p->kv >> 20), mib(least));
}
