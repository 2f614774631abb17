#include "common/engine/workspace.h"

#include <stdbool.h>

#include "common/base/log.h"

enum where { PLAN, DEVICE, HOST };

static enum td_status reserve(struct td_workspace *w, enum where where, const char *name, size_t n, size_t size,
                              void **host, void **dev, struct td_err *err)
{
    enum td_status st = TD_OK;
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes)) st = TD_E_NO_MEMORY;
    if (st == TD_OK && where != DEVICE) {
        st = td_device_alloc_host(w->device, bytes, host);
        if (st == TD_OK) w->host_bytes += bytes;
    }
    if (st == TD_OK && where != HOST) {
        st = td_device_alloc(w->device, bytes, dev);
        if (st == TD_OK) w->device_bytes += bytes;
    }
    return st == TD_OK
               ? st
               : td_err_set(err, st, "no memory for the engine's buffer \"%s\", %zu x %zu bytes", name, n, size);
}

enum td_status td_workspace_create(struct td_device *d, const struct td_workspace_shape *s, struct td_workspace *out,
                                   struct td_err *err)
{
    enum td_status st;
    struct td_workspace w = {.device = d};
#define X(where, type, name, count, shape)                                                                             \
    {                                                                                                                  \
        void *host = NULL, *dev = NULL;                                                                                \
        w.name.n = (count);                                                                                            \
        st = reserve(&w, where, #name, w.name.n, sizeof(type), &host, &dev, err);                                      \
        w.name.host = host;                                                                                            \
        w.name.dev = dev;                                                                                              \
        if (st != TD_OK) goto out;                                                                                     \
    }
#include "common/engine/workspace.def"
#undef X
    *out = w;
    return TD_OK;
out:
    td_workspace_free(&w);
    return st;
}

void td_workspace_free(struct td_workspace *w)
{
#define X(where, type, name, count, shape)                                                                             \
    td_device_free_host(w->device, w->name.host);                                                                      \
    td_device_free(w->device, w->name.dev);
#include "common/engine/workspace.def"
#undef X
    *w = (struct td_workspace){0};
}

void td_workspace_log(const struct td_workspace *w)
{
#define X(where, type, name, count, shape)                                                                             \
    TD_DEBUG("workspace", "name=%s where=%s shape=\"%s\" bytes=%zu", #name, #where, shape, w->name.n * sizeof(type));
#include "common/engine/workspace.def"
#undef X
    TD_INFO("workspace_ready", "device_bytes=%zu host_bytes=%zu", w->device_bytes, w->host_bytes);
}
