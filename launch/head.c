/* Heads made of a model's own layers or of draft models, and a look at head files. Everything is owned by
 * the calling thread for the length of a call. It must never change the model's file.
 *
 * A bootstrapped head needs no training: the query and key projections of one layer, applied to the token
 * embedding, already rank positions far better than chance. It is the head that a trained one must beat. */
#include "launch/head.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/parse.h"
#include "compute/compute.h"
#include "launch/head_import.h"
#include "launch/option_word.h"
#include "model/head.h"

enum { TILE_ROWS = 256, EXIT_USAGE = 2 };

struct bootstrap {
    const char *model_path, *out_path;
    uint32_t layer; /* the same for each group */
    uint32_t groups;
    enum head_pool pool;
};

/* Rows of `from` in 16 bit; freed by the caller. -ERANGE when a weight does not fit. */
static int narrow(struct compute *c, const struct model_tensor *from, const char *name,
                  struct model_tensor *ret, struct err *err)
{
    struct matrix table = {from->type, from->rows, from->cols, from->data};
    uint16_t *to = mem_alloc_aligned((size_t)from->rows * from->cols, sizeof *to);
    float *rows = mem_alloc_aligned((size_t)TILE_ROWS * from->cols, sizeof *rows);
    uint32_t ids[TILE_ROWS];
    int rc = 0;
    for (uint32_t first = 0; first < from->rows && rc == 0; first += TILE_ROWS) {
        uint32_t n = from->rows - first < TILE_ROWS ? from->rows - first : TILE_ROWS;
        for (uint32_t i = 0; i < n; i++)
            ids[i] = first + i;
        compute_embed(c, rows, &table, ids, (int)n);
        uint16_t *out = to + (size_t)first * from->cols;
        for (size_t i = 0; i < (size_t)n * from->cols && rc == 0; i++) {
            out[i] = dtype_f32_to_f16(rows[i]);
            if (!isfinite(dtype_f16_to_f32(out[i])))
                rc = err_set(err, -ERANGE, "%s: found weight %g, expected one that 16 bit can hold", name,
                             (double)rows[i]);
        }
    }
    mem_free(&rows);
    *ret =
        (struct model_tensor){DTYPE_F16, from->rows, from->cols, to, (uint64_t)from->rows * from->cols * 2};
    return rc;
}

static void configure(struct head_config *h, const struct model *model, const struct bootstrap *b)
{
    const struct model_config *m = model_config(model);
    *h = (struct head_config){.model = model_fingerprint(model),
                              .tokenizer = model_tokenizer_fingerprint(model),
                              .vocab = m->vocab,
                              .hidden = m->hidden,
                              .q_heads = m->q_heads,
                              .kv_heads = m->kv_heads,
                              .head_dim = m->head_dim,
                              .layers = m->layers,
                              .groups = b->groups,
                              .rms_eps = m->rms_eps,
                              .rope = m->rope,
                              .trained_context = m->context_max,
                              .pool = b->pool};
    if (h->trained_context > HEAD_CONTEXT_MAX)
        h->trained_context = HEAD_CONTEXT_MAX;
    if (h->rope.scaling != MODEL_ROPE_SCALING_YARN)
        h->rope.original_context = h->trained_context;
    for (uint32_t g = 0; g <= b->groups; g++)
        h->group_first_layer[g] = (uint32_t)((uint64_t)m->layers * g / b->groups);
}

static int write_head(const struct bootstrap *b, const struct model *model, struct compute *c,
                      struct err *err)
{
    struct head_config h;
    struct head_group groups[HEAD_GROUPS_MAX];
    memset(groups, 0, sizeof groups);
    configure(&h, model, b);
    int rc = 0;
    snprintf(h.source, sizeof h.source, "bootstrapped from layer %" PRIu32 " of %.100s", b->layer,
             model_name(model));
    for (uint32_t g = 0; g < b->groups && rc == 0; g++) {
        const struct model_layer *from = &model_layers(model)[b->layer];
        char name[48];
        groups[g].norm = from->attn_norm;
        snprintf(name, sizeof name, "blk.%" PRIu32 ".attn_q.weight", b->layer);
        rc = narrow(c, &from->wq, name, &groups[g].q, err);
        snprintf(name, sizeof name, "blk.%" PRIu32 ".attn_k.weight", b->layer);
        if (rc == 0)
            rc = narrow(c, &from->wk, name, &groups[g].k, err);
    }
    if (rc == 0)
        rc = head_write(b->out_path, &h, NULL, groups, err);
    for (uint32_t g = 0; g < b->groups; g++) {
        void *q = (void *)(uintptr_t)groups[g].q.data, *k = (void *)(uintptr_t)groups[g].k.data;
        mem_free(&q);
        mem_free(&k);
    }
    return rc;
}

