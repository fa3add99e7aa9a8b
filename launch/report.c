/* Turns the figures of a run into JSON and into lines. No state; called once, after the run. */
#include "launch/report.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *count_of(uint64_t value)
{
    return json_integer((json_int_t)value);
}

static json_t *ids_of(const struct token_buf *ids)
{
    json_t *list = json_array();
    for (size_t i = 0; i < ids->count; i++)
        json_array_append_new(list, json_integer(ids->ids[i]));
    return list;
}

static void add_counters(json_t *to, const struct kv_counters *c)
{
    json_object_set_new(to, "attended_mean", number(sequence_attended(c)));
    json_object_set_new(to, "overlap_mean", number(sequence_overlap(c)));
    json_object_set_new(to, "mass_mean", number(sequence_mass(c)));
    json_object_set_new(to, "sparse_steps", count_of(c->steps));
    json_object_set_new(to, "rows_loaded", count_of(c->rows_loaded));
    json_object_set_new(to, "bytes_loaded", count_of(c->bytes_loaded));
    json_object_set_new(to, "bytes_if_reloaded", count_of(c->bytes_if_reloaded));
    json_object_set_new(to, "rows_filled", count_of(c->rows_filled));
    json_object_set_new(to, "bytes_filled", count_of(c->bytes_filled));
    json_object_set_new(to, "bytes_written", count_of(c->bytes_written));
    json_object_set_new(to, "layers_resident", count_of(c->layers_resident));
    json_object_set_new(to, "layers_offloaded", count_of(c->layers_offloaded));
    json_object_set_new(to, "layers_offloaded_max", count_of(c->layers_offloaded_max));
    json_object_set_new(to, "waits_broken", count_of(c->waits_broken));
}

static void add_sequence(json_t *to, const struct sequence *s)
{
    uint32_t prompt =
        s->finished && s->done.prompt_tokens ? s->done.prompt_tokens : (uint32_t)s->prompt->count;
    json_object_set_new(to, "prompt_tokens", count_of(prompt));
    json_object_set_new(to, "cached_tokens", count_of(s->finished ? s->done.cached_tokens : s->cached));
    json_object_set_new(to, "generated_tokens", count_of(s->generated.count));
    json_object_set_new(to, "tokens", ids_of(&s->generated));
    json_object_set_new(to, "text", json_stringn(s->text.text ? s->text.text : "", s->text.bytes));
    json_object_set_new(to, "finish_reason",
                        s->finished ? json_string(msg_finish_name(s->done.reason)) : json_null());
    json_object_set_new(to, "ttft_ms", number(sequence_ttft_ms(s)));
    json_object_set_new(to, "queued_ms",
                        number(s->finished ? (double)s->done.queued_ns / (double)CLOCK_MS : (double)NAN));
    json_object_set_new(to, "prefill_tokens_per_s", number(sequence_prefill_rate(s)));
    json_object_set_new(to, "decode_tokens_per_s", number(sequence_decode_rate(s)));
    if (s->finished && s->done.reason == FINISH_ERROR)
        json_object_set_new(to, "error", json_string(s->done.text));
    add_counters(to, &s->done.counters);
}

static json_t *make(const struct report *r)
{
    const struct run_options *o = r->options;
    json_t *top = json_object();
    if (r->options->prompts) {
        json_t *list = json_array();
        for (uint32_t i = 0; i < r->count; i++) {
            json_t *one = json_object();
            add_sequence(one, &r->sequences[i]);
            json_array_append_new(list, one);
        }
        json_object_set_new(top, "sequences", list);
    } else {
        add_sequence(top, &r->sequences[0]);
    }
    json_object_set_new(top, "version", json_string(SPECONTEXT_VERSION));
    json_object_set_new(top, "model", json_string(r->model_name));
    json_object_set_new(top, "model_file", json_string(o->model));
    json_object_set_new(top, "head", json_string(r->head));
    json_object_set_new(top, "context", count_of(r->context));
    json_object_set_new(top, "attention", json_string(run_options_attention_name(o)));
    json_object_set_new(top, "selection", json_string(run_options_selection_name(o)));
    json_object_set_new(top, "budget", count_of(r->budget));
    json_object_set_new(top, "sinks", count_of(o->sinks));
    json_object_set_new(top, "window", count_of(o->window));
    json_object_set_new(top, "seed", json_integer((json_int_t)r->seed));
    json_object_set_new(top, "load_ms", number((double)r->load_ns / (double)CLOCK_MS));
    json_object_set_new(top, "run_ms", number((double)r->run_ns / (double)CLOCK_MS));
    json_t *processes = json_object();
    for (uint32_t i = 0; i < r->process_count; i++)
        json_object_set_new(processes, r->processes[i].name, count_of(r->processes[i].pid));
    json_object_set_new(top, "processes", processes);
    if (r->error)
        json_object_set_new(top, "error", json_string(r->error));
    return top;
}

