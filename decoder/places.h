/* What the store's tables say of one step, copied out of shared memory and checked.
 *
 * The tables lie in memory that another process writes. So everything is read once, held against the sizes of
 * device memory and lists, and only the copy is used: a table that is half written or wrong ends an entry, it
 * never makes an operator touch memory outside of device memory. One thread. */
#ifndef DECODER_PLACES_H
#define DECODER_PLACES_H

#include <stdint.h>

#include "base/err.h"
#include "decoder/pass.h"
#include "proto/control.h"

struct places;

enum places_phase { PLACES_EARLY = 0, PLACES_LATE = 1 };

/* `control` and `device` (device_bytes long) are borrowed and stay mapped; the header has passed
 * control_header_check. selection_heads must equal row_heads: CHECKed. */
struct places *places_create(const struct kv_layout *layout, struct control_header *control, uint8_t *device);
void places_free(struct places **places);

/* Begins with the record of a posted step, DENSE or SPARSE: the decoder's own copy, not the one in the
 * segment. It must stay as it is until the step's end. */
void places_begin(struct places *t, const struct step_record *record);

/* Reads what a phase says of the step and of each entry; call when its flag was reached, before the first
 * layer that uses it. -EPROTO when the table is of another step or version. Entries that the store dropped,
 * or of whose numbers one is out of range, are dropped: see places_status. */
int places_phase(struct places *t, enum places_phase phase, struct err *err);

/* Fills what pass_run wants for one layer; its phase has been read. Layers in ascending order. */
void places_layer(struct places *t, uint32_t layer, struct pass_kv *kv);

/* 0, or the negative errno for which the entry was dropped so far; *ret_why says it in words. */
int places_status(const struct places *t, uint32_t entry, const char **ret_why);

/* Whether the entry attends every position where a layer is resident, whatever its lists; the phase was
 * read. */
int places_attends_all(const struct places *t, enum places_phase phase, uint32_t entry);

/* Layers of the last step read whose KV is not in pages; 0 before the first. */
uint32_t places_offloaded(const struct places *t);

#endif