static int bootstrap(const struct bootstrap *b, struct err *err)
{
    struct model *model = NULL;
    struct compute *c = NULL;
    int rc = model_open(b->model_path, &model, err);
    if (rc < 0)
        return rc;
    uint32_t layers = model_config(model)->layers, most = layers < HEAD_GROUPS_MAX ? layers : HEAD_GROUPS_MAX;
    if (b->groups < 1 || b->groups > most)
        rc = err_set(err, -EINVAL, "groups: found %" PRIu32 ", expected 1 to %" PRIu32, b->groups, most);
    else if (b->layer >= layers)
        rc = err_set(err, -EINVAL, "layer: found %" PRIu32 ", expected 0 to %" PRIu32, b->layer, layers - 1);
    if (rc == 0)
        rc = compute_create("cpu", 1, COMPUTE_ISA_AUTO, &c, err);
    if (rc == 0)
        rc = write_head(b, model, c, err);
    compute_free(&c);
    model_free(&model);
    return rc;
}

int head_bootstrap(const char *model_path, const char *out_path, uint32_t layer, unsigned groups,
                   struct err *err)
{
    struct bootstrap b = {model_path, out_path, layer, groups, HEAD_POOL_MEAN};
    return bootstrap(&b, err);
}

static void print_tensor(const char *name, uint32_t g, const struct model_tensor *t)
{
    printf("  groups.%" PRIu32 ".%s: %s %" PRIu32 " x %" PRIu32 "\n", g, name, dtype_info(t->type)->name,
           t->rows, t->cols);
}

static void print_head(const struct head *head)
{
    const struct head_config *c = head_config(head);
    struct hash128 hash = head_fingerprint(head);
    char rope[256];
    head_rope_text(&c->rope, rope, sizeof rope);
    printf("head             %s\n", head_path(head));
    printf("fingerprint      %016" PRIx64 "%016" PRIx64 "\n", hash.hi, hash.lo);
    printf("model            %016" PRIx64 "%016" PRIx64 "\n", c->model.hi, c->model.lo);
    printf("tokenizer        %016" PRIx64 "%016" PRIx64 "\n", c->tokenizer.hi, c->tokenizer.lo);
    printf("vocabulary       %" PRIu32 ", embedding of %s, %" PRIu32 " wide\n", c->vocab,
           c->embedding == HEAD_EMBEDDING_OWN ? "its own" : "the model", c->hidden);
    printf("features         %s", head_features_name(c->features));
    for (uint32_t i = 0; i < c->feature_layer_count; i++)
        printf("%s%" PRIu32, i ? ", " : ": what enters layers ", c->feature_layers[i]);
    printf("\n");
    printf("heads            %" PRIu32 " query, %" PRIu32 " key, %" PRIu32 " dimensions\n", c->q_heads,
           c->kv_heads, c->head_dim);
    if (c->features == HEAD_FEATURES_CONTEXT)
        printf("context          %" PRIu32 " views of the last %" PRIu32 " tokens\n", c->views, c->taps);
    printf("rope             %s\n", rope);
    printf("trained context  %" PRIu32 "\n", c->trained_context);
    printf("pool             %s\n", head_pool_name(c->pool));
    char calibration[CALIBRATION_TEXT_BYTES];
    calibration_text(&c->calibration, calibration);
    printf("calibration      %s\n", *calibration ? calibration : "-");
    printf("source           %s\n", *c->source ? c->source : "-");
    printf("groups           %" PRIu32 "\n", c->groups);
    for (uint32_t g = 0; g < c->groups; g++) {
        printf("  groups.%" PRIu32 ": layers %" PRIu32 " to %" PRIu32 "\n", g, c->group_first_layer[g],
               c->group_first_layer[g + 1] - 1);
        print_tensor("q", g, &head_groups(head)[g].q);
        print_tensor("k", g, &head_groups(head)[g].k);
    }
}

