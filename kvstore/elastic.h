/* Elastic loading of one sequence: its selections, the slots that hold rows of its offloaded groups, and
 * which rows have to be gathered. Works on positions and slot numbers alone; it never touches a row.
 *
 * A slot number belongs to (group, row head) and is the same in all layers of the group. Slots named by a
 * list or pinned (sinks, window, the step's own token) are never given away; the others stand in order of
 * their deselection, and the one deselected first is the next victim.
 *
 * Life of a set: elastic_receive checks and merges it (next), elastic_stage finds slots for what is new
 * among free and unselected ones - the set in use stays whole -, elastic_commit makes it the set in use
 * and lets go of the old one. Where staging found slots for everything, elastic_commit_held does so while
 * the old one's slots are still read: they keep their rows until elastic_release, and until then no slot is
 * given to anything. Calls for different sequences may run at once; those for one may not. */
#ifndef KVSTORE_ELASTIC_H
#define KVSTORE_ELASTIC_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/selection.h"
#include "proto/layout.h"
#include "proto/msg.h"

struct elastic_load { /* a row that must be brought into a slot */
    uint32_t position;
    uint16_t slot;
    uint8_t group, head; /* row head */
};

struct elastic_loads {
    struct elastic_load *at;
    uint32_t count, room;
};

struct elastic_head {      /* slots of one (group, row head); arrays exist while the group has slots */
    uint16_t *slot_of;     /* [capacity]: slot of a position, or SELECTION_NO_SLOT */
    uint32_t *position_of; /* [slots] */
    uint16_t *refs;        /* [slots]: lists that name it, and ELASTIC_PIN */
    uint16_t *older,
        *newer;    /* [slots + 1]: unselected slots by time of deselection; [slots] is the ring's head */
    uint32_t used; /* slots [0, used) hold a row */
    uint32_t unselected; /* length of the ring */
    uint32_t selected;   /* slots that lists name */
    uint32_t pinned;
};

#define ELASTIC_PIN 0x8000u

enum elastic_next { ELASTIC_NONE, ELASTIC_RECEIVED, ELASTIC_STAGED };

struct elastic_params {
    const struct kv_layout *layout;
    uint32_t capacity, sinks, window, budget;
    uint32_t slots; /* of one (group, row head) */
    bool reload;    /* nothing is kept: every row of a set is gathered anew */
};

struct elastic {
    struct kv_layout layout;
    uint32_t capacity, sinks, window, slots, list_max;
    uint32_t ratio; /* selection heads of a row head */
    bool reload;
    struct selection *lists;        /* [group][selection head] */
    struct elastic_head *heads;     /* [group][row head] */
    int32_t *scratch;               /* of merges */
    bool attached[LIMIT_GROUPS];    /* the group has slots */
    uint32_t changes;               /* grows when a group gets slots, or loses them: older ones are void */
    uint32_t moves;                 /* grows when any slot may have been given, named, pinned or let go */
    bool has;                       /* there is a set in use */
    uint32_t step, position, limit; /* of the set in use: made in that step from that position */
    enum elastic_next next;
    uint32_t next_step, next_position, next_limit;
    float next_mass, next_mass_base;
    uint32_t next_flags;        /* enum topk_entry_flags */
    bool is_short;              /* of the set in use: TOPK_ENTRY_SHORT */
    bool next_whole;            /* `next` has no predecessor: its rows count as filled, not as loaded */
    bool held;                  /* slots on the rings may still be read: none of them is given away */
    uint32_t pin_low, pin_end;  /* positions [pin_low, pin_end) and the sinks below pin_end are pinned */
    struct elastic_loads loads; /* for sets */
    struct elastic_loads fills; /* for sinks, windows, first sets and groups that got slots */
};

/* Slots that every step of such a sequence can do with; more are of use, fewer are not enough. */
uint32_t elastic_slots_needed(const struct elastic_params *params);

void elastic_init(struct elastic *elastic, const struct elastic_params *params);
void elastic_free(struct elastic *elastic);

