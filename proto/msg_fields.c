/* Tables of all messages; see msg_fields.h. Constant data and pure checks, any thread. Adding a field: one
 * line here and one in msg.h; its name on the wire is its name in the struct. */
#include "proto/msg_fields.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define ERRNO_MAX 4095

/* clang-format off */
/* The range is one argument or two: ANY32 and its like expand to both ends. */
#define PLACE(t, s, f) .name = #f, .type = FIELD_##t, .at = offsetof(struct s, f)
#define RANGE(lo, hi) .min = (lo), .max = (hi)
#define U32(s, f, ...) {PLACE(U32, s, f), RANGE(__VA_ARGS__)}
#define I32(s, f, ...) {PLACE(I32, s, f), RANGE(__VA_ARGS__)}
#define U64(s, f, ...) {PLACE(U64, s, f), RANGE(__VA_ARGS__)}
#define I64(s, f, ...) {PLACE(I64, s, f), RANGE(__VA_ARGS__)}
#define F32(s, f, ...) {PLACE(F32, s, f), RANGE(__VA_ARGS__)}
#define F64(s, f, ...) {PLACE(F64, s, f), RANGE(__VA_ARGS__)}
#define IDS(s, f, ...) {PLACE(IDS, s, f), RANGE(__VA_ARGS__)}
#define BYTES(s, f, ...) {PLACE(BYTES, s, f), RANGE(__VA_ARGS__)}
#define SIZE_OF(s, f) .size = sizeof(((struct s *)0)->f)
#define TEXT(s, f) {PLACE(TEXT, s, f), SIZE_OF(s, f)}
#define HASH(s, f) {PLACE(HASH, s, f), SIZE_OF(s, f)}
#define WORDS(s, f) {PLACE(WORDS, s, f), SIZE_OF(s, f)}
#define STRUCT(s, f, table) {PLACE(STRUCT, s, f), .sub = (table)}
#define STRUCT_IF(s, f, flag, table) \
    {PLACE(STRUCT, s, f), .present_at = offsetof(struct s, flag), .sub = (table)}
#define ENTRIES(s, f, item, ...) {PLACE(ENTRIES, s, f), .size = sizeof(struct item), RANGE(__VA_ARGS__)}
#define ANY32 0, UINT32_MAX
#define ANY64 0, UINT64_MAX
#define POSITIONS 0, LIMIT_CONTEXT
#define END {.name = NULL}

/* ENTRIES has its count right behind the pointer. */
_Static_assert(offsetof(struct msg_step, entry_count) == offsetof(struct msg_step, entries) + sizeof(void *),
               "");
_Static_assert(offsetof(struct msg_topk, entry_count) == offsetof(struct msg_topk, entries) + sizeof(void *),
               "");

static const struct field no_fields[] = {END};

static const struct field layout_fields[] = { /* ranges: layout_check */
    HASH(kv_layout, model),
    U32(kv_layout, layers, ANY32),
    U32(kv_layout, row_heads, ANY32),
    U32(kv_layout, selection_heads, ANY32),
    U32(kv_layout, groups, ANY32),
    U32(kv_layout, piece_bytes, ANY32),
    U32(kv_layout, dtype, ANY32),
    U32(kv_layout, key_row_bytes, ANY32),
    U32(kv_layout, context_max, ANY32),
    WORDS(kv_layout, group_first_layer),
    END,
};

static const struct field features_fields[] = { /* layer: check_hello */
    U32(layout_features, layers, 1, LIMIT_FEATURE_LAYERS),
    U32(layout_features, hidden, 1, LIMIT_FEATURE_HIDDEN),
    WORDS(layout_features, layer),
    END,
};

static const struct field hello_fields[] = {
    U32(msg_hello, role, ROLE_DECODER, ROLE_LAUNCH),
    U32(msg_hello, version_min, ANY32),
    U32(msg_hello, pid, ANY32),
    TEXT(msg_hello, build),
    TEXT(msg_hello, device),
    STRUCT_IF(msg_hello, layout, has_layout, layout_fields),
    HASH(msg_hello, tokenizer),
    U64(msg_hello, head, ANY64),
    STRUCT_IF(msg_hello, features, has_features, features_fields),
    END,
};

