/* Heads made of a model's own layers or of draft models, and a look at head files. Everything is owned by
 * the calling thread for the length of a call. It must never change the model's file.
 *
 * A bootstrapped head needs no training: the query and key projections of one layer, applied to the token
 * embedding, already rank positions far better than chance. It is the head that a trained one must beat. */
#include "launch/head.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/options.h"
#include "compute/compute.h"
#include "launch/head_import.h"
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

struct head_options {
    const char *model, *out;
    struct option_words words;
    uint32_t layer, groups, pool, features, embedding, trained_context;
};

#define AT(field) .at = offsetof(struct head_options, field)

#define BOOTSTRAP "bootstrap -m MODEL -o HEAD: makes a retrieval head of the model's own layers"
#define IMPORT                                                                                     \
    "import DIR: makes a retrieval head of an EAGLE-3 draft model, a folder with config.json and " \
    "model.safetensors\nor pytorch_model.bin, of EAGLE, SpecForge, AngelSlim or speculators"
#define INSPECT "inspect HEAD: prints what a head file holds"

/* A table reads best as rows. */
/* clang-format off */
static const struct option_entry bootstrap_table[] = {
    {.name = "", .kind = OPTION_WORDS, AT(words)},
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(model), .argument = "MODEL", .group = BOOTSTRAP,
     .text = "the model"},
    {.name = "output", .letter = 'o', .kind = OPTION_TEXT, AT(out), .argument = "HEAD", .group = BOOTSTRAP,
     .text = "safetensors file to write"},
    {.name = "layer", .kind = OPTION_UINT, AT(layer), .argument = "N", .initial = "0",
     .most = MODEL_LAYERS_MAX, .group = BOOTSTRAP,
     .text = "layer to take it from; the input of 0 is the embedding itself"},
    {.name = "groups", .kind = OPTION_UINT, AT(groups), .argument = "G", .initial = "1", .least = 1,
     .most = HEAD_GROUPS_MAX, .group = BOOTSTRAP, .text = "layer groups, each with a selection of its own"},
    {.name = "pool", .kind = OPTION_CHOICE, AT(pool), .argument = "KIND", .initial = "mean",
     .choices = "max|mean", .group = BOOTSTRAP, .text = "how query heads of a group are pooled"},
    {0}};

static const struct option_entry import_table[] = {
    {.name = "", .kind = OPTION_WORDS, AT(words)},
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(model), .argument = "MODEL", .group = IMPORT,
     .text = "the model it drafts for; without it the folder is only looked at"},
    {.name = "output", .letter = 'o', .kind = OPTION_TEXT, AT(out), .argument = "HEAD", .group = IMPORT,
     .text = "file to write (default: DIR/" HEAD_IMPORT_FILE ")"},
    {.name = "features", .kind = OPTION_CHOICE, AT(features), .argument = "F", .initial = "none",
     .choices = "none|target", .group = IMPORT,
     .text = "what the head reads beside the embedding"},
    {.name = "embedding", .kind = OPTION_CHOICE, AT(embedding), .argument = "E", .initial = "auto",
     .choices = "auto|own|model", .group = IMPORT, .text = "auto: the model's, unless it has another"},
    {.name = "trained-context", .kind = OPTION_UINT, AT(trained_context), .argument = "N", .least = 1,
     .most = HEAD_CONTEXT_MAX, .group = IMPORT,
     .text = "positions of its training (default: 2048, or what its own rope scaling spans)"},
    {.name = "pool", .kind = OPTION_CHOICE, AT(pool), .argument = "KIND", .initial = "max",
     .choices = "max|mean", .group = IMPORT, .text = "how query heads of a group are pooled"},
    {0}};

static const struct option_entry inspect_table[] = {
    {.name = "", .kind = OPTION_WORDS, AT(words)},
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(model), .argument = "MODEL", .group = INSPECT,
     .text = "also check that it fits this model"},
    {0}};
/* clang-format on */

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

static int run_bootstrap(const struct head_options *o)
{
    struct err err = {0};
    struct bootstrap b = {o->model, o->out, o->layer, o->groups, (enum head_pool)o->pool};
    if (o->words.count)
        return usage_error("bootstrap takes no further argument, found", o->words.at[0]);
    if (!o->model || !o->out)
        return usage_error(o->model ? "bootstrap needs -o HEAD" : "bootstrap needs -m MODEL", NULL);
    if (bootstrap(&b, &err) < 0)
        return failure(&err);
    printf("%s\n", o->out);
    return EXIT_SUCCESS;
}

static int run_import(const struct head_options *o)
{
    struct err err = {0};
    struct head_import i = {.model_path = o->model,
                            .out_path = o->out,
                            .options = {.features = (enum head_features)o->features,
                                        .embedding = (enum eagle_embedding)o->embedding,
                                        .trained_context = o->trained_context,
                                        .pool = (enum head_pool)o->pool}};
    if (o->words.count != 1)
        return usage_error(o->words.count ? "import takes one folder, found also" : "import needs a folder",
                           o->words.count ? o->words.at[1] : NULL);
    if (o->out && !o->model)
        return usage_error("import needs -m MODEL to write a head", NULL);
    i.folder = o->words.at[0];
    return head_import(&i, &err) < 0 ? failure(&err) : EXIT_SUCCESS;
}

static int run_inspect(const struct head_options *o)
{
    struct err err = {0};
    struct model *model = NULL;
    struct head *head = NULL;
    if (o->words.count != 1)
        return usage_error(o->words.count ? "inspect takes one file, found also"
                                          : "inspect needs a HEAD file",
                           o->words.count ? o->words.at[1] : NULL);
    if ((o->model && model_open(o->model, &model, &err) < 0) ||
        head_open(o->words.at[0], model, &head, &err) < 0) {
        model_free(&model);
        return failure(&err);
    }
    print_head(head);
    head_free(&head);
    model_free(&model);
    return EXIT_SUCCESS;
}

static const struct {
    const char *name;
    const struct option_entry *table;
    int (*run)(const struct head_options *options);
} commands[] = {{"bootstrap", bootstrap_table, run_bootstrap},
                {"import", import_table, run_import},
                {"inspect", inspect_table, run_inspect}};

enum { COMMANDS = sizeof commands / sizeof *commands };

static int help(void)
{
    puts("Usage: specontext head bootstrap|import|inspect [options]");
    for (int i = 0; i < COMMANDS; i++)
        options_help(commands[i].table, stdout);
    return EXIT_SUCCESS;
}

int head_main(int argc, char **argv)
{
    struct head_options o = {0};
    struct err err = {0};
    int i = 0;
    if (argc < 2)
        return usage_error("which: bootstrap, import or inspect?", NULL);
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))
        return help();
    while (i < COMMANDS && strcmp(argv[1], commands[i].name) != 0)
        i++;
    if (i == COMMANDS)
        return usage_error("no such sub-command", argv[1]);
    int r = options_parse(commands[i].table, argc - 1, argv + 1, &o, &err);
    return r == 1 ? help() : r < 0 ? usage_error(err.text, NULL) : commands[i].run(&o);
}
