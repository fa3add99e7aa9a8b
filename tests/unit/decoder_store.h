/* A store for tests of the decoder: a thread behind a control segment that grants pages and slots and lists
 * every position, so that sparse steps must give what dense ones give. It can be told to misbehave. Header
 * only, included by one test. */
#ifndef TESTS_UNIT_DECODER_STORE_H
#define TESTS_UNIT_DECODER_STORE_H

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "compute/gpu.h"
#include "link/flag.h"
#include "link/segment.h"
#include "proto/control.h"

enum { STORE_SEQUENCES = 4, STORE_CONTEXT = 256, STORE_STAGING = 192 };

enum store_fault {
    STORE_SOUND,
    STORE_DROPS,    /* table_sequence.status of one sequence */
    STORE_BAD_PAGE, /* a page outside of device memory */
    STORE_BAD_SLOT, /* a slot that does not exist */
    STORE_BAD_SLAB,
    STORE_BAD_LIST,    /* a position that is not there yet */
    STORE_LONG_LIST,   /* more than list_max */
    STORE_POISONS_ROW, /* a K row full of NaN */
    STORE_SILENT,      /* answers no step of it, nor later ones */
    STORE_SHORT,       /* lists of the token alone, and everything to be attended where that is possible */
    STORE_NO_ROWS,     /* makes the tables, and nothing after */
};

struct store {
    struct kv_layout layout;
    struct segment control_segment, device_segment;
    const struct gpu_api *api; /* device memory on a GPU; NULL: a memfd */
    struct gpu *gpu;
    struct control_header *control;
    uint8_t *device;
    uint64_t slots_at; /* of the slabs, behind the pages */
    int bell;
    pthread_t thread;
    atomic_int stop;
    atomic_int fault;
    atomic_uint fault_sequence;
    atomic_int steps_left; /* answers that many steps, then none until it is raised */
    atomic_uint seen;      /* steps looked at */
    uint32_t next;
    atomic_uint offload_step; /* while that step is computed layers are proposed, */
    uint32_t offload_from;    /* as store_offload says it */
};

#include "tests/unit/decoder_store_tables.h"

/* Proposes a resident set of layers [0, from). */
static inline void store_offload(struct store *s, uint32_t from)
{
    struct control_flag *proposed = control_flag_at(s->control, FLAG_RESIDENT_PROPOSED);
    uint32_t version = atomic_load(&proposed->value) + 1;
    s->control->resident_layers[version % CONTROL_RESIDENT_RING] = from;
    flag_raise(proposed, version);
}

static inline void store_step(struct store *s, struct step_record *r)
{
    atomic_store(&s->seen, r->step);
    if (r->kind == STEP_RECORD)
        return;
    int64_t deadline = clock_now_ns() + 60 * CLOCK_S;
    store_fill(s, r);
    if (r->kind == STEP_SPARSE && r->selection == SELECTION_MIXED)
        flag_raise(control_flag_at(s->control, FLAG_TABLES_EARLY), r->step);
    flag_raise(control_flag_at(s->control, FLAG_TABLES_LATE), r->step);
    if (atomic_load(&s->fault) == STORE_NO_ROWS)
        return;
    if (r->step == atomic_load(&s->offload_step))
        store_offload(s, s->offload_from);
    for (uint32_t run = 0; run < s->control->runs; run++) {
        flag_raise(control_flag_at(s->control, FLAG_ROWS_READY + run), r->step);
        if (r->kind == STEP_DENSE &&
            flag_wait(control_flag_at(s->control, FLAG_RUN_CONSUMED + run), r->step, deadline, 0) < 0)
            return;
    }
    if (flag_wait(control_flag_at(s->control, FLAG_KV_WRITTEN), r->step, deadline, 0) < 0)
        return;
    for (uint32_t i = 0; r->kind == STEP_SPARSE && i < r->entries; i++)
        store_move(s, r, &r->entry[i], r->entry[i].position, 0);
    flag_raise(control_flag_at(s->control, FLAG_COMMITTED), r->step);
}