static const struct field error_fields[] = {
    I32(msg_error, code, -ERRNO_MAX, (uint64_t)-1),
    TEXT(msg_error, text),
    END,
};

static const struct field report_fields[] = {
    BYTES(msg_report, json, 0, LIMIT_STATUS_BYTES),
    END,
};

static const struct field made_fields[] = {
    U32(made, kind, 0, ARENA_MADE_SPARSE),
    U32(made, budget, POSITIONS),
    U64(made, head, ANY64),
    END,
};

static const struct field open_fields[] = {
    U64(msg_open, sequence, 1, UINT64_MAX),
    U32(msg_open, flags, 0, OPEN_REUSE | OPEN_REUSE_SPARSE),
    U32(msg_open, reuse_max, POSITIONS),
    U64(msg_open, salt, ANY64),
    STRUCT(msg_open, made, made_fields),
    U32(msg_open, capacity, 1, LIMIT_CONTEXT),
    U32(msg_open, budget, POSITIONS),
    U32(msg_open, sinks, POSITIONS),
    U32(msg_open, window, POSITIONS),
    U32(msg_open, budget_base, POSITIONS),
    F32(msg_open, min_mass, 0, 1),
    F32(msg_open, top_p, 0, 1),
    IDS(msg_open, tokens, POSITIONS),
    END,
};

static const struct field grant_fields[] = {
    U64(msg_grant, sequence, 1, UINT64_MAX),
    U32(msg_grant, index, 0, LIMIT_SEQUENCES - 1),
    U32(msg_grant, cached, POSITIONS),
    END,
};

/* CLOSE, RESUME and RESELECT: structs of the same one field. */
static const struct field sequence_fields[] = {
    U64(msg_close, sequence, 1, UINT64_MAX),
    END,
};
_Static_assert(offsetof(struct msg_resume, sequence) == 0 && offsetof(struct msg_reselect, sequence) == 0,
               "");

static const struct field counters_fields[] = {
    U64(kv_counters, steps, ANY64),
    U64(kv_counters, attended, ANY64),
    U64(kv_counters, lists, ANY64),
    U64(kv_counters, selected, ANY64),
    U64(kv_counters, kept, ANY64),
    U64(kv_counters, rows_loaded, ANY64),
    U64(kv_counters, bytes_loaded, ANY64),
    U64(kv_counters, bytes_if_reloaded, ANY64),
    U64(kv_counters, rows_filled, ANY64),
    U64(kv_counters, bytes_filled, ANY64),
    U64(kv_counters, bytes_written, ANY64),
    U32(kv_counters, layers_resident, 0, LIMIT_LAYERS),
    U32(kv_counters, layers_offloaded, 0, LIMIT_LAYERS),
    U32(kv_counters, layers_offloaded_max, 0, LIMIT_LAYERS),
    F64(kv_counters, mass_sum, 0, UINT64_MAX),
    F64(kv_counters, mass_base_sum, 0, UINT64_MAX),
    U64(kv_counters, mass_count, ANY64),
    U64(kv_counters, grown, ANY64),
    U64(kv_counters, fallbacks, ANY64),
    END,
};

static const struct field closed_fields[] = {
    U64(msg_closed, sequence, 1, UINT64_MAX),
    STRUCT(msg_closed, counters, counters_fields),
    END,
};

static const struct field resumed_fields[] = {
    U64(msg_resumed, sequence, 1, UINT64_MAX),
    U32(msg_resumed, index, 0, LIMIT_SEQUENCES - 1),
    U32(msg_resumed, committed, POSITIONS),
    U32(msg_resumed, prompt_tokens, POSITIONS),
    U32(msg_resumed, capacity, POSITIONS),
    STRUCT(msg_resumed, made, made_fields),
    IDS(msg_resumed, tokens, POSITIONS),
    END,
};

static const struct field prefix_fields[] = {
    U64(msg_prefix, salt, ANY64),
    STRUCT(msg_prefix, made, made_fields),
    IDS(msg_prefix, tokens, POSITIONS),
    END,
};

