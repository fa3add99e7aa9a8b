/* Steps; see stepper.h.
 *
 * Owner: the device thread. State: the number of the next step, the version of the resident set, the private
 * copy of the record in the ring. Order: ids and entries, then STEP_POSTED, then the doorbell; device memory
 * is written between TABLES_LATE (EARLY for mixed selection) and KV_WRITTEN only; after STEP_CONSUMED
 * nothing of the step's tables is read. */
#include "decoder/stepper.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/trace.h"
#include "decoder/places.h"
#include "decoder/step_gpu.h"
#include "link/flag.h"

#define STEPPER_SPIN_NS     (20 * INT64_C(1000))  /* about what a futex wake costs */
#define STEPPER_LOOK_NS     (50 * CLOCK_MS)       /* between two looks at what the retriever does */
#define STEPPER_SPIN_GPU_NS (200 * INT64_C(1000)) /* nothing else wants this thread's core then */
#define STEPPER_PEEK_NS     (50 * INT64_C(1000))  /* between two looks at where the stream is */
#define STEPPER_SOON_NS     (100 * INT64_C(1000)) /* tables that are so near come first */

struct stepper {
    struct stepper_attachment at;
    struct pass *pass;    /* NULL: on a GPU */
    struct step_gpu *gpu; /* NULL: on the CPU */
    struct places *places;
    struct export *export;      /* NULL: nobody reads hidden states */
    uint32_t *feature_rows;     /* [LIMIT_STEP_TOKENS] of the step's tokens */
    struct step_record *record; /* of the step posted last */
    struct pass_entry *entries; /* [LIMIT_SEQUENCES] */
    void *scratch;              /* of the sampler */
    uint32_t next, resident_version;
    uint32_t used_version;  /* resident set of the tables read last; 0, before the first, is all layers */
    uint32_t runs, run;     /* run that the pass is in, `runs` before the first layer */
    uint32_t offloaded;     /* layers, in the step run last */
    unsigned losses_told;   /* of the retriever, that this thread has heard of or the step has told of */
    unsigned refusals;      /* of sequences, that this thread has heard of */
    unsigned refusals_told; /* the same, and those that the step which waits has told of */
    void (*refused)(void *arg, uint64_t id);
    void *refused_arg;
    void (*lost)(void *arg);
    void *lost_arg;
    void (*meanwhile)(void *arg);
    void *meanwhile_arg;
    bool meanwhile_due; /* not called yet in this stepper_run */
    struct stepper_times times;
};

static struct stepper *create(const struct stepper_attachment *attachment)
{
    struct stepper *s = mem_alloc(1, sizeof *s);
    s->at = *attachment;
    s->places = places_create(&attachment->layout, attachment->control, attachment->device);
    s->record = mem_alloc(1, sizeof *s->record);
    s->entries = mem_alloc(LIMIT_SEQUENCES, sizeof *s->entries);
    s->feature_rows = mem_alloc(LIMIT_STEP_TOKENS, sizeof *s->feature_rows);
    s->next = attachment->control->first_step;
    s->runs = layout_runs(&attachment->layout);
    return s;
}

struct stepper *stepper_create(const struct stepper_attachment *attachment, struct pass *pass)
{
    struct stepper *s = create(attachment);
    s->pass = pass;
    s->scratch = mem_alloc_aligned(sampler_scratch_bytes(pass_vocab(pass)), 1);
    return s;
}

int stepper_create_gpu(const struct stepper_attachment *attachment, struct pass_gpu *pass,
                       struct stepper **ret_stepper, struct err *err)
{
    struct stepper *s = create(attachment);
    int r = step_gpu_create(&attachment->layout, attachment->control, pass, &s->gpu, err);
    if (r < 0)
        stepper_free(&s);
    *ret_stepper = s;
    return r;
}

void stepper_free(struct stepper **stepper)
{
    struct stepper *s = *stepper;
    if (!s)
        return;
    step_gpu_free(&s->gpu);
    places_free(&s->places);
    mem_free(&s->record);
    mem_free(&s->entries);
    mem_free(&s->feature_rows);
    mem_free(&s->scratch);
    mem_free(stepper);
}

