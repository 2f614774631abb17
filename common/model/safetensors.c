#include "common/model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "common/model/json_int.h"

#define MAX_HEADER_BYTES (100u << 20) /* the format's own limit */
#define MAX_INDEX_BYTES  (64u << 20)
#define MAX_FILES        4096u

static const struct {
    const char *name;
    uint32_t bytes;
} types[TD_T_N] = {
    [TD_T_BOOL] = {"BOOL", 1},       [TD_T_U8] = {"U8", 1},   [TD_T_I8] = {"I8", 1},   [TD_T_F8_E4M3] = {"F8_E4M3", 1},
    [TD_T_F8_E5M2] = {"F8_E5M2", 1}, [TD_T_U16] = {"U16", 2}, [TD_T_I16] = {"I16", 2}, [TD_T_F16] = {"F16", 2},
    [TD_T_BF16] = {"BF16", 2},       [TD_T_U32] = {"U32", 4}, [TD_T_I32] = {"I32", 4}, [TD_T_F32] = {"F32", 4},
    [TD_T_U64] = {"U64", 8},         [TD_T_I64] = {"I64", 8}, [TD_T_F64] = {"F64", 8},
};

const char *td_tensor_type_name(enum td_tensor_type t) { return types[t].name; }
uint32_t td_tensor_type_bytes(enum td_tensor_type t) { return types[t].bytes; }

struct file {
    char *path;
    uint8_t *map;
    size_t n_bytes;
    struct td_tensor *tensors; /* names are copies */
    uint32_t n_tensors;
};

struct td_safetensors {
    struct file *files;
    uint32_t n_files;
    const struct td_tensor **sorted;
    uint32_t n_tensors;
};

/* ---- one header
 * ------------------------------------------------------------------------------------------------------- */

static enum td_status bad(struct td_err *err, const char *file, const char *tensor, const char *what)
{
    return td_err_set(err, TD_E_BAD_FILE, "%s: tensor \"%.200s\": %s", file, tensor, what);
}

static enum td_status read_entry(const char *file, const char *name, const json_t *j, const uint8_t *data,
                                 uint64_t n_data, struct td_tensor *t, struct td_err *err)
{
    if (!json_is_object(j)) return bad(err, file, name, "entry is not an object");
    const char *type = json_string_value(json_object_get(j, "dtype"));
    if (type == NULL) return bad(err, file, name, "dtype: missing or not a string");
    t->type = TD_T_N;
    for (uint32_t i = 0; i < TD_T_N; i++)
        if (strcmp(type, types[i].name) == 0) t->type = (enum td_tensor_type)i;
    if (t->type == TD_T_N) return bad(err, file, name, "dtype: not a known type");

    const json_t *shape = json_object_get(j, "shape"), *offsets = json_object_get(j, "data_offsets");
    if (!json_is_array(shape)) return bad(err, file, name, "shape: missing or not an array");
    if (json_array_size(shape) > TD_TENSOR_MAX_DIMS) return bad(err, file, name, "shape: too many dimensions");
    t->n_dims = (uint32_t)json_array_size(shape);
    uint64_t n_bytes = types[t->type].bytes;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        const json_t *d = json_array_get(shape, i);
        if (!json_is_integer(d) || json_integer_value(d) < 0)
            return bad(err, file, name, "shape: not a list of natural numbers");
        t->shape[i] = (uint64_t)json_integer_value(d);
        if (__builtin_mul_overflow(n_bytes, t->shape[i], &n_bytes)) return bad(err, file, name, "shape: too large");
    }
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !json_is_integer(json_array_get(offsets, 0)) ||
        !json_is_integer(json_array_get(offsets, 1)))
        return bad(err, file, name, "data_offsets: must be two integers");
    json_int_t begin = json_integer_value(json_array_get(offsets, 0));
    json_int_t end = json_integer_value(json_array_get(offsets, 1));
    if (begin < 0 || end < begin) return bad(err, file, name, "data_offsets: not a range");
    if ((uint64_t)end > n_data)
        return td_err_set(
            err, TD_E_BAD_FILE,
            "%s: tensor \"%.200s\": data_offsets: ends at byte %lld of %llu: the file is cut short or the "
            "header wrong",
            file, name, (long long)end, (unsigned long long)n_data);
    if ((uint64_t)(end - begin) != n_bytes)
        return td_err_set(err, TD_E_BAD_FILE,
                          "%s: tensor \"%.200s\": data_offsets: %lld bytes where the shape needs %llu", file, name,
                          (long long)(end - begin), (unsigned long long)n_bytes);
    t->file = file;
    t->data = data + begin;
    t->n_bytes = n_bytes;
    return TD_OK;
}