struct elastic_set { /* one entry of TOPK, `counts` and `positions` leading to its own part */
    uint32_t step, base_step, limit, position;
    float mass, mass_base;
    uint32_t flags; /* enum topk_entry_flags */
    const uint32_t *counts, *positions;
};

/* Needs next == NONE. 0; -ENOENT: the base is not the set in use; -EINVAL: anything about positions. */
int elastic_receive(struct elastic *elastic, const struct elastic_set *set);

/* The same in parts, so that lists of one sequence may be merged at once: the check without positions; one
 * list (group * selection_heads + head), whose positions begin at `positions`, with scratch of
 * SELECTION_SCRATCH(list_max) entries; and what follows when all of them were right. */
int elastic_check(const struct elastic *elastic, const struct elastic_set *set);
bool elastic_merge(struct elastic *elastic, const struct elastic_set *set, uint32_t list,
                   const uint32_t *positions, int32_t *scratch);
void elastic_received(struct elastic *elastic, const struct elastic_set *set);

/* Finds slots for new positions without touching the set in use; what does not fit waits for elastic_commit.
 * Needs next == RECEIVED. Rows land in `loads`. */
void elastic_stage(struct elastic *elastic);

/* Makes the next set the one in use; nothing reads the old one's slots any more (or only layers into which
 * the new rows are gathered later). Rows land in `loads`. Counts into `counters` all but bytes. Needs next
 * != NONE. */
void elastic_commit(struct elastic *elastic, struct kv_counters *counters);

/* Whether every row of the next set has a slot, in groups that have any: it is staged, and its commit will
 * give no slot away. */
bool elastic_is_whole(const struct elastic *elastic);

/* elastic_commit of a set that is whole while the slots of the one in use are read, up to elastic_release.
 * In between the next set may be received and merged, not staged; nothing may be pinned or attached. */
void elastic_commit_held(struct elastic *elastic, struct kv_counters *counters);
void elastic_release(struct elastic *elastic);

/* Pins [low, end) and the sinks, unpins the rest. Rows below `committed` land in `fills`, others get a
 * slot that the step itself writes. */
void elastic_pin(struct elastic *elastic, uint32_t low, uint32_t end, uint32_t committed);

/* Whether to pin what a step at `position` reads with the set in use - from its limit on, and the sinks -
 * will find all of it pinned but `position` itself, and a slot for that: elastic_slot_ahead of each head, as
 * long as `moves` stays the same. */
bool elastic_pins_one(const struct elastic *elastic, uint32_t position);

/* Gives slots to a group: for the set in use and all that is pinned (rows land in `fills`), then for what
 * of the next set can be had. And takes them away. */
void elastic_attach(struct elastic *elastic, uint32_t group, uint32_t committed);
void elastic_detach(struct elastic *elastic, uint32_t group);

/* Appends every slot of a group that holds a row. */
void elastic_occupied(const struct elastic *elastic, uint32_t group, struct elastic_loads *loads);

/* No group has any: a set is lists of positions alone. */
bool elastic_has_no_slots(const struct elastic *elastic);

/* Distinct rows that the set in use names, of one group, over all row heads. */
uint64_t elastic_selected_rows(const struct elastic *elastic, uint32_t group);

static inline struct selection *elastic_list(const struct elastic *e, uint32_t group, uint32_t selection_head)
{
    return &e->lists[group * e->layout.selection_heads + selection_head];
}

static inline struct elastic_head *elastic_head(const struct elastic *e, uint32_t group, uint32_t row_head)
{
    return &e->heads[group * e->layout.row_heads + row_head];
}

/* The slot that the next row gets which has none; SELECTION_NO_SLOT: there is none to be had. */
static inline uint32_t elastic_slot_ahead(const struct elastic *e, const struct elastic_head *h)
{
    if (h->used < e->slots)
        return h->used;
    return h->unselected ? h->newer[e->slots] : SELECTION_NO_SLOT;
}

/* Structural invariants, for tests: false when any count, link or map entry contradicts another. */
bool elastic_consistent(const struct elastic *elastic);

#endif
