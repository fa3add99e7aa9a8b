/* Inputs of a step on a GPU; see inputs_gpu.h. Owner: the device thread; the stream reads pinned memory,
 * and writes the chosen ids there, between the queueing of a copy and the end of the step. */
#include "decoder/inputs_gpu.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

enum { LINE = 64, ALIGN = 16, PENALTIES_INITIAL = 4096 };

/* Byte offsets of a batch of n tokens, e entries. */
struct early {
    size_t positions, counts, features, params, penalty_begin, penalty_params, bytes; /* ids: 0 */
};

struct inputs_gpu {
    struct gpu_device *device;
    const struct gpu_api *api;
    uint32_t tokens_max, entries_max, vocab;
    uint64_t early_max, rows_max; /* bytes of the blocks */
    uint8_t *host;                /* early, rows [phase], ids, flags [phase], arrival */
    uint8_t *host_device;         /* the same for kernels and flags */
    uint8_t *copy;                /* device: early, rows (of the phase copied last) */
    uint64_t copy_bytes;

    struct cuda_penalty_entry *penalties, *penalties_device; /* pinned; kernels read them there */
    uint32_t penalties_max;
    uint64_t generation;
    uint32_t *occurrences; /* [vocab] zeros between uses */

    const struct step_record *record; /* of this step */
    const struct stepper_spec *spec;
    struct early at;
    uint32_t tokens, entries, rows, penalized, span_max, count_max, exported;
    uint32_t wanted[LIMIT_SEQUENCES]; /* token of each sampling row */
    uint32_t part_of[LIMIT_SEQUENCES];
};

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

static struct early early_of(uint32_t n, uint32_t e)
{
    struct early at;
    at.positions = round_up(n * sizeof(uint32_t), ALIGN);
    at.counts = 2 * at.positions;
    at.features = 3 * at.positions;
    at.params = 4 * at.positions;
    at.penalty_begin = round_up(at.params + e * sizeof(struct cuda_sample_params), ALIGN);
    at.penalty_params = round_up(at.penalty_begin + (e + 1) * sizeof(uint32_t), ALIGN);
    at.bytes = round_up(at.penalty_params + e * 3 * sizeof(float), ALIGN);
    return at;
}

/* A rows block: rows [n], then spans [e]. */
static size_t spans_at(uint32_t n)
{
    return round_up(n * sizeof(uint32_t), ALIGN);
}

static size_t rows_bytes(uint32_t n, uint32_t e)
{
    return spans_at(n) + e * sizeof(struct cuda_span);
}

static size_t rows_at(const struct inputs_gpu *in, unsigned phase)
{
    return in->early_max + phase * in->rows_max;
}

static size_t ids_at(const struct inputs_gpu *in)
{
    return rows_at(in, INPUTS_GPU_PHASES);
}

static size_t go_at(const struct inputs_gpu *in, unsigned phase)
{
    return ids_at(in) + round_up(in->entries_max * sizeof(int32_t), LINE) + phase * LINE;
}

/* ---- life ---- */

static int make_penalties(struct inputs_gpu *in, uint32_t count, struct err *err)
{
    void *host, *mapped;
    int r = in->api->alloc_host(in->device->gpu, count * sizeof *in->penalties, &host, &mapped, err);
    if (r < 0)
        return r;
    if (in->penalties)
        in->api->free_host(in->device->gpu, in->penalties);
    in->penalties = host;
    in->penalties_device = mapped;
    in->penalties_max = count;
    in->generation++;
    return 0;
}

int inputs_gpu_create(struct gpu_device *device, const struct pass_gpu_options *limits, uint32_t vocab,
                      struct inputs_gpu **ret_inputs, struct err *err)
{
    CHECK(limits->entries_max <= LIMIT_SEQUENCES);
    struct inputs_gpu *in = mem_alloc(1, sizeof *in);
    in->device = device;
    in->api = device->api;
    in->tokens_max = limits->tokens_max;
    in->entries_max = limits->entries_max;
    in->vocab = vocab;
    in->occurrences = mem_alloc(vocab, sizeof *in->occurrences);
    in->early_max = round_up(early_of(in->tokens_max, in->entries_max).bytes, LINE);
    in->rows_max = round_up(rows_bytes(in->tokens_max, in->entries_max), LINE);
    in->copy_bytes = ids_at(in);
    void *host = NULL, *mapped = NULL, *copy = NULL;
    int r = in->api->alloc_host(device->gpu, go_at(in, INPUTS_GPU_PHASES + 1), &host, &mapped, err);
    in->host = host;
    in->host_device = mapped;
    if (r == 0)
        r = gpu_device_alloc(device, GPU_DEVICE_ACTIVATIONS, in->copy_bytes, &copy, err);
    in->copy = copy;
    if (r == 0)
        r = make_penalties(in, PENALTIES_INITIAL, err);
    if (r < 0) {
        inputs_gpu_free(&in);
        return r;
    }
    memset(in->host, 0, go_at(in, INPUTS_GPU_PHASES + 1));
    *ret_inputs = in;
    return 0;
}

