/* PyTorch's own files (pytorch_model.bin): a zip archive of stored members, one of which is a pickle. Read
 * without executing anything: the pickle may hold a plain dict of tensors and nothing else; whatever
 * opcode or global does not belong to that is refused by name. The file is mapped and checked as a whole
 * when opened; then the object is read only: any thread.
 *
 * What is understood: archives as torch.save has written them since 1.6, little endian, zip64 or not; dict
 * and OrderedDict; tensors that lie contiguously in their storage; parameters. */
#ifndef MODEL_TORCH_H
#define MODEL_TORCH_H

#include <stdint.h>

#include "base/err.h"
#include "model/safetensors.h"

#define TORCH_PICKLE_MAX  (4u << 20) /* bytes; the tensors lie beside it */
#define TORCH_TENSORS_MAX (1u << 20)

struct torch;

/* 0; an errno of the system; -EBADMSG with a line "file: field: found X, expected Y" for a damaged file;
 * -ENOTSUP for a sound one that holds something else than a plain dict of tensors. */
int torch_open(const char *path, struct torch **ret, struct err *err);
void torch_free(struct torch **torch);

/* In the order of the dict; data may be unaligned, and tensors may share it. */
uint32_t torch_count(const struct torch *torch);
const struct safetensors_tensor *torch_at(const struct torch *torch, uint32_t place);

#endif