static int by_data(const void *a, const void *b)
{
    const struct td_tensor *x = *(const struct td_tensor *const *)a, *y = *(const struct td_tensor *const *)b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes; /* empty ones first: they overlap nothing */
}

static int tensor_by_name(const void *a, const void *b)
{
    return strcmp(((const struct td_tensor *)a)->name, ((const struct td_tensor *)b)->name);
}

static enum td_status check_overlap(const struct file *f, struct td_err *err)
{
    if (f->n_tensors == 0) return TD_OK;
    const struct td_tensor **sorted = td_calloc(f->n_tensors, sizeof *sorted);
    if (sorted == NULL) return td_err_set(err, TD_E_NO_MEMORY, "%s: no memory", f->path);
    for (uint32_t i = 0; i < f->n_tensors; i++) sorted[i] = &f->tensors[i];
    qsort(sorted, f->n_tensors, sizeof *sorted, by_data);
    enum td_status st = TD_OK;
    for (uint32_t i = 1; i < f->n_tensors && st == TD_OK; i++)
        if (sorted[i]->data < sorted[i - 1]->data + sorted[i - 1]->n_bytes)
            st = td_err_set(err, TD_E_BAD_FILE, "%s: tensors \"%.160s\" and \"%.160s\" overlap", f->path,
                            sorted[i - 1]->name, sorted[i]->name);
    free(sorted);
    return st;
}

/* Reads the header at f->map; tensors point behind it. */
static enum td_status read_header(struct file *f, struct td_err *err)
{
    if (f->n_bytes < 8)
        return td_err_set(err, TD_E_BAD_FILE, "%s: %zu bytes are no safetensors file", f->path, f->n_bytes);
    uint64_t n = 0;
    for (uint32_t i = 0; i < 8; i++) n |= (uint64_t)f->map[i] << (8 * i);
    if (n > f->n_bytes - 8 || n > MAX_HEADER_BYTES)
        return td_err_set(err, TD_E_BAD_FILE, "%s: header length: %llu bytes in a file of %zu", f->path,
                          (unsigned long long)n, f->n_bytes);
    json_t *head = NULL;
    enum td_status st = td_model_json_parse((const char *)f->map + 8, (size_t)n, f->path, &head, err);
    if (st != TD_OK) return st;
    f->tensors = td_calloc(json_object_size(head), sizeof *f->tensors);
    if (f->tensors == NULL) {
        st = td_err_set(err, TD_E_NO_MEMORY, "%s: no memory for the header", f->path);
        goto out;
    }
    const char *name;
    json_t *entry;
    json_object_foreach (head, name, entry) {
        if (strcmp(name, "__metadata__") == 0) {
            const char *key;
            json_t *value;
            bool is_fine = json_is_object(entry);
            json_object_foreach (entry, key, value) is_fine = is_fine && json_is_string(value);
            if (!is_fine)
                TD_TRY(td_err_set(err, TD_E_BAD_FILE, "%s: __metadata__: must map strings to strings", f->path));
            continue;
        }
        struct td_tensor *t = &f->tensors[f->n_tensors];
        TD_TRY(read_entry(f->path, name, entry, f->map + 8 + n, f->n_bytes - 8 - n, t, err));
        t->name = td_strdup(name);
        if (t->name == NULL) TD_TRY(td_err_set(err, TD_E_NO_MEMORY, "%s: no memory for the header", f->path));
        f->n_tensors++;
    }
    if (f->n_tensors > 0) qsort(f->tensors, f->n_tensors, sizeof *f->tensors, tensor_by_name);
    st = check_overlap(f, err);
out:
    json_decref(head);
    return st;
}

