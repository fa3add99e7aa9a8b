/* Hidden states on their way to a retriever: what STEP messages name is what the model computes, for every
 * token that has one behind it, however a prompt is cut and whatever is in the batch, on the CPU and on the
 * double of a GPU; and no row is written again before it was read. */
#include <math.h>

#include "base/hash.h"
#include "decoder/export.h"
#include "decoder/handover.h"
#include "decoder/identity.h"
#include "link/fdpass.h"
#include "link/flag.h"
#include "tests/lib/temp.h"
#include "tests/unit/decoder_rig.h"

enum { HIDDEN = 48, LAYERS = 3, REQUESTS = 8 };

static struct layout_features wanted = {LAYERS, HIDDEN, {0, 6, 13}}; /* 13: behind the last layer */

/* What a retriever would have, position by position. */
struct received {
    struct segment segment;
    struct features_header *header;
    uint32_t form;
    const uint8_t *rows; /* the first: in the segment, or the double's memory, which the CPU reaches */
    void *opened;
    float at[REQUESTS][STORE_CONTEXT][LAYERS * HIDDEN];
    uint32_t start[REQUESTS]; /* where the sequence begins: behind a cached prefix */
    uint32_t count[REQUESTS];
    uint32_t messages, reading;
    int late; /* rows are read when the test says so */
};

static struct received received;

static void attach(struct rig *g)
{
    struct features_params expected = {.decoder_epoch = 2, .retriever_epoch = 3, .wanted = &wanted};
    struct err err = {0};
    int fd = dup(export_fd(g->export));
    received = (struct received){0};
    if (segment_map(fd, 0, &received.segment, &err) < 0)
        fail_msg("%s", err.text);
    received.header = received.segment.at;
    if (features_header_check(received.header, &expected, received.segment.bytes, &err) < 0)
        fail_msg("%s", err.text);
    received.form = received.header->form;
    received.rows = (const uint8_t *)received.segment.at + received.header->rows_at;
    if (received.header->form == FEATURES_CUDA) {
        assert_int_equal(
            g->device->api->ipc_open(g->device->gpu, received.header->handle, &received.opened, &err), 0);
        received.rows = received.opened;
    }
}

static void detach(struct rig *g)
{
    if (received.opened)
        g->device->api->ipc_close(g->device->gpu, received.opened);
    segment_close(&received.segment);
}

static void read_row(uint32_t row, float *to)
{
    const struct features_header *h = received.header;
    assert_true(row < h->rows);
    const void *from = received.rows + row * h->row_bytes;
    for (uint32_t i = 0; i < LAYERS * HIDDEN; i++)
        to[i] =
            h->type == DTYPE_F32 ? ((const float *)from)[i] : dtype_bf16_to_f32(((const uint16_t *)from)[i]);
}

/* Reads what the message names, at once, as far as it is new. */
static void take_rows(struct rig *g, const struct msg *msg)
{
    (void)g;
    assert_int_equal(msg->step.reading, ++received.messages);
    for (uint32_t i = 0; i < msg->step.entry_count; i++) {
        const struct msg_step_entry *e = &msg->step.entries[i];
        uint32_t request = (uint32_t)e->sequence, start = received.start[request];
        uint32_t first = e->position == start ? start : e->position - 1;
        assert_int_equal(first, received.count[request] ? received.count[request] : start);
        for (uint32_t p = first; p + 1 < e->position + e->count; p++)
            read_row(msg->step.features.at[i] + p - first, received.at[request][p]);
        received.count[request] = e->position + e->count - 1;
    }
    received.reading = msg->step.reading;
    if (!received.late)
        flag_raise(&received.header->read, msg->step.reading);
}

/* ---- what it must equal ---- */

struct witness {
    struct plain_kv kv;
    float *to;
};

static int witness_layer(void *arg, uint32_t layer, struct pass_kv *kv, struct err *err)
{
    struct witness *w = arg;
    return plain_layer(&w->kv, layer, kv, err);
}