static const struct field prefixed_fields[] = {
    U32(msg_prefixed, cached, POSITIONS),
    END,
};

static const struct field step_fields[] = {
    ENTRIES(msg_step, entries, msg_step_entry, 1, LIMIT_SEQUENCES),
    IDS(msg_step, tokens, 1, LIMIT_STEP_TOKENS),
    IDS(msg_step, features, 0, LIMIT_SEQUENCES),
    U32(msg_step, reading, ANY32),
    END,
};

static const struct field topk_fields[] = {
    ENTRIES(msg_topk, entries, msg_topk_entry, 1, LIMIT_SEQUENCES),
    U32(msg_topk, groups, 1, LIMIT_GROUPS),
    U32(msg_topk, selection_heads, 1, LIMIT_SELECTION_HEADS),
    IDS(msg_topk, counts, ANY32),
    IDS(msg_topk, positions, ANY32),
    END,
};

static const struct field sampling_fields[] = {
    F32(msg_sampling, temperature, 0, 1000),
    F32(msg_sampling, top_p, 0, 1),
    F32(msg_sampling, min_p, 0, 1),
    F32(msg_sampling, repeat_penalty, 0, 1000),
    F32(msg_sampling, presence_penalty, -1000, 1000),
    F32(msg_sampling, frequency_penalty, -1000, 1000),
    U32(msg_sampling, top_k, ANY32),
    U32(msg_sampling, repeat_last_n, ANY32),
    U64(msg_sampling, seed, ANY64),
    END,
};

static const struct field generate_fields[] = {
    U32(msg_generate, flags, 0, GENERATE_FULL | GENERATE_IGNORE_EOS | GENERATE_REUSE | GENERATE_REUSE_SPARSE),
    U32(msg_generate, max_tokens, POSITIONS),
    U32(msg_generate, selection, 0, 2), /* enum selection_mode */
    U32(msg_generate, budget, POSITIONS),
    U32(msg_generate, sinks, POSITIONS),
    U32(msg_generate, window, POSITIONS),
    U32(msg_generate, budget_max, POSITIONS),
    F32(msg_generate, min_mass, 0, 1),
    F32(msg_generate, budget_top_p, 0, 1),
    U64(msg_generate, salt, ANY64),
    STRUCT(msg_generate, sampling, sampling_fields),
    IDS(msg_generate, stop_ids, 0, LIMIT_STOP_IDS),
    IDS(msg_generate, tokens, POSITIONS),
    END,
};

static const struct field progress_fields[] = {
    U32(msg_progress, done, POSITIONS),
    U32(msg_progress, total, POSITIONS),
    U32(msg_progress, cached, POSITIONS),
    END,
};

static const struct field token_fields[] = {
    IDS(msg_token, tokens, 1, LIMIT_CONTEXT),
    END,
};

static const struct field done_fields[] = {
    U32(msg_done, reason, FINISH_STOP, FINISH_ERROR),
    I32(msg_done, code, -ERRNO_MAX, 0),
    TEXT(msg_done, text),
    U32(msg_done, prompt_tokens, POSITIONS),
    U32(msg_done, cached_tokens, POSITIONS),
    U32(msg_done, generated_tokens, POSITIONS),
    I64(msg_done, queued_ns, 0, INT64_MAX),
    I64(msg_done, prefill_ns, 0, INT64_MAX),
    I64(msg_done, decode_ns, 0, INT64_MAX),
    STRUCT(msg_done, counters, counters_fields),
    END,
};

/* clang-format on */

static int refuse(const char *what, uint64_t found, uint64_t expected, struct err *err)
{
    return err_set(err, -EPROTO, "%s: found %llu, expected %llu", what, (unsigned long long)found,
                   (unsigned long long)expected);
}

static int refuse_above(const char *what, uint64_t found, uint64_t most, struct err *err)
{
    return err_set(err, -EPROTO, "%s: found %llu, expected at most %llu", what, (unsigned long long)found,
                   (unsigned long long)most);
}

