/* Draft models into heads. Everything is owned by the calling thread for the length of a call. Choices
 * that change what is selected (embedding, features, the length of training, the stretch beyond it) are
 * always printed. */
#include "launch/head_import.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>

#include "model/head.h"

static void print_draft(const struct eagle *e)
{
    const struct eagle_config *c = eagle_config(e);
    char rope[256];
    head_rope_text(&c->rope, rope, sizeof rope);
    printf("draft model      EAGLE-3, layout of %s, %s\n", eagle_layout_name(c->layout),
           eagle_weights_path(e));
    printf("heads            %" PRIu32 " query, %" PRIu32 " key, %" PRIu32 " dimensions%s\n", c->q_heads,
           c->kv_heads, c->head_dim, c->head_norms ? ", norms of each" : "");
    printf("inputs           %" PRIu32 " of the embedding (%s), %" PRIu32 " of features\n", c->hidden,
           c->own_embedding ? "its own" : "the model's", c->hidden);
    printf("features of      hidden states that enter layers ");
    for (uint32_t i = 0; i < c->feature_layer_count; i++)
        printf("%s%" PRIu32, i ? ", " : "", c->feature_layers[i]);
    printf("%s, %" PRIu32 " wide\n", c->feature_layer_count ? "" : "2, L / 2 and L - 3 of L",
           c->target_hidden);
    printf("rope             %s\n", rope);
    printf("positions        %" PRIu32 " named\n", c->position_max);
}

static int print_made(const char *path, const struct model *model, struct err *err)
{
    struct head *head = NULL;
    struct model_rope rope;
    char text[256];
    int rc = head_open(path, model, &head, err);
    if (rc < 0)
        return rc;
    const struct head_config *c = head_config(head);
    uint32_t context = model_config(model)->context_max;
    printf("embedding        %s\n",
           c->embedding == HEAD_EMBEDDING_OWN ? "the draft model's own" : "the model's");
    printf("features         %s\n", head_features_name(c->features));
    printf("trained context  %" PRIu32 "\n", c->trained_context);
    rc = head_rope(head, context, &rope, err);
    if (rc == 0) {
        head_rope_text(&rope, text, sizeof text);
        printf("at %-13" PRIu32 " %s\n", context, text);
    }
    head_free(&head);
    printf("%s\n", path);
    return rc == -ENOTSUP ? 0 : rc; /* linear scaling: sound up to its own context */
}

static int make(const struct head_import *i, struct eagle *e, struct err *err)
{
    struct model *model = NULL;
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s%s%s", i->out_path ? i->out_path : i->folder,
                     i->out_path ? "" : "/", i->out_path ? "" : HEAD_IMPORT_FILE);
    if (n >= (int)sizeof path)
        return err_set(err, -ENAMETOOLONG, "%.200s: name too long", i->folder);
    int rc = model_open(i->model_path, &model, err);
    if (rc == 0)
        rc = eagle_write(e, model, &i->options, path, err);
    if (rc == 0)
        rc = print_made(path, model, err);
    model_free(&model);
    return rc;
}

int head_import(const struct head_import *import, struct err *err)
{
    struct eagle *e = NULL;
    int rc = eagle_open(import->folder, &e, err);
    if (rc == 0)
        print_draft(e);
    if (rc == 0 && import->model_path)
        rc = make(import, e, err);
    eagle_free(&e);
    return rc;
}
