/* The retriever's command line; see arguments.h. No state, main only. */
#include "retriever/arguments.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "compute/gpu.h"
#include "model/head.h"
#include "proto/limits.h"

enum { THREADS_MAX = 1024 };

#define AT(field) .at = offsetof(struct arguments, field), .group = DAEMON_GROUP

_Static_assert(HEAD_POOL_MAX == 0 && HEAD_POOL_MEAN == 1, "order of --pool");

/* clang-format off */
static const struct option_entry table[] = {
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(model), .argument = "FILE",
     .text = "the language model: its token embedding is used (required)"},
    {.name = "head", .letter = 'H', .kind = OPTION_TEXT, AT(head), .argument = "FILE",
     .text = "the retrieval head (safetensors), made for this model (required)"},
    {.name = "device", .kind = OPTION_TEXT, AT(device), .argument = "NAME", .initial = "cpu",
     .text = "cpu, cuda, cuda:N or the UUID of a GPU: where keys lie and are scored"},
    {.name = "context", .kind = OPTION_UINT, AT(context), .argument = "N", .initial = "0",
     .most = LIMIT_CONTEXT, .text = "positions of a sequence; 0: the model's"},
    {.name = "sequences", .kind = OPTION_UINT, AT(sequences), .argument = "N", .initial = "32", .least = 1,
     .most = LIMIT_SEQUENCES, .text = "open at a time"},
    {.name = "pool", .kind = OPTION_CHOICE, AT(pool), .argument = "KIND", .initial = "head",
     .choices = "head|max|mean", .text = "of a group's query heads; head: as it recommends"},
    {.name = "key-type", .kind = OPTION_CHOICE, AT(keys), .argument = "KIND", .initial = "auto",
     .choices = COMPUTE_KEYS_CHOICES,
     .text = "keys of 16 bits, or of 8 with a scale each; auto: int8 on a GPU, else f16"},
    {.name = "prefix-memory", .kind = OPTION_SIZE, AT(prefix_memory), .argument = "SIZE", .initial = "256M",
     .text = "host memory for keys of prompts, with a head that reads the model's hidden states; 0: none"},
    {.name = "threads", .kind = OPTION_UINT, AT(threads), .argument = "N", .least = 1, .most = THREADS_MAX,
     .text = "threads that compute (default: all processors)"},
    DAEMON_OPTIONS(struct arguments),
    {0}};
/* clang-format on */

int arguments_parse(int argc, char **argv, struct arguments *ret, struct err *err)
{
    *ret = (struct arguments){.daemon.lifeline = -1, .threads = daemon_threads(THREADS_MAX)};
    int r = options_parse(table, argc, argv, ret, err);
    if (r == 1) {
        puts("Usage: specontext-retriever -m MODEL -H HEAD [options]\n\nPicks, for each step of each "
             "sequence, the "
             "positions that attention will read.");
        options_help(table, stdout);
    }
    if (r == 0 && !ret->model)
        return err_set(err, -EINVAL, "--model is missing");
    if (r == 0 && strcmp(ret->device, "cpu") != 0 && !gpu_named(ret->device))
        return err_set(err, -EINVAL, "--device: found %s, expected cpu, cuda, cuda:N or GPU-UUID",
                       ret->device);
    return r || ret->head ? r : err_set(err, -EINVAL, "--head is missing");
}
