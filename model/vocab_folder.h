/* The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja,
 * generation_config.json. Not for other folders. */
#ifndef MODEL_VOCAB_FOLDER_H
#define MODEL_VOCAB_FOLDER_H

#include "model/json_file.h"
#include "model/vocab.h"

/* *ret is NULL with 0 when there is no tokenizer.json. The vocabulary gets `vocab_size` tokens, as the
 * embedding has rows; those that the file lacks are unused. -EBADMSG for damaged files, -ENOTSUP for kinds,
 * normalizers and pre-tokenizers that are not known. */
int vocab_from_folder(const char *folder, const struct json_doc *config, uint32_t vocab_size,
                      struct vocab **ret, struct err *err);

/* As above, from the text of tokenizer.json alone, of which nothing is borrowed. `path` is for errors.
 * vocab_size 0: as many tokens as the file has. */
int vocab_from_json(struct name text, const char *path, uint32_t vocab_size, struct vocab **ret,
                    struct err *err);

/* GGUF's name of a pre-tokenizer by its parts, one a line: "Split REGEX", "Digits" (each alone), "ByteLevel"
 * (GPT-2's expression) or "Bytes" (no expression); NULL when it is not known. */
const char *vocab_pre_name(const char *parts);

#endif
