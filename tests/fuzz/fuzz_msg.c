/* Fuzzing of msg_decode: what decodes must be encodable, and come back the same.
 *
 * Without a fuzzer's main it writes a corpus of seeds: fuzz_msg DIR, built with -DFUZZ_SEEDS. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "tests/lib/message.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct msg first, second;
    struct err err;
    if (msg_decode(data, bytes, &first, &err) < 0) {
        CHECK(err.code < 0 && memchr(err.text, 0, sizeof err.text) && err.text[0]);
        CHECK(first.memory == NULL);
        return 0;
    }
    void *buffer;
    size_t length;
    msg_encode(&first, &buffer, &length);
    CHECK(msg_decode(buffer, length, &second, &err) == 0);
    CHECK(message_equal(&first, &second));
    msg_buffer_free(buffer);
    msg_free(&first);
    msg_free(&second);
    return 0;
}

#ifdef FUZZ_SEEDS
int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s DIR\n", argv[0]);
        return 2;
    }
    static struct message_maker maker = {.random = 1};
    for (int i = 0; i < MESSAGE_KINDS * 4; i++) {
        struct msg msg;
        void *buffer;
        size_t bytes;
        char path[512];
        uint32_t kind = message_kinds[i % MESSAGE_KINDS];
        message_make(&maker, kind, &msg);
        msg_encode(&msg, &buffer, &bytes);
        snprintf(path, sizeof path, "%s/%s-%d", argv[1], msg_kind_name(kind), i / MESSAGE_KINDS);
        FILE *file = fopen(path, "wb");
        if (!file || fwrite(buffer, 1, bytes, file) != bytes || fclose(file) != 0) {
            perror(path);
            return 1;
        }
        msg_buffer_free(buffer);
    }
    return 0;
}
#endif
