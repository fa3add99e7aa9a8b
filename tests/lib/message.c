/* Random valid messages; see message.h. The kinds are filled by hand, not from the tables of the encoder, so
 * that a field that a table forgets does not come back from a round trip. */
#include "tests/lib/message.h"

#include <stdio.h>
#include <string.h>

const uint32_t message_kinds[MESSAGE_KINDS] = {
    MSG_HELLO, MSG_WELCOME, MSG_ERROR,    MSG_PING,     MSG_PONG,     MSG_STATUS,  MSG_REPORT, MSG_DRAIN,
    MSG_OPEN,  MSG_GRANT,   MSG_CLOSE,    MSG_CLOSED,   MSG_RESUME,   MSG_RESUMED, MSG_PREFIX, MSG_PREFIXED,
    MSG_STEP,  MSG_TOPK,    MSG_RESELECT, MSG_GENERATE, MSG_PROGRESS, MSG_TOKEN,   MSG_CANCEL, MSG_DONE,
};

uint64_t message_random(struct message_maker *maker)
{
    uint64_t x = maker->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return maker->random = x;
}

static uint32_t upto(struct message_maker *m, uint32_t most)
{
    return (uint32_t)(message_random(m) % ((uint64_t)most + 1));
}

static uint32_t between(struct message_maker *m, uint32_t least, uint32_t most)
{
    return least + upto(m, most - least);
}

/* Sizes of every form that msgpack has for numbers. */
static uint64_t any64(struct message_maker *m)
{
    return (message_random(m) >> upto(m, 63)) | 1;
}

static struct msg_u32s words(struct message_maker *m, uint32_t least, uint32_t most)
{
    uint32_t count = between(m, least, most);
    for (uint32_t i = 0; i < count; i++)
        m->words[i] = (uint32_t)message_random(m);
    return (struct msg_u32s){.at = m->words, .count = count};
}

static struct hash128 any_hash(struct message_maker *m)
{
    return (struct hash128){.lo = message_random(m), .hi = message_random(m)};
}

static struct made any_made(struct message_maker *m)
{
    return (struct made){.kind = between(m, ARENA_MADE_FULL, ARENA_MADE_SPARSE),
                         .budget = upto(m, LIMIT_CONTEXT),
                         .head = any64(m)};
}

static void text(struct message_maker *m, char *to, uint32_t room)
{
    uint32_t length = upto(m, room - 1);
    for (uint32_t i = 0; i < length; i++)
        to[i] = (char)between(m, 0x20, 0x7e);
}

static void make_layout(struct message_maker *m, struct kv_layout *layout)
{
    layout->model = any_hash(m);
    layout->layers = between(m, LIMIT_GROUPS, LIMIT_LAYERS);
    layout->row_heads = between(m, 1, 16);
    layout->selection_heads = layout->row_heads * between(m, 1, 8);
    layout->piece_bytes = between(m, 1, 65536);
    layout->dtype = upto(m, 64);
    layout->key_row_bytes = upto(m, 1 << 20);
    layout->context_max = between(m, 1, LIMIT_CONTEXT);
    layout_set_groups(layout, between(m, 1, LIMIT_GROUPS));
}

static void make_features(struct message_maker *m, struct layout_features *features)
{
    features->layers = between(m, 1, LIMIT_FEATURE_LAYERS);
    features->hidden = between(m, 1, LIMIT_FEATURE_HIDDEN);
    for (uint32_t i = 0; i < features->layers; i++)
        features->layer[i] = between(m, i ? features->layer[i - 1] + 1 : 0, 8 * (i + 1));
}

static void make_hello(struct message_maker *m, struct msg_hello *hello)
{
    hello->role = between(m, ROLE_DECODER, ROLE_LAUNCH);
    hello->version_min = between(m, 1, 9);
    hello->pid = between(m, 1, 1 << 22);
    text(m, hello->build, sizeof hello->build);
    text(m, hello->device, sizeof hello->device);
    hello->has_layout = upto(m, 1);
    if (hello->has_layout)
        make_layout(m, &hello->layout);
    hello->tokenizer = any_hash(m);
    hello->head = any64(m);
    hello->has_features = upto(m, 1);
    if (hello->has_features)
        make_features(m, &hello->features);
}

