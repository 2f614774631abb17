/* JSON files of a model directory: bounded reading, and fields with errors that name file and field. */
#ifndef TD_MODEL_JSON_INT_H
#define TD_MODEL_JSON_INT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* Regular file of at most max_bytes, whole, into *out (free it). NOT_FOUND if there is none, and no message then. */
enum td_status td_model_read_file(const char *path, size_t max_bytes, char **out, size_t *n_out, struct td_err *err);
/* The file's one JSON object; duplicate keys are refused. NOT_FOUND as above. */
enum td_status td_model_json_load(const char *path, size_t max_bytes, json_t **out, struct td_err *err);
/* Text of at most n bytes. */
enum td_status td_model_json_parse(const char *text, size_t n, const char *what, json_t **out, struct td_err *err);

/* One object being read. The getters leave *out alone when the field is absent or null (so *out starts as the default)
 * and remember the first error; NULL object: every field is absent. */
struct td_json_fields {
    const char *file, *prefix; /* prefix: "rope_scaling." or "" */
    const json_t *object;
    enum td_status st;
    struct td_err *err;
};
bool td_json_has(const struct td_json_fields *f, const char *name);
void td_json_fail(struct td_json_fields *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void td_json_u32(struct td_json_fields *f, const char *name, uint32_t min, uint32_t max, uint32_t *out);
void td_json_f64(struct td_json_fields *f, const char *name, double min, double max, double *out);
void td_json_bool(struct td_json_fields *f, const char *name, bool *out);
const char *td_json_str(struct td_json_fields *f, const char *name); /* NULL when absent */
const json_t *td_json_object(struct td_json_fields *f, const char *name);
const json_t *td_json_array(struct td_json_fields *f, const char *name);
void td_json_require(struct td_json_fields *f, const char *name);

#endif
