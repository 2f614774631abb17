/* A device: memory, streams, and the ops it runs. Backends are tables (struct td_backend); the CPU's is built in,
 * others arrive as plug-ins that export the same table. A device may be used from any thread; a stream from one thread
 * at a time. */
#ifndef TD_KERNELS_DEVICE_H
#define TD_KERNELS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "kernels/ops.h"

struct td_device;
struct td_stream;

struct td_device_options {
    const char *backend; /* NULL or "cpu" */
    const char
        *cpu_path; /* NULL: the best this processor has; "scalar", "avx2", "avx512" (tests: all give the same bits) */
};

/* Shapes that size an op's scratch memory; maxima over all passes. */
struct td_scratch_shape {
    uint32_t n_rows, top_k, n_experts, intermediate, hidden;
};

struct td_backend {
    const char *name;
    enum td_status (*open)(const struct td_device_options *o, struct td_device **out, struct td_err *err);
    void (*close)(struct td_device *d);
    enum td_status (*alloc)(struct td_device *d, size_t bytes, void **out); /* aligned to 64, not cleared */
    void (*free)(struct td_device *d, void *p);
    enum td_status (*upload)(struct td_device *d, void *to, const void *from_host, size_t bytes);
    enum td_status (*download)(struct td_device *d, void *to_host, const void *from, size_t bytes);
    size_t (*packed_bytes)(const struct td_device *d, uint32_t n_out, uint32_t n_in, enum td_row_order order,
                           size_t *bias_out);
    size_t (*scratch_bytes)(const struct td_device *d, const struct td_scratch_shape *s);
    enum td_status (*stream_create)(struct td_device *d, uint32_t n_threads, struct td_stream **out);
    void (*stream_destroy)(struct td_stream *s);
    enum td_status (*stream_sync)(struct td_stream *s);
    struct td_ops ops;
};

struct td_device {
    const struct td_backend *backend;
};
struct td_stream {
    struct td_device *device;
};

/* UNSUPPORTED, with the reason, for a backend or path that this machine does not have. */
enum td_status td_device_open(const struct td_device_options *o, struct td_device **out, struct td_err *err);
void td_device_close(struct td_device *d);                 /* NULL is fine; streams and memory go first */
const char *td_device_describe(const struct td_device *d); /* "cpu" */

enum td_status td_device_alloc(struct td_device *d, size_t bytes, void **out);
void td_device_free(struct td_device *d, void *p); /* NULL is fine */
enum td_status td_device_upload(struct td_device *d, void *to, const void *from_host, size_t bytes);
enum td_status td_device_download(struct td_device *d, void *to_host, const void *from, size_t bytes);
/* Bytes of a packed matrix; *bias_out: bytes of its bias. */
size_t td_device_packed_bytes(const struct td_device *d, uint32_t n_out, uint32_t n_in, enum td_row_order order,
                              size_t *bias_out);
size_t td_device_scratch_bytes(const struct td_device *d, const struct td_scratch_shape *s);
const struct td_ops *td_device_ops(const struct td_device *d);

/* n_threads: CPU only, 0: as many as the process may use. The caller's thread is one of them. */
enum td_status td_stream_create(struct td_device *d, uint32_t n_threads, struct td_stream **out);
void td_stream_destroy(struct td_stream *s); /* NULL is fine; waits */
enum td_status td_stream_sync(struct td_stream *s);

#endif