void stepper_export(struct stepper *s, struct export *export)
{
    s->export = export;
    if (s->gpu)
        step_gpu_export(s->gpu, export);
}

void stepper_on_refused(struct stepper *s, void (*refused)(void *arg, uint64_t id), void *arg)
{
    s->refused = refused;
    s->refused_arg = arg;
}

void stepper_on_lost(struct stepper *s, void (*lost)(void *arg), void *arg)
{
    s->lost = lost;
    s->lost_arg = arg;
}

void stepper_on_meanwhile(struct stepper *s, void (*meanwhile)(void *arg), void *arg)
{
    s->meanwhile = meanwhile;
    s->meanwhile_arg = arg;
}

static void do_meanwhile(struct stepper *s)
{
    if (s->meanwhile_due && s->meanwhile)
        s->meanwhile(s->meanwhile_arg);
    s->meanwhile_due = false;
}

static struct control_flag *flag_at(struct stepper *s, unsigned flag)
{
    return control_flag_at(s->at.control, flag);
}

void stepper_adopt_residents(struct stepper *s)
{
    uint32_t version = atomic_load_explicit(&flag_at(s, FLAG_RESIDENT_PROPOSED)->value, memory_order_acquire);
    if (version == s->resident_version || version - s->resident_version >= FLAG_ABORT_AHEAD / 2)
        return;
    s->resident_version = version;
    flag_raise(flag_at(s, FLAG_RESIDENT_ACKED), version);
    doorbell_ring(s->at.store_bell);
}

uint32_t stepper_next(const struct stepper *s)
{
    return s->next;
}

uint32_t stepper_dense_limit(const struct stepper *s, int sure)
{
    uint32_t staging = s->at.control->staging_tokens;
    int unknown = s->resident_version != s->used_version;
    int limited = unknown ? !sure : places_offloaded(s->places) > 0;
    return staging && limited ? staging : UINT32_MAX;
}

void stepper_post(struct stepper *s, const struct stepper_spec *spec)
{
    struct step_record *r = s->record;
    CHECK(spec->count > 0 && spec->count <= s->at.control->sequences_max && spec->count <= LIMIT_SEQUENCES);
    memset(r, 0, offsetof(struct step_record, entry));
    s->refusals_told = s->refusals;
    s->losses_told = s->at.losses ? *s->at.losses_heard : 0;
    r->step = s->next++;
    r->kind = spec->kind;
    r->selection = spec->selection;
    r->early_layers = spec->selection == SELECTION_MIXED ? s->at.early_layers : 0;
    r->resident_version = s->resident_version;
    r->entries = spec->count;
    for (uint32_t i = 0; i < spec->count; i++) {
        const struct stepper_part *p = &spec->parts[i];
        CHECK(p->count > 0 && p->count <= LIMIT_STEP_TOKENS - r->tokens);
        CHECK(spec->kind != STEP_SPARSE || p->count == 1);
        r->entry[i] = (struct step_entry){p->id, p->index, p->position, p->count, r->tokens};
        memcpy(r->token + r->tokens, p->history + p->position, p->count * sizeof *r->token);
        r->tokens += p->count;
    }
    struct step_record *ring = control_step_at(s->at.control, r->step);
    size_t head = offsetof(struct step_record, entry) + r->entries * sizeof *r->entry;
    memcpy(ring, r, head);
    memcpy(ring->token, r->token, r->tokens * sizeof *r->token);
    if (s->at.awake)
        awake_hint(s->at.awake);
    flag_raise(flag_at(s, FLAG_STEP_POSTED), r->step);
    trace(TRACE_POSTED, r->step);
    doorbell_ring(s->at.store_bell);
    uint64_t *counter = spec->kind == STEP_DENSE    ? &s->times.dense
                        : spec->kind == STEP_SPARSE ? &s->times.sparse
                                                    : &s->times.record;
    ++*counter;
}

/* Tells if the retriever was lost, unheard by this thread. */
static bool tell_lost(struct stepper *s)
{
    unsigned losses = s->at.losses ? atomic_load(s->at.losses) : s->losses_told;
    bool news = losses != s->losses_told;
    s->losses_told = losses;
    if (news && s->lost)
        s->lost(s->lost_arg);
    return s->at.losses && losses != *s->at.losses_heard;
}

