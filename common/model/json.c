#include "common/model/json_int.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/mem.h"

enum td_status td_model_read_file(const char *path, size_t max_bytes, char **out, size_t *n_out, struct td_err *err)
{
    enum td_status st = TD_OK;
    char *text = NULL;
    /* NONBLOCK: opening a pipe by mistake must not hang. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) return TD_E_NOT_FOUND;
    if (fd < 0) return td_err_set(err, TD_E_IO, "%s: %s", path, strerror(errno));
    struct stat info;
    if (fstat(fd, &info) != 0) {
        st = td_err_set(err, TD_E_IO, "%s: %s", path, strerror(errno));
        goto out;
    }
    if (!S_ISREG(info.st_mode)) {
        st = td_err_set(err, TD_E_BAD_FILE, "%s: not a regular file", path);
        goto out;
    }
    if ((uint64_t)info.st_size > max_bytes) {
        st = td_err_set(err, TD_E_BAD_FILE, "%s: %lld bytes, more than the %zu expected of such a file", path,
                        (long long)info.st_size, max_bytes);
        goto out;
    }
    size_t n = 0, size = (size_t)info.st_size;
    text = td_calloc(size + 1, 1);
    if (text == NULL) {
        st = td_err_set(err, TD_E_NO_MEMORY, "%s: no memory for %zu bytes", path, size);
        goto out;
    }
    while (n < size) {
        ssize_t got = read(fd, text + n, size - n);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            st = td_err_set(err, TD_E_IO, "%s: %s", path, strerror(errno));
            goto out;
        }
        if (got == 0) break; /* it shrank: what is there is what there is */
        n += (size_t)got;
    }
    *out = text;
    *n_out = n;
    text = NULL;
out:
    free(text);
    close(fd);
    return st;
}

enum td_status td_model_json_parse(const char *text, size_t n, const char *what, json_t **out, struct td_err *err)
{
    json_error_t e;
    /* NUL in a string is legal JSON, and tokenizers may hold it. */
    json_t *j = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &e);
    if (j == NULL) return td_err_set(err, TD_E_BAD_FILE, "%s: line %d, column %d: %s", what, e.line, e.column, e.text);
    if (!json_is_object(j)) {
        json_decref(j);
        return td_err_set(err, TD_E_BAD_FILE, "%s: not a JSON object", what);
    }
    *out = j;
    return TD_OK;
}

enum td_status td_model_json_load(const char *path, size_t max_bytes, json_t **out, struct td_err *err)
{
    char *text = NULL;
    size_t n = 0;
    enum td_status st = td_model_read_file(path, max_bytes, &text, &n, err);
    if (st != TD_OK) return st;
    st = td_model_json_parse(text, n, path, out, err);
    free(text);
    return st;
}

static const json_t *get(const struct td_json_fields *f, const char *name)
{
    const json_t *j = f->object != NULL ? json_object_get(f->object, name) : NULL;
    return json_is_null(j) ? NULL : j;
}

bool td_json_has(const struct td_json_fields *f, const char *name) { return get(f, name) != NULL; }

void td_json_fail(struct td_json_fields *f, const char *fmt, ...)
{
    if (f->st != TD_OK) return;
    char text[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    f->st = td_err_set(f->err, TD_E_BAD_FILE, "%s: %s%s", f->file, f->prefix, text);
}

void td_json_require(struct td_json_fields *f, const char *name)
{
    if (get(f, name) == NULL) td_json_fail(f, "%s: missing", name);
}

void td_json_u32(struct td_json_fields *f, const char *name, uint32_t min, uint32_t max, uint32_t *out)
{
    const json_t *j = get(f, name);
    if (j == NULL) return;
    if (!json_is_integer(j)) {
        td_json_fail(f, "%s: must be an integer", name);
        return;
    }
    json_int_t v = json_integer_value(j);
    if (v < (json_int_t)min || v > (json_int_t)max)
        td_json_fail(f, "%s: %lld is outside %u .. %u", name, (long long)v, min, max);
    else
        *out = (uint32_t)v;
}

void td_json_f64(struct td_json_fields *f, const char *name, double min, double max, double *out)
{
    const json_t *j = get(f, name);
    if (j == NULL) return;
    if (!json_is_number(j)) {
        td_json_fail(f, "%s: must be a number", name);
        return;
    }
    double v = json_number_value(j);
    if (!(v >= min && v <= max))
        td_json_fail(f, "%s: %g is outside %g .. %g", name, v, min, max);
    else
        *out = v;
}

void td_json_bool(struct td_json_fields *f, const char *name, bool *out)
{
    const json_t *j = get(f, name);
    if (j == NULL) return;
    if (!json_is_boolean(j))
        td_json_fail(f, "%s: must be true or false", name);
    else
        *out = json_is_true(j);
}

const char *td_json_str(struct td_json_fields *f, const char *name)
{
    const json_t *j = get(f, name);
    if (j == NULL) return NULL;
    if (!json_is_string(j)) {
        td_json_fail(f, "%s: must be a string", name);
        return NULL;
    }
    return json_string_value(j);
}

const json_t *td_json_object(struct td_json_fields *f, const char *name)
{
    const json_t *j = get(f, name);
    if (j != NULL && !json_is_object(j)) {
        td_json_fail(f, "%s: must be an object", name);
        return NULL;
    }
    return j;
}

const json_t *td_json_array(struct td_json_fields *f, const char *name)
{
    const json_t *j = get(f, name);
    if (j != NULL && !json_is_array(j)) {
        td_json_fail(f, "%s: must be an array", name);
        return NULL;
    }
    return j;
}
