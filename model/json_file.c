/* Reads small JSON files. A json_doc belongs to its caller. The size limit comes before the parser: jansson
 * builds the whole tree, so the text's length is what bounds memory. */
#include "model/json_file.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/mapping.h"

/* Numbers beyond 64 bits stand in real files ("model_max_length": 1e30 written out): whole numbers are taken
 * as fractions then. */
static json_t *parse(const struct mapping *m, json_error_t *why)
{
    const char *text = m->data ? (const char *)m->data : "";
    json_t *root = json_loadb(text, m->bytes, JSON_REJECT_DUPLICATES, why);
    if (!root && json_error_code(why) == json_error_numeric_overflow)
        root = json_loadb(text, m->bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, why);
    return root;
}

bool json_whole(const json_t *value, json_int_t *ret)
{
    double real = json_real_value(value);
    if (!json_is_integer(value) && !(json_is_real(value) && fabs(real) < 0x1p53 && real == floor(real)))
        return false;
    *ret = json_is_integer(value) ? json_integer_value(value) : (json_int_t)real;
    return true;
}

int json_doc_open(struct json_doc *doc, const char *folder, const char *file, struct err *err)
{
    struct mapping m = {0};
    json_error_t why = {0};
    memset(doc, 0, sizeof *doc);
    size_t room = strlen(folder) + strlen(file) + 2;
    doc->where = "";
    doc->path = mem_alloc(room, 1);
    snprintf(doc->path, room, "%s/%s", folder, file);
    int rc = mapping_open(&m, doc->path, err);
    if (rc < 0)
        return rc;
    if (m.bytes > JSON_FILE_MAX) {
        rc = err_set(err, -EBADMSG, "%.200s: size: found %" PRIu64 " bytes, expected at most %u", doc->path,
                     m.bytes, JSON_FILE_MAX);
    } else {
        doc->root = parse(&m, &why);
        if (!doc->root)
            rc = err_set(err, -EBADMSG, "%.200s: line %d: found no valid JSON (%.100s), expected an object",
                         doc->path, why.line, why.text);
        else if (!json_is_object(doc->root))
            rc = err_set(err, -EBADMSG, "%.200s: found %s, expected an object", doc->path,
                         json_kind(doc->root));
    }
    mapping_close(&m);
    return rc;
}

void json_doc_free(struct json_doc *doc)
{
    json_decref(doc->root);
    doc->root = NULL;
    mem_free(&doc->path);
}

const char *json_kind(const json_t *value)
{
    if (!value)
        return "nothing";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a fraction";
    case JSON_NULL:
        return "null";
    default:
        return json_is_true(value) ? "true" : "false";
    }
}

static int find(const struct json_doc *doc, const char *key, json_t **ret, struct err *err)
{
    *ret = json_object_get(doc->root, key);
    if (!*ret || json_is_null(*ret))
        return err_set(err, -ENOENT, "%.200s: %s%s: found no such field, expected it", doc->path, doc->where,
                       key);
    return 0;
}

static int mismatch(const struct json_doc *doc, const char *key, const json_t *value, const char *expected,
                    struct err *err)
{
    return err_set(err, -EBADMSG, "%.200s: %s%s: found %s, expected %s", doc->path, doc->where, key,
                   json_kind(value), expected);
}

int json_u32(const struct json_doc *doc, const char *key, uint32_t least, uint32_t most, uint32_t *ret,
             struct err *err)
{
    json_t *value;
    int rc = find(doc, key, &value, err);
    if (rc < 0)
        return rc;
    json_int_t number;
    if (!json_whole(value, &number))
        return mismatch(doc, key, value, "an integer", err);
    if (number < (json_int_t)least || number > (json_int_t)most)
        return err_set(err, -EBADMSG,
                       "%.200s: %s%s: found %" JSON_INTEGER_FORMAT ", expected %" PRIu32 " to %" PRIu32,
                       doc->path, doc->where, key, number, least, most);
    *ret = (uint32_t)number;
    return 0;
}

int json_f32(const struct json_doc *doc, const char *key, float most, float *ret, struct err *err)
{
    json_t *value;
    int rc = find(doc, key, &value, err);
    if (rc < 0)
        return rc;
    if (!json_is_number(value))
        return mismatch(doc, key, value, "a number", err);
    float number = (float)json_number_value(value);
    if (!(number > 0 && number <= most))
        return err_set(err, -EBADMSG, "%.200s: %s%s: found %g, expected more than 0, at most %g", doc->path,
                       doc->where, key, json_number_value(value), (double)most);
    *ret = number;
    return 0;
}

int json_flag(const struct json_doc *doc, const char *key, bool *ret, struct err *err)
{
    json_t *value;
    int rc = find(doc, key, &value, err);
    if (rc < 0)
        return rc;
    if (!json_is_boolean(value))
        return mismatch(doc, key, value, "true or false", err);
    *ret = json_is_true(value);
    return 0;
}

int json_text(const struct json_doc *doc, const char *key, const char **ret, struct err *err)
{
    json_t *value;
    int rc = find(doc, key, &value, err);
    if (rc < 0)
        return rc;
    if (!json_is_string(value))
        return mismatch(doc, key, value, "a string", err);
    *ret = json_string_value(value);
    return 0;
}

int json_required(int rc, struct err *err)
{
    if (rc != -ENOENT)
        return rc;
    if (err)
        err->code = -EBADMSG;
    return -EBADMSG;
}

int json_optional(int rc)
{
    return rc == -ENOENT ? 0 : rc;
}

int json_stream(const yajl_callbacks *callbacks, void *arg, const void *text, size_t bytes,
                char ret_why[JSON_WHY_BYTES])
{
    yajl_handle h = yajl_alloc(callbacks, NULL, arg);
    if (!h)
        return -ENOMEM;
    yajl_status status = yajl_parse(h, text, bytes);
    if (status == yajl_status_ok)
        status = yajl_complete_parse(h);
    if (status == yajl_status_error) {
        unsigned char *why = yajl_get_error(h, 0, NULL, 0); /* a line, with its end */
        snprintf(ret_why, JSON_WHY_BYTES, "%.*s", (int)strcspn((const char *)why, "\n"), (const char *)why);
        yajl_free_error(h, why);
    }
    yajl_free(h);
    return status == yajl_status_ok ? 0 : status == yajl_status_error ? -EBADMSG : -ECANCELED;
}
