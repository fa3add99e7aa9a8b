/* Drivers of compute_matmul, compute_matmul_many and compute_embed: cut products into items for the pool.
 *
 * One token goes straight over the file's blocks (bound by memory). Several tokens share panels of expanded
 * rows. Both sum in the order that kernels.h states, so a token's result never depends on its company.
 * Quantized activations rest in the compute object's shared buffer, as many tokens at a time as fit. Called
 * by the owner's thread; items write to disjoint outputs and to their own thread's scratch. */
#include <string.h>

#include "base/check.h"
#include "base/pool.h"
#include "compute/cpu/kernels.h"

enum {
    PRODUCTS_MAX = 8,
    ITEM_MACS = 1 << 17,      /* least work of many tokens that is worth a turn of the pool: about 5 us */
    ITEM_BYTES = 32 << 10,    /* the same for one token: about 2 us */
    ITEMS_PER_THREAD = 4,     /* so that an uneven start evens out */
    TOKENS_MIN = 24,          /* a panel is not worth expanding for fewer when a matrix has few rows */
    QUANTIZE_FLOATS = 1 << 13 /* activations of one item */
};

/* One product of a job, cut into items of rows_per_item x tokens_per_item. */
struct part {
    struct product p;
    int q8;
    uint32_t rows_per_item; /* a multiple of MATMUL_PANEL */
    int row_items, tokens_per_item, items;
};

struct job {
    const struct compute *c;
    const float *x;
    struct act_block *acts; /* [n][cols / Q8_BLOCK] */
    int n;
    uint32_t cols;
    int count;
    struct part part[PRODUCTS_MAX];
};

static int count_items(uint64_t total, uint64_t per_item)
{
    return (int)((total + per_item - 1) / per_item);
}

static uint32_t round_panel(uint64_t rows)
{
    return (uint32_t)count_items(rows, MATMUL_PANEL) * MATMUL_PANEL;
}

static const struct act_block *acts_of(const struct job *job, int token)
{
    return job->acts + (size_t)token * (job->cols / Q8_BLOCK);
}

static void token_rows(const struct job *job, const struct part *part, uint32_t first, uint32_t rows)
{
    float *out = part->p.out + first;
    if (part->q8)
        job->c->kernels->q8_dot_rows(out, part->p.w, first, rows, job->acts);
    else
        job->c->kernels->dot_rows(out, part->p.w, first, rows, job->x);
    for (uint32_t r = 0; part->p.bias && r < rows; r++)
        out[r] += part->p.bias[first + r];
}

/* A panel's rows and the tokens that it serves. */
struct area {
    uint32_t row;
    int rows, token, tokens;
};

static void q8_area(const struct job *job, const struct part *part, struct scratch *s, const struct area *a)
{
    const struct matrix *w = part->p.w;
    int blocks = (int)(w->cols / Q8_BLOCK);
    for (int block = 0; block < blocks; block += Q8_BLOCKS) {
        struct q8_tile tile = {
            .out = part->p.out + (size_t)a->token * w->rows + a->row,
            .out_stride = w->rows,
            .panel = s->q8_panel,
            .type = w->type,
            .rows = a->rows,
            .blocks = blocks - block < Q8_BLOCKS ? blocks - block : Q8_BLOCKS,
            .x = acts_of(job, a->token) + block,
            .x_stride = (size_t)blocks,
            .tokens = a->tokens,
            .first = block == 0,
            .last = blocks - block <= Q8_BLOCKS,
            .acc = s->q8_acc,
            .bias = part->p.bias ? part->p.bias + a->row : NULL,
        };
        job->c->kernels->q8_panel(s->q8_panel, w, a->row, a->rows, (uint32_t)block, tile.blocks);
        job->c->kernels->q8_tile(&tile);
    }
}

static void expand_panel(const struct job *job, const struct matrix *w, float *panel, const struct area *a,
                         uint32_t col, uint32_t cols)
{
    const struct dtype_info *info = dtype_info(w->type);
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    const uint8_t *from =
        (const uint8_t *)w->data + a->row * row_bytes + (size_t)(col / info->block_len) * info->block_bytes;
    for (int r = 0; r < a->rows; r++) {
        float *to = panel + r * MATMUL_COLS;
        job->c->kernels->expand(to, w->type, from + (size_t)r * row_bytes, cols);
        for (uint32_t i = cols; i % 16; i++)
            to[i] = 0;
    }
}

static void float_area(const struct job *job, const struct part *part, struct scratch *s,
                       const struct area *a)
{
    const struct matrix *w = part->p.w;
    for (uint32_t col = 0; col < w->cols; col += MATMUL_COLS) {
        uint32_t cols = w->cols - col < MATMUL_COLS ? w->cols - col : MATMUL_COLS;
        expand_panel(job, w, s->panel, a, col, cols);
        struct matmul_tile tile = {
            .out = part->p.out + (size_t)a->token * w->rows + a->row,
            .out_stride = w->rows,
            .panel = s->panel,
            .rows = a->rows,
            .x = job->x + (size_t)a->token * w->cols + col,
            .x_stride = w->cols,
            .tokens = a->tokens,
            .cols = cols,
            .acc = s->acc,
            .first = col == 0,
            .last = w->cols - col <= MATMUL_COLS,
            .bias = part->p.bias ? part->p.bias + a->row : NULL,
        };
        job->c->kernels->matmul_tile(&tile);
    }
}

