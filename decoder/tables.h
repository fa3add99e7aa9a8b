/* What the store's tables say of one step, copied out of shared memory and checked.
 *
 * The tables lie in memory that another process writes. So everything is read once, held against the sizes of
 * device memory and lists, and only the copy is used: a table that is half written or wrong ends an entry, it
 * never makes an operator touch memory outside of device memory. One thread. */
#ifndef DECODER_TABLES_H
#define DECODER_TABLES_H

#include <stdint.h>

#include "base/err.h"
#include "decoder/forward.h"
#include "proto/control.h"

struct tables;

enum tables_phase { TABLES_PHASE_EARLY = 0, TABLES_PHASE_LATE = 1 };

/* `control` and `device` (device_bytes long) are borrowed and stay mapped; the header has passed
 * control_header_check. selection_heads must equal row_heads: CHECKed. */
struct tables *tables_create(const struct kv_layout *layout, struct control_header *control, uint8_t *device);
void tables_free(struct tables **tables);

/* Begins with the record of a posted step, DENSE or SPARSE: the decoder's own copy, not the one in the
 * segment. It must stay as it is until the step's end. */
void tables_begin(struct tables *t, const struct step_record *record);

/* Reads what a phase says of the step and of each entry; call when its flag was reached, before the first
 * layer that uses it. -EPROTO when the table is of another step or version. Entries that the store dropped,
 * or of whose numbers one is out of range, are dropped: see tables_status. */
int tables_phase(struct tables *t, enum tables_phase phase, struct err *err);

/* Fills what forward_run wants for one layer; its phase has been read. Layers in ascending order. */
void tables_layer(struct tables *t, uint32_t layer, struct forward_kv *kv);

/* 0, or the negative errno for which the entry was dropped so far; *ret_why says it in words. */
int tables_status(const struct tables *t, uint32_t entry, const char **ret_why);

/* Layers of the last step read whose KV is not in pages; 0 before the first. */
uint32_t tables_offloaded(const struct tables *t);

#endif
