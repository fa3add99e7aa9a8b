/* libFuzzer target: any bytes as a file of torch.save. Opening must refuse or succeed; of an opened file
 * every tensor must be readable. Seeds a corpus folder with sound archives. The bytes are read twice: as a
 * file, and as the pickle of an otherwise sound one, which mutation of whole archives would seldom reach. */
#include <stddef.h>
#include <stdint.h>

#include "base/check.h"
#include "model/torch.h"
#include "tests/lib/fuzzfile.h"
#include "tests/lib/torchgen.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    uint8_t file[TORCHGEN_BYTES_MAX];
    fuzzfile_seed(*argc, *argv, "seed-zip", file, torchgen_sound(file, false));
    fuzzfile_seed(*argc, *argv, "seed-zip64", file, torchgen_sound(file, true));
    fuzzfile_seed(*argc, *argv, "seed-pickle", torchgen_pickle, torchgen_pickle_bytes);
    return 0;
}

static void read_file(const uint8_t *data, size_t bytes)
{
    struct torch *t = NULL;
    struct err err = {0};
    if (torch_open(fuzzfile_put(data, bytes), &t, &err) < 0) {
        CHECK(err.code < 0 && err.text[0]);
        return;
    }
    for (uint32_t i = 0; i < torch_count(t); i++) {
        const struct safetensors_tensor *tensor = torch_at(t, i);
        const volatile uint8_t *p = tensor->data; /* both ends, for the sanitizer to see */
        if (tensor->bytes)
            (void)(p[0] + p[tensor->bytes - 1]);
    }
    torch_free(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    read_file(data, bytes);
    if (bytes > 4096)
        return 0;
    uint8_t file[TORCHGEN_BYTES_MAX];
    const struct torchgen_member members[] = {{"m/data.pkl", data, bytes, 0, 0},
                                              {"m/data/0", torchgen_storage, sizeof torchgen_storage, 0, 0}};
    read_file(file, torchgen_zip(file, members, 2, false));
    return 0;
}
