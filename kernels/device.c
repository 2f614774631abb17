#include "kernels/device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/device_cpu.h"

/* ---- plug-ins
 * ----------------------------------------------------------------------------------------------------------- */

static enum td_status load_plugin(const char *path, const char *name, const struct td_backend **out, struct td_err *err)
{
    /* Never closed: a device library that was unloaded cannot be loaded again safely. */
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL)
        return td_err_set(err, TD_E_UNSUPPORTED, "backend \"%s\": its plug-in cannot be loaded: %s", name, dlerror());
    void *symbol = dlsym(lib, TD_BACKEND_ENTRY);
    td_backend_entry_fn *entry;
    memcpy(&entry, &symbol, sizeof entry); /* ISO C has no cast from object to function pointer */
    const struct td_backend *b = entry != NULL ? entry(TD_BACKEND_ABI) : NULL;
    if (b == NULL)
        return td_err_set(err, TD_E_UNSUPPORTED, "backend \"%s\": %s belongs to another version of Tandem", name, path);
    *out = b;
    return TD_OK;
}

static enum td_status find_plugin(const char *name, const struct td_backend **out, struct td_err *err)
{
    char dir[1024] = "", path[1200];
    const char *given = getenv("TANDEM_PLUGIN_DIR");
    if (strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789") != strlen(name) || strlen(name) > 32)
        return td_err_set(err, TD_E_UNSUPPORTED, "backend \"%.40s\" is not a backend's name", name);
    ssize_t n = readlink("/proc/self/exe", dir, sizeof dir - 1);
    dir[n < 0 ? 0 : n] = '\0';
    char *slash = strrchr(dir, '/');
    if (slash != NULL) *slash = '\0';
    static const char *const beside[] = {"/../lib", ""};
    for (int i = 0; i < (given != NULL ? 1 : 2); i++) {
        snprintf(path, sizeof path, "%s%s/libtandem-%s.so", given != NULL ? given : dir, given != NULL ? "" : beside[i],
                 name);
        if (access(path, F_OK) == 0) return load_plugin(path, name, out, err);
    }
    if (given != NULL)
        return td_err_set(err, TD_E_UNSUPPORTED, "backend \"%s\": there is no %s (TANDEM_PLUGIN_DIR)", name, path);
    return td_err_set(err, TD_E_UNSUPPORTED,
                      "backend \"%s\" is not built in, and no libtandem-%s.so lies in %s/../lib or %s; "
                      "built with nvcc, Tandem has it",
                      name, name, dir, dir);
}

enum td_status td_device_open(const struct td_device_options *o, struct td_device **out, struct td_err *err)
{
    const char *name = o->backend != NULL ? o->backend : "cpu";
    const struct td_backend *b = &td_backend_cpu;
    enum td_status st = strcmp(name, "cpu") == 0 ? TD_OK : find_plugin(name, &b, err);
    return st == TD_OK ? b->open(o, out, err) : st;
}

/* ---- calls passed on
 * ---------------------------------------------------------------------------------------------------- */

void td_device_close(struct td_device *d)
{
    if (d != NULL) d->backend->close(d);
}

const char *td_device_describe(const struct td_device *d) { return d->backend->name; }

enum td_status td_device_alloc(struct td_device *d, size_t bytes, void **out)
{
    return d->backend->alloc(d, bytes, out);
}

void td_device_free(struct td_device *d, void *p)
{
    if (p != NULL) d->backend->free(d, p);
}

enum td_status td_device_alloc_host(struct td_device *d, size_t bytes, void **out)
{
    return d->backend->alloc_host(d, bytes, out);
}

void td_device_free_host(struct td_device *d, void *p)
{
    if (p != NULL) d->backend->free_host(d, p);
}

enum td_status td_device_pin_host(struct td_device *d, void *p, size_t bytes)
{
    return d->backend->pin_host != NULL ? d->backend->pin_host(d, p, bytes) : TD_OK;
}

void td_device_unpin_host(struct td_device *d, void *p)
{
    if (d->backend->unpin_host != NULL) d->backend->unpin_host(d, p);
}

enum td_status td_device_memory(struct td_device *d, uint64_t *free_out, uint64_t *total_out)
{
    return d->backend->memory != NULL ? d->backend->memory(d, free_out, total_out) : TD_E_UNSUPPORTED;
}

enum td_status td_device_upload(struct td_device *d, void *to, const void *from_host, size_t bytes)
{
    return d->backend->upload(d, to, from_host, bytes);
}

enum td_status td_device_download(struct td_device *d, void *to_host, const void *from, size_t bytes)
{
    return d->backend->download(d, to_host, from, bytes);
}

size_t td_device_packed_bytes(const struct td_device *d, uint32_t n_out, uint32_t n_in, enum td_row_order order,
                              size_t *bias_out)
{
    return d->backend->packed_bytes(d, n_out, n_in, order, bias_out);
}

size_t td_device_scratch_bytes(const struct td_device *d, const struct td_scratch_shape *s)
{
    return d->backend->scratch_bytes(d, s);
}

const struct td_ops *td_device_ops(const struct td_device *d) { return &d->backend->ops; }

uint32_t td_device_act_bytes(const struct td_device *d) { return d->backend->act_bytes; }
const char *td_device_last_error(const struct td_device *d)
{
    return d->backend->last_error != NULL ? d->backend->last_error(d) : "";
}

enum td_status td_stream_create(struct td_device *d, uint32_t n_threads, struct td_stream **out)
{
    return d->backend->stream_create(d, n_threads, out);
}

void td_stream_destroy(struct td_stream *s)
{
    if (s != NULL) s->device->backend->stream_destroy(s);
}

enum td_status td_stream_sync(struct td_stream *s) { return s->device->backend->stream_sync(s); }

enum td_status td_stream_copy_in(struct td_stream *s, void *to, const void *from_host, size_t bytes)
{
    return s->device->backend->copy_in(s, to, from_host, bytes);
}

enum td_status td_stream_copy_out(struct td_stream *s, void *to_host, const void *from, size_t bytes)
{
    return s->device->backend->copy_out(s, to_host, from, bytes);
}

enum td_status td_stream_copy(struct td_stream *s, void *to, const void *from, size_t bytes)
{
    return s->device->backend->copy(s, to, from, bytes);
}

enum td_expert_form td_device_expert_form(const struct td_device *d) { return d->experts; }
bool td_device_is_on_host(const struct td_device *d) { return d->backend->is_on_host; }

enum td_status td_stream_packed(struct td_stream *s, uint64_t *n_inexact_out)
{
    *n_inexact_out = 0;
    return s->device->backend->packed != NULL ? s->device->backend->packed(s, n_inexact_out) : TD_OK;
}

enum td_status td_stream_mark(struct td_stream *s, uint32_t i)
{
    return i < TD_STREAM_MARKS ? s->device->backend->mark(s, i) : TD_E_INVALID;
}

bool td_device_runs_behind(const struct td_device *d) { return d->backend->has_passed != NULL; }

enum td_status td_stream_has_passed(struct td_stream *s, uint32_t mark, bool *out)
{
    if (s->device->backend->has_passed == NULL) return TD_E_UNSUPPORTED;
    return mark < TD_STREAM_MARKS ? s->device->backend->has_passed(s, mark, out) : TD_E_INVALID;
}

enum td_status td_stream_mark_us(struct td_stream *s, uint32_t from, uint32_t to, double *out)
{
    if (from >= TD_STREAM_MARKS || to >= TD_STREAM_MARKS) return TD_E_INVALID;
    return s->device->backend->mark_us(s, from, to, out);
}

enum td_status td_side_stream_create(struct td_device *d, struct td_stream **out)
{
    return d->backend->side_stream_create(d, out);
}

enum td_status td_stream_follow(struct td_stream *s, struct td_stream *other)
{
    return s->device->backend->follow(s, other);
}

enum td_status td_stream_call(struct td_stream *s, void (*fn)(void *arg), void *arg)
{
    return s->device->backend->call(s, fn, arg);
}

enum td_status td_stream_scatter(struct td_stream *s, const struct td_piece *pieces, uint32_t n)
{
    return s->device->backend->scatter(s, pieces, n);
}

enum td_status td_device_enter(struct td_device *d) { return d->backend->enter != NULL ? d->backend->enter(d) : TD_OK; }

bool td_device_can_sample(const struct td_device *d) { return d->backend->sample != NULL; }

enum td_status td_stream_sample(struct td_stream *s, const struct td_sample_args *a)
{
    return s->device->backend->sample != NULL ? s->device->backend->sample(s, a) : TD_E_UNSUPPORTED;
}

uint64_t td_device_n_saturated(const struct td_device *d)
{
    return d->backend->n_saturated != NULL ? d->backend->n_saturated(d) : 0;
}

void td_device_explain(const struct td_device *d, const struct td_explain_shape *s,
                       void (*line)(void *user, const char *text), void *user)
{
    if (d->backend->explain != NULL)
        d->backend->explain(d, s, line, user);
    else
        line(user, "op=all kernel=the backend's only one");
}

bool td_device_has_graphs(const struct td_device *d) { return d->backend->graph_begin != NULL; }

enum td_status td_graph_begin(struct td_stream *s)
{
    return s->device->backend->graph_begin != NULL ? s->device->backend->graph_begin(s) : TD_E_UNSUPPORTED;
}

enum td_status td_graph_end(struct td_stream *s, struct td_graph **out)
{
    return s->device->backend->graph_end != NULL ? s->device->backend->graph_end(s, out) : TD_E_UNSUPPORTED;
}

enum td_status td_graph_launch(struct td_stream *s, struct td_graph *g)
{
    return s->device->backend->graph_launch != NULL ? s->device->backend->graph_launch(s, g) : TD_E_UNSUPPORTED;
}

void td_graph_destroy(struct td_device *d, struct td_graph *g)
{
    if (g != NULL) d->backend->graph_destroy(d, g);
}