static void witness_hidden(void *arg, uint32_t layer, const float *x)
{
    struct witness *w = arg;
    for (uint32_t i = 0; i < LAYERS; i++)
        if (wanted.layer[i] == layer)
            memcpy(w->to + i * HIDDEN, x, HIDDEN * sizeof *x);
}

/* Of the rows that were compared so far. */
static double off_sum, length_sum;

/* To the bit, as the rows' type rounds; `roughly`, of a GPU: so in layer 0, while in layer 1 the distance is
 * summed up.
 * Behind all layers of random weights in bf16 nothing is left to compare: what is there is a number. */
static void check_row(const float *found, const float *want, int roughly)
{
    for (uint32_t i = 0; i < LAYERS * HIDDEN; i++) {
        float rounded =
            received.header->type == DTYPE_F32 ? want[i] : dtype_bf16_to_f32(dtype_f32_to_bf16(want[i]));
        if (!roughly || i < HIDDEN)
            assert_memory_equal(&found[i], &rounded, sizeof rounded);
        assert_true(isfinite(found[i]));
        if (i >= 2 * HIDDEN)
            continue;
        off_sum += ((double)found[i] - (double)want[i]) * ((double)found[i] - (double)want[i]);
        length_sum += (double)want[i] * (double)want[i];
    }
}

/* Token by token through a pass of its own on the CPU. `tokens` [count] */
static void check_rows(struct rig *g, uint32_t request, const uint32_t *tokens, uint32_t count, int roughly)
{
    uint32_t pages = STORE_CONTEXT / BLOCK_TOKENS, all = g->layout.layers * pages;
    struct pass_options options = {.threads = 1, .tokens_max = 1, .entries_max = 1, .logits_max = 1};
    struct pass *pass = NULL;
    float want[LAYERS * HIDDEN];
    struct witness w = {{g, mem_alloc_aligned(all, g->store.control->page_bytes), mem_alloc(all, 8)}, want};
    struct pass_source source = {.layer = witness_layer, .hidden = witness_hidden, .arg = &w};
    assert_int_equal(pass_create(g->model, &options, &pass, NULL), 0);
    for (uint32_t i = 0; i < all; i++)
        w.kv.at[i] = i * g->store.control->page_bytes;
    assert_int_equal(received.count[request], count);
    for (uint32_t p = 0; p < count; p++) {
        struct pass_entry entry = {&tokens[p], p, 1, 0};
        assert_int_equal(pass_run(pass, &entry, 1, &source, NULL), 0);
        if (p >= received.start[request])
            check_row(received.at[request][p], want, roughly);
    }
    pass_free(&pass);
    mem_free(&w.kv.base);
    mem_free(&w.kv.at);
}

static void check_request(struct rig *g, uint32_t request, uint32_t seed, uint32_t prompt, int roughly)
{
    uint32_t tokens[STORE_CONTEXT];
    const struct result *r = &g->results[request];
    for (uint32_t i = 0; i < prompt; i++)
        tokens[i] = prompt_id(g, seed, i);
    memcpy(tokens + prompt, r->tokens, r->count * sizeof *tokens);
    assert_int_equal(r->done, 1);
    assert_int_equal(r->last.reason, FINISH_LENGTH);
    /* The last token was never computed, the one before it is nobody's predecessor. */
    check_rows(g, request, tokens, prompt + r->count - 2, roughly);
}

/* Prompts shorter than a chunk, of a chunk, a token longer, of several; modes side by side; one request with
 * full attention, of which nothing is told. */
