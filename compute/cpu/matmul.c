/* Drivers of compute_matmul and compute_embed: cut the product into items for the pool.
 *
 * One token goes straight over the file's blocks (bound by memory). Several tokens share panels of expanded
 * rows. Both sum in the order that kernels.h states, so a token's result never depends on its company. Called
 * by the owner's thread; items write to disjoint outputs and to their own thread's scratch. */
#include <string.h>

#include "base/check.h"
#include "base/pool.h"
#include "compute/cpu/kernels.h"

enum {
    ITEM_MACS = 1 << 17,  /* least work that is worth a turn of the pool: about 10 us */
    ITEMS_PER_THREAD = 4, /* so that an uneven start evens out */
    TOKENS_MIN = 24       /* a panel is not worth expanding for fewer when a matrix has few rows */
};

struct job {
    const struct compute *c;
    float *out;
    const struct matrix *w;
    const float *x, *bias;
    int n;
    uint32_t rows_per_item; /* a multiple of MATMUL_PANEL */
    int row_items;
    int tokens_per_item;
};

static uint32_t round_panel(uint64_t rows)
{
    return (uint32_t)((rows + MATMUL_PANEL - 1) / MATMUL_PANEL * MATMUL_PANEL);
}

/* Few large items keep the pool's cost low; at least some per thread keep all of them busy. */
static uint32_t rows_per_item(const struct compute *c, const struct matrix *w, int tokens)
{
    uint64_t row_macs = (uint64_t)w->cols * (uint64_t)tokens + 1;
    uint64_t least = ITEM_MACS / row_macs + 1;
    uint64_t even = w->rows / (uint64_t)(c->threads * ITEMS_PER_THREAD) + 1;
    uint64_t rows = tokens > 1 ? least : (least > even ? least : even);
    return round_panel(rows < w->rows ? rows : w->rows);
}

static void token_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct job *job = arg;
    uint32_t first = (uint32_t)index * job->rows_per_item;
    uint32_t rows = job->w->rows - first < job->rows_per_item ? job->w->rows - first : job->rows_per_item;
    job->c->kernels->dot_rows(job->out + first, job->w, first, rows, job->x);
    if (job->bias)
        for (uint32_t r = first; r < first + rows; r++)
            job->out[r] += job->bias[r];
}

static void expand_panel(const struct job *job, float *panel, uint32_t row, int rows, uint32_t col,
                         uint32_t cols)
{
    const struct dtype_info *info = dtype_info(job->w->type);
    size_t row_bytes = dtype_row_bytes(job->w->type, job->w->cols);
    const uint8_t *from =
        (const uint8_t *)job->w->data + row * row_bytes + (size_t)(col / info->block_len) * info->block_bytes;
    for (int r = 0; r < rows; r++) {
        float *to = panel + r * MATMUL_COLS;
        job->c->kernels->expand(to, job->w->type, from + (size_t)r * row_bytes, cols);
        for (uint32_t i = cols; i % 8; i++)
            to[i] = 0;
    }
}

static void run_panel(const struct job *job, struct scratch *s, uint32_t row, int rows, int token, int tokens)
{
    const struct matrix *w = job->w;
    for (uint32_t col = 0; col < w->cols; col += MATMUL_COLS) {
        uint32_t cols = w->cols - col < MATMUL_COLS ? w->cols - col : MATMUL_COLS;
        expand_panel(job, s->panel, row, rows, col, cols);
        struct matmul_tile tile = {
            .out = job->out + (size_t)token * w->rows + row,
            .out_stride = w->rows,
            .panel = s->panel,
            .rows = rows,
            .x = job->x + (size_t)token * w->cols + col,
            .x_stride = w->cols,
            .tokens = tokens,
            .cols = cols,
            .acc = s->acc,
            .first = col == 0,
            .last = w->cols - col <= MATMUL_COLS,
            .bias = job->bias ? job->bias + row : NULL,
        };
        job->c->kernels->matmul_tile(&tile);
    }
}

static void tile_item(void *arg, int index, int thread)
{
    const struct job *job = arg;
    int token = index / job->row_items * job->tokens_per_item;
    int tokens = job->n - token < job->tokens_per_item ? job->n - token : job->tokens_per_item;
    uint32_t first = (uint32_t)(index % job->row_items) * job->rows_per_item;
    uint32_t end = job->w->rows - first < job->rows_per_item ? job->w->rows : first + job->rows_per_item;
    for (uint32_t row = first; row < end; row += MATMUL_PANEL) {
        int rows = end - row < MATMUL_PANEL ? (int)(end - row) : MATMUL_PANEL;
        run_panel(job, &job->c->scratch[thread], row, rows, token, tokens);
    }
}

static int count_items(uint32_t total, uint32_t per_item)
{
    return (int)((total + (uint64_t)per_item - 1) / per_item);
}

void compute_matmul(struct compute *c, float *out, const struct matrix *w, const float *x, const float *bias,
                    int n)
{
    if (n <= 0 || w->rows == 0)
        return;
    struct job job = {
        .c = c, .out = out, .w = w, .x = x, .bias = bias, .n = n, .tokens_per_item = MATMUL_TOKENS};
    int panels = count_items(w->rows, MATMUL_PANEL);
    while (job.tokens_per_item > TOKENS_MIN &&
           (int64_t)panels * count_items((uint32_t)n, (uint32_t)job.tokens_per_item) < 2 * c->threads)
        job.tokens_per_item /= 2;
    job.rows_per_item = rows_per_item(c, w, n < job.tokens_per_item ? n : job.tokens_per_item);
    job.row_items = count_items(w->rows, job.rows_per_item);
    int token_items = count_items((uint32_t)n, (uint32_t)job.tokens_per_item);
    pool_run(c->pool, job.row_items * token_items, n == 1 ? token_item : tile_item, &job);
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
