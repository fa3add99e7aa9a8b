/* Chat formats against the prompts that the models' own templates render (tests/vectors/chat.json), and the
 * recognition of templates. Tokenizers of models are looked for in models/ and ../shared; what is absent is
 * skipped by name. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "model/chat.h"
#include "model/detok.h"
#include "model/model.h"
#include "model/vocab_folder.h"

#define SMOLLM2 "models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define BAR     "\xef\xbd\x9c"
#define EOS     "<" BAR "end\xe2\x96\x81of\xe2\x96\x81sentence" BAR ">"

/* One-byte tokens in the alphabet of byte-level BPE (what prints, space, newline) and marks; BOS is <s>. */
static struct tokenizer *make_tokenizer(struct vocab *v, const char *const *marks)
{
    static char printing[94];
    struct tokenizer *t = NULL;
    memset(v, 0, sizeof *v);
    v->count = 97;
    while (marks[v->count - 97])
        v->count++;
    v->pre = name_of("gpt-2");
    v->tokens = mem_alloc(v->count, sizeof *v->tokens);
    v->types = mem_alloc(v->count, 1);
    memset(v->types, VOCAB_TYPE_CONTROL, v->count);
    memset(v->types, VOCAB_TYPE_NORMAL, 96);
    for (int i = 0; i < 94; i++) {
        printing[i] = (char)('!' + i);
        v->tokens[i] = (struct name){&printing[i], 1};
    }
    v->tokens[94] = name_of("\xc4\xa0"); /* space */
    v->tokens[95] = name_of("\xc4\x8a"); /* newline */
    v->tokens[96] = name_of("<s>");
    for (uint32_t i = 97; i < v->count; i++)
        v->tokens[i] = name_of(marks[i - 97]);
    v->bos = 96;
    v->eos = v->eot = v->eom = v->unknown = VOCAB_NO_TOKEN;
    assert_int_equal(tokenizer_create_from(v, &t, NULL), 0);
    return t;
}

static void drop(struct tokenizer **t, struct vocab *v)
{
    tokenizer_free(t);
    mem_free(&v->tokens);
    mem_free(&v->types);
}

static void spell(const struct tokenizer *t, const struct token_buf *ids, struct text_buf *out)
{
    for (size_t i = 0; i < ids->count; i++) {
        size_t bytes;
        const char *text = tokenizer_bytes(t, ids->ids[i], &bytes);
        text_buf_append(out, text, bytes);
    }
    text_buf_append(out, "", 1);
}

static void check_prompt(const struct tokenizer *t, const struct chat *chat, const char *prompt)
{
    struct token_buf ids = {0};
    struct text_buf text = {0};
    struct err err = {0};
    if (chat_encode_as(t, chat, &ids, &err) < 0)
        fail_msg("%s", err.text);
    spell(t, &ids, &text);
    if (strcmp(text.text, prompt))
        fail_msg("%s: found \"%s\", expected \"%s\"", chat->format->name, text.text, prompt);
    text_buf_free(&text);
    token_buf_free(&ids);
}

static void check_vector(const struct tokenizer *t, const struct chat_format *format, const json_t *vector)
{
    const json_t *list = json_object_get(vector, "messages");
    struct chat_message messages[8];
    struct chat chat = {format, messages, json_array_size(list),
                        json_is_true(json_object_get(vector, "generate"))};
    assert_true(chat.count <= 8);
    for (size_t i = 0; i < chat.count; i++) {
        const json_t *m = json_array_get(list, i);
        messages[i] = (struct chat_message){json_string_value(json_object_get(m, "role")),
                                            json_string_value(json_object_get(m, "content")),
                                            json_string_length(json_object_get(m, "content"))};
    }
    check_prompt(t, &chat, json_string_value(json_object_get(vector, "prompt")));
}

/* All vectors of a format, by the format that the template is recognised as. */
static void check_vectors(const struct tokenizer *t, const char *name, const char *template)
{
    struct chat_format format, by_name;
    struct err err = {0};
    json_t *vectors = json_load_file("tests/vectors/chat.json", 0, NULL), *vector;
    size_t i, seen = 0;
    assert_non_null(vectors);
    if (chat_format_by_template(template, strlen(template), &format, &err) < 0)
        fail_msg("%s", err.text);
    assert_string_equal(format.name, name);
    assert_int_equal(chat_format_by_name(name, &by_name, NULL), 0);
    assert_memory_equal(&format.family, &by_name.family, sizeof format.family);
    assert_string_equal(format.system, by_name.system);
    json_array_foreach(vectors, i, vector)
    {
        if (strcmp(json_string_value(json_object_get(vector, "format")), name))
            continue;
        check_vector(t, &format, vector);
        seen++;
    }
    assert_true(seen >= 6);
    json_decref(vectors);
}

