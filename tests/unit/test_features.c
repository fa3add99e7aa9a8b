/* What proto/ says of hidden states: the layers that a HELLO names, and the feature segment's sizes. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "proto/features.h"
#include "proto/msg.h"

static int hello_with(uint32_t layers, const uint32_t *layer, struct err *err)
{
    struct msg in = {.kind = MSG_HELLO, .version = MSG_VERSION}, out;
    in.hello.role = ROLE_RETRIEVER;
    in.hello.has_features = true;
    in.hello.features = (struct layout_features){.layers = 1, .hidden = 48};
    void *frame;
    size_t bytes;
    msg_encode(&in, &frame, &bytes);
    const char key[] = "features";
    uint8_t *at = frame;
    while (memcmp(at, key, sizeof key - 1))
        at++;
    at += sizeof key - 1 + 1 + 1 + sizeof "layers" - 1; /* the map's head, the key's, the key */
    assert_int_equal(*at, 1);
    *at = (uint8_t)layers;
    memcpy((uint8_t *)frame + bytes - sizeof in.hello.features.layer, layer, sizeof in.hello.features.layer);
    int r = msg_decode(frame, bytes, &out, err);
    if (r == 0)
        msg_free(&out);
    msg_buffer_free(frame);
    return r;
}

static void feature_layers_ascend(void **state)
{
    (void)state;
    const struct {
        uint32_t layers, layer[LIMIT_FEATURE_LAYERS];
        int expected;
    } cases[] = {{1, {0}, 0},
                 {3, {2, 16, 29}, 0},
                 {8, {0, 1, 2, 3, 4, 5, 6, LIMIT_LAYERS}, 0},
                 {3, {2, 16, 16}, -EPROTO},
                 {3, {2, 16, 29, 30}, -EPROTO},
                 {2, {0, LIMIT_LAYERS + 1}, -EPROTO},
                 {0, {0}, -EPROTO},
                 {9, {0, 1, 2, 3, 4, 5, 6, 7}, -EPROTO}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err err = {0};
        assert_int_equal(hello_with(cases[i].layers, cases[i].layer, &err), cases[i].expected);
        assert_true(cases[i].expected == 0 || strstr(err.text, "layer"));
    }
}

/* Whatever the chunk, type and form: rows lie behind the header, within the segment, and its own check takes
 * it; another length is refused. */
static void segments_hold_their_rows(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {1, 256, 2048, LIMIT_STEP_TOKENS};
    const struct layout_features wanted = {3, 576, {2, 16, 29}};
    const uint8_t handle[CONTROL_HANDLE_BYTES] = {7};
    for (unsigned i = 0; i < 16; i++) {
        struct features_header h;
        struct err err = {0};
        struct features_params p = {.decoder_epoch = 5,
                                    .retriever_epoch = 6,
                                    .wanted = &wanted,
                                    .chunk = chunks[i / 4],
                                    .type = i % 2 ? DTYPE_BF16 : DTYPE_F32,
                                    .form = i / 2 % 2 ? FEATURES_CUDA : FEATURES_HOST,
                                    .uuid = "GPU-1",
                                    .handle = handle};
        features_header_init(&h, &p);
        assert_int_equal(h.row_bytes, 3 * 576 * (i % 2 ? 2 : 4));
        assert_int_equal(h.rows, FEATURES_STEPS * LIMIT_SEQUENCES + FEATURES_CHUNKS * p.chunk);
        assert_int_equal(features_bytes(p.chunk, 3, 576, p.type), h.rows * h.row_bytes);
        assert_int_equal(h.total_bytes % FEATURES_ROWS_AT, 0);
        if (p.form == FEATURES_HOST)
            assert_in_range(h.total_bytes - h.rows_at - h.rows * h.row_bytes, 0, FEATURES_ROWS_AT - 1);
        assert_int_equal(features_header_check(&h, &p, h.total_bytes, &err), 0);
        assert_int_equal(features_header_check(&h, &p, h.total_bytes - 1, &err), -EINVAL);
        assert_non_null(strstr(err.text, "length"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(feature_layers_ascend),
        cmocka_unit_test(segments_hold_their_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
