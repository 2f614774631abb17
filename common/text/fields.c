#include "common/text/fields.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

struct td_fields td_fields_open(const json_t *v, struct td_err *err, const char *path, ...)
{
    struct td_fields f = {.object = v, .err = err};
    va_list ap;
    va_start(ap, path);
    vsnprintf(f.path, sizeof f.path - 1, path, ap); /* room for the dot */
    va_end(ap);
    if (!json_is_object(v)) {
        f.object = NULL;
        f.st = f.path[0] == '\0' ? td_err_set(err, TD_E_INVALID, "the body must be a JSON object")
                                 : td_err_set(err, TD_E_INVALID, "%s: must be an object", f.path);
    }
    if (f.path[0] != '\0') strcat(f.path, ".");
    return f;
}

void td_fields_fail(struct td_fields *f, enum td_status st, const char *name, const char *fmt, ...)
{
    char text[320];
    if (f->st != TD_OK) return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    f->st = td_err_set(f->err, st, "%s%s: %s", f->path, name, text);
}

void td_fields_no_memory(struct td_fields *f)
{
    if (f->st == TD_OK) f->st = td_err_set(f->err, TD_E_NO_MEMORY, "no memory for the request");
}

const json_t *td_fields_get(const struct td_fields *f, const char *name)
{
    const json_t *v = json_object_get(f->object, name);
    return json_is_null(v) ? NULL : v;
}

static const char *type_name(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER:
    case JSON_REAL: return "a number";
    case JSON_TRUE:
    case JSON_FALSE: return "a boolean";
    default: return "null";
    }
}

/* The field if it is there and of the type, for which is_right speaks. */
static const json_t *typed(struct td_fields *f, const char *name, bool (*is_right)(const json_t *v), const char *what)
{
    const json_t *v = f->st == TD_OK ? td_fields_get(f, name) : NULL;
    if (v == NULL || is_right(v)) return v;
    td_fields_fail(f, TD_E_INVALID, name, "must be %s, not %s", what, type_name(v));
    return NULL;
}

static bool is_string(const json_t *v) { return json_is_string(v); }
static bool is_array(const json_t *v) { return json_is_array(v); }
static bool is_object(const json_t *v) { return json_is_object(v); }
static bool is_boolean(const json_t *v) { return json_is_boolean(v); }
static bool is_number(const json_t *v) { return json_is_number(v); }
static bool is_whole(const json_t *v)
{
    if (json_is_integer(v)) return true;
    if (!json_is_real(v)) return false;
    double d = json_real_value(v);
    return fabs(d) < 9007199254740992.0 && d == floor(d);
}

static int64_t whole_of(const json_t *v)
{
    return json_is_integer(v) ? (int64_t)json_integer_value(v) : (int64_t)json_real_value(v);
}

bool td_fields_u32(struct td_fields *f, const char *name, uint32_t min, uint32_t max, uint32_t *out)
{
    const json_t *v = typed(f, name, is_whole, "a whole number");
    if (v == NULL) return false;
    int64_t n = whole_of(v);
    if (n < (int64_t)min || n > (int64_t)max) {
        td_fields_fail(f, TD_E_INVALID, name, "%" PRId64 " is not between %u and %u", n, min, max);
        return false;
    }
    *out = (uint32_t)n;
    return true;
}

bool td_fields_i64(struct td_fields *f, const char *name, int64_t *out)
{
    const json_t *v = typed(f, name, is_whole, "a whole number");
    if (v == NULL) return false;
    *out = whole_of(v);
    return true;
}

bool td_fields_float(struct td_fields *f, const char *name, float min, float max, float *out)
{
    const json_t *v = typed(f, name, is_number, "a number");
    if (v == NULL) return false;
    double d = json_number_value(v);
    if (!(d >= (double)min && d <= (double)max)) {
        td_fields_fail(f, TD_E_INVALID, name, "%g is not between %g and %g", d, (double)min, (double)max);
        return false;
    }
    *out = (float)d;
    return true;
}

bool td_fields_bool(struct td_fields *f, const char *name, bool *out)
{
    const json_t *v = typed(f, name, is_boolean, "true or false");
    if (v == NULL) return false;
    *out = json_is_true(v);
    return true;
}

bool td_fields_text(struct td_fields *f, const char *name, struct td_text *out)
{
    const json_t *v = typed(f, name, is_string, "a string");
    if (v == NULL) return false;
    *out = td_json_text(v);
    return true;
}

bool td_fields_str(struct td_fields *f, const char *name, const char **out)
{
    struct td_text t;
    if (!td_fields_text(f, name, &t)) return false;
    if (strlen(t.p) != t.n) {
        td_fields_fail(f, TD_E_INVALID, name, "must not hold a zero byte");
        return false;
    }
    *out = t.p;
    return true;
}

bool td_fields_array(struct td_fields *f, const char *name, const json_t **out)
{
    const json_t *v = typed(f, name, is_array, "an array");
    if (v != NULL) *out = v;
    return v != NULL;
}

bool td_fields_object(struct td_fields *f, const char *name, const json_t **out)
{
    const json_t *v = typed(f, name, is_object, "an object");
    if (v != NULL) *out = v;
    return v != NULL;
}

static bool is_harmless(const json_t *v, enum td_fields_harmless how)
{
    switch (how) {
    case TD_HARMLESS_FALSE: return json_is_false(v);
    case TD_HARMLESS_TRUE: return json_is_true(v);
    case TD_HARMLESS_EMPTY:
        return (json_is_string(v) && json_string_length(v) == 0) || (json_is_array(v) && json_array_size(v) == 0) ||
               (json_is_object(v) && json_object_size(v) == 0);
    case TD_HARMLESS_ONE: return json_is_number(v) && json_number_value(v) == 1;
    default: return false;
    }
}

void td_fields_refuse(struct td_fields *f, const struct td_fields_refusal *list, size_t n)
{
    for (size_t i = 0; i < n && f->st == TD_OK; i++) {
        const json_t *v = td_fields_get(f, list[i].name);
        if (v == NULL || is_harmless(v, list[i].harmless)) continue;
        td_fields_fail(f, TD_E_UNIMPLEMENTED, list[i].name, "%s",
                       list[i].why != NULL ? list[i].why : "this is not supported here");
    }
}