static const char usage[] =
    "usage: specontext head bootstrap -m MODEL -o HEAD [--layer N] [--groups G] [--pool max|mean]\n"
    "       specontext head import DIR [-m MODEL] [-o HEAD] [--features none|target]\n"
    "                              [--embedding auto|own|model] [--trained-context N] [--pool max|mean]\n"
    "       specontext head inspect [-m MODEL] HEAD\n"
    "\n"
    "bootstrap  makes a retrieval head of the model's own layers\n"
    "  -m, --model MODEL  GGUF file\n"
    "  -o, --output HEAD  safetensors file to write\n"
    "      --layer N      layer to take it from (default: 0, whose input is the embedding itself)\n"
    "      --groups G     layer groups, each with a selection of its own (default: 1)\n"
    "      --pool KIND    how query heads of a group are pooled: max, mean (default: mean)\n"
    "import     makes a retrieval head of an EAGLE-3 draft model: a folder with config.json and\n"
    "           model.safetensors or pytorch_model.bin, of EAGLE, SpecForge, AngelSlim or speculators\n"
    "  -m, --model MODEL  the model it drafts for; without it the folder is only looked at\n"
    "  -o, --output HEAD  (default: DIR/" HEAD_IMPORT_FILE ")\n"
    "      --features F   none: the projections' embedding half (default); target: also what they make\n"
    "                     of the model's hidden states, which the decoder hands over\n"
    "      --embedding E  auto: the model's, unless the draft model has another (default); own; model\n"
    "      --trained-context N  positions of its training, beyond which YaRN stretches it (default: 2048,\n"
    "                     or what the draft model's own rope scaling spans)\n"
    "      --pool KIND    max (default) or mean\n"
    "inspect    prints what a head file holds\n"
    "  -m, --model MODEL  also check that it fits this model\n";

static int usage_error(const char *what, const char *value)
{
    fprintf(stderr, "specontext head: %s%s%s\n", what, value ? ": " : "", value ? value : "");
    fprintf(stderr, "Try `specontext head --help`.\n");
    return EXIT_USAGE;
}

static int failure(const struct err *err)
{
    fprintf(stderr, "specontext head: %s\n", err->text);
    return EXIT_FAILURE;
}

enum {
    OPTION_LAYER = 256,
    OPTION_GROUPS,
    OPTION_POOL,
    OPTION_FEATURES,
    OPTION_EMBEDDING,
    OPTION_TRAINED_CONTEXT
};

static const struct option options[] = {{"model", required_argument, NULL, 'm'},
                                        {"output", required_argument, NULL, 'o'},
                                        {"layer", required_argument, NULL, OPTION_LAYER},
                                        {"groups", required_argument, NULL, OPTION_GROUPS},
                                        {"pool", required_argument, NULL, OPTION_POOL},
                                        {"features", required_argument, NULL, OPTION_FEATURES},
                                        {"embedding", required_argument, NULL, OPTION_EMBEDDING},
                                        {"trained-context", required_argument, NULL, OPTION_TRAINED_CONTEXT},
                                        {"help", no_argument, NULL, 'h'},
                                        {0}};

/* Place of the option's value in a list that NULL ends; -1: not there. */
static int place_of(const char *const *names)
{
    for (int i = 0; names[i]; i++)
        if (!strcmp(optarg, names[i]))
            return i;
    return -1;
}

static const char *const features_names[] = {"none", "target", NULL};        /* enum head_features */
static const char *const embedding_names[] = {"auto", "own", "model", NULL}; /* enum eagle_embedding */

/* One option of import alone; as take_option. */
static int take_import_option(struct head_import *i, int option)
{
    int place;
    switch (option) {
    case OPTION_FEATURES:
        if ((place = place_of(features_names)) < 0)
            return usage_error("--features wants none or target, found", optarg) + 1;
        i->options.features = (enum head_features)place;
        return 0;
    case OPTION_EMBEDDING:
        if ((place = place_of(embedding_names)) < 0)
            return usage_error("--embedding wants auto, own or model, found", optarg) + 1;
        i->options.embedding = (enum eagle_embedding)place;
        return 0;
    default:
        if (parse_u32(optarg, 1, HEAD_CONTEXT_MAX, &i->options.trained_context) < 0)
            return usage_error("--trained-context wants a number of positions, found", optarg) + 1;
        return 0;
    }
}