static void test_smollm2(void **state)
{
    (void)state;
    struct model *m = NULL;
    struct tokenizer *t = NULL;
    if (access(SMOLLM2, R_OK) < 0) {
        print_message("skipped: %s is absent\n", SMOLLM2);
        skip();
    }
    assert_int_equal(model_open(SMOLLM2, &m, NULL), 0);
    assert_int_equal(tokenizer_create(m, &t, NULL), 0);
    size_t bytes;
    const char *text = tokenizer_chat_template(t, &bytes);
    char *template = mem_alloc(bytes + 1, 1);
    memcpy(template, text, bytes);
    check_vectors(t, "smollm2", template);
    mem_free(&template);
    tokenizer_free(&t);
    model_free(&m);
}

static struct vocab *read_shared(const char *folder)
{
    char path[160], command[200];
    snprintf(path, sizeof path, "../shared/tokenizers/%s/tokenizer.json.xz", folder);
    snprintf(command, sizeof command, "xz -dc '%s'", path);
    if (access(path, R_OK) < 0) {
        print_message("skipped: %s is absent\n", path);
        skip();
    }
    FILE *pipe = popen(command, "re");
    assert_non_null(pipe);
    size_t room = 32 << 20, bytes = 0, n;
    char *json = mem_alloc(room, 1);
    while (bytes < room && (n = fread(json + bytes, 1, room - bytes, pipe)) > 0)
        bytes += n;
    pclose(pipe);
    struct vocab *v = NULL;
    struct err err = {0};
    if (vocab_from_json((struct name){json, bytes}, path, 0, &v, &err) < 0)
        fail_msg("%s", err.text);
    mem_free(&json);
    return v;
}

static void check_shared(const char *folder, const char *name, const char *bos)
{
    struct vocab *v = read_shared(folder);
    struct tokenizer *t = NULL;
    char path[160];
    for (uint32_t i = 0; bos && i < v->count; i++)
        if (name_is(v->tokens[i], bos))
            v->bos = i;
    assert_int_equal(tokenizer_create_from(v, &t, NULL), 0);
    snprintf(path, sizeof path, "../shared/tokenizers/%s/tokenizer_config.json", folder);
    json_t *config = json_load_file(path, JSON_DECODE_INT_AS_REAL, NULL);
    assert_non_null(config);
    check_vectors(t, name, json_string_value(json_object_get(config, "chat_template")));
    json_decref(config);
    tokenizer_free(&t);
    vocab_free(&v);
}

static void test_llama3(void **state)
{
    (void)state;
    check_shared("llama3", "llama3", "<|begin_of_text|>");
}

static void test_qwen3(void **state)
{
    (void)state;
    check_shared("qwen3", "qwen3", NULL);
}

#define SAY(role, text)             \
    {                               \
        role, text, sizeof text - 1 \
    }

static const struct chat_message talk[] = {SAY("system", " S "), SAY("user", " a "),
                                           SAY("assistant", "<think>t</think>b"), SAY("user", "c")};

/* Families without a file at hand: the branches of their templates that matter, and the prompts. */
static void test_llama31(void **state)
{
    (void)state;
    static const char template[] =
        "{{- bos_token }}\n{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}\n"
        "{{- \"Cutting Knowledge Date: December 2023\\n\" }}\n{{- \"Today Date: \" + date_string + "
        "\"\\n\\n\" }}\n"
        "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\\n\\n'+ "
        "message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}";
    static const char *const marks[] = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", NULL};
    struct vocab v;
    struct chat_format f;
    struct tokenizer *t = make_tokenizer(&v, marks);
    assert_int_equal(chat_format_by_template(template, sizeof template - 1, &f, NULL), 0);
    assert_string_equal(f.name, "llama3.1");
    struct chat chat = {&f, talk, 2, true};
    check_prompt(
        t, &chat,
        "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday "
        "Date: 26 Jul 2024\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n");
    chat = (struct chat){&f, talk + 1, 1, false};
    check_prompt(
        t, &chat,
        "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday "
        "Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>");
    drop(&t, &v);
}

