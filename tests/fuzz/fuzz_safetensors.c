/* libFuzzer target: any bytes as a safetensors file. Opening must refuse or succeed; of an opened file every
 * tensor must be readable. Seeds a corpus folder with sound headers. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/check.h"
#include "model/safetensors.h"
#include "tests/lib/fuzzfile.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static const char *const headers[] = {
        "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
        "}",
        "{\"b\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[4,8]},\"c\":{\"dtype\":\"I8\","
        "\"shape\":[4],"
        "\"data_offsets\":[0,4]}}",
        "{\"e\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}   ",
    };
    for (unsigned i = 0; i < sizeof headers / sizeof *headers; i++) {
        char file[512] = {0}, name[16] = "seed-0";
        uint64_t length = strlen(headers[i]);
        name[5] = (char)('0' + i);
        memcpy(file, &length, 8);
        memcpy(file + 8, headers[i], length);
        fuzzfile_seed(*argc, *argv, name, file, 8 + length + 8);
    }
    return 0;
}

/* Reads both ends, for the sanitizer to see. */
static void touch(const void *data, uint64_t bytes)
{
    const volatile uint8_t *p = data;
    if (bytes)
        (void)(p[0] + p[bytes - 1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct safetensors *s = NULL;
    struct err err = {0};
    if (safetensors_open(fuzzfile_put(data, bytes), &s, &err) < 0) {
        CHECK(err.code < 0 && err.text[0]);
        return 0;
    }
    for (uint32_t i = 0; i < safetensors_count(s); i++) {
        const struct safetensors_tensor *t = safetensors_at(s, i);
        CHECK(safetensors_find(s, t->name.text) == t);
        touch(t->data, t->bytes);
    }
    safetensors_metadata(s, "format");
    safetensors_free(&s);
    return 0;
}