void stepper_refused(struct stepper_refusals *refusals, uint64_t id)
{
    unsigned at = atomic_load_explicit(&refusals->count, memory_order_relaxed);
    atomic_store_explicit(&refusals->id[at % STEPPER_REFUSALS], id, memory_order_relaxed);
    atomic_store_explicit(&refusals->count, at + 1, memory_order_release);
}

void stepper_retriever_refused(struct stepper *s)
{
    s->refusals++;
}

static bool is_entry(const struct step_record *r, uint64_t id)
{
    for (uint32_t i = 0; i < r->entries; i++)
        if (r->entry[i].id == id)
            return true;
    return false;
}

/* Tells of the step's sequences that the retriever refused, unheard by this thread. */
static void tell_refused(struct stepper *s)
{
    const struct stepper_refusals *all = s->at.refusals;
    unsigned count = all ? atomic_load_explicit(&all->count, memory_order_acquire) : s->refusals_told;
    if (count - s->refusals_told > STEPPER_REFUSALS)
        s->refusals_told = count - STEPPER_REFUSALS;
    for (; s->refusals_told != count; s->refusals_told++) {
        uint64_t id =
            atomic_load_explicit(&all->id[s->refusals_told % STEPPER_REFUSALS], memory_order_relaxed);
        if (is_entry(s->record, id) && s->refused)
            s->refused(s->refused_arg, id);
    }
}

/* Sets of a sparse step that never come: whose they are is closed, and so its tables come. A refusal by
 * one that was lost since is heard of second. */
static void look_at_retriever(struct stepper *s)
{
    if (s->record->kind == STEP_SPARSE && !tell_lost(s))
        tell_refused(s);
}

/* Until the flag or the deadline. A GPU that gets its tables soon would wait for what is done meanwhile. */
static int wait_looking(struct stepper *s, unsigned flag, int64_t begin)
{
    int64_t end = begin + STEPPER_WAIT_S * CLOCK_S, spin = s->gpu ? STEPPER_SPIN_GPU_NS : STEPPER_SPIN_NS;
    int r = -ETIMEDOUT;
    if (s->meanwhile_due) {
        r = flag_wait(flag_at(s, flag), s->record->step, begin + STEPPER_SOON_NS, STEPPER_SOON_NS);
        if (r == -ETIMEDOUT)
            do_meanwhile(s);
    }
    for (int64_t now = begin; r == -ETIMEDOUT && now < end; now = clock_now_ns(), spin = 0) {
        int64_t until = now + STEPPER_LOOK_NS;
        r = flag_wait(flag_at(s, flag), s->record->step, until < end ? until : end, spin);
        if (r == -ETIMEDOUT)
            look_at_retriever(s);
    }
    return r;
}

/* `what`: what the store did not do, should it not come. */
static int wait_end(struct stepper *s, int r, const char *what, struct err *err)
{
    if (r == 0)
        return 0;
    s->times.waits_broken++;
    if (r == -ECANCELED)
        return err_set(err, r, "step %u was broken off while it waited for the kvstore to %s",
                       s->record->step, what);
    return err_set(err, r, "kvstore did not %s step %u within %d s", what, s->record->step, STEPPER_WAIT_S);
}

static int wait_flag(struct stepper *s, unsigned flag, const char *what, int64_t *account, struct err *err)
{
    int64_t begin = clock_now_ns();
    int r = wait_looking(s, flag, begin);
    *account += clock_now_ns() - begin;
    return wait_end(s, r, what, err);
}

/* For tables that the stream comes to ask for while they are waited for: only what it waits is a wait. */
static int wait_beside(struct stepper *s, unsigned flag, const _Atomic uint32_t *arrived, const char *what,
                       struct err *err)
{
    int64_t begin = clock_now_ns(), now = begin, stands = 0;
    int r = -ETIMEDOUT;
    while (r == -ETIMEDOUT && !stands && now - begin < STEPPER_WAIT_S * CLOCK_S) {
        int64_t spin = now - begin < STEPPER_SPIN_GPU_NS ? STEPPER_PEEK_NS : 0;
        stands = (int32_t)(atomic_load(arrived) - s->record->step) >= 0 ? now : 0;
        r = flag_wait(flag_at(s, flag), s->record->step, now + STEPPER_PEEK_NS, spin);
        if (r == -ETIMEDOUT)
            do_meanwhile(s);
        now = clock_now_ns();
        if (r == -ETIMEDOUT)
            look_at_retriever(s);
    }
    if (r == -ETIMEDOUT && stands)
        r = wait_looking(s, flag, stands);
    s->times.wait_tables += stands ? clock_now_ns() - stands : 0;
    return wait_end(s, r, what, err);
}