static void rows_are_what_the_model_computes(int on_gpu, const char *reader, int roughly)
{
    static const uint32_t prompts[] = {1, 5, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, PROMPT};
    struct rig *g = mem_alloc(1, sizeof *g);
    wanted.layer[1] = on_gpu ? 1 : 6;
    rig_open_for(g, on_gpu ? decoder_model_gpu() : decoder_model(), on_gpu, &wanted, reader);
    attach(g);
    g->stepped = take_rows;
    off_sum = length_sum = 0;
    for (uint32_t i = 0; i < 7; i++)
        ask(g, i + 1, i, prompts[i], plain(12 + i, GENERATE_IGNORE_EOS, i % 3));
    ask(g, 8 % REQUESTS, 9, PROMPT, plain(9, GENERATE_IGNORE_EOS | GENERATE_FULL, 0));
    finish(g);
    for (uint32_t i = 0; i < 7; i++)
        check_request(g, i + 1, i, prompts[i], roughly);
    assert_int_equal(received.count[8 % REQUESTS], 0);
    if (!(sqrt(off_sum) <= 0.02 * sqrt(length_sum)))
        fail_msg("off by %g of %g", sqrt(off_sum), sqrt(length_sum));
    for (uint32_t i = 0; i < STORE_SEQUENCES; i++)
        assert_int_equal(g->index_used[i], 0);
    if (on_gpu) /* counted, as launch plans it */
        assert_int_equal(g->device->bytes[GPU_DEVICE_FEATURES],
                         received.form == FEATURES_CUDA ? features_bytes(CHUNK, LAYERS, HIDDEN, DTYPE_BF16)
                                                        : 0);
    detach(g);
    rig_close(g);
    mem_free(&g);
}

static void rows_on_the_cpu(void **state)
{
    (void)state;
    rows_are_what_the_model_computes(0, "cpu", 0);
}

static void rows_for_a_gpu(void **state)
{
    (void)state;
    rows_are_what_the_model_computes(0, "GPU-00000000-0000-0000-0000-000000000000", 0);
}

static const char *own_card(void)
{
    static char uuid[48];
    struct gpu_device *device = NULL;
    fakegpu_use(NULL);
    assert_int_equal(gpu_device_open("cuda:0", &device, NULL), 0);
    snprintf(uuid, sizeof uuid, "%s", device->api->info(device->gpu)->uuid);
    gpu_device_free(&device);
    return uuid;
}

/* In memory of the card, and on the host: the same. */
static void rows_of_a_gpu(void **state)
{
    (void)state;
    struct hash128 on_card, on_host;
    rows_are_what_the_model_computes(1, own_card(), 1);
    on_card = hash_bytes(0, received.at, sizeof received.at);
    assert_int_equal(received.form, FEATURES_CUDA);
    rows_are_what_the_model_computes(1, "cpu", 1);
    on_host = hash_bytes(0, received.at, sizeof received.at);
    assert_int_equal(received.form, FEATURES_HOST);
    assert_true(hash_equal(on_card, on_host));
}

/* ---- a retriever that takes its time ---- */

static struct export *export_of(struct segment *ret)
{
    struct err err = {0};
    struct export *x = NULL;
    struct export_options o = {
        .wanted = wanted, .decoder_epoch = 2, .retriever_epoch = 3, .chunk = CHUNK, .reader = "cpu"};
    if (export_create(&o, &x, &err) < 0 || segment_map(dup(export_fd(x)), 0, ret, &err) < 0)
        fail_msg("%s", err.text);
    return x;
}

static struct control_flag *read_flag(const struct segment *s)
{
    return &((struct features_header *)s->at)->read;
}

/* Chunks take turns, and so do the last tokens of a sequence; neither meets the other. */
static void rows_take_turns(void **state)
{
    (void)state;
    struct segment segment;
    struct export *x = export_of(&segment);
    uint32_t rows = features_rows(CHUNK), owner[1024] = {0};
    assert_true(rows <= 1024);
    for (uint32_t c = 1; c <= FEATURES_CHUNKS; c++)
        for (uint32_t i = 0, row = export_chunk(x, CHUNK); i < CHUNK; i++)
            owner[row + i] += c;
    for (uint32_t index = 0; index < LIMIT_SEQUENCES; index++)
        for (uint32_t p = 100; p < 100 + FEATURES_STEPS; p++)
            owner[export_step(x, index, p)] += 1;
    for (uint32_t i = 0; i < rows; i++)
        assert_true(owner[i] >= 1 && owner[i] <= FEATURES_CHUNKS);
    assert_int_equal(export_step(x, 5, 7), export_step(x, 5, 7 + FEATURES_STEPS));
    segment_close(&segment);
    export_free(&x);
}

