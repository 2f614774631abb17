/* A device: memory, streams, and the ops it runs. Backends are tables (struct td_backend); the CPU's is built in,
 * others arrive as plug-ins that export the same table. A device may be used from any thread; a stream from one thread
 * at a time. */
#ifndef TD_KERNELS_DEVICE_H
#define TD_KERNELS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "kernels/ops.h"

struct td_device;
struct td_stream;

/* How a device holds routed experts. BF16: every device, exact. FP8: E4M3 with a power-of-two scale a tile of 128 x
 * 128. MXFP4: as released, widened while computing. Both take E4M3 activations, unless asked for bf16. */
enum td_expert_form { TD_EXPERTS_BF16, TD_EXPERTS_FP8, TD_EXPERTS_MXFP4 };

struct td_device_options {
    const char *backend; /* NULL or "cpu"; "cuda" is a plug-in */
    uint32_t index;      /* of several devices of one kind */
    enum td_expert_form experts;
    bool has_bf16_activations; /* of experts in FP8 or MXFP4, instead of E4M3: more exact, slower */
    bool is_dense_fp8; /* matrices packed as TD_ROWS_DENSE in E4M3, a scale a row */
    const char
        *cpu_path; /* NULL: the best this processor has; "scalar", "avx2", "avx512" (tests: all give the same bits) */
    bool is_batch_invariant; /* rows do not depend on their company, bit for bit (args.h); the CPU's never do */
};

/* Shapes that size an op's scratch memory; maxima over all passes. */
struct td_scratch_shape {
    uint32_t n_rows, top_k, n_experts, intermediate, hidden;
    size_t fp8_kv_bytes; /* of one sequence's FP8 pages in one layer; 0: none are FP8 */
};

/* Shapes of a model, for what explains which kernels they get. */
struct td_explain_shape {
    uint32_t n_heads, n_kv_heads, head_dim, hidden, intermediate, n_experts, top_k, vocab;
};

/* A run of bytes that a scatter moves. Both ends on 16 bytes, n_bytes a multiple of 16. */
struct td_piece {
    const void *from;
    void *to;
    uint64_t n_bytes;
};

/* Work recorded once and replayed with the same arguments; buffers it names outlive it. */
struct td_graph;

struct td_backend {
    const char *name;
    uint32_t act_bytes; /* of an activation (args.h): 4 f32, 2 bf16 */
    bool is_on_host;    /* its memory is the host's: any pointer will do, and files are read where they lie */
    enum td_status (*open)(const struct td_device_options *o, struct td_device **out, struct td_err *err);
    void (*close)(struct td_device *d);
    enum td_status (*alloc)(struct td_device *d, size_t bytes, void **out); /* aligned to 64, not cleared */
    void (*free)(struct td_device *d, void *p);
    enum td_status (*upload)(struct td_device *d, void *to, const void *from_host, size_t bytes);
    enum td_status (*download)(struct td_device *d, void *to_host, const void *from, size_t bytes);
    /* Host memory that copies to and from the device fast; cleared, aligned to 64. */
    enum td_status (*alloc_host)(struct td_device *d, size_t bytes, void **out);
    void (*free_host)(struct td_device *d, void *p);
    /* NULL: nothing to do. Host memory of others becomes as fast to copy as alloc_host's. */
    enum td_status (*pin_host)(struct td_device *d, void *p, size_t bytes);
    void (*unpin_host)(struct td_device *d, void *p);
    size_t (*packed_bytes)(const struct td_device *d, uint32_t n_out, uint32_t n_in, enum td_row_order order,
                           size_t *bias_out);
    size_t (*scratch_bytes)(const struct td_device *d, const struct td_scratch_shape *s);
    enum td_status (*stream_create)(struct td_device *d, uint32_t n_threads, struct td_stream **out);
    void (*stream_destroy)(struct td_stream *s);
    enum td_status (*stream_sync)(struct td_stream *s);
    /* In stream order; the host memory is alloc_host's and stays untouched until the stream passes. */
    enum td_status (*copy_in)(struct td_stream *s, void *to, const void *from_host, size_t bytes);
    enum td_status (*copy_out)(struct td_stream *s, void *to_host, const void *from, size_t bytes);
    enum td_status (*copy)(struct td_stream *s, void *to, const void *from, size_t bytes); /* both on the device */
    /* A stream of short work beside a busy one: goes first where both have something to run. Runs no ops. */
    enum td_status (*side_stream_create)(struct td_device *d, struct td_stream **out);
    enum td_status (*enter)(struct td_device *d); /* NULL: nothing to do */
    enum td_status (*follow)(struct td_stream *s, struct td_stream *other);
    enum td_status (*call)(struct td_stream *s, void (*fn)(void *arg), void *arg);
    enum td_status (*scatter)(struct td_stream *s, const struct td_piece *pieces, uint32_t n);
    /* NULL for a backend without graphs. */
    enum td_status (*graph_begin)(struct td_stream *s);
    enum td_status (*graph_end)(struct td_stream *s, struct td_graph **out);
    enum td_status (*graph_launch)(struct td_stream *s, struct td_graph *g);
    void (*graph_destroy)(struct td_device *d, struct td_graph *g);
    const char *(*last_error)(const struct td_device *d); /* the first failure's text, "" if none */
    /* NULL: nobody can say. */
    enum td_status (*memory)(struct td_device *d, uint64_t *free_out, uint64_t *total_out);
    enum td_status (*packed)(struct td_stream *s, uint64_t *n_inexact_out); /* NULL: pack_weight never defers */
    enum td_status (*mark)(struct td_stream *s, uint32_t i);
    enum td_status (*mark_us)(struct td_stream *s, uint32_t from, uint32_t to, double *out);
    /* NULL for a backend that has done its work when a call returns. */
    enum td_status (*has_passed)(struct td_stream *s, uint32_t mark, bool *out);
    /* NULL: the engine draws on the host, and logits are few rows at a time. */
    enum td_status (*sample)(struct td_stream *s, const struct td_sample_args *a);
    /* Values of all passes that were beyond what FP8 pages hold. NULL: 0. */
    uint64_t (*n_saturated)(const struct td_device *d);
    /* NULL: there is nothing to choose. A line an op and number of rows, "op=... rows=... kernel=...". */
    void (*explain)(const struct td_device *d, const struct td_explain_shape *s,
                    void (*line)(void *user, const char *text), void *user);
    struct td_ops ops;
};