static void make_counters(struct message_maker *m, struct kv_counters *c)
{
    c->steps = any64(m);
    c->attended = any64(m);
    c->lists = any64(m);
    c->selected = any64(m);
    c->kept = any64(m);
    c->rows_loaded = any64(m);
    c->bytes_loaded = any64(m);
    c->bytes_if_reloaded = any64(m);
    c->rows_filled = any64(m);
    c->bytes_filled = any64(m);
    c->bytes_written = any64(m);
    c->layers_resident = upto(m, LIMIT_LAYERS);
    c->layers_offloaded = upto(m, LIMIT_LAYERS);
    c->layers_offloaded_max = upto(m, LIMIT_LAYERS);
    c->mass_sum = (double)message_random(m) / 1e9;
    c->mass_base_sum = (double)message_random(m) / 1e9;
    c->mass_count = any64(m);
    c->grown = any64(m);
    c->fallbacks = any64(m);
}

static void make_open(struct message_maker *m, struct msg_open *open)
{
    open->sequence = any64(m);
    open->flags = upto(m, OPEN_REUSE | OPEN_REUSE_SPARSE);
    open->reuse_max = upto(m, LIMIT_CONTEXT);
    open->salt = any64(m);
    open->made = any_made(m);
    open->capacity = between(m, MESSAGE_WORDS_MAX, LIMIT_CONTEXT);
    open->budget = upto(m, LIMIT_CONTEXT);
    open->sinks = upto(m, LIMIT_CONTEXT);
    open->window = upto(m, LIMIT_CONTEXT);
    open->budget_base = upto(m, open->budget);
    open->min_mass = (float)upto(m, 1000) / 1000;
    open->top_p = (float)upto(m, 1000) / 1000;
    open->tokens = words(m, 0, 300);
}

static void make_resumed(struct message_maker *m, struct msg_resumed *resumed)
{
    resumed->sequence = any64(m);
    resumed->index = upto(m, LIMIT_SEQUENCES - 1);
    resumed->capacity = between(m, MESSAGE_WORDS_MAX, LIMIT_CONTEXT);
    resumed->prompt_tokens = upto(m, resumed->capacity);
    resumed->made = any_made(m);
    resumed->tokens = words(m, 0, 300);
    resumed->committed = upto(m, resumed->tokens.count);
}

static void make_step(struct message_maker *m, struct msg *msg)
{
    uint32_t sum = 0;
    msg->id = (uint32_t)msg->id;
    msg->step.entry_count = between(m, 1, MESSAGE_ENTRIES_MAX);
    msg->step.entries = m->step;
    for (uint32_t i = 0; i < msg->step.entry_count; i++) {
        uint32_t count = between(m, 1, 40);
        sum += count;
        m->step[i] = (struct msg_step_entry){.sequence = any64(m),
                                             .index = upto(m, LIMIT_SEQUENCES - 1),
                                             .position = upto(m, LIMIT_CONTEXT - count),
                                             .count = count,
                                             .flags = upto(m, STEP_ENTRY_SELECT)};
    }
    msg->step.tokens = words(m, sum, sum);
    msg->step.features.at = m->words + sum; /* what words() left there, or zeros */
    msg->step.features.count = upto(m, 1) * msg->step.entry_count;
    msg->step.reading = (uint32_t)any64(m);
}

static void make_topk(struct message_maker *m, struct msg *msg)
{
    struct msg_topk *topk = &msg->topk;
    uint32_t sum = 0;
    msg->id = (uint32_t)msg->id;
    topk->entry_count = between(m, 1, MESSAGE_ENTRIES_MAX);
    topk->groups = between(m, 1, 2);
    topk->selection_heads = between(m, 1, 4);
    topk->entries = m->topk;
    topk->counts.at = m->counts;
    topk->counts.count = topk->entry_count * topk->groups * topk->selection_heads * 2;
    for (uint32_t i = 0; i < topk->entry_count; i++)
        m->topk[i] = (struct msg_topk_entry){.sequence = any64(m),
                                             .index = upto(m, LIMIT_SEQUENCES - 1),
                                             .base_step = (uint32_t)msg->id - upto(m, 1),
                                             .limit = upto(m, LIMIT_CONTEXT),
                                             .position = upto(m, LIMIT_CONTEXT - 1),
                                             .mass = (float)upto(m, 1000) / 1000,
                                             .mass_base = (float)upto(m, 1000) / 1000,
                                             .flags = upto(m, TOPK_ENTRY_GROWN | TOPK_ENTRY_SHORT)};
    for (uint32_t i = 0; i < topk->counts.count; i++) {
        const struct msg_topk_entry *entry = &m->topk[i / (topk->counts.count / topk->entry_count)];
        bool none = (i & 1) && entry->base_step == (uint32_t)msg->id;
        m->counts[i] = none ? 0 : upto(m, 6);
        sum += m->counts[i];
    }
    topk->positions = words(m, sum, sum);
}

