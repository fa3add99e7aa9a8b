/* Hugging Face folders and split GGUF that are wrong: each is refused with one line that names file and
 * field, at once and without much memory; and what beside the weights belongs to a sound folder. */
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
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "model/model.h"
#include "model/safetensors.h"
#include "model/tokenizer.h"
#include "model/vocab.h"
#include "tests/lib/ggufgen.h"
#include "tests/lib/ggufgen_arch.h"

/* Seconds of a processor that this process has had: what others take is not counted. */
static double spent(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The most memory that the process has had, in KiB. */
static long peak_kib(void)
{
    char line[128];
    long kib = 0;
    FILE *file = fopen("/proc/self/status", "re");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "VmHWM: %ld", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib;
}

static void check_refused(const char *path, int code, const char *words)
{
    struct model *m = NULL;
    struct err err = {0};
    double begin = spent();
    long before = peak_kib();
    int rc = model_open(path, &m, &err);
    if (rc != code || !strstr(err.text, words) || strchr(err.text, '\n'))
        fail_msg("found %d \"%s\", expected %d \"%s\"", rc, err.text, code, words);
    assert_null(m);
    assert_true(spent() - begin < 3); /* what is quadratic takes minutes */
#ifndef __SANITIZE_ADDRESS__
    assert_true(peak_kib() - before < 64 << 10);
#else
    (void)before;
#endif
}

/* The case's configuration with one field changed (`json`: its text, NULL: taken out). Free with free. */
static char *changed_config(const char *name, const char *key, const char *json)
{
    char path[128];
    snprintf(path, sizeof path, ARCH_VECTORS "/%s/config.json", name);
    json_t *config = json_load_file(path, 0, NULL);
    assert_non_null(config);
    if (json) {
        json_t *value = json_loads(json, JSON_DECODE_ANY, NULL);
        assert_non_null(value);
        json_object_set_new(config, key, value);
    } else {
        json_object_del(config, key);
    }
    char *text = json_dumps(config, 0);
    json_decref(config);
    return text;
}

static char *make_changed(const char *name, const char *key, const char *json)
{
    char *path, *config = changed_config(name, key, json);
    ggufgen_arch_folder(name, 1, config, &path);
    free(config);
    return path;
}

static void put_file(const char *folder, const char *file, const void *text, size_t bytes)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    FILE *to = fopen(path, "we");
    assert_non_null(to);
    assert_int_equal(fwrite(text, 1, bytes, to), bytes);
    fclose(to);
}

static void put_text(const char *folder, const char *file, const char *text)
{
    put_file(folder, file, text, strlen(text));
}

