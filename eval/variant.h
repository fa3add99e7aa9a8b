/* One way to choose, as a text: "head=FILE,budget=1024,sinks=4,window=64,pool=mean,selection=previous,
 * min-mass=0.9,max-budget=2048,top-p=0.95,pins=0.25,pin-layers=4,oracle=groups,group-budgets=2048:512".
 * What it leaves out is as in the base. */
#ifndef EVAL_VARIANT_H
#define EVAL_VARIANT_H

#include <stdint.h>

#include "base/err.h"
#include "eval/lane.h"
#include "eval/sets.h"
#include "proto/control.h"
#include "proto/limits.h"

#define VARIANT_HEAD_BYTES 512u

struct variant {
    const char *text;              /* as given; NULL: made of other options */
    char head[VARIANT_HEAD_BYTES]; /* as -H takes it; "": the first one */
    uint32_t pool;                 /* 0 as the head recommends, 1 max, 2 mean */
    uint32_t keys;                 /* enum compute_keys */
    struct choice choice;
    enum selection_mode selection;
    float pins; /* share of the picked positions that is kept for what the prompt's end looked at */
    enum oracle oracle;
    uint32_t group_budgets[LIMIT_GROUPS], group_count; /* of the head's groups; count 0: one budget */
    uint32_t pin_layers; /* looked at in the first so many layers; 0: in those of each group */
};

/* -EINVAL with one line. `text` is borrowed. */
int variant_parse(const char *text, const struct variant *base, struct variant *ret, struct err *err);

#endif
