/* Recognises pre-tokenizers of tokenizer.json by what they say. A table of constants; any thread. */
#include <string.h>

#include "model/pretok_published.h"
#include "model/vocab_folder.h"

static const struct {
    const char *parts, *name;
} knowns[] = {
    {"ByteLevel\n", "gpt-2"},
    {"Digits\nByteLevel\n", "smollm"},
    {"Split " PUBLISHED_TIKTOKEN("\\p{N}{1,3}") "\nBytes\n", "llama-bpe"},
    {"Split " PUBLISHED_TIKTOKEN("\\p{N}") "\nBytes\n", "qwen2"},
    {"Split [\\r\\n]\nSplit \\s?[" PUBLISHED_CASED "]+\nSplit \\s?[" PUBLISHED_MARKS
     "]+\nSplit \\s+$\nSplit [" PUBLISHED_ASIAN "]+\nDigits\nBytes\n",
     "deepseek-llm"},
    {"Split \\p{N}{1,3}\nSplit [" PUBLISHED_ASIAN3 "]+\nSplit " PUBLISHED_V3 "\nBytes\n", "deepseek-v3"},
};

const char *vocab_pre_name(const char *parts)
{
    for (unsigned i = 0; i < sizeof knowns / sizeof *knowns; i++)
        if (!strcmp(parts, knowns[i].parts))
            return knowns[i].name;
    return NULL;
}