static inline void *store_main(void *arg)
{
    struct store *s = arg;
    while (!atomic_load(&s->stop)) {
        struct pollfd p = {.fd = s->bell, .events = POLLIN};
        poll(&p, 1, 50);
        doorbell_clear(s->bell);
        while (atomic_load(&s->steps_left) > 0 &&
               flag_reached(control_flag_at(s->control, FLAG_STEP_POSTED), s->next)) {
            atomic_fetch_sub(&s->steps_left, 1);
            struct step_record *r = control_step_at(s->control, s->next);
            CHECK(r->step == s->next);
            if (atomic_load(&s->fault) == STORE_SILENT)
                return NULL;
            store_step(s, r);
            s->next++;
        }
    }
    return NULL;
}

/* The double's device memory can be written by the CPU as well. */
static inline void store_make_device(struct store *s, struct control_params *params, uint8_t *handle)
{
    void *at = NULL;
    params->device_form = CONTROL_DEVICE_CUDA;
    params->device_handle = handle;
    CHECK(s->api->open("cuda:0", &s->gpu, NULL) == 0);
    params->device_uuid = s->api->info(s->gpu)->uuid;
    CHECK(s->api->alloc(s->gpu, params->device_bytes, &at, NULL) == 0);
    CHECK(s->api->ipc_export(s->gpu, at, handle, NULL) == 0);
    s->device = at;
}

/* `api` NULL: device memory is a memfd. */
static inline void store_start_on(struct store *s, const struct kv_layout *layout, uint64_t decoder_epoch,
                                  const struct gpu_api *api)
{
    memset(s, 0, sizeof *s);
    s->layout = *layout;
    s->api = api;
    uint8_t handle[GPU_IPC_BYTES];
    struct control_params params = {.store_epoch = 1,
                                    .decoder_epoch = decoder_epoch,
                                    .sequences_max = STORE_SEQUENCES,
                                    .list_max = STORE_CONTEXT,
                                    .slots = STORE_CONTEXT + 3,
                                    .staging_tokens = STORE_STAGING,
                                    .first_step = 5};
    struct control_header trial;
    control_header_init(&trial, layout, &params);
    uint64_t pairs = (uint64_t)STORE_SEQUENCES * layout->layers;
    s->slots_at = pairs * (STORE_CONTEXT / BLOCK_TOKENS) * trial.page_bytes;
    params.device_bytes = s->slots_at + pairs * trial.slabs_max * trial.slab_bytes;
    if (api)
        store_make_device(s, &params, handle);
    else
        CHECK(segment_create("test-device", params.device_bytes, &s->device_segment, NULL) == 0);
    control_header_init(&trial, layout, &params);
    CHECK(segment_create("test-control", trial.total_bytes, &s->control_segment, NULL) == 0);
    s->control = s->control_segment.at;
    s->device = api ? s->device : s->device_segment.at;
    memcpy(s->control, &trial, sizeof trial);
    CHECK(control_header_check(s->control, layout, trial.total_bytes, NULL) == 0);
    memset(s->device, 0xff, (size_t)params.device_bytes);
    s->next = params.first_step;
    atomic_store(&s->steps_left, INT_MAX);
    CHECK(doorbell_create(&s->bell) == 0);
    CHECK(pthread_create(&s->thread, NULL, store_main, s) == 0);
}

static inline void store_start(struct store *s, const struct kv_layout *layout, uint64_t decoder_epoch)
{
    store_start_on(s, layout, decoder_epoch, NULL);
}

/* Any thread: lets it answer `steps` more. */
static inline void store_allow(struct store *s, int steps)
{
    atomic_store(&s->steps_left, steps);
    doorbell_ring(s->bell);
}

/* Ends its thread; the memory stays. */
static inline void store_break(struct store *s)
{
    if (atomic_exchange(&s->stop, 1))
        return;
    flag_abort_all(s->control);
    doorbell_ring(s->bell);
    pthread_join(s->thread, NULL);
}

static inline void store_stop(struct store *s)
{
    store_break(s);
    close(s->bell);
    segment_close(&s->control_segment);
    if (s->api) {
        s->api->free(s->gpu, s->device);
        s->api->close(&s->gpu);
    } else {
        segment_close(&s->device_segment);
    }
}

#endif