static int check_features(const struct layout_features *f, struct err *err)
{
    for (uint32_t i = 0; i < LIMIT_FEATURE_LAYERS; i++) {
        if (i >= f->layers && f->layer[i])
            return refuse("HELLO: features: layer past the layers", f->layer[i], 0, err);
        if (i < f->layers && f->layer[i] > LIMIT_LAYERS)
            return refuse_above("HELLO: features: layer", f->layer[i], LIMIT_LAYERS, err);
        if (i && i < f->layers && f->layer[i] <= f->layer[i - 1])
            return err_set(err, -EPROTO,
                           "HELLO: features: layer: found %u behind %u, expected ascending ones", f->layer[i],
                           f->layer[i - 1]);
    }
    return 0;
}

static int check_hello(const struct msg *msg, struct err *err)
{
    const struct msg_hello *hello = &msg->hello;
    if (hello->has_features && check_features(&hello->features, err) < 0)
        return -EPROTO;
    if (!hello->has_layout)
        return 0;
    if (layout_check(&hello->layout, err) < 0)
        return err_prefix(err, -EPROTO, "HELLO");
    for (uint32_t g = hello->layout.groups + 1; g <= LIMIT_GROUPS; g++)
        if (hello->layout.group_first_layer[g])
            return refuse("HELLO: group_first_layer past the groups", hello->layout.group_first_layer[g], 0,
                          err);
    return 0;
}

static int check_open(const struct msg *msg, struct err *err)
{
    const struct msg_open *open = &msg->open;
    if (open->tokens.count > open->capacity)
        return refuse_above("OPEN: tokens against capacity", open->tokens.count, open->capacity, err);
    if (open->budget_base > open->budget)
        return refuse_above("OPEN: budget_base against budget", open->budget_base, open->budget, err);
    return 0;
}

static int check_grant(const struct msg *msg, struct err *err)
{
    if (msg->grant.cached % BLOCK_TOKENS)
        return refuse("GRANT: cached, remainder by a block", msg->grant.cached % BLOCK_TOKENS, 0, err);
    return 0;
}

static int check_made(const char *what, const struct made *made, struct err *err)
{
    return made->kind ? 0 : refuse(what, 0, ARENA_MADE_FULL, err);
}

static int check_resumed(const struct msg *msg, struct err *err)
{
    const struct msg_resumed *resumed = &msg->resumed;
    if (resumed->tokens.count > resumed->capacity)
        return refuse_above("RESUMED: tokens against capacity", resumed->tokens.count, resumed->capacity,
                            err);
    if (resumed->committed > resumed->tokens.count)
        return refuse_above("RESUMED: committed against tokens", resumed->committed, resumed->tokens.count,
                            err);
    if (resumed->prompt_tokens > resumed->capacity)
        return refuse_above("RESUMED: prompt_tokens against capacity", resumed->prompt_tokens,
                            resumed->capacity, err);
    return check_made("RESUMED: made.kind", &resumed->made, err);
}

static int check_prefix(const struct msg *msg, struct err *err)
{
    return check_made("PREFIX: made.kind", &msg->prefix.made, err);
}

static int check_step_id(const char *what, const struct msg *msg, struct err *err)
{
    return msg->id <= UINT32_MAX ? 0 : refuse_above(what, msg->id, UINT32_MAX, err);
}

static int check_step(const struct msg *msg, struct err *err)
{
    const struct msg_step *step = &msg->step;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < step->entry_count; i++) {
        const struct msg_step_entry *entry = &step->entries[i];
        if (entry->sequence == 0)
            return refuse("STEP: sequence", 0, 1, err);
        if (entry->index >= LIMIT_SEQUENCES)
            return refuse_above("STEP: index", entry->index, LIMIT_SEQUENCES - 1, err);
        if (entry->count == 0)
            return refuse("STEP: count", 0, 1, err);
        if (entry->position > LIMIT_CONTEXT || entry->count > LIMIT_CONTEXT - entry->position)
            return refuse_above("STEP: position + count", (uint64_t)entry->position + entry->count,
                                LIMIT_CONTEXT, err);
        if (entry->flags & ~(uint32_t)STEP_ENTRY_SELECT)
            return refuse_above("STEP: flags", entry->flags, STEP_ENTRY_SELECT, err);
        sum += entry->count;
    }
    if (sum != step->tokens.count)
        return refuse("STEP: tokens", step->tokens.count, sum, err);
    if (step->features.count && step->features.count != step->entry_count)
        return refuse("STEP: features", step->features.count, step->entry_count, err);
    return check_step_id("STEP: id", msg, err);
}

