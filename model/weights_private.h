/* What the files behind weights.h share. */
#ifndef MODEL_WEIGHTS_PRIVATE_H
#define MODEL_WEIGHTS_PRIVATE_H

#include "model/weights.h"

/* Makes the table over the shards that are open. */
int weights_add_shards(struct weights *weights, struct err *err);

#endif