static void *read_later(void *arg)
{
    struct control_flag *flag = arg;
    while (!atomic_load(&flag->waiters)) /* until somebody waits */
        poll(NULL, 0, 1);
    flag_raise(flag, 2);
    return NULL;
}

static void rows_wait_for_their_reader(void **state)
{
    (void)state;
    struct segment segment;
    struct err err = {0};
    struct export *x = export_of(&segment);
    struct export_figures f;
    pthread_t thread;
    uint32_t a = export_chunk(x, CHUNK), b = export_chunk(x, CHUNK);
    assert_int_equal(export_claim(x, a, CHUNK, &err), 0); /* nobody was told of them */
    assert_int_equal(export_message(x), 1);
    export_named(x, a, CHUNK);
    assert_int_equal(export_message(x), 2);
    export_named(x, b + 3, 1);
    assert_int_equal(export_claim(x, b, 3, &err), 0); /* of these none */
    flag_raise(read_flag(&segment), 1);
    assert_int_equal(export_claim(x, a, CHUNK, &err), 0);
    export_figures(x, &f);
    assert_int_equal(f.waits, 0);
    assert_int_equal(pthread_create(&thread, NULL, read_later, read_flag(&segment)), 0);
    assert_int_equal(export_claim(x, b, CHUNK, &err), 0);
    pthread_join(thread, NULL);
    export_figures(x, &f);
    assert_int_equal(f.waits, 1);
    assert_int_equal(export_message(x), 3);
    export_named(x, a, 1);
    flag_abort(read_flag(&segment)); /* the retriever is gone */
    assert_int_equal(export_claim(x, a, 1, &err), -ECANCELED);
    assert_non_null(strstr(err.text, "waited for the retriever"));
    segment_close(&segment);
    export_free(&x);
}

/* Nothing is read: the third chunk, which would write over the first one's rows, does not begin. */
static void a_prompt_waits_for_the_retriever(void **state)
{
    (void)state;
    struct rig *g = mem_alloc(1, sizeof *g);
    pthread_t thread;
    rig_open_for(g, decoder_model(), 0, &wanted, "cpu");
    attach(g);
    g->stepped = take_rows;
    received.late = 1;
    ask(g, 1, 3, 4 * CHUNK, plain(4, GENERATE_IGNORE_EOS, SELECTION_PREVIOUS));
    turn(g);
    for (int i = 0; i < 2; i++)
        turn(g);
    assert_int_equal(received.reading, 2);
    assert_int_equal(g->results[1].progress, 2 * CHUNK);
    assert_int_equal(pthread_create(&thread, NULL, read_later, &received.header->read), 0);
    turn(g); /* until it has read message 2 */
    pthread_join(thread, NULL);
    assert_int_equal(g->results[1].progress, 3 * CHUNK);
    received.late = 0;
    flag_raise(&received.header->read, received.reading);
    finish(g);
    check_request(g, 1, 3, 4 * CHUNK, 0);
    detach(g);
    rig_close(g);
    mem_free(&g);
}

/* ---- cached prefixes ---- */

enum { LONG = 3 * BLOCK_TOKENS + 8 };

static struct rig *open_keeping(void)
{
    struct rig *g = mem_alloc(1, sizeof *g);
    rig_open_for(g, decoder_model(), 0, &wanted, "cpu");
    attach(g);
    g->stepped = take_rows;
    g->cached = 3 * BLOCK_TOKENS;
    return g;
}

static void close_keeping(struct rig **g)
{
    detach(*g);
    rig_close(*g);
    mem_free(g);
}

/* What is cached and has keys is neither computed nor told; what follows is, from the first row on. In the
 * tests' store a sequence finds in its pages what the one before it left there. */
