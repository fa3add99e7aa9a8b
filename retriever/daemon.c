/* The life of the retriever: options, model and head, threads, sockets, loop, end. The main thread is the
 * loop thread. It must end with a line that says why, when it cannot begin, and never serve with another
 * head, or another rotation of it, than it says. */
#include "retriever/daemon.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "base/err.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/trace.h"
#include "link/daemon.h"
#include "model/head.h"
#include "model/model.h"
#include "retriever/arguments.h"
#include "retriever/card.h"
#include "retriever/rows.h"
#include "retriever/selector.h"
#include "retriever/endpoint.h"
#include "retriever/worker.h"

struct retriever {
    struct daemon life;
    struct arguments options;
    struct model *model;
    struct head *head;
    struct loop *loop;
    struct selector *selector; /* until the worker has it */
    struct worker *worker;
    struct endpoint *endpoint;
    struct endpoint_identity identity;
    char rope[256];
};

static void on_end(void *arg, const char *why)
{
    struct loop *loop = arg;
    log_info("ends: %s", why);
    loop_stop(loop, 0);
}

static int open_files(struct retriever *d, struct err *err)
{
    int rc = model_open(d->options.model, &d->model, err);
    return rc < 0 ? rc : head_open(d->options.head, d->model, &d->head, err);
}

static int make_selector(struct retriever *d, struct err *err)
{
    const struct head_config *head = head_config(d->head);
    uint32_t context = d->options.context ? d->options.context : model_config(d->model)->context_max;
    struct selector_options o = {.device = d->options.device,
                                 .model = d->model,
                                 .head = d->head,
                                 .pool = d->options.pool ? (enum head_pool)(d->options.pool - 1) : head->pool,
                                 .context = context < LIMIT_CONTEXT ? context : LIMIT_CONTEXT,
                                 .sequences = d->options.sequences,
                                 .threads = d->options.threads,
                                 .kept_bytes = d->options.prefix_memory,
                                 .keys = (enum compute_keys)d->options.keys,
                                 .isa = COMPUTE_ISA_AUTO};
    int rc = selector_create(&o, &d->selector, err);
    if (rc < 0)
        return rc;
    head_rope_text(selector_rope(d->selector), d->rope, sizeof d->rope);
    if (o.context > head->trained_context)
        log_warn("head stretched: context=%" PRIu32 " trained=%" PRIu32 " rope=%s", o.context,
                 head->trained_context, d->rope);
    else
        log_info("head as trained: context=%" PRIu32 " trained=%" PRIu32 " rope=%s", o.context,
                 head->trained_context, d->rope);
    d->identity.pool = head_pool_name(o.pool);
    d->identity.hello.layout.context_max = o.context;
    return 0;
}

static int identify(struct retriever *d, struct err *err)
{
    const struct head_config *head = head_config(d->head);
    struct hash128 hash = selector_fingerprint(d->selector);
    struct endpoint_identity *id = &d->identity;
    struct msg_hello *hello = &id->hello;
    struct kv_layout *layout = &hello->layout;
    hello->role = ROLE_RETRIEVER;
    hello->version_min = MSG_VERSION_MIN;
    hello->pid = (uint32_t)getpid();
    snprintf(hello->build, sizeof hello->build, "%s", SPECONTEXT_VERSION);
    const struct card *card = selector_card(d->selector);
    if (card)
        id->gpu = *card_info(card);
    snprintf(hello->device, sizeof hello->device, "%s", card ? id->gpu.uuid : "cpu");
    hello->tokenizer = head->tokenizer;
    hello->head = hash.lo;
    hello->has_layout = true;
    hello->has_features = head->features == HEAD_FEATURES_TARGET;
    if (hello->has_features)
        hello->features = rows_features(head);
    layout->model = head->model;
    layout->layers = head->layers;
    layout->row_heads = layout->selection_heads = head->kv_heads;
    layout->groups = head->groups;
    layout->piece_bytes = 2 * model_config(d->model)->head_dim * (uint32_t)sizeof(uint16_t);
    layout->dtype = DTYPE_F16;
    memcpy(layout->group_first_layer, head->group_first_layer, sizeof head->group_first_layer);
    id->model = model_name(d->model);
    id->head = head_path(d->head);
    id->rope = d->rope;
    id->key_type = selector_keys_int8(d->selector) ? "int8" : "f16";
    id->backend = card ? id->gpu.name : selector_backend(d->selector);
    id->threads = (uint32_t)d->options.threads;
    id->sequences = d->options.sequences;
    snprintf(id->fingerprint, sizeof id->fingerprint, "%016" PRIx64 "%016" PRIx64, hash.hi, hash.lo);
    return layout_check(layout, err);
}

static int start(struct retriever *d, struct err *err)
{
    int rc = open_files(d, err);
    if (rc < 0)
        return rc;
    d->loop = loop_create();
    d->life = (struct daemon){.loop = d->loop, .options = &d->options.daemon, .end = on_end, .arg = d->loop};
    if ((rc = daemon_watch(&d->life, err)) < 0 || (rc = make_selector(d, err)) < 0 ||
        (rc = identify(d, err)) < 0 || (rc = runtime_prepare(d->options.daemon.runtime, err)) < 0)
        return rc;
    d->worker = worker_create(d->selector);
    d->selector = NULL;
    return endpoint_create(d->loop, d->worker, &d->identity, d->options.daemon.runtime, &d->endpoint, err);
}

static void end(struct retriever *d)
{
    endpoint_free(&d->endpoint);
    worker_free(&d->worker);
    selector_free(&d->selector);
    loop_free(&d->loop);
    head_free(&d->head);
    model_free(&d->model);
}

static void log_work(struct retriever *d)
{
    struct selector_stats t;
    worker_stats(d->worker, &t);
    log_info("end: steps=%" PRIu64 " tokens=%" PRIu64 " selections=%" PRIu64 " refused=%" PRIu64, t.steps,
             t.tokens, t.selections, t.refused);
}

int retriever_main(int argc, char **argv)
{
    struct retriever d = {0};
    struct err err = {0};
    int r = arguments_parse(argc, argv, &d.options, &err);
    if (r < 0)
        fprintf(stderr, "specontext-retriever: %s\n", err.text);
    if (r)
        return r < 0 ? 2 : 0;
    log_init("retriever", d.options.daemon.log);
    trace_open("retriever");
    log_info("start: version=%s model=%s head=%s", SPECONTEXT_VERSION, d.options.model, d.options.head);
    sd_notify(0, "STATUS=loading the model and the head");
    int code = 1;
    if (start(&d, &err) < 0) {
        log_error("%s", err.text);
        sd_notifyf(0, "STOPPING=1\nSTATUS=%s", err.text);
    } else {
        log_info("ready: runtime=%s backend=%s threads=%" PRIu32 " fingerprint=%s", d.options.daemon.runtime,
                 d.identity.backend, d.identity.threads, d.identity.fingerprint);
        sd_notify(0, "READY=1\nSTATUS=serving");
        code = loop_run(d.loop);
        sd_notify(0, "STOPPING=1\nSTATUS=ending");
        log_work(&d);
    }
    end(&d);
    return code;
}
