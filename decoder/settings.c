/* The decoder's command line; see settings.h. No state, main only. */
#include "decoder/settings.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "compute/gpu.h"
#include "proto/limits.h"
#include "proto/memory_gpu.h"

enum { THREADS_MAX = 1024, CHUNK_CPU = 256, CHUNK_GPU = MEMORY_GPU_PROMPT };

#define AT(field) .at = offsetof(struct settings, field), .group = DAEMON_GROUP

/* clang-format off */
static const struct option_entry table[] = {
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(model), .argument = "FILE",
     .text = "the model: a GGUF file or a Hugging Face folder (required)"},
    {.name = "device", .kind = OPTION_TEXT, AT(device), .argument = "NAME", .initial = "cpu",
     .text = "cpu, cuda, cuda:N or the UUID of a GPU: where the model is computed"},
    {.name = "context", .letter = 'c', .kind = OPTION_UINT, AT(context), .argument = "N", .initial = "0",
     .most = LIMIT_CONTEXT, .text = "positions of a sequence; 0: the model's"},
    {.name = "sequences", .kind = OPTION_UINT, AT(sequences), .argument = "N", .initial = "32", .least = 1,
     .most = LIMIT_SEQUENCES, .text = "sequences live at once"},
    {.name = "chunk", .kind = OPTION_UINT, AT(chunk), .argument = "N", .least = 1,
     .most = LIMIT_STEP_TOKENS, .text = "prompt tokens computed in one step (default: 256; on a GPU 2048)"},
    {.name = "early-layers", .kind = OPTION_UINT, AT(early_layers), .argument = "N", .most = LIMIT_LAYERS,
     .text = "mixed selection: layers that use the set before (default: a third)"},
    {.name = "threads", .kind = OPTION_UINT, AT(threads), .argument = "N", .least = 1, .most = THREADS_MAX,
     .text = "threads that compute (default: all processors)"},
    {.name = "isa", .kind = OPTION_CHOICE, AT(isa), .argument = "NAME", .initial = "auto",
     .choices = COMPUTE_ISA_CHOICES, .text = "instruction set of the operators"},
    {.name = "activations", .kind = OPTION_CHOICE, AT(activations), .argument = "KIND", .initial = "f32",
     .choices = COMPUTE_ACTIVATIONS_CHOICES,
     .text = "what quantized weights are multiplied by; q8: rounded to 8 bits"},
    {.name = "idle", .kind = OPTION_CHOICE, AT(idle), .argument = "KIND", .initial = "auto",
     .choices = AWAKE_IDLE_CHOICES,
     .text = "idle cores while tokens are made; auto: poll on a GPU"},
    DAEMON_OPTIONS(struct settings),
    {0}};
/* clang-format on */

uint32_t settings_awake(const struct settings *s)
{
    bool poll = s->idle == AWAKE_IDLE_AUTO ? gpu_named(s->device) : s->idle == AWAKE_IDLE_POLL;
    return poll ? (uint32_t)s->threads : 0;
}

int settings_parse(int argc, char **argv, struct settings *ret, struct err *err)
{
    *ret =
        (struct settings){.daemon.lifeline = -1, .threads = daemon_threads(THREADS_MAX), .early_layers = -1};
    int r = options_parse(table, argc, argv, ret, err);
    if (r == 1) {
        puts("Usage: specontext-decoder -m MODEL [options]\n\nThe language model's forward passes, batching "
             "and "
             "sampling.");
        options_help(table, stdout);
    }
    if (r)
        return r;
    if (!ret->model)
        return err_set(err, -EINVAL, "--model is missing");
    if (strcmp(ret->device, "cpu") != 0 && !gpu_named(ret->device))
        return err_set(err, -EINVAL, "--device: found %s, expected cpu, cuda, cuda:N or a GPU's UUID",
                       ret->device);
    if (ret->chunk == 0)
        ret->chunk = gpu_named(ret->device) ? CHUNK_GPU : CHUNK_CPU;
    return 0;
}