static void free_tensors(struct file *f)
{
    for (uint32_t i = 0; i < f->n_tensors; i++) free((char *)(uintptr_t)f->tensors[i].name);
    free(f->tensors);
}

enum td_status td_safetensors_check(const uint8_t *bytes, size_t n, struct td_err *err)
{
    char name[] = "memory";
    struct file f = {.path = name, .map = (uint8_t *)(uintptr_t)bytes, .n_bytes = n};
    enum td_status st = read_header(&f, err);
    free_tensors(&f);
    return st;
}

/* ---- files and index
 * ---------------------------------------------------------------------------------------------------- */

static enum td_status open_file(struct file *f, struct td_err *err)
{
    enum td_status st = TD_OK;
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return td_err_set(err, TD_E_BAD_FILE, "%s: %s", f->path, strerror(errno));
    struct stat info;
    if (fstat(fd, &info) != 0) {
        st = td_err_set(err, TD_E_IO, "%s: %s", f->path, strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        st = td_err_set(err, TD_E_BAD_FILE, "%s: not a regular file", f->path);
    } else if (info.st_size < 8) {
        st = td_err_set(err, TD_E_BAD_FILE, "%s: %lld bytes are no safetensors file", f->path, (long long)info.st_size);
    } else {
        void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            st = td_err_set(err, TD_E_IO, "%s: cannot map: %s", f->path, strerror(errno));
        } else {
            f->map = map;
            f->n_bytes = (size_t)info.st_size;
        }
    }
    close(fd);
    return st != TD_OK ? st : read_header(f, err);
}

static struct file *find_file(struct td_safetensors *s, const char *path)
{
    for (uint32_t i = 0; i < s->n_files; i++)
        if (strcmp(s->files[i].path, path) == 0) return &s->files[i];
    return NULL;
}

static enum td_status add_file(struct td_safetensors *s, const char *path, struct file **out, struct td_err *err)
{
    if (s->n_files == MAX_FILES) return td_err_set(err, TD_E_BAD_FILE, "%s: more than %u files", path, MAX_FILES);
    struct file *grown = td_realloc(s->files, s->n_files + 1, sizeof *grown);
    if (grown == NULL) return td_err_set(err, TD_E_NO_MEMORY, "%s: no memory", path);
    s->files = grown;
    struct file *f = &s->files[s->n_files];
    *f = (struct file){.path = td_strdup(path)};
    if (f->path == NULL) return td_err_set(err, TD_E_NO_MEMORY, "%s: no memory", path);
    s->n_files++;
    *out = f;
    return open_file(f, err);
}

static const struct td_tensor *find_in_file(const struct file *f, const char *name)
{
    struct td_tensor key = {.name = name};
    return f->n_tensors == 0 ? NULL : bsearch(&key, f->tensors, f->n_tensors, sizeof key, tensor_by_name);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const struct td_tensor *const *)a)->name, (*(const struct td_tensor *const *)b)->name);
}

static enum td_status add_tensor(struct td_safetensors *s, const struct td_tensor *t, struct td_err *err)
{
    const struct td_tensor **grown = td_realloc(s->sorted, (size_t)s->n_tensors + 1, sizeof *grown);
    if (grown == NULL) return td_err_set(err, TD_E_NO_MEMORY, "%s: no memory", t->file);
    s->sorted = grown;
    s->sorted[s->n_tensors++] = t;
    return TD_OK;
}

