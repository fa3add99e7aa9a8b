/* Asks the daemons of a runtime directory for their status and prints it. Single-threaded but for ZeroMQ's
 * own thread; ends after DEADLINE_NS whatever is missing. It changes nothing. */
#include "launch/status.h"

#include <errno.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/options.h"
#include "launch/client.h"
#include "link/runtime.h"

#define DEADLINE_NS (2 * CLOCK_S)
#define TICK_NS     (50 * CLOCK_MS)
#define NAME_COLUMN 36

struct status_options {
    const char *runtime;
    bool json;
};

#define AT(field) .at = offsetof(struct status_options, field)

static const struct option_entry table[] = {
    {.name = "runtime",
     .kind = OPTION_TEXT,
     AT(runtime),
     .argument = "DIR",
     .initial = RUNTIME_DIR_DEFAULT,
     .group = "Options",
     .text = "directory of the daemons' sockets"},
    {.name = "json", .kind = OPTION_FLAG, AT(json), .group = "Options", .text = "JSON instead of a table"},
    {0}};

struct status {
    struct loop *loop;
    struct client *client;
    int64_t deadline_ns;
    bool asked[CLIENT_PARTS];
    json_t *answers[CLIENT_PARTS]; /* NULL: none yet */
};

static void on_lost(void *arg, enum client_part part, const char *why)
{
    (void)arg;
    fprintf(stderr, "specontext status: %s: %s\n", client_part_program(part), why);
}

static int missing(const struct status *status)
{
    int count = 0;
    for (int i = 0; i < CLIENT_PARTS; i++)
        count += !status->answers[i];
    return count;
}

static void on_report(void *arg, enum client_part part, const char *json, uint32_t bytes)
{
    struct status *status = arg;
    json_error_t why;
    if (status->answers[part])
        return;
    status->answers[part] = json_loadb(json, bytes, 0, &why);
    if (!status->answers[part])
        fprintf(stderr, "specontext status: %s: its answer is no JSON: %s\n", client_part_program(part),
                why.text);
    if (!missing(status))
        loop_stop(status->loop, 0);
}

static const struct client_ops ops = {.lost = on_lost, .report = on_report};

/* Each part is asked as soon as it greets. */
static void on_tick(void *arg)
{
    struct status *status = arg;
    for (int i = 0; i < CLIENT_PARTS; i++)
        if (!status->asked[i])
            status->asked[i] = !client_ask_status(status->client, (enum client_part)i);
    if (clock_now_ns() >= status->deadline_ns)
        loop_stop(status->loop, 0);
}

static void print_value(const char *name, const json_t *value)
{
    const char *key;
    json_t *inner;
    size_t index;
    char path[256];
    if (json_is_object(value)) {
        json_object_foreach((json_t *)(uintptr_t)value, key, inner)
        {
            snprintf(path, sizeof path, "%s%s%s", name, *name ? "." : "", key);
            print_value(path, inner);
        }
        return;
    }
    if (json_is_array(value) && json_array_size(value) && json_is_object(json_array_get(value, 0))) {
        json_array_foreach(value, index, inner)
        {
            snprintf(path, sizeof path, "%s[%zu]", name, index);
            print_value(path, inner);
        }
        return;
    }
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6) | JSON_COMPACT);
    printf("  %-*s %s\n", NAME_COLUMN, name,
           json_is_string(value) ? json_string_value(value)
           : text                ? text
                                 : "?");
    free(text);
}

static void print_table(const struct status *status)
{
    for (int i = 0; i < CLIENT_PARTS; i++) {
        enum client_part part = (enum client_part)i;
        if (!status->answers[i]) {
            printf("%s: no answer within %d s\n", client_part_program(part), (int)(DEADLINE_NS / CLOCK_S));
            continue;
        }
        printf("%s: pid %u\n", client_part_program(part), client_part_pid(status->client, part));
        print_value("", status->answers[i]);
    }
}

static void print_json(const struct status *status)
{
    json_t *top = json_object(), *absent = json_array();
    for (int i = 0; i < CLIENT_PARTS; i++) {
        const char *name = client_part_name((enum client_part)i);
        if (status->answers[i])
            json_object_set(top, name, status->answers[i]);
        else
            json_array_append_new(absent, json_string(name));
    }
    json_object_set_new(top, "missing", absent);
    json_dumpf(top, stdout, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(9));
    putchar('\n');
    json_decref(top);
}

int status_main(int argc, char **argv)
{
    struct status_options options = {0};
    struct err err = {0};
    int r = options_parse(table, argc, argv, &options, &err);
    if (r == 1) {
        puts("Usage: specontext status [options]\n\nAsks the three daemons how they are. Exit code: 0 all "
             "answered.");
        options_help(table, stdout);
        return 0;
    }
    if (r) {
        fprintf(stderr, "specontext status: %s\n", err.text);
        return 2;
    }
    struct status status = {.loop = loop_create(), .deadline_ns = clock_now_ns() + DEADLINE_NS};
    struct stat st;
    if (stat(options.runtime, &st))
        r = err_set(&err, -errno, "%s: %s", options.runtime, strerror(errno));
    else if (!S_ISDIR(st.st_mode))
        r = err_set(&err, -ENOTDIR, "%s: %s", options.runtime, strerror(ENOTDIR));
    if (!r)
        r = client_create(status.loop, options.runtime, &ops, &status, &status.client, &err);
    if (r) {
        fprintf(stderr, "specontext status: %s\n", err.text);
        if (options.json)
            print_json(&status);
    } else {
        loop_add_timer(status.loop, TICK_NS, on_tick, &status);
        loop_run(status.loop);
        if (options.json)
            print_json(&status);
        else
            print_table(&status);
    }
    int code = r || missing(&status) ? 1 : 0;
    client_free(&status.client);
    loop_free(&status.loop);
    for (int i = 0; i < CLIENT_PARTS; i++)
        json_decref(status.answers[i]);
    return code;
}