void inputs_gpu_free(struct inputs_gpu **inputs)
{
    struct inputs_gpu *in = *inputs;
    if (!in)
        return;
    gpu_device_release(in->device, GPU_DEVICE_ACTIVATIONS, in->copy_bytes, in->copy);
    if (in->host)
        in->api->free_host(in->device->gpu, in->host);
    if (in->penalties)
        in->api->free_host(in->device->gpu, in->penalties);
    mem_free(&in->occurrences);
    mem_free(inputs);
}

/* ---- a step ---- */

static void lay_tokens(struct inputs_gpu *in)
{
    uint32_t *ids = (uint32_t *)in->host, *positions = (uint32_t *)(in->host + in->at.positions),
             *counts = (uint32_t *)(in->host + in->at.counts),
             *features = (uint32_t *)(in->host + in->at.features);
    in->span_max = in->count_max = in->exported = 0;
    for (uint32_t e = 0; e < in->entries; e++) {
        const struct step_entry *entry = &in->record->entry[e];
        uint32_t row = in->spec->parts[e].features;
        in->exported += row != EXPORT_NONE;
        for (uint32_t i = 0; i < entry->count; i++) {
            uint32_t t = entry->token_at + i;
            features[t] = row == EXPORT_NONE ? EXPORT_NONE : row + i;
            ids[t] = in->record->token[t];
            positions[t] = entry->position + i;
            counts[t] = entry->position + i + 1;
        }
        uint32_t end = entry->position + entry->count;
        in->span_max = entry->count > in->span_max ? entry->count : in->span_max;
        in->count_max = end > in->count_max ? end : in->count_max;
    }
}

static int has_penalties(const struct sampler_params *p)
{
    return p->repeat_last_n > 0 &&
           (p->repeat_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0);
}

static uint32_t window_of(const struct stepper_part *part)
{
    uint32_t all = part->position + part->count;
    return part->sampling->repeat_last_n < all ? part->sampling->repeat_last_n : all;
}

/* Writes each id of the window once, with its number; there is room. Returns how many. */
static uint32_t put_penalties(struct inputs_gpu *in, const struct stepper_part *part,
                              struct cuda_penalty_entry *to)
{
    uint32_t n = window_of(part), count = 0;
    const uint32_t *last = part->history + part->position + part->count - n;
    for (uint32_t i = 0; i < n; i++)
        in->occurrences[last[i]]++;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t *seen = &in->occurrences[last[i]];
        if (*seen)
            to[count++] = (struct cuda_penalty_entry){last[i], *seen};
        *seen = 0;
    }
    return count;
}

static void put_sampling(struct inputs_gpu *in, uint32_t row, const struct stepper_part *part)
{
    struct cuda_sample_params *params = (struct cuda_sample_params *)(in->host + in->at.params) + row;
    uint32_t *begin = (uint32_t *)(in->host + in->at.penalty_begin) + row;
    float *penalty = (float *)(in->host + in->at.penalty_params) + (size_t)row * 3;
    const struct sampler_params *p = part->sampling;
    *params = (struct cuda_sample_params){.top_p = 1};
    penalty[0] = 1;
    penalty[1] = penalty[2] = 0;
    begin[1] = begin[0];
    if (!p)
        return;
    *params = (struct cuda_sample_params){.temperature = p->temperature,
                                          .top_p = p->top_p,
                                          .min_p = p->min_p,
                                          .top_k = p->top_k,
                                          .seed = p->seed,
                                          .sequence = 0, /* a request has one */
                                          .position = part->position + part->count};
    if (!has_penalties(p))
        return;
    penalty[0] = p->repeat_penalty;
    penalty[1] = p->presence_penalty;
    penalty[2] = p->frequency_penalty;
    begin[1] += put_penalties(in, part, in->penalties + begin[0]);
    in->penalized++;
}

static int make_room(struct inputs_gpu *in, struct err *err)
{
    uint64_t need = 0;
    for (uint32_t i = 0; i < in->entries; i++) {
        const struct stepper_part *part = &in->spec->parts[i];
        if (part->sampling && has_penalties(part->sampling))
            need += window_of(part) < in->vocab ? window_of(part) : in->vocab;
    }
    uint64_t count = in->penalties_max;
    while (count < need)
        count *= 2;
    CHECK(count <= UINT32_MAX);
    return count > in->penalties_max ? make_penalties(in, (uint32_t)count, err) : 0;
}

int inputs_gpu_begin(struct inputs_gpu *in, const struct step_record *record, const struct stepper_spec *spec,
                     struct err *err)
{
    CHECK(record->tokens <= in->tokens_max && record->entries <= in->entries_max);
    in->record = record;
    in->spec = spec;
    in->tokens = record->tokens;
    in->entries = record->entries;
    in->at = early_of(in->tokens, in->entries);
    in->rows = in->penalized = 0;
    int r = make_room(in, err);
    if (r < 0)
        return r;
    lay_tokens(in);
    *(uint32_t *)(in->host + in->at.penalty_begin) = 0;
    for (uint32_t i = 0; i < in->entries; i++) {
        if (!spec->parts[i].sampling && record->kind != STEP_SPARSE)
            continue;
        in->wanted[in->rows] = record->entry[i].token_at + record->entry[i].count - 1;
        in->part_of[in->rows] = i;
        put_sampling(in, in->rows++, &spec->parts[i]);
    }
    inputs_gpu_void(in);
    return 0;
}

