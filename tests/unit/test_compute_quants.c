/* Block types against what the gguf package makes of the same bytes (tests/vectors/quants.bin, made by
 * tools/quant_vectors.py). Run from the root of the source tree. */
#include "tests/unit/compute_util.h"

enum { ELEMENTS_MAX = 1 << 14, BYTES_MAX = 1 << 16 };

struct record {
    uint32_t type, elements, bytes;
    uint8_t blocks[BYTES_MAX];
    float values[ELEMENTS_MAX];
};

static FILE *open_vectors(uint32_t *ret_records)
{
    FILE *f = fopen("tests/vectors/quants.bin", "rbe");
    char magic[4];
    assert_non_null(f);
    assert_int_equal(fread(magic, 1, 4, f), 4);
    assert_memory_equal(magic, "QVEC", 4);
    assert_int_equal(fread(ret_records, sizeof *ret_records, 1, f), 1);
    return f;
}

static void read_record(FILE *f, struct record *r)
{
    uint32_t head[3];
    assert_int_equal(fread(head, sizeof head, 1, f), 1);
    r->type = head[0];
    r->elements = head[1];
    r->bytes = head[2];
    assert_true(r->elements <= ELEMENTS_MAX && r->bytes <= BYTES_MAX);
    assert_int_equal(r->bytes, dtype_row_bytes((enum dtype)r->type, r->elements));
    assert_int_equal(fread(r->blocks, r->bytes, 1, f), 1);
    assert_int_equal(fread(r->values, sizeof(float), r->elements, f), r->elements);
}

/* The package rounds products of a scale and a minimum as we do, up to the order of one addition. */
static void check_record(struct compute *c, const struct record *r)
{
    struct matrix w = {(enum dtype)r->type, 1, r->elements, r->blocks};
    float *out = mem_alloc(r->elements, sizeof *out);
    compute_embed(c, out, &w, &(uint32_t){0}, 1);
    for (uint32_t i = 0; i < r->elements; i++)
        check_near(out[i], (double)r->values[i], fabs((double)r->values[i]) + 0.1, 1e-6,
                   dtype_info(r->type)->name, i);
    mem_free(&out);
}

static void expansion_agrees_with_gguf(void **state)
{
    (void)state;
    uint32_t records;
    struct record *r = mem_alloc(1, sizeof *r);
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        FILE *f = open_vectors(&records);
        assert_int_equal(records, 11);
        for (uint32_t i = 0; i < records; i++) {
            read_record(f, r);
            check_record(c, r);
        }
        fclose(f);
        compute_free(&c);
    }
    mem_free(&r);
}

/* A product with a single 1 among the activations picks one element; 127 steps make it exact in int8 too. */
static void products_agree_with_gguf(void **state)
{
    (void)state;
    uint32_t records;
    struct record *r = mem_alloc(1, sizeof *r);
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        FILE *f = open_vectors(&records);
        for (uint32_t i = 0; i < records; i++) {
            read_record(f, r);
            struct matrix w = {(enum dtype)r->type, 1, r->elements, r->blocks};
            float *x = mem_alloc(r->elements, sizeof *x), out;
            for (uint32_t j = i; j < r->elements; j += 29) {
                x[j] = 1;
                compute_matmul(c, &out, &w, x, NULL, 1);
                check_near(out, (double)r->values[j], fabs((double)r->values[j]) + 0.1, 2e-5,
                           dtype_info(r->type)->name, j);
                x[j] = 0;
            }
            mem_free(&x);
        }
        fclose(f);
        compute_free(&c);
    }
    mem_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(expansion_agrees_with_gguf),
        cmocka_unit_test(products_agree_with_gguf),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