static void make_generate(struct message_maker *m, struct msg_generate *generate)
{
    generate->flags = upto(m, 15);
    generate->max_tokens = upto(m, LIMIT_CONTEXT);
    generate->selection = upto(m, 2);
    generate->budget = upto(m, LIMIT_CONTEXT);
    generate->sinks = upto(m, LIMIT_CONTEXT);
    generate->window = upto(m, LIMIT_CONTEXT);
    generate->budget_max = upto(m, LIMIT_CONTEXT);
    generate->min_mass = (float)upto(m, 1000) / 1000;
    generate->budget_top_p = (float)upto(m, 1000) / 1000;
    generate->salt = any64(m);
    generate->sampling = (struct msg_sampling){.temperature = (float)upto(m, 2000) / 1000,
                                               .top_p = (float)upto(m, 1000) / 1000,
                                               .min_p = (float)upto(m, 1000) / 1000,
                                               .repeat_penalty = (float)upto(m, 2000) / 1000,
                                               .presence_penalty = (float)upto(m, 4000) / 1000 - 2,
                                               .frequency_penalty = (float)upto(m, 4000) / 1000 - 2,
                                               .top_k = (uint32_t)any64(m),
                                               .repeat_last_n = (uint32_t)any64(m),
                                               .seed = any64(m)};
    generate->stop_ids.count = upto(m, LIMIT_STOP_IDS);
    generate->stop_ids.at = m->stop_ids;
    for (uint32_t i = 0; i < generate->stop_ids.count; i++)
        m->stop_ids[i] = (uint32_t)message_random(m);
    generate->tokens = words(m, 0, 300);
}

static void make_done(struct message_maker *m, struct msg_done *done)
{
    done->reason = between(m, FINISH_STOP, FINISH_ERROR);
    done->code = -(int32_t)upto(m, 4095);
    text(m, done->text, sizeof done->text);
    done->prompt_tokens = upto(m, LIMIT_CONTEXT);
    done->cached_tokens = upto(m, LIMIT_CONTEXT);
    done->generated_tokens = upto(m, LIMIT_CONTEXT);
    done->queued_ns = (int64_t)(any64(m) >> 1);
    done->prefill_ns = (int64_t)(any64(m) >> 1);
    done->decode_ns = (int64_t)(any64(m) >> 1);
    make_counters(m, &done->counters);
}

static void make_progress(struct message_maker *m, struct msg_progress *progress)
{
    progress->total = between(m, 1, LIMIT_CONTEXT);
    progress->done = upto(m, progress->total);
    progress->cached = upto(m, progress->total);
}

static void make_grant(struct message_maker *m, struct msg_grant *grant)
{
    grant->sequence = any64(m);
    grant->index = upto(m, LIMIT_SEQUENCES - 1);
    grant->cached = upto(m, LIMIT_CONTEXT / BLOCK_TOKENS) * BLOCK_TOKENS;
}

static void make_report(struct message_maker *m, struct msg_report *report)
{
    snprintf(m->text, sizeof m->text, "{\"x\":%u}", upto(m, 1000000));
    report->json = (struct msg_bytes){.data = m->text, .bytes = (uint32_t)strlen(m->text)};
}

static void make_error(struct message_maker *m, struct msg_error *error)
{
    error->code = -(int32_t)between(m, 1, 4095);
    text(m, error->text, sizeof error->text);
}

