/* What the decoder maps of the store: device memory and the control segment, and the doorbells. */
#ifndef DECODER_ATTACH_H
#define DECODER_ATTACH_H

#include <stdint.h>

#include "base/err.h"
#include "link/segment.h"
#include "proto/control.h"

struct attach {
    int connection; /* to kvstore.fd, open for the decoder's life: its end is the store's death; -1: none */
    struct segment device, control; /* device: closed where it is a GPU's */
    int store_bell;                 /* we ring */
    int decoder_bell;               /* the store rings: a resident set was proposed */
    uint64_t store_epoch;
};

void attach_init(struct attach *a);

/* Connects and asks. The answer comes later: attach->connection becomes readable. Blocks up to 1 s while
 * nobody listens. */
int attach_ask(struct attach *a, const char *path, uint64_t epoch, struct err *err);

/* Takes the answer, checks the control segment against the layout and maps what came: device memory only
 * where it is the CPU's. Blocks up to 1 s for a frame that came in part. `epoch`: our own. -EPROTO when
 * device memory is not where we compute. */
int attach_take(struct attach *a, const struct kv_layout *layout, uint64_t epoch, int on_gpu,
                struct err *err);

static inline struct control_header *attach_control(const struct attach *a)
{
    return (struct control_header *)a->control.at;
}

/* Unmaps and closes what there is. */
void attach_close(struct attach *a);

#endif
