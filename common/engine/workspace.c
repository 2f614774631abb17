#include "common/engine/workspace.h"

#include <stdbool.h>

#include "common/base/log.h"

#define PLAN_ALIGN 64u

enum where { PLAN, LIST, BACK, KEPT, DEVICE, HOST };

static bool is_on_device(enum where where) { return where == DEVICE || where == LIST || where == BACK; }
static uint32_t n_host_copies(enum where where)
{
    return where == LIST || where == BACK || where == KEPT ? 2 : where == HOST;
}

static enum td_status no_memory(struct td_err *err, enum td_status st, const char *name, size_t n, size_t size)
{
    return td_err_set(err, st,
                      "no memory for the engine's buffer \"%s\", %zu x %zu bytes: lower --kv-bytes, "
                      "--prefill-chunk-tokens or --max-batch",
                      name, n, size);
}

static enum td_status reserve(struct td_workspace *w, enum where where, const char *name, size_t n, size_t size,
                              void *host[2], void **dev, struct td_err *err)
{
    enum td_status st = TD_OK;
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes)) st = TD_E_NO_MEMORY;
    for (uint32_t i = 0; i < n_host_copies(where) && st == TD_OK; i++) {
        st = td_device_alloc_host(w->device, bytes, &host[i]);
        if (st == TD_OK) w->host_bytes += bytes;
    }
    if (st == TD_OK && is_on_device(where)) {
        st = td_device_alloc(w->device, bytes, dev);
        if (st == TD_OK) w->device_bytes += bytes;
    }
    return st == TD_OK ? st : no_memory(err, st, name, n, size);
}

/* Behind what of the plan is there already; false: too large to count. */
static bool place(size_t *offset, size_t n, size_t size, size_t *at)
{
    size_t bytes;
    *at = *offset;
    if (__builtin_mul_overflow(n, size, &bytes) || __builtin_add_overflow(*offset, bytes, offset) ||
        *offset > SIZE_MAX - PLAN_ALIGN)
        return false;
    *offset = (*offset + PLAN_ALIGN - 1) / PLAN_ALIGN * PLAN_ALIGN;
    return true;
}

static enum td_status create_plan(struct td_workspace *w, const struct td_workspace_shape *s, struct td_err *err)
{
    size_t bytes = 0, at;
#define X(where, type, name, count, shape)                                                                             \
    if (where == PLAN && !place(&bytes, (count), sizeof(type), &at))                                                   \
        return no_memory(err, TD_E_NO_MEMORY, #name, (count), sizeof(type));
#include "common/engine/workspace.def"
#undef X
    enum td_status st = td_device_alloc(w->device, bytes, &w->plan_dev);
    for (int i = 0; i < 2 && st == TD_OK; i++) st = td_device_alloc_host(w->device, bytes, &w->plan_host[i]);
    if (st != TD_OK) return no_memory(err, st, "plan", 1, bytes);
    w->device_bytes += bytes;
    w->host_bytes += 2 * bytes;
    bytes = 0;
#define X(where, type, name, count, shape)                                                                             \
    if (where == PLAN) {                                                                                               \
        place(&bytes, (count), sizeof(type), &at);                                                                     \
        w->name.n = (count);                                                                                           \
        w->name.dev = (type *)(void *)((char *)w->plan_dev + at);                                                      \
        for (int i = 0; i < 2; i++) w->name.turns[i] = (type *)(void *)((char *)w->plan_host[i] + at);                 \
    }
#include "common/engine/workspace.def"
#undef X
    return TD_OK;
}

enum td_status td_workspace_create(struct td_device *d, const struct td_workspace_shape *s, struct td_workspace *out,
                                   struct td_err *err)
{
    struct td_workspace w = {.device = d};
    enum td_status st = create_plan(&w, s, err);
    if (st != TD_OK) goto out;
#define X(where, type, name, count, shape)                                                                             \
    if (where != PLAN) {                                                                                               \
        void *host[2] = {NULL, NULL}, *dev = NULL;                                                                     \
        w.name.n = (count);                                                                                            \
        st = reserve(&w, where, #name, w.name.n, sizeof(type), host, &dev, err);                                       \
        w.name.turns[0] = host[0];                                                                                     \
        w.name.turns[1] = where == HOST ? host[0] : host[1];                                                           \
        w.name.dev = dev;                                                                                              \
        if (st != TD_OK) goto out;                                                                                     \
    }
#include "common/engine/workspace.def"
#undef X
    td_workspace_turn(&w, 0);
    *out = w;
    return TD_OK;
out:
    td_workspace_free(&w);
    return st;
}

void td_workspace_free(struct td_workspace *w)
{
#define X(where, type, name, count, shape)                                                                             \
    if (where != PLAN) {                                                                                               \
        td_device_free_host(w->device, w->name.turns[0]);                                                              \
        if (where != HOST) td_device_free_host(w->device, w->name.turns[1]);                                           \
        td_device_free(w->device, w->name.dev);                                                                        \
    }
#include "common/engine/workspace.def"
#undef X
    for (int i = 0; i < 2; i++) td_device_free_host(w->device, w->plan_host[i]);
    td_device_free(w->device, w->plan_dev);
    *w = (struct td_workspace){0};
}

void td_workspace_turn(struct td_workspace *w, uint32_t turn)
{
#define X(where, type, name, count, shape) w->name.host = w->name.turns[turn];
#include "common/engine/workspace.def"
#undef X
}

size_t td_workspace_plan_bytes(const struct td_workspace *w, size_t n_pages)
{
    return (size_t)((const char *)(w->pages.dev + n_pages) - (const char *)w->plan_dev);
}

void td_workspace_log(const struct td_workspace *w)
{
#define X(where, type, name, count, shape)                                                                             \
    TD_DEBUG("workspace", "name=%s where=%s shape=\"%s\" bytes=%zu", #name, #where, shape, w->name.n * sizeof(type));
#include "common/engine/workspace.def"
#undef X
    TD_INFO("workspace_ready", "device_bytes=%zu host_bytes=%zu", w->device_bytes, w->host_bytes);
}
