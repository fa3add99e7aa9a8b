/* For tests: archives as torch.save writes them, out of members that the caller makes. */
#ifndef TESTS_LIB_TORCHGEN_H
#define TESTS_LIB_TORCHGEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct torchgen_member {
    const char *name;
    const void *data;
    size_t bytes;
    uint16_t flags, method; /* of zip; 0: plain and stored */
};

#define TORCHGEN_BYTES_MAX 8192 /* of an archive that these functions can make */

/* Writes the archive to `to` [TORCHGEN_BYTES_MAX], with sizes and places in extra fields and a zip64 end
 * record if `zip64`; returns its bytes. */
size_t torchgen_zip(uint8_t *to, const struct torchgen_member *members, unsigned count, bool zip64);

/* A pickle with one tensor "a" [3] of HalfStorage "0" in an OrderedDict with versions, as of a state dict,
 * and its six bytes of data; then both as an archive "m". */
extern const uint8_t torchgen_pickle[];
extern const size_t torchgen_pickle_bytes;
extern const uint8_t torchgen_storage[6];
size_t torchgen_sound(uint8_t *to, bool zip64);

#endif