static const struct {
    const char *name, *key, *json, *words;
    int code;
} configs[] = {
    {"llama-gqa", "model_type", NULL, "config.json: model_type: found no such field", -EBADMSG},
    {"llama-gqa", "model_type", "3", "model_type: found an integer, expected a string", -EBADMSG},
    {"llama-gqa", "model_type", "\"mamba\"", "model_type: found mamba, expected llama", -ENOTSUP},
    {"llama-gqa", "architectures", "[\"LlamaForCausalLMEagle3\"]",
     "architectures: found LlamaForCausalLMEagle3", -ENOTSUP},
    {"llama-gqa", "hidden_size", NULL, "hidden_size: found no such field", -EBADMSG},
    {"llama-gqa", "hidden_size", "0", "hidden_size: found 0", -EBADMSG},
    {"llama-gqa", "hidden_size", "-64", "hidden_size: found -64", -EBADMSG},
    {"llama-gqa", "hidden_size", "64.5", "hidden_size: found a fraction", -EBADMSG},
    {"llama-gqa", "hidden_size", "4294967360", "hidden_size: found 4294967360", -EBADMSG},
    {"llama-gqa", "hidden_size", "128", "shape: found 64 x 128", -EBADMSG},
    {"llama-gqa", "num_hidden_layers", "1025", "num_hidden_layers: found 1025", -EBADMSG},
    {"llama-gqa", "num_hidden_layers", "3", "tensor model.layers.2.input_layernorm.weight: found no such",
     -EBADMSG},
    {"llama-gqa", "num_hidden_layers", "1", "tensor model.layers.1.", -ENOTSUP},
    {"llama-gqa", "num_key_value_heads", "3", "num_key_value_heads: found 3, expected a divisor of 4",
     -EBADMSG},
    {"llama-gqa", "num_key_value_heads", "4", "k_proj.weight: shape", -EBADMSG},
    {"mistral", "num_key_value_heads", NULL, "num_key_value_heads: found no such field", -EBADMSG},
    {"llama-gqa", "head_dim", "15", "head dimension: found 15", -EBADMSG},
    {"llama-gqa", "head_dim", "32", "q_proj.weight: shape", -EBADMSG},
    {"llama-gqa", "intermediate_size", "97", "gate_proj.weight: shape", -EBADMSG},
    {"llama-gqa", "vocab_size", "129", "embed_tokens.weight: shape: found 128 rows, expected the 129",
     -EBADMSG},
    {"llama-gqa", "vocab_size", "16777216", "expected the 16777216 of vocab_size", -EBADMSG},
    {"llama-gqa", "rms_norm_eps", NULL, "rms_norm_eps: found no such field", -EBADMSG},
    {"llama-gqa", "rms_norm_eps", "0", "rms_norm_eps: found 0", -EBADMSG},
    {"llama-gqa", "hidden_act", "\"gelu\"", "hidden_act: found gelu, expected silu", -ENOTSUP},
    {"llama-gqa", "attention_bias", "true", "q_proj.bias: found no such tensor", -EBADMSG},
    {"llama-gqa", "attention_bias", "1", "attention_bias: found an integer", -EBADMSG},
    {"llama-gqa", "mlp_bias", "true", "mlp_bias: found true", -ENOTSUP},
    {"llama-gqa", "partial_rotary_factor", "0.5", "partial_rotary_factor", -ENOTSUP},
    {"llama-gqa", "tie_word_embeddings", "\"yes\"", "tie_word_embeddings: found a string", -EBADMSG},
    {"llama-mha-tied", "tie_word_embeddings", "false", "tensor lm_head.weight: found no such tensor",
     -EBADMSG},
    {"llama-mha-tied", "tie_word_embeddings", NULL, "tensor lm_head.weight: found no such tensor", -EBADMSG},
    {"llama-gqa", "quantization_config", "{\"quant_method\":\"awq\"}", "quantization_config: found awq",
     -ENOTSUP},
    {"mistral", "sliding_window", "255", "sliding_window: found 255, expected null", -ENOTSUP},
    {"qwen2", "use_sliding_window", "true", "sliding_window: found 64", -ENOTSUP},
    {"qwen3", "layer_types", "[\"full_attention\",\"sliding_attention\"]",
     "layer_types: found sliding_attention", -ENOTSUP},
    {"qwen3", "model_type", "\"qwen2\"", "architectures: found Qwen3ForCausalLM", -ENOTSUP},
    {"llama-gqa", "rope_theta", "1", "rope_theta: found 1, expected more than 1", -EBADMSG},
    {"llama-gqa", "rope_theta", "\"x\"", "rope_theta: found a string", -EBADMSG},
    {"llama-gqa", "rope_scaling", "[]", "rope_scaling: found an array", -EBADMSG},
    {"llama-gqa", "rope_scaling", "{}", "rope_scaling.rope_type: found no such field", -EBADMSG},
    {"llama-gqa", "rope_scaling", "{\"type\":\"dynamic\",\"factor\":2}", "rope_type: found dynamic",
     -ENOTSUP},
    {"llama-gqa", "rope_scaling", "{\"rope_type\":\"longrope\",\"factor\":2}", "rope_type: found longrope",
     -ENOTSUP},
    {"llama-gqa", "rope_scaling", "{\"type\":\"linear\",\"rope_type\":\"yarn\",\"factor\":2}",
     "rope_type: found yarn, expected linear", -EBADMSG},
    {"llama-gqa", "rope_scaling", "{\"type\":\"linear\"}", "rope_scaling.factor: found no such field",
     -EBADMSG},
    {"llama-gqa", "rope_scaling", "{\"type\":\"linear\",\"factor\":0}", "rope_scaling.factor: found 0",
     -EBADMSG},
    {"llama-gqa", "rope_scaling", "{\"type\":\"yarn\",\"factor\":4}",
     "original_max_position_embeddings: found no such field", -EBADMSG},
    {"llama-gqa", "rope_scaling",
     "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4}",
     "original_max_position_embeddings: found no such field", -EBADMSG},
    {"llama-gqa", "rope_scaling",
     "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4,"
     "\"original_max_position_embeddings\":64}",
     "high_freq_factor: found 4, expected more than 4", -EBADMSG},
    {"llama-gqa", "rope_parameters", "{\"rope_type\":\"mrope\",\"rope_theta\":1e6}",
     "rope_parameters.rope_type: found mrope", -ENOTSUP},
};