static void test_deepseek(void **state)
{
    (void)state;
    static const char head[] =
        "{{bos_token}}{{ns.system_prompt}}{{'<" BAR "User" BAR ">' + message['content']}}";
    static const char strip[] = "{% set content = content.split('</think>')[-1] %}";
    static const char answer[] = "{{'<" BAR "Assistant" BAR ">' + content + '" EOS "'}}";
    static const char *const tails[] = {"{{'<" BAR "Assistant" BAR "><think>\\n'}}",
                                        "{{'<" BAR "Assistant" BAR ">'}}"};
    static const char *const marks[] = {"<" BAR "User" BAR ">", "<" BAR "Assistant" BAR ">", EOS, NULL};
    struct vocab v;
    struct tokenizer *t = make_tokenizer(&v, marks);
    for (int i = 0; i < 4; i++) {
        char template[512], expected[512];
        struct chat_format f;
        snprintf(template, sizeof template, "%s%s%s%s", head, i & 2 ? strip : "", answer, tails[i & 1]);
        assert_int_equal(chat_format_by_template(template, strlen(template), &f, NULL), 0);
        assert_string_equal(f.name, "deepseek-r1");
        struct chat chat = {&f, talk, 4, true};
        snprintf(expected, sizeof expected,
                 "<s> S <" BAR "User" BAR "> a <" BAR "Assistant" BAR ">%sb" EOS "<" BAR "User" BAR ">c<" BAR
                 "Assistant" BAR ">%s",
                 i & 2 ? "" : "<think>t</think>", i & 1 ? "" : "<think>\n");
        check_prompt(t, &chat, expected);
    }
    struct chat_format f;
    struct token_buf ids = {0};
    const struct chat_message tool[] = {SAY("tool", "x")};
    assert_int_equal(chat_format_choose(t, "deepseek-r1", &f, NULL), 0);
    struct chat chat = {&f, tool, 1, true};
    assert_int_equal(chat_encode_as(t, &chat, &ids, NULL), -EINVAL);
    drop(&t, &v);
}

static void test_qwen25(void **state)
{
    (void)state;
    static const char template[] =
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- else %}\n    {%- if messages[0]['role'] == "
        "'system' %}\n"
        "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n{%- else %}\n{{- "
        "'<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.<|im_end|>\\n' "
        "}}\n{%- endif %}\n{%- endif %}\n{{- '<|im_start|>' + message.role + '\\n' + message.content + "
        "'<|im_end|>' + '\\n' }}{{- '\\n<tool_response>\\n' }}{%- if add_generation_prompt %}\n"
        "{{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n";
    static const char *const marks[] = {"<|im_start|>", "<|im_end|>", NULL};
    static const struct chat_message tools[] = {SAY("user", "a"), SAY("tool", "x"), SAY("tool", "y")};
    struct vocab v;
    struct chat_format f;
    struct tokenizer *t = make_tokenizer(&v, marks);
    assert_int_equal(chat_format_by_template(template, sizeof template - 1, &f, NULL), 0);
    assert_string_equal(f.name, "qwen2.5");
    struct chat chat = {&f, tools, 3, true};
    check_prompt(
        t, &chat,
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>user\n<tool_response>\nx\n</tool_response>\n"
        "<tool_response>\ny\n</tool_response><|im_end|>\n<|im_start|>assistant\n");
    drop(&t, &v);
}

static void test_choose(void **state)
{
    (void)state;
    static const char *const marks[] = {"<|im_start|>", "<|im_end|>", NULL};
    struct vocab v;
    struct chat_format f;
    struct err err = {0};
    struct tokenizer *t = make_tokenizer(&v, marks);
    assert_int_equal(chat_format_choose(t, NULL, &f, &err), -ENOENT); /* the model has none */
    assert_non_null(strstr(err.text, "--chat-template"));
    assert_int_equal(chat_format_choose(t, "chatml", &f, &err), 0);
    assert_int_equal(chat_format_choose(t, "llama3", &f, &err), -ENOTSUP); /* marks are missing */
    assert_non_null(strstr(err.text, "<|start_header_id|>"));
    assert_int_equal(chat_format_choose(t, "nonsense", &f, &err), -ENOENT);
    assert_non_null(strstr(err.text, "expected chatml, smollm2"));
    assert_int_equal(chat_format_choose(t, "/nonexistent/x.jinja", &f, &err), -ENOENT);
    assert_int_equal(chat_format_choose(t, "/dev/null", &f, &err), -EINVAL);
    char path[] = "/tmp/specontext-test-XXXXXX.jinja";
    int fd = mkstemps(path, 6);
    static const char text[] =
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt "
        "%}{{ '<|im_start|>assistant\n' }}{% endif %}\n";
    assert_int_equal(write(fd, text, sizeof text - 1), sizeof text - 1);
    close(fd);
    assert_int_equal(chat_format_choose(t, path, &f, &err), 0);
    assert_string_equal(f.name, "chatml");
    unlink(path);
    drop(&t, &v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_smollm2), cmocka_unit_test(test_llama3),   cmocka_unit_test(test_qwen3),
        cmocka_unit_test(test_llama31), cmocka_unit_test(test_deepseek), cmocka_unit_test(test_qwen25),
        cmocka_unit_test(test_choose),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