static int write_all(int fd, const char *text, size_t bytes)
{
    while (bytes) {
        ssize_t n = write(fd, text, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        text += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* A device, a pipe, a socket: not to be replaced by a file. */
static bool is_special(const char *path)
{
    struct stat st;
    return !stat(path, &st) && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode);
}

static char *temporary_name(const char *path)
{
    size_t room = strlen(path) + 16;
    char *name = mem_alloc(room, 1);
    snprintf(name, room, "%s.%d", path, (int)getpid());
    return name;
}

int report_check(const char *path, struct err *err)
{
    struct stat st;
    int r = 0;
    if (is_special(path)) {
        r = access(path, W_OK) ? -errno : 0;
    } else if (!stat(path, &st) && S_ISDIR(st.st_mode)) {
        r = -EISDIR;
    } else {
        char *temporary = temporary_name(path);
        int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        r = fd < 0 ? -errno : 0;
        if (fd >= 0) {
            close(fd);
            unlink(temporary);
        }
        mem_free(&temporary);
    }
    return r ? err_set(err, r, "--report: %s: %s", path, strerror(-r)) : 0;
}

int report_write(const struct report *report, const char *path, struct err *err)
{
    json_t *value = make(report);
    char *text = json_dumps(value, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(9));
    json_decref(value);
    if (!text)
        return err_set(err, -EINVAL, "%s: the report cannot be written as JSON", path);
    bool special = is_special(path);
    char *temporary = temporary_name(path);
    const char *to = special ? path : temporary;
    int flags = special ? O_NONBLOCK : O_CREAT | O_TRUNC; /* nobody may be at a pipe's other end */
    int r = 0, fd = open(to, O_WRONLY | O_CLOEXEC | flags, 0666);
    if (fd < 0) {
        r = -errno;
    } else {
        r = write_all(fd, text, strlen(text));
        r = r ? r : write_all(fd, "\n", 1);
        if (close(fd) && !r)
            r = -errno;
        if (!r && !special && rename(temporary, path))
            r = -errno;
        if (r && !special)
            unlink(temporary);
    }
    mem_free(&temporary);
    free(text);
    return r ? err_set(err, r, "%s: %s", path, strerror(-r)) : 0;
}

static void add_up(struct kv_counters *sum, const struct kv_counters *c)
{
    sum->steps += c->steps;
    sum->attended += c->attended;
    sum->lists += c->lists;
    sum->selected += c->selected;
    sum->kept += c->kept;
    sum->rows_loaded += c->rows_loaded;
    sum->bytes_loaded += c->bytes_loaded;
    sum->bytes_if_reloaded += c->bytes_if_reloaded;
    sum->mass_sum += c->mass_sum;
    sum->mass_count += c->mass_count;
    sum->layers_resident = c->layers_resident;
    sum->layers_offloaded = c->layers_offloaded;
    if (c->layers_offloaded_max > sum->layers_offloaded_max)
        sum->layers_offloaded_max = c->layers_offloaded_max;
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
    double ttft = 0;
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
        add_up(&sum, &s->done.counters);
    }
    fprintf(to, "load:       %10.2f ms\n", (double)report->load_ns / (double)CLOCK_MS);
    if (report->count == 1 && prefill_ns > 0)
        fprintf(to, "prefill:    %10.2f ms, %" PRIu64 " tokens (%" PRIu64 " cached), %.2f tokens/s\n",
                (double)prefill_ns / (double)CLOCK_MS, prompt, cached,
                sequence_prefill_rate(report->sequences));
    if (report->count == 1 && decode_ns > 0)
        fprintf(to, "decode:     %10.2f ms, %" PRIu64 " tokens, %.2f tokens/s\n",
                (double)decode_ns / (double)CLOCK_MS, generated, sequence_decode_rate(report->sequences));
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
