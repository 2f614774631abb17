/* Typed access to a JSON object's fields, for bodies that clients send: a wrong type or value becomes an error that
 * names the field by its path ("messages[2].content: ..."). The first error sticks, so a reader asks for all it wants
 * and looks at st once. null is the same as absent; fields nobody asks for are ignored. Any thread. */
#ifndef TD_TEXT_FIELDS_H
#define TD_TEXT_FIELDS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "common/base/status.h"
#include "common/text/chat.h"

struct td_fields {
    const json_t *object; /* borrowed */
    char path[160];       /* of the object, ends in "." unless empty */
    enum td_status st;
    struct td_err *err;
};

/* Fails with INVALID if v is no object. path as printf gives it: "messages[2]", "" for the body itself. */
struct td_fields td_fields_open(const json_t *v, struct td_err *err, const char *path, ...)
    __attribute__((format(printf, 3, 4)));

/* Each leaves *out alone when the field is absent, and returns whether it was there and good. Bounds are inclusive;
 * whole numbers may come as 5 or 5.0. */
bool td_fields_u32(struct td_fields *f, const char *name, uint32_t min, uint32_t max, uint32_t *out);
bool td_fields_i64(struct td_fields *f, const char *name, int64_t *out);
bool td_fields_float(struct td_fields *f, const char *name, float min, float max, float *out);
bool td_fields_bool(struct td_fields *f, const char *name, bool *out);
bool td_fields_text(struct td_fields *f, const char *name, struct td_text *out);
bool td_fields_str(struct td_fields *f, const char *name, const char **out); /* a text without zero bytes */
bool td_fields_array(struct td_fields *f, const char *name, const json_t **out);
bool td_fields_object(struct td_fields *f, const char *name, const json_t **out);
const json_t *td_fields_get(const struct td_fields *f, const char *name); /* any type; NULL: absent or null */

/* Sets the error "<path>name: message" if there is none yet. */
void td_fields_fail(struct td_fields *f, enum td_status st, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void td_fields_no_memory(struct td_fields *f);

/* Fields that are known, but not supported: any value but null and the one that asks for nothing is refused by name
 * (UNIMPLEMENTED). */
enum td_fields_harmless { TD_HARMLESS_NONE, TD_HARMLESS_FALSE, TD_HARMLESS_TRUE, TD_HARMLESS_EMPTY, TD_HARMLESS_ONE };
struct td_fields_refusal {
    const char *name;
    enum td_fields_harmless harmless;
    const char *why; /* NULL: "not supported" */
};
void td_fields_refuse(struct td_fields *f, const struct td_fields_refusal *list, size_t n);

static inline struct td_text td_json_text(const json_t *v)
{
    return (struct td_text){json_string_value(v), json_string_length(v)};
}
static inline bool td_text_is(struct td_text t, const char *s)
{
    return t.p != NULL && t.n == strlen(s) && memcmp(t.p, s, t.n) == 0;
}

#endif
