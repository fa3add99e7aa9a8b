/* The model of the decoder's tests: small, of random weights, three runs of layers, with grouped heads. */
#ifndef TESTS_UNIT_DECODER_MODEL_H
#define TESTS_UNIT_DECODER_MODEL_H

#include <stdlib.h>
#include <unistd.h>

#include "tests/unit/tiny_model.h"

enum { DECODER_MODEL_CPU, DECODER_MODEL_GPU, DECODER_MODELS };

static char decoder_model_path[DECODER_MODELS][32] = {"/tmp/specontext-model-XXXXXX",
                                                      "/tmp/specontext-model-XXXXXX"};
static int decoder_model_made[DECODER_MODELS];

static inline void decoder_model_remove(void)
{
    for (int i = 0; i < DECODER_MODELS; i++)
        if (decoder_model_made[i])
            unlink(decoder_model_path[i]);
}

static inline const char *decoder_model_of(int which)
{
    char *path = decoder_model_path[which];
    if (decoder_model_made[which])
        return path;
    int fd = mkstemp(path);
    if (fd < 0)
        abort();
    close(fd);
    struct tiny_model m = {.vocab = 500,
                           .hidden = 48,
                           .q_heads = 4,
                           .kv_heads = 2,
                           .head_dim = which == DECODER_MODEL_GPU ? 64 : 16,
                           .layers = 13,
                           .context = 1024,
                           .seed = 11,
                           .rope_base = 10000};
    tiny_model_write(&m, path);
    if (!decoder_model_made[!which])
        atexit(decoder_model_remove);
    decoder_model_made[which] = 1;
    return path;
}

/* Its path; the file is written by the first call and removed when the test ends. */
static inline const char *decoder_model(void)
{
    return decoder_model_of(DECODER_MODEL_CPU);
}

/* The same with heads that GPU kernels serve. */
static inline const char *decoder_model_gpu(void)
{
    return decoder_model_of(DECODER_MODEL_GPU);
}

#endif