static int check_topk_entry(const struct msg_topk_entry *entry, struct err *err)
{
    if (entry->sequence == 0)
        return refuse("TOPK: sequence", 0, 1, err);
    if (entry->index >= LIMIT_SEQUENCES)
        return refuse_above("TOPK: index", entry->index, LIMIT_SEQUENCES - 1, err);
    if (entry->position >= LIMIT_CONTEXT)
        return refuse_above("TOPK: position", entry->position, LIMIT_CONTEXT - 1, err);
    if (entry->limit > LIMIT_CONTEXT)
        return refuse_above("TOPK: limit", entry->limit, LIMIT_CONTEXT, err);
    if (!isfinite(entry->mass) || entry->mass < 0)
        return err_set(err, -EPROTO, "TOPK: mass: found %g, expected a finite share", (double)entry->mass);
    if (!isfinite(entry->mass_base) || entry->mass_base < 0)
        return err_set(err, -EPROTO, "TOPK: mass_base: found %g, expected a finite share",
                       (double)entry->mass_base);
    if (entry->flags & ~(uint32_t)(TOPK_ENTRY_GROWN | TOPK_ENTRY_SHORT))
        return refuse_above("TOPK: flags", entry->flags, TOPK_ENTRY_GROWN | TOPK_ENTRY_SHORT, err);
    return entry->pad ? refuse("TOPK: pad", entry->pad, 0, err) : 0;
}

static int check_topk(const struct msg *msg, struct err *err)
{
    const struct msg_topk *topk = &msg->topk;
    uint32_t lists = topk->groups * topk->selection_heads; /* of one entry; within 2048 */
    uint64_t counts = (uint64_t)topk->entry_count * lists * 2, sum = 0;
    int r = check_step_id("TOPK: id", msg, err);
    if (r == 0 && topk->counts.count != counts)
        r = refuse("TOPK: counts", topk->counts.count, counts, err);
    for (uint32_t i = 0; r == 0 && i < topk->entry_count; i++) {
        const uint32_t *pair = topk->counts.at + (size_t)i * lists * 2;
        bool whole = topk->entries[i].base_step == (uint32_t)msg->id;
        r = check_topk_entry(&topk->entries[i], err);
        for (uint32_t l = 0; r == 0 && l < lists; l++, pair += 2) {
            sum += (uint64_t)pair[0] + pair[1];
            if (whole && pair[1])
                r = refuse("TOPK: removed positions of a full set", pair[1], 0, err);
        }
    }
    if (r == 0 && topk->positions.count != sum)
        r = refuse("TOPK: positions", topk->positions.count, sum, err);
    return r;
}

static int check_reselect(const struct msg *msg, struct err *err)
{
    return check_step_id("RESELECT: id", msg, err);
}

static int check_progress(const struct msg *msg, struct err *err)
{
    const struct msg_progress *progress = &msg->progress;
    if (progress->done > progress->total)
        return refuse_above("PROGRESS: done against total", progress->done, progress->total, err);
    if (progress->cached > progress->total)
        return refuse_above("PROGRESS: cached against total", progress->cached, progress->total, err);
    return 0;
}