static void test_configs(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof configs / sizeof *configs; i++) {
        char *path = make_changed(configs[i].name, configs[i].key, configs[i].json);
        check_refused(path, configs[i].code, configs[i].words);
        ggufgen_arch_remove(&path);
    }
}

static void test_config_files(void **state)
{
    (void)state;
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    char *path;
    const struct {
        const char *text, *words;
    } texts[] = {
        {"", "config.json: line"},
        {"{\"a\":1,}", "config.json: line 1: found no valid JSON"},
        {"[]", "config.json: found an array, expected an object"},
        {"{\"model_type\":\"llama\",\"model_type\":\"llama\"}", "duplicate"},
        {lfs, "config.json: content: found a Git-LFS pointer"},
    };
    for (unsigned i = 0; i < sizeof texts / sizeof *texts; i++) {
        ggufgen_arch_folder("llama-gqa", 1, texts[i].text, &path);
        check_refused(path, -EBADMSG, texts[i].words);
        ggufgen_arch_remove(&path);
    }
    const size_t deep = 1 << 20;
    char *nested = mem_alloc(deep + 2, 1);
    memset(nested, '[', deep);
    for (int i = 0; i < 2; i++, nested[deep] = '[') { /* as large as is read, and one byte more */
        ggufgen_arch_folder("llama-gqa", 1, nested, &path);
        check_refused(path, -EBADMSG, i ? "config.json: size: found 1048577" : "found no valid JSON");
        ggufgen_arch_remove(&path);
    }
    for (size_t i = 0; i + 3 <= deep; i += 3)
        memcpy(nested + i, i ? ",[]" : "[[]", 3);
    nested[deep] = '\0';
    ggufgen_arch_folder("llama-gqa", 1, nested, &path);
    check_refused(path, -EBADMSG, "config.json");
    ggufgen_arch_remove(&path);
    mem_free(&nested);
}

static void test_weight_files(void **state)
{
    (void)state;
    static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    char *path, file[256];
    ggufgen_arch_folder("llama-gqa", 1, NULL, &path);
    put_text(path, "model.safetensors", lfs);
    check_refused(path, -EBADMSG, "model.safetensors: content: found a Git-LFS pointer");
    put_text(path, "model.safetensors", "\x05");
    check_refused(path, -EBADMSG, "model.safetensors: header length");
    snprintf(file, sizeof file, "%s/model.safetensors", path);
    unlink(file);
    check_refused(path, -EBADMSG, "found neither model.safetensors nor model.safetensors.index.json");
    ggufgen_arch_remove(&path);
    check_refused("/nonexistent/model", -ENOENT, "/nonexistent/model: open");
}

/* The index of three shards with one change. */
static void check_index(const char *tensor, const char *file, const char *words)
{
    char *path, index_path[256];
    ggufgen_arch_folder("llama-gqa", 3, NULL, &path);
    snprintf(index_path, sizeof index_path, "%s/model.safetensors.index.json", path);
    json_t *index = json_load_file(index_path, 0, NULL), *map = json_object_get(index, "weight_map");
    if (file)
        json_object_set_new(map, tensor, json_string(file));
    else
        json_object_del(map, tensor);
    assert_int_equal(json_dump_file(index, index_path, 0), 0);
    json_decref(index);
    check_refused(path, -EBADMSG, words);
    ggufgen_arch_remove(&path);
}

static void test_shards(void **state)
{
    (void)state;
    char *path, file[256];
    check_index("model.norm.weight", "model-00007-of-00003.safetensors", "found shard model-00007-of-00003");
    check_index("model.extra.weight", "model-00001-of-00003.safetensors", "model.extra.weight: found shard");
    check_index("model.norm.weight", NULL, "tensor model.norm.weight: found it in the shard, expected it in");
    check_index("model.norm.weight", "../x.safetensors", "expected a file name");
    check_index("model.norm.weight", "/etc/passwd", "expected a file name");
    check_index("model.norm.weight", "", "expected a file name");
    check_index("model.embed_tokens.weight", "model-00002-of-00003.safetensors",
                "model.embed_tokens.weight: found shard");
    ggufgen_arch_folder("llama-gqa", 2, NULL, &path);
    snprintf(file, sizeof file, "%s/model-00002-of-00002.safetensors", path);
    unlink(file);
    check_refused(path, -EBADMSG,
                  "weight_map: found shard model-00002-of-00002.safetensors, expected it in the folder");
    put_text(path, "model.safetensors.index.json", "{\"weight_map\":{}}");
    check_refused(path, -EBADMSG, "weight_map: found an empty one");
    put_text(path, "model.safetensors.index.json", "{\"weight_map\":[]}");
    check_refused(path, -EBADMSG, "weight_map: found an array");
    put_text(path, "model.safetensors.index.json", "{\"weight_map\":{\"x\":1}}");
    check_refused(path, -EBADMSG, "weight_map: x: found an integer");
    ggufgen_arch_remove(&path);
}