void message_make(struct message_maker *m, uint32_t kind, struct msg *msg)
{
    memset(msg, 0, sizeof *msg);
    msg->kind = kind;
    msg->version = MSG_VERSION;
    msg->epoch = any64(m);
    msg->id = any64(m);
    msg->deadline_ns = (int64_t)(any64(m) >> 1);
    switch (kind) {
    case MSG_HELLO:
    case MSG_WELCOME:
        make_hello(m, &msg->hello);
        break;
    case MSG_ERROR:
        make_error(m, &msg->error);
        break;
    case MSG_REPORT:
        make_report(m, &msg->report);
        break;
    case MSG_OPEN:
        make_open(m, &msg->open);
        break;
    case MSG_GRANT:
        make_grant(m, &msg->grant);
        break;
    case MSG_CLOSE:
        msg->close.sequence = any64(m);
        break;
    case MSG_CLOSED:
        msg->closed.sequence = any64(m);
        make_counters(m, &msg->closed.counters);
        break;
    case MSG_RESUME:
        msg->resume.sequence = any64(m);
        break;
    case MSG_RESUMED:
        make_resumed(m, &msg->resumed);
        break;
    case MSG_PREFIX:
        msg->prefix = (struct msg_prefix){.salt = any64(m), .made = any_made(m), .tokens = words(m, 0, 300)};
        break;
    case MSG_PREFIXED:
        msg->prefixed.cached = upto(m, LIMIT_CONTEXT);
        break;
    case MSG_STEP:
        make_step(m, msg);
        break;
    case MSG_TOPK:
        make_topk(m, msg);
        break;
    case MSG_RESELECT:
        msg->id = (uint32_t)msg->id;
        msg->reselect.sequence = any64(m);
        break;
    case MSG_GENERATE:
        make_generate(m, &msg->generate);
        break;
    case MSG_PROGRESS:
        make_progress(m, &msg->progress);
        break;
    case MSG_TOKEN:
        msg->token.tokens = words(m, 1, 300);
        break;
    case MSG_DONE:
        make_done(m, &msg->done);
        break;
    default: /* no body */
        break;
    }
}

/* Compares what two pointers lead to and makes the second equal the first. */
static bool same(const void *a, const void **b, size_t bytes)
{
    if (bytes && memcmp(a, *b, bytes) != 0)
        return false;
    *b = a;
    return true;
}

static bool same_words(const struct msg_u32s *a, struct msg_u32s *b)
{
    return a->count == b->count && same(a->at, (const void **)&b->at, a->count * sizeof *a->at);
}

static bool same_bulk(const struct msg *a, struct msg *b)
{
    switch (a->kind) {
    case MSG_REPORT:
        return a->report.json.bytes == b->report.json.bytes &&
               same(a->report.json.data, &b->report.json.data, a->report.json.bytes);
    case MSG_OPEN:
        return same_words(&a->open.tokens, &b->open.tokens);
    case MSG_RESUMED:
        return same_words(&a->resumed.tokens, &b->resumed.tokens);
    case MSG_PREFIX:
        return same_words(&a->prefix.tokens, &b->prefix.tokens);
    case MSG_STEP:
        return a->step.entry_count == b->step.entry_count &&
               same(a->step.entries, (const void **)&b->step.entries,
                    a->step.entry_count * sizeof *a->step.entries) &&
               same_words(&a->step.tokens, &b->step.tokens) &&
               same_words(&a->step.features, &b->step.features);
    case MSG_TOPK:
        return a->topk.entry_count == b->topk.entry_count &&
               same(a->topk.entries, (const void **)&b->topk.entries,
                    a->topk.entry_count * sizeof *a->topk.entries) &&
               same_words(&a->topk.counts, &b->topk.counts) &&
               same_words(&a->topk.positions, &b->topk.positions);
    case MSG_GENERATE:
        return same_words(&a->generate.stop_ids, &b->generate.stop_ids) &&
               same_words(&a->generate.tokens, &b->generate.tokens);
    case MSG_TOKEN:
        return same_words(&a->token.tokens, &b->token.tokens);
    default:
        return true;
    }
}

bool message_equal(const struct msg *a, const struct msg *b)
{
    struct msg copy = *b;
    copy.memory = a->memory;
    return a->kind == b->kind && same_bulk(a, &copy) && memcmp(a, &copy, sizeof copy) == 0;
}