static const struct kind kinds[] = {
    {MSG_HELLO, "HELLO", hello_fields, check_hello},
    {MSG_WELCOME, "WELCOME", hello_fields, check_hello},
    {MSG_ERROR, "ERROR", error_fields, NULL},
    {MSG_PING, "PING", no_fields, NULL},
    {MSG_PONG, "PONG", no_fields, NULL},
    {MSG_STATUS, "STATUS", no_fields, NULL},
    {MSG_REPORT, "REPORT", report_fields, NULL},
    {MSG_DRAIN, "DRAIN", no_fields, NULL},
    {MSG_OPEN, "OPEN", open_fields, check_open},
    {MSG_GRANT, "GRANT", grant_fields, check_grant},
    {MSG_CLOSE, "CLOSE", sequence_fields, NULL},
    {MSG_CLOSED, "CLOSED", closed_fields, NULL},
    {MSG_RESUME, "RESUME", sequence_fields, NULL},
    {MSG_RESUMED, "RESUMED", resumed_fields, check_resumed},
    {MSG_PREFIX, "PREFIX", prefix_fields, check_prefix},
    {MSG_PREFIXED, "PREFIXED", prefixed_fields, NULL},
    {MSG_STEP, "STEP", step_fields, check_step},
    {MSG_TOPK, "TOPK", topk_fields, check_topk},
    {MSG_RESELECT, "RESELECT", sequence_fields, check_reselect},
    {MSG_GENERATE, "GENERATE", generate_fields, NULL},
    {MSG_PROGRESS, "PROGRESS", progress_fields, check_progress},
    {MSG_TOKEN, "TOKEN", token_fields, NULL},
    {MSG_CANCEL, "CANCEL", no_fields, NULL},
    {MSG_DONE, "DONE", done_fields, NULL},
};

const struct kind *kind_find(uint32_t number)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i].kind == number)
            return &kinds[i];
    return NULL;
}

static int check_unsigned(const struct field *field, uint64_t value, struct err *err)
{
    if (value >= (uint64_t)field->min && value <= field->max)
        return 0;
    return err_set(err, -EPROTO, "%s: found %llu, expected %lld to %llu", field->name,
                   (unsigned long long)value, (long long)field->min, (unsigned long long)field->max);
}

static int check_signed(const struct field *field, int64_t value, struct err *err)
{
    if (value >= field->min && value <= (int64_t)field->max)
        return 0;
    return err_set(err, -EPROTO, "%s: found %lld, expected %lld to %lld", field->name, (long long)value,
                   (long long)field->min, (long long)field->max);
}

static int check_real(const struct field *field, double value, struct err *err)
{
    double most = field->min < 0 ? (double)(int64_t)field->max : (double)field->max;
    if (isfinite(value) && value >= (double)field->min && value <= most)
        return 0;
    return err_set(err, -EPROTO, "%s: found %g, expected %g to %g", field->name, value, (double)field->min,
                   most);
}

static int check_table(const struct field *table, const uint8_t *base, struct err *err)
{
    int r = 0;
    for (const struct field *f = table; r == 0 && f->name; f++) {
        const void *at = base + f->at;
        if (f->present_at && !*(const bool *)(base + f->present_at))
            continue;
        switch (f->type) {
        case FIELD_U32:
            r = check_unsigned(f, *(const uint32_t *)at, err);
            break;
        case FIELD_U64:
            r = check_unsigned(f, *(const uint64_t *)at, err);
            break;
        case FIELD_I32:
            r = check_signed(f, *(const int32_t *)at, err);
            break;
        case FIELD_I64:
            r = check_signed(f, *(const int64_t *)at, err);
            break;
        case FIELD_F32:
            r = check_real(f, (double)*(const float *)at, err);
            break;
        case FIELD_F64:
            r = check_real(f, *(const double *)at, err);
            break;
        case FIELD_TEXT:
            r = memchr(at, 0, f->size) ? 0 : err_set(err, -EPROTO, "%s: found no end of the text", f->name);
            break;
        case FIELD_IDS:
            r = check_unsigned(f, ((const struct msg_u32s *)at)->count, err);
            break;
        case FIELD_BYTES:
            r = check_unsigned(f, ((const struct msg_bytes *)at)->bytes, err);
            break;
        case FIELD_ENTRIES:
            r = check_unsigned(f, *(const uint32_t *)((const uint8_t *)at + sizeof(void *)), err);
            break;
        case FIELD_STRUCT:
            r = check_table(f->sub, at, err);
            break;
        case FIELD_HASH:
        case FIELD_WORDS:
            break;
        }
    }
    return r;
}

int kind_check_fields(const struct kind *kind, const struct msg *msg, struct err *err)
{
    int r = check_table(kind->fields, (const uint8_t *)&msg->hello, err);
    return r == 0 ? 0 : err_prefix(err, r, "%s", kind->name);
}