static void what_has_keys_is_taken_from_the_cache(void **state)
{
    (void)state;
    static const struct {
        uint32_t kept, cached, taken, prompt; /* by retriever, store, both */
    } cases[] = {{0, 192, 0, LONG},
                 {192, 192, 192, LONG},
                 {64, 192, 64, LONG},
                 {192, 128, 128, LONG},
                 {128, 192, 128, 129}};
    struct rig *g = open_keeping();
    for (uint32_t i = 0; i < 5; i++) {
        uint32_t request = i + 1;
        g->kept = cases[i].kept;
        g->cached = cases[i].cached;
        received.start[request] = cases[i].taken;
        ask(g, request, 3, cases[i].prompt, plain(12, GENERATE_REUSE | GENERATE_IGNORE_EOS, i % 3));
        finish(g);
        check_request(g, request, 3, cases[i].prompt, 0);
        assert_int_equal(g->results[request].last.cached_tokens, cases[i].taken);
        if (cases[i].prompt == LONG)
            assert_memory_equal(g->results[request].tokens, g->results[1].tokens, 12 * sizeof(uint32_t));
    }
    close_keeping(&g);
}

/* Who asks for no prefix, and who attends everything, is opened at once; a prefix of sparse KV, whose states
 * nobody has seen, is not asked for. */
static void the_retriever_is_asked_first(void **state)
{
    (void)state;
    struct rig *g = open_keeping();
    struct err err = {0};
    g->kept = 128;
    ask(g, 1, 3, LONG, plain(4, GENERATE_REUSE | GENERATE_REUSE_SPARSE, 0));
    ask(g, 2, 3, PROMPT, plain(4, GENERATE_REUSE | GENERATE_FULL, 0));
    ask(g, 3, 3, PROMPT, plain(4, 0, 0));
    assert_true(scheduler_turn(g->scheduler, &err) >= 0);
    assert_int_equal(g->keys_asked_count, 1);
    assert_int_equal(g->asked_count, 2);
    assert_int_equal(g->asked[0].open.flags, OPEN_REUSE);
    assert_int_equal(g->asked[0].open.reuse_max, 0);
    assert_int_equal(g->asked[1].open.flags, 0);
    answer_keys(g);
    assert_int_equal(g->asked_count, 3);
    assert_int_equal(g->asked[2].open.flags, OPEN_REUSE);
    assert_int_equal(g->asked[2].open.reuse_max, 128);
    g->cached = 0; /* of which nothing is there */
    finish(g);
    close_keeping(&g);
}

static void grant(struct rig *g, uint32_t request, uint32_t cached)
{
    struct msg msg = {.kind = MSG_GRANT, .id = request, .grant = {request, 0, cached}};
    scheduler_retriever(g->scheduler, &msg);
}

/* While the retriever is asked: a cancelled request, one that it refuses, answers that cannot be. None
 * of them is opened at the store. */
static void ends_before_the_store_is_asked(void **state)
{
    (void)state;
    struct rig *g = open_keeping();
    g->keys_silent = true;
    for (uint32_t i = 1; i <= 4; i++)
        ask(g, i, 3, LONG, plain(4, GENERATE_REUSE, 0));
    turn(g);
    turn(g);
    assert_int_equal(g->keys_asked_count, 4);
    scheduler_cancel(g->scheduler, 1);
    assert_int_equal(g->results[1].done, 0);
    grant(g, 1, 128);
    assert_int_equal(g->results[1].done, 1);
    assert_int_equal(g->results[1].last.reason, FINISH_CANCELLED);
    struct msg error = {.kind = MSG_ERROR, .id = 2, .error = {.code = -EAGAIN, .text = "too much to do"}};
    scheduler_retriever(g->scheduler, &error);
    check_error(g, 2, -EAGAIN, "retriever: too much to do");
    grant(g, 3, 63);
    check_error(g, 3, -EPROTO, "retriever granted keys of 63 of 200 tokens");
    grant(g, 4, 256);
    check_error(g, 4, -EPROTO, "retriever granted keys of 256 of 200 tokens");
    grant(g, 4, 64); /* of none that is known */
    assert_int_equal(g->keys_closed, 3);
    assert_int_equal(g->opened + g->asked_count, 0);
    g->keys_asked_count = 0;
    close_keeping(&g);
}

