/* The small models of tests/vectors/arch, one for each architecture and variant, as files: tests make them
 * here by the rule that tools/reference_model.py states. Failures abort. */
#ifndef TESTS_LIB_GGUFGEN_ARCH_H
#define TESTS_LIB_GGUFGEN_ARCH_H

#include <stdint.h>

#include "base/dtype.h"

#define ARCH_VECTORS "tests/vectors/arch"

/* Names of the cases, NULL at the end. */
extern const char *const ggufgen_arch_names[];

/* A temporary Hugging Face folder, in as many safetensors files, with weights of the type that config.json
 * says. `config`: text in place of the case's config.json, or NULL. *ret_path is the caller's. */
void ggufgen_arch_folder(const char *name, unsigned shards, const char *config, char **ret_path);

/* The case with heads of another width, so that there are no golden values for it. */
void ggufgen_arch_folder_heads(const char *name, uint32_t head_dim, char **ret_path);

/* A temporary GGUF file with matrices of the type (F32, F16 or BF16); parts > 1: split, *ret_path the
 * first. */
void ggufgen_arch_file(const char *name, enum dtype type, unsigned parts, char **ret_path);

/* Removes a folder and what it holds, or a file with its parts; frees the name. */
void ggufgen_arch_remove(char **path);

/* The case's tokens and logits [tokens][vocab]; free both with mem_free. */
struct ggufgen_arch_golden {
    uint32_t tokens, vocab;
    uint32_t *ids;
    float *logits;
};
void ggufgen_arch_golden(const char *name, uint32_t vocab, struct ggufgen_arch_golden *ret);

#endif
