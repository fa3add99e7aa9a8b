/* Turns the figures of a run into JSON and into lines. No state; called once, after the run. */
#include "launch/report.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/outfile.h"
#include "link/figures.h"

static json_t *ids_of(const struct token_buf *ids)
{
    json_t *list = json_array();
    for (size_t i = 0; i < ids->count; i++)
        json_array_append_new(list, json_integer(ids->ids[i]));
    return list;
}

static void add_counters(json_t *to, const struct kv_counters *c)
{
    figures_real(to, "attended_mean", sequence_attended(c));
    figures_real(to, "overlap_mean", sequence_overlap(c));
    figures_real(to, "mass_mean", sequence_mass(c));
    figures_real(to, "mass_base_mean", sequence_mass_base(c));
    figures_count(to, "budget_grown", c->grown);
    figures_count(to, "fallbacks", c->fallbacks);
    figures_count(to, "sparse_steps", c->steps);
    figures_count(to, "rows_loaded", c->rows_loaded);
    figures_count(to, "bytes_loaded", c->bytes_loaded);
    figures_count(to, "bytes_if_reloaded", c->bytes_if_reloaded);
    figures_count(to, "rows_filled", c->rows_filled);
    figures_count(to, "bytes_filled", c->bytes_filled);
    figures_count(to, "bytes_written", c->bytes_written);
    figures_count(to, "layers_resident", c->layers_resident);
    figures_count(to, "layers_offloaded", c->layers_offloaded);
    figures_count(to, "layers_offloaded_max", c->layers_offloaded_max);
}

static void add_sequence(json_t *to, const struct sequence *s)
{
    uint32_t prompt =
        s->finished && s->done.prompt_tokens ? s->done.prompt_tokens : (uint32_t)s->prompt->count;
    figures_count(to, "prompt_tokens", prompt);
    figures_count(to, "cached_tokens", s->finished ? s->done.cached_tokens : s->cached);
    figures_count(to, "generated_tokens", s->generated.count);
    json_object_set_new(to, "tokens", ids_of(&s->generated));
    json_object_set_new(to, "text", json_stringn(s->text.text ? s->text.text : "", s->text.bytes));
    figures_text(to, "finish_reason", s->finished ? msg_finish_name(s->done.reason) : NULL);
    figures_real(to, "ttft_ms", sequence_ttft_ms(s));
    figures_real(to, "queued_ms", s->finished ? (double)s->done.queued_ns / (double)CLOCK_MS : (double)NAN);
    figures_real(to, "prefill_tokens_per_s", sequence_prefill_rate(s));
    figures_real(to, "decode_tokens_per_s", sequence_decode_rate(s));
    if (s->finished && s->done.reason == FINISH_ERROR)
        figures_text(to, "error", s->done.text);
    add_counters(to, &s->done.counters);
}

static json_t *make(const struct report *r)
{
    const struct run_options *o = r->options;
    json_t *top = json_object();
    if (r->options->prompts) {
        json_t *list = figures_list(top, "sequences");
        for (uint32_t i = 0; i < r->count; i++)
            add_sequence(figures_item(list), &r->sequences[i]);
    } else {
        add_sequence(top, &r->sequences[0]);
    }
    figures_text(top, "version", SPECONTEXT_VERSION);
    figures_text(top, "model", r->model_name);
    figures_text(top, "model_file", o->model);
    figures_text(top, "head", r->head);
    figures_count(top, "context", r->context);
    figures_text(top, "attention", run_options_attention_name(o));
    figures_text(top, "selection", run_options_selection_name(o));
    figures_count(top, "budget", r->budget);
    figures_count(top, "max_budget", r->budget_max);
    figures_real(top, "min_mass", (double)o->min_mass);
    figures_real(top, "budget_top_p", (double)o->budget_top_p);
    figures_count(top, "sinks", o->sinks);
    figures_count(top, "window", o->window);
    figures_count(top, "seed", r->seed);
    figures_ms(top, "load_ms", r->load_ns);
    figures_ms(top, "run_ms", r->run_ns);
    json_t *processes = figures_section(top, "processes");
    for (uint32_t i = 0; i < r->process_count; i++)
        figures_count(processes, r->processes[i].name, r->processes[i].pid);
    if (r->error)
        figures_text(top, "error", r->error);
    return top;
}

int report_check(const char *path, struct err *err)
{
    int r = outfile_try(path);
    return r ? err_set(err, r, "--report: %s: %s", path, strerror(-r)) : 0;
}

