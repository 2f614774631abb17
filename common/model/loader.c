#include "common/model/loader_int.h"

#include <stdio.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/model/dummy_int.h"

#define PROGRESS_NS (2 * TD_NS_PER_S)

enum td_status td_loader_no_memory(struct td_loader *l, const char *name)
{
    return td_err_set(l->err, TD_E_NO_MEMORY, "tensor \"%s\": no memory", name);
}

static void say_progress(struct td_loader *l)
{
    uint64_t now = td_clock_ns();
    if (now - l->said_ns < PROGRESS_NS) return;
    l->said_ns = now;
    TD_INFO("weights_loading", "percent=%llu read_gb=%.1f gb_per_s=%.2f",
            (unsigned long long)(l->n_total > 0 ? 100 * l->w->n_bytes / l->n_total : 0), (double)l->n_read / 1e9,
            (double)l->n_read / (double)(now - l->begun_ns));
}

static void print_shape(char *out, size_t n, const uint64_t *shape, uint32_t n_dims)
{
    size_t at = (size_t)snprintf(out, n, "[");
    for (uint32_t i = 0; i < n_dims && at < n; i++)
        at += (size_t)snprintf(out + at, n - at, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    if (at < n) snprintf(out + at, n - at, "]");
}

enum td_status td_loader_find(struct td_loader *l, const char *name, const struct td_want *want, struct td_tensor *out)
{
    say_progress(l);
    if (l->files == NULL) {
        *out = (struct td_tensor){.name = name, .file = "dummy", .type = want->type, .n_dims = want->n_dims};
        uint64_t n = 1;
        for (uint32_t i = 0; i < want->n_dims; i++) n *= out->shape[i] = want->shape[i];
        out->n_bytes = n * td_tensor_type_bytes(want->type);
        l->n_read += out->n_bytes;
        return TD_OK;
    }
    const struct td_tensor *t = td_safetensors_find(l->files, name);
    if (t == NULL) return td_err_set(l->err, TD_E_BAD_FILE, "tensor \"%s\" is missing", name);
    if (t->type != want->type && !(want->or_f32 && t->type == TD_T_F32))
        return td_err_set(l->err, TD_E_BAD_FILE, "%s: tensor \"%s\": dtype: %s where %s%s is expected", t->file, name,
                          td_tensor_type_name(t->type), td_tensor_type_name(want->type), want->or_f32 ? " or F32" : "");
    if (t->n_dims != want->n_dims || memcmp(t->shape, want->shape, want->n_dims * sizeof want->shape[0]) != 0) {
        char have[128], need[128];
        print_shape(have, sizeof have, t->shape, t->n_dims);
        print_shape(need, sizeof need, want->shape, want->n_dims);
        return td_err_set(l->err, TD_E_BAD_FILE, "%s: tensor \"%s\": shape: %s where config.json calls for %s", t->file,
                          name, have, need);
    }
    *out = *t;
    l->n_read += t->n_bytes;
    return TD_OK;
}

/* ---- device memory
 * ---------------------------------------------------------------------------------------------------- */

enum td_status td_loader_alloc(struct td_loader *l, size_t bytes, const char *name, bool is_sharded, void **out)
{
    struct td_weights *w = l->w;
    if (w->n_blocks == w->cap_blocks) {
        uint32_t cap = w->cap_blocks == 0 ? 64 : 2 * w->cap_blocks;
        void **grown = td_realloc(w->blocks, cap, sizeof *grown);
        if (grown == NULL) return td_loader_no_memory(l, name);
        w->blocks = grown;
        w->cap_blocks = cap;
    }
    enum td_status st = td_device_alloc(w->device, bytes, out);
    if (st != TD_OK) return td_err_set(l->err, st, "tensor \"%s\": no memory for %zu bytes of weights", name, bytes);
    w->blocks[w->n_blocks++] = *out;
    w->n_bytes += bytes;
    if (is_sharded) w->n_sharded_bytes += bytes;
    return TD_OK;
}

enum td_status td_loader_floats(struct td_loader *l, const char *name, const struct td_want *want, const float **out)
{
    struct td_tensor t;
    enum td_status st = td_loader_find(l, name, want, &t);
    if (st != TD_OK) return st;
    size_t n = (size_t)(t.n_bytes / td_tensor_type_bytes(t.type));
    if (n > l->n_floats) {
        float *p = td_realloc(l->floats, n, sizeof *p);
        if (p == NULL) return td_loader_no_memory(l, name);
        l->floats = p;
        l->n_floats = n;
    }
    *out = l->floats;
    if (t.type == TD_T_F32) {
        memcpy(l->floats, t.data, n * sizeof(float));
        return TD_OK;
    }
    /* Into the upper half of its own memory, then widened from the front. */
    uint16_t *narrow = (uint16_t *)(void *)l->floats + n;
    if (t.data != NULL)
        memcpy(narrow, t.data, n * sizeof *narrow);
    else
        td_dummy_bytes(l->dummy_seed, &t, 0, t.n_bytes, (uint8_t *)narrow);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)narrow[i] << 16;
        memcpy(&l->floats[i], &bits, sizeof bits);
    }
    return TD_OK;
}

enum td_status td_loader_turn(struct td_loader *l, const char *name, struct td_stream **out)
{
    enum td_status st = td_lanes_turn(l->lanes, out);
    return st == TD_OK ? st : td_err_set(l->err, st, "tensor \"%s\": %s", name, td_device_last_error(l->w->device));
}

enum td_status td_loader_bytes(struct td_loader *l, const struct td_tensor *t, uint64_t at, uint64_t n,
                               const uint8_t **out)
{
    enum td_status st = td_lanes_bytes(l->lanes, t, at, n, out);
    return st == TD_OK ? st : td_loader_no_memory(l, t->name);
}

enum td_status td_loader_put(struct td_loader *l, const char *name, const void *from, size_t n, const void **out)
{
    enum td_status st = td_lanes_put(l->lanes, from, n, out);
    return st == TD_OK ? st : td_loader_no_memory(l, name);
}

enum td_status td_loader_pack(struct td_loader *l, struct td_stream *stream, const char *name,
                              const struct td_pack_weight_args *a)
{
    enum td_status st = td_device_ops(l->w->device)->pack_weight(stream, a);
    if (st == TD_E_INVALID)
        return td_err_set(l->err, TD_E_BAD_FILE, "tensor \"%s\": a scale is NaN (255) or too large for bf16", name);
    return st == TD_OK ? TD_OK : td_err_set(l->err, st, "tensor \"%s\": cannot be packed", name);
}

enum td_status td_loader_finish(struct td_loader *l, const char *name)
{
    uint64_t n_inexact;
    enum td_status st = td_lanes_finish(l->lanes, &n_inexact);
    l->n_inexact += n_inexact;
    if (st == TD_E_INVALID)
        return td_err_set(l->err, TD_E_BAD_FILE, "tensor \"%s\": a scale is NaN (255) or too large for bf16", name);
    return st == TD_OK ? TD_OK : td_err_set(l->err, st, "tensor \"%s\": cannot be packed", name);
}
