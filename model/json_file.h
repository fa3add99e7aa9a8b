/* JSON in a model's files: the small ones beside its weights, with typed access to their fields and errors
 * that name file, field, what was found and what was expected; large ones by callbacks. Stateless: any
 * thread. Not for other folders. */
#ifndef MODEL_JSON_FILE_H
#define MODEL_JSON_FILE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <yajl/yajl_parse.h>

#include "base/err.h"

/* Larger files are refused: a JSON tree takes some 40 times the text. */
#define JSON_FILE_MAX (1u << 20)

/* Room for a parser's words on what is wrong. */
#define JSON_WHY_BYTES 128

/* An object and where it is from. `where` is "" or "rope_scaling.": put before field names in errors. */
struct json_doc {
    json_t *root;
    char *path;
    const char *where;
};

/* folder/file as a JSON object. 0; -ENOENT when there is no such file; an errno of the system; -EBADMSG when
 * it is too large, a Git-LFS pointer or no object. Release with json_doc_free, which accepts a zeroed one. */
int json_doc_open(struct json_doc *doc, const char *folder, const char *file, struct err *err);
void json_doc_free(struct json_doc *doc);

/* "an object", "a string": for errors. */
const char *json_kind(const json_t *value);

/* The value of a whole number. False for anything else. */
bool json_whole(const json_t *value, json_int_t *ret);

/* Fields by key. A key that is absent or null: -ENOENT (err set: callers that need it turn it into -EBADMSG
 * with json_required). Of another type or out of range: -EBADMSG. Outputs are untouched on failure. */
int json_u32(const struct json_doc *doc, const char *key, uint32_t least, uint32_t most, uint32_t *ret,
             struct err *err);
int json_f32(const struct json_doc *doc, const char *key, float most, float *ret, struct err *err); /* > 0 */
int json_flag(const struct json_doc *doc, const char *key, bool *ret, struct err *err);
int json_text(const struct json_doc *doc, const char *key, const char **ret, struct err *err);
int json_required(int rc, struct err *err);

/* -ENOENT as 0, *ret keeping its default: for optional fields. */
int json_optional(int rc);

/* One JSON value, nothing behind it, to callbacks. 0; -ECANCELED when a callback returned 0, which has told
 * why; -EBADMSG with `ret_why`; -ENOMEM. */
int json_stream(const yajl_callbacks *callbacks, void *arg, const void *text, size_t bytes,
                char ret_why[JSON_WHY_BYTES]);

#endif