static enum td_status open_indexed(struct td_safetensors *s, const char *dir, const char *path, json_t *index,
                                   struct td_err *err)
{
    const json_t *map = json_object_get(index, "weight_map");
    if (!json_is_object(map)) return td_err_set(err, TD_E_BAD_FILE, "%s: weight_map: missing or not an object", path);
    /* Files first: adding one moves the table that tensors point into through find_file. */
    for (int pass = 0; pass < 2; pass++) {
        void *it = json_object_iter((json_t *)(uintptr_t)map);
        for (; it != NULL; it = json_object_iter_next((json_t *)(uintptr_t)map, it)) {
            const char *name = json_object_iter_key(it), *file = json_string_value(json_object_iter_value(it));
            if (file == NULL || file[0] == 0 || strchr(file, '/') != NULL || strcmp(file, "..") == 0 ||
                strlen(file) > 255)
                return td_err_set(err, TD_E_BAD_FILE, "%s: weight_map: \"%.200s\": not the name of a file beside it",
                                  path, name);
            char file_path[4096];
            if (snprintf(file_path, sizeof file_path, "%s/%s", dir, file) >= (int)sizeof file_path)
                return td_err_set(err, TD_E_BAD_FILE, "%s: path too long", dir);
            struct file *f = find_file(s, file_path);
            enum td_status st = TD_OK;
            if (f == NULL && pass == 0) st = add_file(s, file_path, &f, err);
            if (st != TD_OK) return td_err_prefix(err, st, "%s names it", path);
            if (pass == 0) continue;
            const struct td_tensor *t = find_in_file(f, name);
            if (t == NULL)
                return td_err_set(err, TD_E_BAD_FILE, "%s: tensor \"%.200s\" is missing, though %s places it there",
                                  f->path, name, path);
            st = add_tensor(s, t, err);
            if (st != TD_OK) return st;
        }
    }
    return TD_OK;
}

enum td_status td_safetensors_open(const char *dir, struct td_safetensors **out, struct td_err *err)
{
    char path[4096];
    json_t *index = NULL;
    enum td_status st;
    struct td_safetensors *s = td_calloc(1, sizeof *s);
    if (s == NULL) return td_err_set(err, TD_E_NO_MEMORY, "%s: no memory", dir);
    if (snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir) >= (int)sizeof path)
        TD_TRY(td_err_set(err, TD_E_BAD_FILE, "%s: path too long", dir));
    st = td_model_json_load(path, MAX_INDEX_BYTES, &index, err);
    if (st == TD_E_NOT_FOUND) {
        struct file *f = NULL;
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        st = add_file(s, path, &f, err);
        if (st != TD_OK) TD_TRY(td_err_prefix(err, st, "no model.safetensors.index.json, and no single file"));
        for (uint32_t i = 0; i < f->n_tensors; i++) TD_TRY(add_tensor(s, &f->tensors[i], err));
    } else {
        if (st == TD_OK) st = open_indexed(s, dir, path, index, err);
        if (st != TD_OK) goto out;
    }
    if (s->n_tensors > 0) qsort(s->sorted, s->n_tensors, sizeof *s->sorted, by_name);
    *out = s;
    s = NULL;
out:
    json_decref(index);
    td_safetensors_close(s);
    return st;
}

void td_safetensors_close(struct td_safetensors *s)
{
    if (s == NULL) return;
    for (uint32_t i = 0; i < s->n_files; i++) {
        free_tensors(&s->files[i]);
        if (s->files[i].map != NULL) munmap(s->files[i].map, s->files[i].n_bytes);
        free(s->files[i].path);
    }
    free(s->files);
    free(s->sorted);
    free(s);
}

uint32_t td_safetensors_count(const struct td_safetensors *s) { return s->n_tensors; }

const struct td_tensor *td_safetensors_at(const struct td_safetensors *s, uint32_t i)
{
    TD_CHECK(i < s->n_tensors);
    return s->sorted[i];
}

const struct td_tensor *td_safetensors_find(const struct td_safetensors *s, const char *name)
{
    struct td_tensor key = {.name = name};
    const struct td_tensor *k = &key;
    const struct td_tensor **hit = s->n_tensors == 0 ? NULL : bsearch(&k, s->sorted, s->n_tensors, sizeof k, by_name);
    return hit == NULL ? NULL : *hit;
}