struct td_device {
    const struct td_backend *backend;
    enum td_expert_form experts;
};
struct td_stream {
    struct td_device *device;
};

/* What a plug-in exports, as TD_BACKEND_ENTRY. abi: TD_BACKEND_ABI of the program; NULL if the plug-in was built for
 * another. */
#define TD_BACKEND_ENTRY "td_backend_entry"
#define TD_BACKEND_ABI                                                                                                 \
    ((uint64_t)sizeof(struct td_backend) << 48 | (uint64_t)sizeof(struct td_attention_args) << 32 |                    \
     (uint64_t)(sizeof(struct td_device_options) + sizeof(struct td_pack_weight_args)) << 16 |                         \
     sizeof(struct td_moe_args))
typedef const struct td_backend *td_backend_entry_fn(uint64_t abi);

/* UNSUPPORTED, with the reason, for a backend or path that this machine does not have. A plug-in libtandem-<backend>.so
 * is looked for in TANDEM_PLUGIN_DIR if that is set, else in ../lib and . beside the program. */
enum td_status td_device_open(const struct td_device_options *o, struct td_device **out, struct td_err *err);
void td_device_close(struct td_device *d);                 /* NULL is fine; streams and memory go first */
const char *td_device_describe(const struct td_device *d); /* "cpu" */

enum td_status td_device_alloc(struct td_device *d, size_t bytes, void **out);
void td_device_free(struct td_device *d, void *p); /* NULL is fine */
enum td_status td_device_alloc_host(struct td_device *d, size_t bytes, void **out);
void td_device_free_host(struct td_device *d, void *p); /* NULL is fine */
/* Memory that somebody else allocated: copies to and from it get faster. A failure changes nothing else. */
enum td_status td_device_pin_host(struct td_device *d, void *p, size_t bytes);
void td_device_unpin_host(struct td_device *d, void *p);
/* Bytes of the device that are free now, and all of them. UNSUPPORTED: the backend cannot say (the CPU's). */
enum td_status td_device_memory(struct td_device *d, uint64_t *free_out, uint64_t *total_out);
/* At once; no stream is waited for. */
enum td_status td_device_upload(struct td_device *d, void *to, const void *from_host, size_t bytes);
enum td_status td_device_download(struct td_device *d, void *to_host, const void *from, size_t bytes);
/* Bytes of a packed matrix; *bias_out: bytes of its bias. */
size_t td_device_packed_bytes(const struct td_device *d, uint32_t n_out, uint32_t n_in, enum td_row_order order,
                              size_t *bias_out);