/* One option into `b` and `i`; 0, or the exit code plus one, so that --help ends well. */
static int take_option(struct bootstrap *b, struct head_import *i, int option, char *const *argv)
{
    uint32_t value = 0;
    char text[OPTION_WORD_BYTES];
    switch (option) {
    case 'm':
        i->model_path = b->model_path = optarg;
        return 0;
    case 'o':
        i->out_path = b->out_path = optarg;
        return 0;
    case OPTION_FEATURES:
    case OPTION_EMBEDDING:
    case OPTION_TRAINED_CONTEXT:
        return take_import_option(i, option);
    case OPTION_LAYER:
        if (parse_u32(optarg, 0, MODEL_LAYERS_MAX, &value) < 0)
            return usage_error("--layer wants a layer's number, found", optarg) + 1;
        b->layer = (uint32_t)value;
        return 0;
    case OPTION_GROUPS:
        if (parse_u32(optarg, 1, HEAD_GROUPS_MAX, &value) < 0)
            return usage_error("--groups wants a number from 1 to 16, found", optarg) + 1;
        b->groups = value;
        return 0;
    case OPTION_POOL:
        if (strcmp(optarg, "max") != 0 && strcmp(optarg, "mean") != 0)
            return usage_error("--pool wants max or mean, found", optarg) + 1;
        i->options.pool = b->pool = strcmp(optarg, "max") == 0 ? HEAD_POOL_MAX : HEAD_POOL_MEAN;
        return 0;
    case 'h':
        fputs(usage, stdout);
        return EXIT_SUCCESS + 1;
    default:
        option_word(argv, option, text);
        return usage_error(text, NULL) + 1;
    }
}

static int run_bootstrap(const struct bootstrap *b, const char *extra)
{
    struct err err = {0};
    if (extra)
        return usage_error("bootstrap takes no further argument, found", extra);
    if (!b->model_path || !b->out_path)
        return usage_error(b->model_path ? "bootstrap needs -o HEAD" : "bootstrap needs -m MODEL", NULL);
    if (bootstrap(b, &err) < 0)
        return failure(&err);
    printf("%s\n", b->out_path);
    return EXIT_SUCCESS;
}

static int run_import(struct head_import *i, const char *folder, const char *extra)
{
    struct err err = {0};
    if (!folder || extra)
        return usage_error(folder ? "import takes one folder, found also" : "import needs a folder", extra);
    if (i->out_path && !i->model_path)
        return usage_error("import needs -m MODEL to write a head", NULL);
    i->folder = folder;
    return head_import(i, &err) < 0 ? failure(&err) : EXIT_SUCCESS;
}

static int run_inspect(const struct bootstrap *b, const char *path, const char *extra)
{
    struct err err = {0};
    struct model *model = NULL;
    struct head *head = NULL;
    if (!path || extra)
        return usage_error(path ? "inspect takes one file, found also" : "inspect needs a HEAD file", extra);
    if ((b->model_path && model_open(b->model_path, &model, &err) < 0) ||
        head_open(path, model, &head, &err) < 0) {
        model_free(&model);
        return failure(&err);
    }
    print_head(head);
    head_free(&head);
    model_free(&model);
    return EXIT_SUCCESS;
}

int head_main(int argc, char **argv)
{
    struct bootstrap b = {.groups = 1, .pool = HEAD_POOL_MEAN};
    struct head_import i = {.options = {.pool = HEAD_POOL_MAX}};
    int option;
    optind = 0; /* the caller's own options were parsed with getopt as well */
    while ((option = getopt_long(argc, argv, ":m:o:h", options, NULL)) != -1) {
        int end = take_option(&b, &i, option, argv);
        if (end)
            return end - 1;
    }
    char **words = argv + optind;
    if (!words[0])
        return usage_error("which: bootstrap, import or inspect?", NULL);
    if (!strcmp(words[0], "bootstrap"))
        return run_bootstrap(&b, words[1]);
    if (!strcmp(words[0], "import"))
        return run_import(&i, words[1], words[1] ? words[2] : NULL);
    if (!strcmp(words[0], "inspect"))
        return run_inspect(&b, words[1], words[1] ? words[2] : NULL);
    return usage_error("no such sub-command", words[0]);
}
