/* What reader and writer of safetensors share. Not for other folders. */
#ifndef MODEL_SAFETENSORS_PRIVATE_H
#define MODEL_SAFETENSORS_PRIVATE_H

#include <string.h>

#include "model/safetensors.h"

/* Bytes of a tensor; -EOVERFLOW when they do not fit 64 bits. */
int safetensors_size(enum safetensors_type type, const uint64_t *shape, uint32_t dims, uint64_t *ret_bytes);

/* Where the data begins in a file whose header length was checked. */
static inline uint64_t safetensors_data_at(const uint8_t *file)
{
    uint64_t header;
    memcpy(&header, file, sizeof header);
    return 8 + header;
}

#endif