size_t td_device_scratch_bytes(const struct td_device *d, const struct td_scratch_shape *s);
const struct td_ops *td_device_ops(const struct td_device *d);
uint32_t td_device_act_bytes(const struct td_device *d);
bool td_device_is_on_host(const struct td_device *d);
enum td_expert_form td_device_expert_form(const struct td_device *d);
const char *td_device_last_error(const struct td_device *d); /* "" if none */

/* n_threads: CPU only, 0: as many as the process may use. The caller's thread is one of them. */
enum td_status td_stream_create(struct td_device *d, uint32_t n_threads, struct td_stream **out);
void td_stream_destroy(struct td_stream *s); /* NULL is fine; waits */
enum td_status td_stream_sync(struct td_stream *s);
enum td_status td_stream_copy_in(struct td_stream *s, void *to, const void *from_host, size_t bytes);
enum td_status td_stream_copy_out(struct td_stream *s, void *to_host, const void *from, size_t bytes);
enum td_status td_stream_copy(struct td_stream *s, void *to, const void *from, size_t bytes); /* within the device */

/* Waits for what pack_weight deferred on this stream; INVALID if one of those matrices was. */
enum td_status td_stream_packed(struct td_stream *s, uint64_t *n_inexact_out);

/* Points in a stream's work, also of work that is recorded (each replay passes them anew), for benchmarks. Microseconds
 * between two that the stream has passed: sync first. INVALID: i is too large, or such a mark was never passed. */
#define TD_STREAM_MARKS 1024u
enum td_status td_stream_mark(struct td_stream *s, uint32_t i);
enum td_status td_stream_mark_us(struct td_stream *s, uint32_t from, uint32_t to, double *out);
/* Has all that stands before a mark been done? UNSUPPORTED where calls return only when their work is done. */
bool td_device_runs_behind(const struct td_device *d);
enum td_status td_stream_has_passed(struct td_stream *s, uint32_t mark, bool *out);

/* For what runs beside the ops' stream: takes follow, call, scatter and copies, and goes first. */
enum td_status td_side_stream_create(struct td_device *d, struct td_stream **out);
/* What s gets from now on waits for what other has got so far. Neither host thread waits. */
enum td_status td_stream_follow(struct td_stream *s, struct td_stream *other);
/* fn(arg) once s has come here, on a thread of the device's own (or, on the CPU, at once): short, and it may not call
 * the device. Not called at all if the device fails first. td_stream_sync and td_stream_destroy wait for it. */
enum td_status td_stream_call(struct td_stream *s, void (*fn)(void *arg), void *arg);
/* Moves pieces within the device, or from it into memory of a peer that is mapped here. The list is read before the
 * call returns. When the stream has passed, the bytes are there for whoever learns of it, on whichever device or
 * processor he reads them. */
enum td_status td_stream_scatter(struct td_stream *s, const struct td_piece *pieces, uint32_t n);
/* A thread that calls other libraries of the device's maker does so about this device from now on. Any thread. */
enum td_status td_device_enter(struct td_device *d);

/* Draws on the device; UNSUPPORTED where the backend leaves that to the host. */
bool td_device_can_sample(const struct td_device *d);
enum td_status td_stream_sample(struct td_stream *s, const struct td_sample_args *a);

/* Values stored in FP8 pages that were beyond their range, since the device was opened. Any thread. */
uint64_t td_device_n_saturated(const struct td_device *d);
/* Which kernels a model's shapes get, a line each. */
void td_device_explain(const struct td_device *d, const struct td_explain_shape *s,
                       void (*line)(void *user, const char *text), void *user);

bool td_device_has_graphs(const struct td_device *d);
/* Graphs: what is enqueued between begin and end is recorded, not run. UNSUPPORTED on the CPU. */
enum td_status td_graph_begin(struct td_stream *s);
enum td_status td_graph_end(struct td_stream *s, struct td_graph **out);
enum td_status td_graph_launch(struct td_stream *s, struct td_graph *g);
void td_graph_destroy(struct td_device *d, struct td_graph *g); /* NULL is fine */

#endif