/* `arrived`: as step_gpu.h says. */
static int wait_tables(struct stepper *s, enum places_phase phase, const _Atomic uint32_t *arrived,
                       struct err *err)
{
    int early = phase == PLACES_EARLY;
    const char *what = early ? "make the early tables of" : "make the tables of";
    unsigned flag = early ? FLAG_TABLES_EARLY : FLAG_TABLES_LATE;
    int r = arrived ? wait_beside(s, flag, arrived, what, err)
                    : wait_flag(s, flag, what, &s->times.wait_tables, err);
    trace(early ? TRACE_RELEASED_EARLY : TRACE_RELEASED_LATE, s->record->step);
    return r < 0 ? r : places_phase(s->places, phase, err);
}

static int begin_layer(void *arg, uint32_t layer, struct pass_kv *kv, struct err *err)
{
    struct stepper *s = arg;
    int mixed = s->record->kind == STEP_SPARSE && s->record->selection == SELECTION_MIXED;
    uint32_t early_layers = mixed ? s->record->early_layers : 0;
    int r = 0;
    if (layer == 0 && early_layers)
        r = wait_tables(s, PLACES_EARLY, NULL, err);
    if (r == 0 && layer == early_layers)
        r = wait_tables(s, PLACES_LATE, NULL, err);
    uint32_t run = layout_run_of(&s->at.layout, layer);
    if (r == 0 && run != s->run) {
        s->run = run;
        r = wait_flag(s, FLAG_ROWS_READY + run, "have the rows ready of", &s->times.wait_rows, err);
    }
    if (r == 0)
        places_layer(s->places, layer, kv);
    return r;
}

static void end_layer(void *arg, uint32_t layer)
{
    struct stepper *s = arg;
    uint32_t run = layout_run_of(&s->at.layout, layer);
    if (s->record->kind == STEP_DENSE && layer + 1 == layout_run_first(&s->at.layout, run + 1))
        flag_raise(flag_at(s, FLAG_RUN_CONSUMED + run), s->record->step);
}

/* Row `row` of the logits belongs to the part. */
static int32_t sample(struct stepper *s, const struct stepper_part *part, uint32_t row)
{
    struct sampler_input input = {.logits = pass_logits(s->pass, row),
                                  .vocab = pass_vocab(s->pass),
                                  .history = part->history,
                                  .history_count = part->position + part->count,
                                  .sequence = 0, /* a request has one */
                                  .position = part->position + part->count,
                                  .scratch = s->scratch};
    uint32_t id;
    int r = sampler_sample(part->sampling, &input, &id);
    CHECK(r == 0 || r == -EDOM); /* the history was checked when it came */
    return r == 0 ? (int32_t)id : -1;
}

static void sample_all(struct stepper *s, const struct stepper_spec *spec, struct stepper_verdict *verdicts)
{
    int64_t begin = clock_now_ns();
    for (uint32_t i = 0, row = 0; i < spec->count; i++)
        if (spec->parts[i].sampling) {
            if (verdicts[i].status == 0)
                verdicts[i].token = sample(s, &spec->parts[i], row);
            row++;
        }
    s->times.sampling += clock_now_ns() - begin;
}

static void take_hidden(void *arg, uint32_t layer, const float *x)
{
    struct stepper *s = arg;
    export_write(s->export, layer, x, s->feature_rows, s->record->tokens);
}

static int run_cpu(struct stepper *s, const struct stepper_spec *spec, struct err *err)
{
    uint32_t t = 0;
    for (uint32_t i = 0; i < spec->count; i++) {
        const struct stepper_part *p = &spec->parts[i];
        for (uint32_t j = 0; j < p->count; j++)
            s->feature_rows[t++] = p->features == EXPORT_NONE ? EXPORT_NONE : p->features + j;
        s->entries[i] =
            (struct pass_entry){p->history + p->position, p->position, p->count, p->sampling ? 1 : 0};
    }
    s->run = s->runs;
    do_meanwhile(s);
    struct pass_source source = {begin_layer, end_layer, s->export ? take_hidden : NULL, s};
    return pass_run(s->pass, s->entries, spec->count, &source, err);
}