static void product_item(void *arg, int index, int thread)
{
    const struct job *job = arg;
    const struct part *part = job->part;
    for (; index >= part->items; part++)
        index -= part->items;
    uint32_t first = (uint32_t)(index % part->row_items) * part->rows_per_item;
    uint32_t left = part->p.w->rows - first,
             end = first + (left < part->rows_per_item ? left : part->rows_per_item);
    if (job->n == 1) {
        token_rows(job, part, first, end - first);
        return;
    }
    int token = index / part->row_items * part->tokens_per_item;
    struct area a = {first, part->q8 ? job->c->kernels->q8_rows : MATMUL_PANEL, token,
                     job->n - token < part->tokens_per_item ? job->n - token : part->tokens_per_item};
    for (int step = a.rows; a.row < end; a.row += (uint32_t)step) {
        a.rows = end - a.row < (uint32_t)step ? (int)(end - a.row) : step;
        if (part->q8)
            q8_area(job, part, &job->c->scratch[thread], &a);
        else
            float_area(job, part, &job->c->scratch[thread], &a);
    }
}

/* Few large items keep the pool's cost low; at least some per thread keep all of them busy. */
static uint32_t rows_per_item(const struct job *job, const struct part *part, uint64_t all_rows)
{
    const struct matrix *w = part->p.w;
    int tokens = job->n < part->tokens_per_item ? job->n : part->tokens_per_item;
    uint64_t rows = ITEM_MACS / ((uint64_t)w->cols * (uint64_t)tokens + 1) + 1;
    if (job->n == 1) {
        uint64_t least = ITEM_BYTES / (dtype_row_bytes(w->type, w->cols) + 1) + 1;
        uint64_t even = all_rows / (uint64_t)(job->c->threads * ITEMS_PER_THREAD) + 1;
        rows = least > even ? least : even;
    }
    return round_panel(rows < w->rows ? rows : w->rows);
}

static void cut(const struct job *job, struct part *part, uint64_t all_rows)
{
    const struct matrix *w = part->p.w;
    part->q8 = job->c->activations == COMPUTE_ACTIVATIONS_Q8 && q8_type(w->type) && w->cols > 0;
    part->tokens_per_item = part->q8 ? Q8_TOKENS : MATMUL_TOKENS;
    int panels = count_items(all_rows, MATMUL_PANEL);
    while (part->tokens_per_item > TOKENS_MIN &&
           (int64_t)panels * count_items((uint64_t)job->n, (uint64_t)part->tokens_per_item) <
               2 * job->c->threads)
        part->tokens_per_item /= 2;
    part->rows_per_item = rows_per_item(job, part, all_rows);
    part->row_items = count_items(w->rows, part->rows_per_item);
    part->items = part->row_items * count_items((uint64_t)job->n, (uint64_t)part->tokens_per_item);
}

static int tokens_per_quantize(const struct job *job)
{
    return job->cols < QUANTIZE_FLOATS ? (int)(QUANTIZE_FLOATS / job->cols) : 1;
}

static void quantize_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct job *job = arg;
    int per_item = tokens_per_quantize(job), first = index * per_item;
    int end = job->n - first < per_item ? job->n : first + per_item;
    for (int t = first; t < end; t++)
        job->c->kernels->quantize(job->acts + (size_t)t * (job->cols / Q8_BLOCK),
                                  job->x + (size_t)t * job->cols, job->cols);
}

/* The job's products for its n tokens, whose activations fit in the shared buffer. */
static void run(struct job *job)
{
    uint64_t rows = 0;
    int items = 0, q8 = 0;
    for (int i = 0; i < job->count; i++)
        rows += job->part[i].p.w->rows;
    for (int i = 0; i < job->count; i++) {
        struct part *part = &job->part[i];
        cut(job, part, rows);
        items += part->items;
        q8 |= part->q8;
    }
    if (q8)
        pool_run(job->c->pool, count_items((uint64_t)job->n, (uint64_t)tokens_per_quantize(job)),
                 quantize_item, job);
    pool_run(job->c->pool, items, product_item, job);
}

void compute_matmul_many(struct compute *c, const struct product *products, int count, const float *x, int n)
{
    CHECK(count >= 1 && count <= PRODUCTS_MAX);
    uint32_t cols = products[0].w->cols;
    struct job job = {.c = c, .cols = cols, .acts = (struct act_block *)c->shared};
    uint64_t act_bytes = (uint64_t)(cols / Q8_BLOCK + 1) * sizeof(struct act_block);
    uint64_t wave = (uint64_t)SHARED_FLOATS * sizeof(float) / act_bytes;
    CHECK(wave > 0); /* 22 M columns */
    if (c->activations == COMPUTE_ACTIVATIONS_F32)
        wave = (uint64_t)(n > 0 ? n : 1);
    for (int i = 0; i < count; i++) {
        CHECK(products[i].w->cols == cols);
        if (products[i].w->rows > 0)
            job.part[job.count++].p = products[i];
    }
    for (int token = 0; job.count && token < n; token += job.n) {
        job.n = (uint64_t)(n - token) < wave ? n - token : (int)wave;
        job.x = x + (size_t)token * cols;
        run(&job);
        for (int i = 0; i < job.count; i++)
            job.part[i].p.out += (size_t)job.n * job.part[i].p.w->rows;
    }
}

void compute_matmul(struct compute *c, float *out, const struct matrix *w, const float *x, const float *bias,
                    int n)
{
    struct product product = {out, w, bias};
    compute_matmul_many(c, &product, 1, x, n);
}

void compute_embed(struct compute *c, float *out, const struct matrix *table, const uint32_t *ids, int n)
{
    size_t row_bytes = dtype_row_bytes(table->type, table->cols);
    for (int t = 0; t < n; t++) {
        CHECK(ids[t] < table->rows);
        c->kernels->expand(out + (size_t)t * table->cols, table->type,
                           (const uint8_t *)table->data + ids[t] * row_bytes, table->cols);
    }
}
