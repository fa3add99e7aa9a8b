/* GGUF files for tests, made in memory: sound ones, small llama models with pseudo-random weights, and
 * ones that are wrong on purpose. An object is built by calls in any order, then finished once. Failures
 * abort. */
#ifndef TESTS_LIB_GGUFGEN_H
#define TESTS_LIB_GGUFGEN_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

struct ggufgen_part {
    uint8_t *data;
    size_t bytes, capacity;
};

struct ggufgen {
    struct ggufgen_part keys, infos, weights;
    uint64_t key_count, tensor_count;
    uint32_t version;   /* 3 */
    uint32_t alignment; /* 32; of the layout only, general.alignment is a key like others */
    uint64_t seed;      /* of the next tensor's values */
};

void ggufgen_init(struct ggufgen *gen);
void ggufgen_free(struct ggufgen *gen);

/* Metadata. `raw` writes a value as it is given: type number, then bytes. */
void ggufgen_raw(struct ggufgen *gen, const char *key, uint32_t type, const void *value, size_t bytes);
void ggufgen_u32(struct ggufgen *gen, const char *key, uint32_t value);
void ggufgen_f32(struct ggufgen *gen, const char *key, float value);
void ggufgen_bool(struct ggufgen *gen, const char *key, int value);
void ggufgen_string(struct ggufgen *gen, const char *key, const char *value);
void ggufgen_strings(struct ggufgen *gen, const char *key, const char *const *values, uint64_t count);
void ggufgen_i32s(struct ggufgen *gen, const char *key, const int32_t *values, uint64_t count);
void ggufgen_f32s(struct ggufgen *gen, const char *key, const float *values, uint64_t count);

/* A tensor with pseudo-random values of about +-scale, of any type that base/dtype.h knows; cols is the
 * fastest dimension; rows 0: a vector. scale 0: all ones (F32 only). */
void ggufgen_tensor(struct ggufgen *gen, const char *name, enum dtype type, uint64_t rows, uint64_t cols,
                    float scale);

/* A tensor with these values (F32, F16 or BF16), rows x cols or a vector of cols. */
void ggufgen_values(struct ggufgen *gen, const char *name, enum dtype type, const float *values,
                    uint64_t rows, uint64_t cols);

/* A directory entry with exactly these numbers and no data. */
void ggufgen_info(struct ggufgen *gen, const char *name, uint32_t dims, const uint64_t *shape, uint32_t type,
                  uint64_t offset);

struct ggufgen_llama {
    uint32_t layers, hidden, q_heads, kv_heads, head_dim, ffn, vocab, context;
    enum dtype type; /* of the matrices */
    int untied;      /* with output.weight */
};

/* All keys and weights of a llama model without a tokenizer. */
void ggufgen_llama(struct ggufgen *gen, const struct ggufgen_llama *sizes);

/* The file's bytes (free with mem_free). ret_sections, if not NULL, gets the offsets where metadata, tensor
 * directory and data begin, and the file's length. */
uint8_t *ggufgen_finish(const struct ggufgen *gen, size_t *ret_bytes, size_t ret_sections[4]);

/* Writes bytes into a new temporary file and puts its name, owned by the caller, into *ret_path. */
void ggufgen_save(const void *data, size_t bytes, char **ret_path);

/* unlink and free. */
void ggufgen_remove(char **path);

#endif