/* Its death while it is asked costs nothing: the next one is asked, and has kept nothing. */
static void another_retriever_is_asked_anew(void **state)
{
    (void)state;
    struct rig *g = open_keeping();
    g->keys_silent = true;
    g->kept = 128;
    ask(g, 1, 3, LONG, plain(4, GENERATE_REUSE | GENERATE_IGNORE_EOS, 0));
    ask(g, 2, 3, LONG, plain(4, GENERATE_REUSE, 0));
    turn(g);
    scheduler_cancel(g->scheduler, 2);
    scheduler_retriever_ready(g->scheduler, 0);
    assert_int_equal(g->results[2].last.reason, FINISH_CANCELLED);
    scheduler_retriever_ready(g->scheduler, 1);
    g->keys_asked_count = 0;
    g->keys_silent = false;
    g->kept = 0;
    finish(g);
    check_request(g, 1, 3, LONG, 0);
    assert_int_equal(g->results[1].last.cached_tokens, 0);
    close_keeping(&g);
}

/* One whose question ends every retriever fails, as one does that they end with later. */
static void one_whose_question_ends_them_all_fails(void **state)
{
    (void)state;
    struct rig *g = open_keeping();
    g->keys_silent = true;
    ask(g, 1, 3, LONG, plain(4, GENERATE_REUSE, 0));
    for (uint32_t i = 0; i <= GENERATION_VAIN_MAX; i++) {
        turn(g);
        assert_int_equal(g->keys_asked_count, i + 1);
        assert_int_equal(g->results[1].done, 0);
        scheduler_retriever_ready(g->scheduler, 0);
        scheduler_retriever_ready(g->scheduler, 1);
        grant(g, 1, 64); /* of the one before, which only hung */
    }
    check_error(g, 1, -EHOSTUNREACH, "retriever is gone, 5 times without a new token in between");
    g->keys_asked_count = 0;
    close_keeping(&g);
}

/* A store that grants more than there are keys of. */
static void more_than_has_keys_is_refused(void **state)
{
    (void)state;
    struct rig *g = open_keeping();
    struct err err = {0};
    g->kept = 64;
    ask(g, 1, 3, LONG, plain(4, GENERATE_REUSE, 0));
    assert_true(scheduler_turn(g->scheduler, &err) >= 0);
    answer_keys(g);
    assert_int_equal(g->asked_count, 1);
    g->asked[0].open.reuse_max = 0;
    answer(g);
    finish(g);
    check_error(g, 1, -EPROTO, "192 cached of 200 tokens");
    close_keeping(&g);
}

/* What the model has: layers 0 to 13, 48 wide. */
static void what_the_model_lacks_is_refused(void **state)
{
    (void)state;
    static const struct {
        struct layout_features asked;
        const char *words; /* NULL: it is there */
    } cases[] = {{{3, HIDDEN, {0, 6, 13}}, NULL},
                 {{3, HIDDEN, {0, 6, 14}}, "features: layer: found 14, expected at most 13"},
                 {{3, HIDDEN + 8, {0, 6, 13}}, "features: hidden: found 56, expected 48"}};
    struct model *model = NULL;
    struct err err = {0};
    assert_int_equal(model_open(decoder_model(), &model, &err), 0);
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct identity id;
        struct msg_hello hello;
        assert_int_equal(identity_init(&id, model, 0, &err), 0);
        identity_hello(&id, &hello);
        hello.has_layout = hello.has_features = true;
        hello.layout = id.layout;
        layout_set_groups(&hello.layout, 1);
        hello.features = cases[i].asked;
        assert_int_equal(identity_join(&id, &hello, &err), cases[i].words ? -EPROTO : 0);
        if (cases[i].words && !strstr(err.text, cases[i].words))
            fail_msg("expected '%s' in: %s", cases[i].words, err.text);
        if (cases[i].words)
            continue;
        assert_memory_equal(&id.features, &cases[i].asked, sizeof id.features);
        hello.features.layer[2] = 12; /* another life of the retriever, with another head */
        assert_int_equal(identity_compare(&id, &hello, &err), -EPROTO);
        assert_non_null(strstr(err.text, "features"));
    }
    model_free(&model);
}

