/* The model of the decoder's tests: small, of random weights, three runs of layers, with grouped heads. */
#ifndef TESTS_UNIT_DECODER_MODEL_H
#define TESTS_UNIT_DECODER_MODEL_H

#include <stdlib.h>
#include <unistd.h>

#include "tests/unit/tiny_model.h"

static char decoder_model_path[] = "/tmp/specontext-model-XXXXXX";

static inline void decoder_model_remove(void)
{
    unlink(decoder_model_path);
}

/* Its path; the file is written by the first call and removed when the test ends. */
static inline const char *decoder_model(void)
{
    static int made;
    if (made)
        return decoder_model_path;
    int fd = mkstemp(decoder_model_path);
    if (fd < 0)
        abort();
    close(fd);
    struct tiny_model m = {.vocab = 500,
                           .hidden = 48,
                           .q_heads = 4,
                           .kv_heads = 2,
                           .head_dim = 16,
                           .layers = 13,
                           .context = 1024,
                           .seed = 11,
                           .rope_base = 10000};
    tiny_model_write(&m, decoder_model_path);
    atexit(decoder_model_remove);
    made = 1;
    return decoder_model_path;
}

#endif
