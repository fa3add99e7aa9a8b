/* See bench_parts.h. No state; no I/O. */
#include "launch/bench_parts.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/alloc.h"

enum { BEGIN, END };

#define WAITS_MAX (sizeof((struct bench_waits *)NULL)->at / sizeof((struct bench_waits *)NULL)->at[0])

void bench_window_answer(struct bench_window *w, enum client_part part, const char *json, uint32_t bytes)
{
    char **to = w->text[BEGIN][part] ? &w->text[END][part] : &w->text[BEGIN][part];
    if (*to)
        return;
    *to = mem_alloc(bytes + (size_t)1, 1);
    memcpy(*to, json, bytes);
}

bool bench_window_complete(const struct bench_window *w)
{
    for (int part = 0; part < CLIENT_PARTS; part++)
        if (!w->text[END][part])
            return false;
    return true;
}

void bench_window_clear(struct bench_window *w)
{
    for (int part = 0; part < CLIENT_PARTS; part++) {
        mem_free(&w->text[BEGIN][part]);
        mem_free(&w->text[END][part]);
    }
}

/* The number at "section.key", or at "key"; 0 where there is none. */
static double number_at(const json_t *report, const char *section, const char *key)
{
    const json_t *in = section ? json_object_get(report, section) : report;
    return json_number_value(json_object_get(in, key));
}

/* What the number grew by. */
static double growth(json_t *const reports[2], const char *section, const char *key)
{
    return number_at(reports[END], section, key) - number_at(reports[BEGIN], section, key);
}

/* Adds `sign` times the counts of a list of [below, steps]. */
static void add_waits(struct bench_waits *w, const json_t *list, int sign)
{
    size_t index;
    json_t *pair;
    json_array_foreach((json_t *)(uintptr_t)list, index, pair)
    {
        double below = json_number_value(json_array_get(pair, 0));
        uint32_t i = 0;
        while (i < w->count && w->at[i].below_us < below)
            i++;
        if (i == w->count || w->at[i].below_us > below) {
            if (w->count == WAITS_MAX)
                return;
            memmove(&w->at[i + 1], &w->at[i], (w->count - i) * sizeof w->at[0]);
            w->count++;
            w->at[i].below_us = below;
            w->at[i].steps = 0;
        }
        w->at[i].steps += sign * json_integer_value(json_array_get(pair, 1));
    }
}

static void add_wait_lengths(struct bench_waits *w, json_t *const decoder[2], const char *key)
{
    for (int i = BEGIN; i <= END; i++) {
        const json_t *section = json_object_get(json_object_get(decoder[i], "wait_us"), key);
        add_waits(w, json_object_get(section, "below"), i == END ? 1 : -1);
    }
}

/* On a GPU the stream's waits are in wait_rows; wait_tables is this thread's, which waits for the same. */
static void add_decoder(struct bench_parts *p, json_t *const decoder[2])
{
    bool gpu = json_object_get(decoder[END], "gpu") != NULL;
    if (gpu)
        p->steps += growth(decoder, "gpu", "steps_measured");
    else
        p->steps += growth(decoder, "steps", "sparse") + growth(decoder, "steps", "dense");
    p->wait_ms +=
        growth(decoder, "step_ms", "wait_rows") + (gpu ? 0 : growth(decoder, "step_ms", "wait_tables"));
    p->attention_ms += growth(decoder, "step_ms", "attention");
    p->matmul_ms += growth(decoder, "step_ms", "matmul");
    p->sampling_ms += growth(decoder, "step_ms", "sampling");
    p->other_ms += growth(decoder, "step_ms", "other");
    add_wait_lengths(&p->tables, decoder, "tables");
    add_wait_lengths(&p->rows, decoder, "rows");
}

/* Changes of residency that the decoder tells at the end and that the window's steps made. */
static void add_moves(struct bench_parts *p, json_t *const decoder[2])
{
    json_int_t from = (json_int_t)number_at(decoder[BEGIN], "steps", "sparse");
    size_t index;
    json_t *pair;
    json_array_foreach(json_object_get(json_object_get(decoder[END], "steps"), "moves"), index, pair)
    {
        json_int_t step = json_integer_value(json_array_get(pair, 0)) - from;
        if (step <= 0 || p->move_count == BENCH_MOVES_MAX)
            continue;
        p->moves[p->move_count++] = (struct bench_move){
            p->repeats, (uint32_t)step - 1, (uint32_t)json_integer_value(json_array_get(pair, 1))};
    }
}

/* The retriever tells means since it began. */
static double sum_growth(json_t *const retriever[2], const char *key)
{
    return number_at(retriever[END], "step_ms", key) * number_at(retriever[END], NULL, "steps") -
           number_at(retriever[BEGIN], "step_ms", key) * number_at(retriever[BEGIN], NULL, "steps");
}

static void add_retriever(struct bench_parts *p, json_t *const retriever[2])
{
    p->retriever_steps += growth(retriever, NULL, "steps");
    p->append_ms += sum_growth(retriever, "append");
    p->score_ms += sum_growth(retriever, "score");
    p->topk_ms += sum_growth(retriever, "topk");
    p->encode_ms += sum_growth(retriever, "encode");
}

static void add_store(struct bench_parts *p, json_t *const store[2])
{
    p->store_steps += growth(store, "totals", "steps_sparse") + growth(store, "totals", "steps_dense");
    p->move_ms += 1e-3 * growth(store, "totals", "move_us");
    p->bytes_loaded +=
        growth(store, "counters_live", "bytes_loaded") + growth(store, "counters_closed", "bytes_loaded");
}

int bench_parts_add(struct bench_parts *p, const struct bench_window *w)
{
    json_t *reports[CLIENT_PARTS][2];
    int r = 0;
    for (int part = 0; part < CLIENT_PARTS; part++)
        for (int i = BEGIN; i <= END; i++) {
            reports[part][i] = json_loads(w->text[i][part], 0, NULL);
            r = reports[part][i] ? r : -EPROTO;
        }
    if (r == 0) {
        add_decoder(p, reports[CLIENT_DECODER]);
        add_moves(p, reports[CLIENT_DECODER]);
        add_retriever(p, reports[CLIENT_RETRIEVER]);
        add_store(p, reports[CLIENT_KVSTORE]);
        p->repeats++;
    }
    for (int part = 0; part < CLIENT_PARTS; part++) {
        if (r == 0) {
            json_decref(p->gpu[part]);
            p->gpu[part] = json_incref(json_object_get(reports[part][END], "gpu"));
        }
        json_decref(reports[part][BEGIN]);
        json_decref(reports[part][END]);
    }
    return r;
}

void bench_parts_free(struct bench_parts *p)
{
    for (int part = 0; part < CLIENT_PARTS; part++)
        json_decref(p->gpu[part]);
    *p = (struct bench_parts){0};
}

double bench_parts_mean(double sum, double steps)
{
    return steps > 0 ? sum / steps : (double)NAN;
}

double bench_waits_quantile(const struct bench_waits *w, double q)
{
    int64_t total = 0, seen = 0;
    for (uint32_t i = 0; i < w->count; i++)
        total += w->at[i].steps;
    for (uint32_t i = 0; i < w->count; i++) {
        seen += w->at[i].steps;
        if (w->at[i].steps > 0 && (double)seen >= q * (double)total)
            return w->at[i].below_us;
    }
    return (double)NAN;
}

uint64_t bench_parts_gpu_bytes(const struct bench_parts *p, enum client_part part)
{
    return (uint64_t)json_integer_value(json_object_get(p->gpu[part], "total_bytes"));
}