struct answers {
    struct loop *loop;
    struct handover handover;
    uint32_t count;
    const char *why; /* of the last; NULL: taken */
    int64_t deadline_ns;
};

static void note_answer(void *arg, const char *why)
{
    struct answers *a = arg;
    a->count++;
    a->why = why;
}

/* What the other end did was seen. */
static void look_seen(void *arg)
{
    struct answers *a = arg;
    assert_true(clock_now_ns() < a->deadline_ns);
    if (a->count || a->handover.connection < 0)
        loop_stop(a->loop, 0);
}

static void hand(struct answers *a, const char *path, int fd)
{
    struct err err = {0};
    a->count = 0;
    a->deadline_ns = clock_now_ns() + 60 * CLOCK_S;
    if (handover_send(&a->handover, path, fd, 1, &err) < 0)
        fail_msg("%s", err.text);
}

/* A retriever that dies before it answers is waited for, until it is known to be lost or time is over; the
 * next one's answer counts. */
static void a_retriever_dies_before_it_answers(void **state)
{
    (void)state;
    char folder[PATH_MAX], path[PATH_MAX + 16];
    struct answers a = {.loop = loop_create()};
    struct segment segment;
    struct err err = {0};
    int listener, peer;
    pid_t pid;
    temp_make(folder);
    snprintf(path, sizeof path, "%s/fd", folder);
    assert_int_equal(segment_create("features", FEATURES_ROWS_AT, &segment, &err), 0);
    handover_init(&a.handover, a.loop, note_answer, &a);
    loop_add_timer(a.loop, CLOCK_MS, look_seen, &a);

    hand(&a, path, segment.fd); /* nobody listens */
    assert_true(a.handover.timer >= 0);
    assert_int_equal(fdpass_listen(path, &listener, &err), 0);
    hand(&a, path, segment.fd);
    assert_int_equal(fdpass_accept(listener, &peer, &pid, &err), 0);
    close(peer);
    loop_run(a.loop);
    assert_int_equal(a.count, 0);
    assert_true(a.handover.timer >= 0);
    handover_drop(&a.handover);
    assert_int_equal(a.handover.timer, -1);

    hand(&a, path, segment.fd);
    assert_int_equal(fdpass_accept(listener, &peer, &pid, &err), 0);
    struct fdpass_frame taken = {.kind = FDPASS_TAKEN, .role = ROLE_RETRIEVER};
    assert_int_equal(fdpass_send(peer, &taken, NULL, &err), 0);
    loop_run(a.loop);
    assert_int_equal(a.count, 1);
    assert_null(a.why);
    assert_int_equal(a.handover.timer, -1);
    handover_close(&a.handover);
    close(peer);
    close(listener);
    segment_close(&segment);
    loop_free(&a.loop);
    temp_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_on_the_cpu),
        cmocka_unit_test(rows_for_a_gpu),
        cmocka_unit_test(rows_of_a_gpu),
        cmocka_unit_test(rows_take_turns),
        cmocka_unit_test(rows_wait_for_their_reader),
        cmocka_unit_test(a_prompt_waits_for_the_retriever),
        cmocka_unit_test(what_has_keys_is_taken_from_the_cache),
        cmocka_unit_test(the_retriever_is_asked_first),
        cmocka_unit_test(ends_before_the_store_is_asked),
        cmocka_unit_test(another_retriever_is_asked_anew),
        cmocka_unit_test(one_whose_question_ends_them_all_fails),
        cmocka_unit_test(more_than_has_keys_is_refused),
        cmocka_unit_test(what_the_model_lacks_is_refused),
        cmocka_unit_test(a_retriever_dies_before_it_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