/* One tensor in two shards; one of a type that is no weight; one that nothing asks for. */
static void test_tensors(void **state)
{
    (void)state;
    static const float zeros[64];
    const struct {
        const char *name, *words;
        enum safetensors_type type;
        int code;
    } extras[] = {
        {"model.norm.weight", "tensor model.norm.weight: found it in", SAFETENSORS_F32, -EBADMSG},
        {"model.layers.0.self_attn.o_proj.bias", "o_proj.bias: found, expected no such tensor",
         SAFETENSORS_F32, -ENOTSUP},
    };
    for (unsigned i = 0; i < sizeof extras / sizeof *extras; i++) {
        char *path, file[256];
        ggufgen_arch_folder("llama-gqa", 2, NULL, &path);
        const struct safetensors_entry e = {extras[i].name, extras[i].type, 1, {64}, zeros};
        const struct safetensors_content content = {.tensors = &e, .tensor_count = 1};
        snprintf(file, sizeof file, "%s/extra.safetensors", path);
        assert_int_equal(safetensors_write(file, &content, NULL), 0);
        snprintf(file, sizeof file, "%s/model.safetensors.index.json", path);
        json_t *index = json_load_file(file, 0, NULL);
        json_object_set_new(json_object_get(index, "weight_map"), extras[i].name,
                            json_string("extra.safetensors"));
        json_object_set_new(json_object_get(index, "weight_map"), "zz", json_string("extra.safetensors"));
        if (i)
            json_object_del(json_object_get(index, "weight_map"), "zz");
        assert_int_equal(json_dump_file(index, file, 0), 0);
        json_decref(index);
        check_refused(path, extras[i].code, extras[i].words);
        ggufgen_arch_remove(&path);
    }
    const struct safetensors_entry e = {
        "model.embed_tokens.weight", SAFETENSORS_F8_E4M3, 2, {128, 64}, mem_alloc(8192, 1)};
    const struct safetensors_content content = {.tensors = &e, .tensor_count = 1};
    char *path, file[256];
    ggufgen_arch_folder("llama-gqa", 1, NULL, &path);
    snprintf(file, sizeof file, "%s/model.safetensors", path);
    assert_int_equal(safetensors_write(file, &content, NULL), 0);
    check_refused(path, -ENOTSUP, "embed_tokens.weight: type: found F8_E4M3");
    ggufgen_arch_remove(&path);
    void *data = (void *)(uintptr_t)e.data;
    mem_free(&data);
}

/* A header of odd length, as old writers made them: no element is aligned, all values are the same. */
static void test_unaligned(void **state)
{
    (void)state;
    char *path, file[256];
    struct model *a = NULL, *b = NULL;
    ggufgen_arch_folder("qwen2", 1, NULL, &path);
    assert_int_equal(model_open(path, &a, NULL), 0);
    snprintf(file, sizeof file, "%s/model.safetensors", path);
    FILE *from = fopen(file, "re");
    assert_non_null(from);
    char *bytes = mem_alloc(1 << 20, 1);
    size_t count = fread(bytes, 1, 1 << 20, from);
    fclose(from);
    uint64_t header;
    memcpy(&header, bytes, 8);
    memmove(bytes + 9 + header, bytes + 8 + header, count - 8 - header);
    bytes[8 + header++] = ' ';
    memcpy(bytes, &header, 8);
    unlink(file); /* model a goes on with the old one */
    put_file(path, "model.safetensors", bytes, count + 1);
    struct err err = {0};
    if (model_open(path, &b, &err) < 0)
        fail_msg("%s", err.text);
    const struct model_tensor *x = &model_layers(a)[1].down, *y = &model_layers(b)[1].down;
    assert_true((uintptr_t)y->data % 8 == 0);
    assert_memory_equal(x->data, y->data, x->bytes);
    x = &model_layers(a)[1].q_bias;
    y = &model_layers(b)[1].q_bias;
    assert_int_equal(x->type, DTYPE_F32);
    assert_memory_equal(x->data, y->data, x->bytes);
    model_free(&a);
    model_free(&b);
    mem_free(&bytes);
    ggufgen_arch_remove(&path);
}

