#include "kernels/device.h"

#include <string.h>

#include "kernels/device_cpu.h"

enum td_status td_device_open(const struct td_device_options *o, struct td_device **out, struct td_err *err)
{
    const char *name = o->backend != NULL ? o->backend : "cpu";
    if (strcmp(name, "cpu") == 0) return td_backend_cpu.open(o, out, err);
    return td_err_set(err, TD_E_UNSUPPORTED, "backend \"%s\" is not in this build; there is: cpu", name);
}

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

enum td_status td_stream_create(struct td_device *d, uint32_t n_threads, struct td_stream **out)
{
    return d->backend->stream_create(d, n_threads, out);
}

void td_stream_destroy(struct td_stream *s)
{
    if (s != NULL) s->device->backend->stream_destroy(s);
}

enum td_status td_stream_sync(struct td_stream *s) { return s->device->backend->stream_sync(s); }