int inputs_gpu_penalizes(const struct inputs_gpu *in)
{
    return in->penalized > 0;
}

uint64_t inputs_gpu_generation(const struct inputs_gpu *in)
{
    return in->generation;
}

void inputs_gpu_rows(struct inputs_gpu *in, enum places_phase phase, const struct places *places)
{
    uint8_t *block = in->host + rows_at(in, phase);
    uint32_t *rows = (uint32_t *)block;
    struct cuda_span *spans = (struct cuda_span *)(block + spans_at(in->tokens));
    for (uint32_t e = 0; e < in->entries; e++) {
        const struct step_entry *entry = &in->record->entry[e];
        const char *why;
        uint32_t row = places_status(places, e, &why) == 0 ? entry->sequence : INPUTS_GPU_ROW_VOID;
        for (uint32_t i = 0; i < entry->count; i++)
            rows[entry->token_at + i] = row;
        spans[e] = (struct cuda_span){row, entry->token_at, entry->count, entry->position};
    }
}

void inputs_gpu_void(struct inputs_gpu *in)
{
    for (unsigned phase = 0; phase < INPUTS_GPU_PHASES; phase++)
        memset(in->host + rows_at(in, phase), 0xff, rows_bytes(in->tokens, in->entries));
}

int inputs_gpu_queue(struct inputs_gpu *in)
{
    const struct cuda_mapped_copy all = {
        .to = in->copy, .from = in->host_device, .bytes = in->at.bytes, .rows = 1};
    return in->api->copy_mapped(&all, 1, in->device->stream);
}

struct cuda_mapped_copy inputs_gpu_rows_copy(const struct inputs_gpu *in, enum places_phase phase)
{
    return (struct cuda_mapped_copy){.to = in->copy + rows_at(in, 0),
                                     .from = in->host_device + rows_at(in, phase),
                                     .bytes = rows_bytes(in->tokens, in->entries),
                                     .rows = 1};
}

const uint32_t *inputs_gpu_features(const struct inputs_gpu *in)
{
    return in->exported ? (const uint32_t *)(in->copy + in->at.features) : NULL;
}

void inputs_gpu_batch(const struct inputs_gpu *in, struct pass_gpu_batch *ret)
{
    uint8_t *rows = in->copy + rows_at(in, 0);
    *ret = (struct pass_gpu_batch){.n = in->tokens,
                                   .ids = (const uint32_t *)in->copy,
                                   .positions = (const uint32_t *)(in->copy + in->at.positions),
                                   .rows = (const uint32_t *)rows,
                                   .counts = (const uint32_t *)(in->copy + in->at.counts),
                                   .count_max = in->count_max,
                                   .span_count = in->entries,
                                   .span_max = in->span_max,
                                   .logits = in->rows,
                                   .wanted = in->record->kind == STEP_SPARSE ? NULL : in->wanted};
    if (in->record->kind == STEP_DENSE && in->spec->prompt)
        ret->spans = (const struct cuda_span *)(rows + spans_at(in->tokens));
}

void inputs_gpu_sampling(const struct inputs_gpu *in, struct pass_gpu_sampling *ret)
{
    *ret = (struct pass_gpu_sampling){.params = (const struct cuda_sample_params *)(in->copy + in->at.params),
                                      .penalties = in->penalized ? in->penalties_device : NULL,
                                      .penalty_begin = (const uint32_t *)(in->copy + in->at.penalty_begin),
                                      .penalty_params = (const float *)(in->copy + in->at.penalty_params),
                                      .ret_ids = (int32_t *)(in->host_device + ids_at(in))};
}

int32_t inputs_gpu_chosen(const struct inputs_gpu *in, uint32_t part)
{
    const int32_t *ids = (const int32_t *)(in->host + ids_at(in));
    for (uint32_t row = 0; row < in->rows; row++)
        if (in->part_of[row] == part)
            return ids[row];
    return -1;
}

uint32_t *inputs_gpu_go(const struct inputs_gpu *in, enum places_phase phase)
{
    return (uint32_t *)(in->host_device + go_at(in, phase));
}

void inputs_gpu_let_go(struct inputs_gpu *in, enum places_phase phase, uint32_t step)
{
    atomic_store_explicit((_Atomic uint32_t *)(in->host + go_at(in, phase)), step, memory_order_release);
}

uint32_t *inputs_gpu_arrival(const struct inputs_gpu *in)
{
    return (uint32_t *)(in->host_device + go_at(in, INPUTS_GPU_PHASES));
}

_Atomic uint32_t *inputs_gpu_arrived(const struct inputs_gpu *in)
{
    return (_Atomic uint32_t *)(in->host + go_at(in, INPUTS_GPU_PHASES));
}
