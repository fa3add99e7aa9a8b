/* Between the files of model/head*.c. */
#ifndef MODEL_HEAD_PRIVATE_H
#define MODEL_HEAD_PRIVATE_H

#include "model/head.h"

/* What head_fingerprint returns; groups [config->groups]. */
struct hash128 head_hash(const struct head_config *config, const struct head_group *groups);

#endif