#define TOKENIZER                                                                                           \
    "{\"added_tokens\":[{\"id\":5,\"content\":\"<s>\",\"special\":true},{\"id\":6,\"content\":\"</"         \
    "s>\",\"special\":true},"                                                                               \
    "{\"id\":7,\"content\":\"<|eot|>\",\"special\":true}],\"normalizer\":null,\"pre_tokenizer\":{\"type\":" \
    "\"ByteLevel\","                                                                                        \
    "\"add_prefix_space\":false},\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":"      \
    "\"ByteLevel\"},"                                                                                       \
    "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},{"      \
    "\"Sequence\":{"                                                                                        \
    "\"id\":\"A\",\"type_id\":0}}]}]},\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},"    \
    "\"merges\":[\"a b\"]}}"

static void test_tokenizer(void **state)
{
    (void)state;
    char *path;
    struct model *m = NULL;
    struct tokenizer *t = NULL;
    struct token_buf ids = {0};
    struct err err = {0};
    size_t bytes;
    ggufgen_arch_folder("llama-gqa", 1, NULL, &path);
    put_text(path, "tokenizer.json", TOKENIZER);
    put_text(path, "tokenizer_config.json",
             "{\"model_max_length\":1000000000000000019884624838656,\"eos_token\":{\"content\":\"</s>\"},"
             "\"chat_template\":[{\"name\":\"tool\",\"template\":\"x\"},{\"name\":\"default\",\"template\":"
             "\"from config\"}]}");
    put_text(path, "generation_config.json", "{\"eos_token_id\":[6,7]}");
    if (model_open(path, &m, &err) < 0 || tokenizer_create(m, &t, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(model_config(m)->bos, 5);
    assert_int_equal(model_config(m)->eos, 6);
    assert_int_equal(tokenizer_vocab(t), 128); /* as the embedding has rows */
    assert_true(tokenizer_add_bos(t));
    assert_true(tokenizer_is_eos(t, 6) && tokenizer_is_eos(t, 7) && !tokenizer_is_eos(t, 5));
    assert_int_equal(tokenizer_encode_prompt(t, "abb", 3, false, &ids, NULL), 0);
    assert_int_equal(ids.count, 3);
    assert_true(ids.ids[0] == 5 && ids.ids[1] == 2 && ids.ids[2] == 1);
    assert_string_equal(tokenizer_bytes(t, 100, &bytes) ? "some" : "none", "some");
    const char *template = tokenizer_chat_template(t, &bytes);
    assert_memory_equal(template, "from config", bytes);
    token_buf_free(&ids);
    tokenizer_free(&t);
    model_free(&m);
    put_text(path, "chat_template.jinja", "from file");
    put_text(path, "tokenizer_config.json", "{\"add_bos_token\":false}");
    assert_int_equal(model_open(path, &m, NULL), 0);
    assert_int_equal(tokenizer_create(m, &t, NULL), 0);
    assert_false(tokenizer_add_bos(t));
    template = tokenizer_chat_template(t, &bytes);
    assert_memory_equal(template, "from file", bytes);
    tokenizer_free(&t);
    model_free(&m);
    put_text(path, "tokenizer_config.json", "[");
    check_refused(path, -EBADMSG, "tokenizer_config.json: line");
    put_text(path, "tokenizer.json", "{\"model\":{\"vocab\":{\"a\":128}}}");
    check_refused(path, -EBADMSG, "tokenizer.json: model.vocab: found id 128, expected less than the 128");
    ggufgen_arch_remove(&path);
}

/* Stretched contexts, both spellings, transformers 5's place for it all. */
static void test_rope(void **state)
{
    (void)state;
    const struct {
        const char *key, *json;
        float base, factor, attn_factor;
        uint32_t context;
        enum model_rope_scaling scaling;
    } ropes[] = {
        {"rope_scaling", "{\"type\":\"default\"}", 1e4f, 1, 1, 256, MODEL_ROPE_SCALING_NONE},
        {"rope_scaling", "{\"type\":\"linear\",\"rope_type\":\"linear\",\"factor\":2.0}", 1e4f, 2, 1, 512,
         MODEL_ROPE_SCALING_LINEAR},
        {"rope_scaling", "{\"type\":\"yarn\",\"factor\":4,\"original_max_position_embeddings\":256}", 1e4f, 4,
         1, 1024, MODEL_ROPE_SCALING_YARN},
        {"rope_scaling",
         "{\"type\":\"yarn\",\"factor\":4,\"original_max_position_embeddings\":64,\"attention_factor\":"
         "1.1386294361119891}",
         1e4f, 4, 1, 256, MODEL_ROPE_SCALING_YARN},
        {"rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":500000}", 5e5f, 1, 1, 256,
         MODEL_ROPE_SCALING_NONE},
    };
    for (unsigned i = 0; i < sizeof ropes / sizeof *ropes; i++) {
        struct model *m = NULL;
        struct err err = {0};
        char *path = make_changed("llama-gqa", ropes[i].key, ropes[i].json);
        if (model_open(path, &m, &err) < 0)
            fail_msg("%s", err.text);
        const struct model_rope *r = &model_config(m)->rope;
        assert_true(r->base == ropes[i].base && r->factor == ropes[i].factor);
        assert_true(r->attn_factor > ropes[i].attn_factor - 1e-6f &&
                    r->attn_factor < ropes[i].attn_factor + 1e-6f);
        assert_int_equal(model_config(m)->context_max, ropes[i].context);
        assert_int_equal(r->scaling, ropes[i].scaling);
        model_free(&m);
        ggufgen_arch_remove(&path);
    }
}

static void test_split(void **state)
{
    (void)state;
    char *path, other[256], third[256], away[280];
    ggufgen_arch_file("qwen3", DTYPE_F16, 3, &path);
    snprintf(other, sizeof other, "%.*s2-of-00003.gguf", (int)(strlen(path) - strlen("1-of-00003.gguf")),
             path);
    snprintf(third, sizeof third, "%.*s3-of-00003.gguf", (int)(strlen(path) - strlen("1-of-00003.gguf")),
             path);
    check_refused(other, -EBADMSG, "expected its first part");
    snprintf(away, sizeof away, "%s.away", other);
    assert_int_equal(rename(other, away), 0);
    check_refused(path, -EBADMSG, "00002-of-00003.gguf: found no such file, expected it as part 2 of 3");
    assert_int_equal(link(third, other), 0);
    check_refused(path, -EBADMSG, "00002-of-00003.gguf: split.no, split.count: found 2, 3, expected 1, 3");
    assert_int_equal(rename(away, other), 0);
    struct model *m = NULL;
    assert_int_equal(model_open(path, &m, NULL), 0);
    assert_string_equal(model_format(m), "GGUF in 3 parts");
    struct hash128 h = model_fingerprint(m);
    model_free(&m);
    char *whole;
    ggufgen_arch_file("qwen3", DTYPE_F16, 1, &whole);
    assert_int_equal(model_open(whole, &m, NULL), 0);
    assert_string_equal(model_format(m), "GGUF");
    assert_false(hash_equal(model_fingerprint(m), h));
    model_free(&m);
    ggufgen_arch_remove(&whole);
    char renamed[256];
    snprintf(renamed, sizeof renamed, "%.*s/x.gguf", (int)(strrchr(path, '/') - path), path);
    assert_int_equal(rename(path, renamed), 0);
    check_refused(renamed, -EBADMSG, "file name: found a part of a model split in 3");
    assert_int_equal(rename(renamed, path), 0);
    ggufgen_arch_remove(&path);
}

/* Cuts of a part. */
static void test_split_truncated(void **state)
{
    (void)state;
    char *path, other[256];
    ggufgen_arch_file("qwen2", DTYPE_F32, 2, &path);
    snprintf(other, sizeof other, "%.*s2-of-00002.gguf", (int)(strlen(path) - strlen("1-of-00002.gguf")),
             path);
    for (long cut = 1; cut < 400; cut += 7) {
        struct model *m = NULL;
        assert_int_equal(truncate(other, cut), 0);
        assert_int_equal(model_open(path, &m, NULL), -EBADMSG);
    }
    ggufgen_arch_remove(&path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_configs),      cmocka_unit_test(test_config_files),
        cmocka_unit_test(test_weight_files), cmocka_unit_test(test_shards),
        cmocka_unit_test(test_tensors),      cmocka_unit_test(test_unaligned),
        cmocka_unit_test(test_tokenizer),    cmocka_unit_test(test_rope),
        cmocka_unit_test(test_split),        cmocka_unit_test(test_split_truncated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