int report_write(const struct report *report, const char *path, struct err *err)
{
    json_t *value = make(report);
    char *text = json_dumps(value, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(9));
    json_decref(value);
    if (!text)
        return err_set(err, -EINVAL, "%s: the report cannot be written as JSON", path);
    size_t bytes = strlen(text);
    text[bytes] = '\n'; /* in place of the NUL */
    int r = outfile_write(path, text, bytes + 1);
    free(text);
    return r ? err_set(err, r, "%s: %s", path, strerror(-r)) : 0;
}

static void print_attention(const struct report *report, const struct kv_counters *sum, FILE *to)
{
    if (sum->lists)
        fprintf(to, "attention:  %10.1f positions a step of a budget of %u", sequence_attended(sum),
                report->budget);
    if (sum->lists && sum->selected)
        fprintf(to, ", overlap %.1f %%", 100 * sequence_overlap(sum));
    if (sum->lists && sum->mass_count)
        fprintf(to, ", mass %.3f", sequence_mass(sum));
    if (sum->lists)
        fputc('\n', to);
    if (sum->mass_count && (report->options->min_mass > 0 || report->options->budget_top_p > 0))
        fprintf(to,
                "by mass:    %10" PRIu64 " of %" PRIu64 " selections grew, %" PRIu64
                " steps fell back to all positions; mass at the base budget %.3f\n",
                sum->grown, sum->mass_count, sum->fallbacks, sequence_mass_base(sum));
    if (sum->bytes_if_reloaded)
        fprintf(to,
                "loaded:     %10.2f MB for selections, %.2f MB if each were loaded whole (%.1f %% saved)\n",
                (double)sum->bytes_loaded / 1e6, (double)sum->bytes_if_reloaded / 1e6,
                100 - 100 * (double)sum->bytes_loaded / (double)sum->bytes_if_reloaded);
    if (sum->layers_resident + sum->layers_offloaded)
        fprintf(to, "layers:     %10" PRIu32 " on the device, %" PRIu32 " offloaded (at most %" PRIu32 ")\n",
                sum->layers_resident, sum->layers_offloaded, sum->layers_offloaded_max);
}

/* Of several sequences the times overlap, so their rates are taken over the whole. */
void report_print(const struct report *report, FILE *to)
{
    struct kv_counters sum = {0};
    uint64_t prompt = 0, cached = 0, generated = 0;
    int64_t prefill_ns = 0, decode_ns = 0;
    double ttft = 0, prefill_rate = report->count == 1 ? sequence_prefill_rate(report->sequences) : 0;
    for (uint32_t i = 0; i < report->count; i++) {
        const struct sequence *s = &report->sequences[i];
        generated += s->generated.count;
        if (s->first_ns)
            ttft = fmax(ttft, sequence_ttft_ms(s));
        if (!s->finished)
            continue;
        prompt += s->done.prompt_tokens;
        cached += s->done.cached_tokens;
        prefill_ns += s->done.prefill_ns;
        decode_ns += s->done.decode_ns;
        msg_add_counters(&sum, &s->done.counters);
    }
    fprintf(to, "load:       %10.2f ms\n", (double)report->load_ns / (double)CLOCK_MS);
    if (report->count == 1 && prefill_ns > 0 && isnan(prefill_rate))
        fprintf(to, "prefill:    %10.2f ms, %" PRIu32 " of %" PRIu64 " tokens (%" PRIu64 " cached)\n",
                (double)prefill_ns / (double)CLOCK_MS, report->sequences->prefilled, prompt, cached);
    else if (report->count == 1 && prefill_ns > 0)
        fprintf(to, "prefill:    %10.2f ms, %" PRIu64 " tokens (%" PRIu64 " cached), %.2f tokens/s\n",
                (double)prefill_ns / (double)CLOCK_MS, prompt, cached, prefill_rate);
    if (report->count == 1 && decode_ns > 0) {
        double rate = sequence_decode_rate(report->sequences);
        fprintf(to, "decode:     %10.2f ms, %" PRIu64 " tokens", (double)decode_ns / (double)CLOCK_MS,
                generated);
        if (isfinite(rate)) /* one token, which the prompt gave, has none */
            fprintf(to, ", %.2f tokens/s", rate);
        fputc('\n', to);
    }
    if (report->count > 1 && report->run_ns > 0)
        fprintf(to,
                "batch:      %10.2f ms, %u prompts, %" PRIu64 " tokens (%" PRIu64 " cached) in, %" PRIu64
                " out, %.2f tokens/s out\n",
                (double)report->run_ns / (double)CLOCK_MS, report->count, prompt, cached, generated,
                (double)generated * (double)CLOCK_S / (double)report->run_ns);
    if (ttft > 0)
        fprintf(to, "first token:%10.2f ms%s\n", ttft, report->count > 1 ? " at the latest" : "");
    print_attention(report, &sum, to);
}