static int wait_tables_of(void *arg, enum places_phase phase, const _Atomic uint32_t *arrived,
                          struct err *err)
{
    return wait_tables(arg, phase, arrived, err);
}

static void do_meanwhile_of(void *arg)
{
    do_meanwhile(arg);
}

static int run_gpu(struct stepper *s, const struct stepper_spec *spec, struct stepper_verdict *verdicts,
                   struct err *err)
{
    int32_t tokens[LIMIT_SEQUENCES];
    struct step_gpu_tables tables = {wait_tables_of, do_meanwhile_of, s, s->places};
    int r = step_gpu_run(s->gpu, s->record, spec, &tables, tokens, err);
    for (uint32_t i = 0; r == 0 && i < spec->count; i++)
        verdicts[i].token = tokens[i];
    return r;
}

/* Rows that this step writes. Nobody reads those of a retriever that is gone. */
static int claim_rows(struct stepper *s, const struct stepper_spec *spec, struct err *err)
{
    int r = 0;
    for (uint32_t i = 0; i < spec->count && s->export && r == 0; i++)
        if (spec->parts[i].features != EXPORT_NONE)
            r = export_claim(s->export, spec->parts[i].features, spec->parts[i].count, err);
    if (r == -ECANCELED && tell_lost(s))
        return 0;
    if (r < 0)
        s->times.waits_broken++;
    return r;
}

/* Layers went into host memory, or came back, with the step that was run. */
static void note_move(struct stepper *s)
{
    uint32_t offloaded = places_offloaded(s->places);
    if (offloaded == s->offloaded)
        return;
    s->offloaded = offloaded;
    uint64_t at = s->times.move_count++ % STEPPER_MOVES;
    s->times.moves[at].sparse = s->times.sparse;
    s->times.moves[at].offloaded = offloaded;
}

static int run(struct stepper *s, const struct stepper_spec *spec, struct stepper_verdict *ret_verdicts,
               struct err *err)
{
    int64_t tables_before = s->times.wait_tables, rows_before = s->times.wait_rows;
    places_begin(s->places, s->record);
    int r = claim_rows(s, spec, err);
    if (r < 0)
        return r;
    r = s->gpu ? run_gpu(s, spec, ret_verdicts, err) : run_cpu(s, spec, err);
    if (r < 0)
        return r;
    s->used_version = s->record->resident_version;
    note_move(s);
    flag_raise(flag_at(s, FLAG_KV_WRITTEN), s->record->step);
    flag_raise(flag_at(s, FLAG_STEP_CONSUMED), s->record->step);
    doorbell_ring(s->at.store_bell);
    for (uint32_t i = 0; i < spec->count; i++) {
        ret_verdicts[i].status = places_status(s->places, i, &ret_verdicts[i].why);
        s->times.dropped += ret_verdicts[i].status < 0;
    }
    if (!spec->prompt) {
        waits_add(&s->times.tables, s->times.wait_tables - tables_before);
        if (!s->gpu)
            waits_add(&s->times.rows, s->times.wait_rows - rows_before);
    }
    if (!s->gpu)
        sample_all(s, spec, ret_verdicts);
    return 0;
}

int stepper_run(struct stepper *s, const struct stepper_spec *spec, struct stepper_verdict *ret_verdicts,
                struct err *err)
{
    CHECK(spec->kind != STEP_RECORD && s->record->kind == spec->kind && s->record->entries == spec->count);
    s->meanwhile_due = true;
    int r = run(s, spec, ret_verdicts, err);
    do_meanwhile(s);
    return r;
}

const struct stepper_times *stepper_times(const struct stepper *s)
{
    return &s->times;
}

void stepper_gpu_figures(const struct stepper *s, struct step_gpu_figures *ret)
{
    *ret = (struct step_gpu_figures){0};
    if (s->gpu)
        step_gpu_figures(s->gpu, ret);
}
