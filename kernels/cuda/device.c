/* The CUDA backend's table: memory, streams, graphs. A plug-in of its own (libtandem-cuda.so) that needs nothing of the
 * program that loads it. Memory is allocated when the engine is built; a step allocates nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_int.h"
#include "kernels/dense_format.h"
#include "kernels/expert_format.h"

static const struct td_backend backend;

/* ---- the device ---- */

static void cuda_close(struct td_device *d)
{
    cudaFreeHost(td_cuda_device_of(d)->n_saturated);
    cudaStreamDestroy(td_cuda_device_of(d)->copies);
    free(d);
}

static uint64_t cuda_n_saturated(const struct td_device *d)
{
    return __atomic_load_n(((const struct td_cuda_device *)(const void *)d)->n_saturated, __ATOMIC_RELAXED);
}

static enum td_status cuda_open(const struct td_device_options *o, struct td_device **out, struct td_err *err)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0)
        return td_cuda_err(err, TD_E_UNSUPPORTED, "device \"cuda\": this machine has no usable CUDA device (%s)",
                           e != cudaSuccess ? cudaGetErrorString(e) : "none found");
    if (o->index >= (uint32_t)n)
        return td_cuda_err(err, TD_E_UNSUPPORTED, "device \"cuda\": there is no GPU %u, only %d", o->index, n);
    struct cudaDeviceProp p;
    e = cudaGetDeviceProperties(&p, (int)o->index);
    if (e == cudaSuccess && (p.major != 9 || p.minor != 0))
        return td_cuda_err(err, TD_E_UNSUPPORTED,
                           "device \"cuda\": %s has compute capability %d.%d; Tandem's kernels are for Hopper, 9.0",
                           p.name, p.major, p.minor);
    if (e == cudaSuccess) e = cudaSetDevice((int)o->index);
    struct td_cuda_device *d = (struct td_cuda_device *)calloc(1, sizeof *d);
    if (d == NULL) return td_cuda_err(err, TD_E_NO_MEMORY, "no memory for the CUDA device");
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&d->copies, cudaStreamNonBlocking);
    if (e != cudaSuccess) {
        free(d);
        return td_cuda_err(err, TD_E_UNSUPPORTED, "device \"cuda\": %s cannot be used: %s", p.name,
                           cudaGetErrorString(e));
    }
    d->base.backend = &backend;
    d->index = (int)o->index;
    d->n_sms = p.multiProcessorCount;
    d->base.experts = d->experts = o->experts;
    d->is_batch_invariant = o->is_batch_invariant;
    d->has_bf16_activations = o->has_bf16_activations;
    d->is_dense_fp8 = o->is_dense_fp8;
    if (cudaHostAlloc((void **)&d->n_saturated, sizeof *d->n_saturated, cudaHostAllocMapped) != cudaSuccess) {
        cuda_close(&d->base);
        return td_cuda_err(err, TD_E_NO_MEMORY, "device \"cuda\": no pinned host memory");
    }
    *d->n_saturated = 0;
    *out = &d->base;
    return TD_OK;
}

/* The runtime keeps a current device per thread; any thread may call us. */
static cudaError_t use(struct td_device *d) { return cudaSetDevice(td_cuda_device_of(d)->index); }

/* ---- memory ---- */

static enum td_status cuda_alloc(struct td_device *d, size_t bytes, void **out)
{
    cudaError_t e = use(d);
    if (e == cudaSuccess) e = cudaMalloc(out, bytes == 0 ? 256 : bytes);
    return td_cuda_status(e, "cudaMalloc");
}

static enum td_status cuda_memory(struct td_device *d, uint64_t *free_out, uint64_t *total_out)
{
    size_t n_free = 0, n_total = 0;
    cudaError_t e = use(d);
    if (e == cudaSuccess) e = cudaMemGetInfo(&n_free, &n_total);
    *free_out = n_free;
    *total_out = n_total;
    return td_cuda_status(e, "cudaMemGetInfo");
}

static void cuda_free(struct td_device *d, void *p)
{
    if (use(d) == cudaSuccess) td_cuda_status(cudaFree(p), "cudaFree");
}

static enum td_status cuda_alloc_host(struct td_device *d, size_t bytes, void **out)
{
    cudaError_t e = use(d);
    if (e == cudaSuccess) e = cudaHostAlloc(out, bytes == 0 ? 64 : bytes, cudaHostAllocDefault);
    if (e == cudaSuccess) memset(*out, 0, bytes);
    return td_cuda_status(e, "cudaHostAlloc");
}

static void cuda_free_host(struct td_device *d, void *p)
{
    if (use(d) == cudaSuccess) td_cuda_status(cudaFreeHost(p), "cudaFreeHost");
}

static enum td_status cuda_pin_host(struct td_device *d, void *p, size_t bytes)
{
    if (use(d) != cudaSuccess) return TD_E_DEVICE;
    cudaError_t e = cudaHostRegister(p, bytes, cudaHostRegisterDefault);
    if (e == cudaSuccess) return TD_OK;
    cudaGetLastError(); /* not a failure of the device: copies are slower, that is all */
    return TD_E_UNSUPPORTED;
}

static void cuda_unpin_host(struct td_device *d, void *p)
{
    if (use(d) == cudaSuccess && cudaHostUnregister(p) != cudaSuccess) cudaGetLastError();
}

static enum td_status copy_now(struct td_device *d, void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    cudaStream_t s = td_cuda_device_of(d)->copies;
    cudaError_t e = use(d);
    if (e == cudaSuccess) e = cudaMemcpyAsync(to, from, bytes, kind, s);
    if (e == cudaSuccess) e = cudaStreamSynchronize(s);
    return td_cuda_status(e, "copy");
}

static enum td_status cuda_upload(struct td_device *d, void *to, const void *from, size_t bytes)
{
    return copy_now(d, to, from, bytes, cudaMemcpyHostToDevice);
}

static enum td_status cuda_download(struct td_device *d, void *to, const void *from, size_t bytes)
{
    return copy_now(d, to, from, bytes, cudaMemcpyDeviceToHost);
}

/* Row-major as stored, but for what is held in fewer bits. */
static size_t cuda_packed_bytes(const struct td_device *d, uint32_t n_out, uint32_t n_in, enum td_row_order order,
                                size_t *bias_out)
{
    const struct td_cuda_device *c = (const struct td_cuda_device *)(const void *)d;
    enum td_expert_form form = c->experts;
    if (c->is_dense_fp8 && order == TD_ROWS_DENSE) {
        *bias_out = (size_t)n_out * sizeof(float);
        return (size_t)n_out * td_dense_fp8_row_bytes(n_in);
    }
    if (form != TD_EXPERTS_BF16 && td_is_expert_order(order)) {
        struct td_expert_layout l = td_expert_layout(form, n_out, n_in);
        *bias_out = l.n_rows * sizeof(float);
        return l.bytes;
    }
    *bias_out = (size_t)n_out * sizeof(float);
    return (size_t)n_out * n_in * TD_BF16_BYTES;
}

static size_t cuda_scratch_bytes(const struct td_device *d, const struct td_scratch_shape *s)
{
    const struct td_cuda_device *c = (const struct td_cuda_device *)(const void *)d;
    size_t moe = c->experts == TD_EXPERTS_BF16 ? td_cuda_moe_scratch_bytes(s) : td_cuda_moe_fp8_scratch_bytes(c, s),
           widened = 2 * s->fp8_kv_bytes;
    return moe > widened ? moe : widened;
}

/* ---- streams ---- */

static void cuda_stream_destroy(struct td_stream *base)
{
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    if (s->s != NULL) {
        cudaStreamSynchronize(s->s);
        cudaStreamDestroy(s->s);
    }
    if (s->event != NULL) cudaEventDestroy(s->event);
    cudaFree(s->parts);
    cudaFree(s->counters);
    cudaFree(s->staging);
    cudaFree(s->found);
    for (uint32_t i = 0; s->marks != NULL && i < TD_STREAM_MARKS; i++)
        if (s->marks[i] != NULL) cudaEventDestroy(s->marks[i]);
    free(s->marks);
    free(s);
}

static enum td_status cuda_stream_create(struct td_device *d, uint32_t n_threads, struct td_stream **out)
{
    (void)n_threads;
    struct td_cuda_stream *s = (struct td_cuda_stream *)calloc(1, sizeof *s);
    if (s == NULL) return TD_E_NO_MEMORY;
    s->base.device = d;
    s->n_sms = td_cuda_device_of(d)->n_sms;
    s->is_batch_invariant = td_cuda_device_of(d)->is_batch_invariant;
    s->is_dense_fp8 = td_cuda_device_of(d)->is_dense_fp8;
    s->n_saturated = td_cuda_device_of(d)->n_saturated;
    size_t part_bytes = (size_t)s->n_sms * TD_CUDA_PART_BLOCKS * 2 * TD_CUDA_PART_FLOATS * sizeof(float);
    cudaError_t e = use(d);
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&s->s, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaMalloc((void **)&s->parts, part_bytes);
    if (e == cudaSuccess) e = cudaMalloc((void **)&s->counters, TD_CUDA_MAX_UNITS * sizeof *s->counters);
    if (e == cudaSuccess) e = cudaMemsetAsync(s->counters, 0, TD_CUDA_MAX_UNITS * sizeof *s->counters, s->s);
    if (e == cudaSuccess) e = cudaStreamSynchronize(s->s);
    if (e != cudaSuccess) {
        cuda_stream_destroy(&s->base);
        return td_cuda_status(e, "stream_create");
    }
    *out = &s->base;
    return TD_OK;
}

/* Blocks of a kernel with a higher priority come up first when room on a multiprocessor falls free. */
static enum td_status cuda_side_stream_create(struct td_device *d, struct td_stream **out)
{
    struct td_cuda_stream *s = (struct td_cuda_stream *)calloc(1, sizeof *s);
    if (s == NULL) return TD_E_NO_MEMORY;
    s->base.device = d;
    s->n_sms = td_cuda_device_of(d)->n_sms;
    int lowest, highest;
    cudaError_t e = use(d);
    if (e == cudaSuccess) e = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    if (e == cudaSuccess) e = cudaStreamCreateWithPriority(&s->s, cudaStreamNonBlocking, highest);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&s->event, cudaEventDisableTiming);
    if (e != cudaSuccess) {
        cuda_stream_destroy(&s->base);
        return td_cuda_status(e, "side_stream_create");
    }
    *out = &s->base;
    return TD_OK;
}

/* The wait is for the event as it stands now: recording it again for the next call changes nothing. */
static enum td_status cuda_follow(struct td_stream *base, struct td_stream *other)
{
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    if (s->event == NULL) return TD_E_UNSUPPORTED;
    cudaError_t e = cudaEventRecord(s->event, td_cuda_stream_of(other)->s);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(s->s, s->event, 0);
    return td_cuda_status(e, "follow");
}

static enum td_status cuda_call(struct td_stream *s, void (*fn)(void *arg), void *arg)
{
    return td_cuda_status(cudaLaunchHostFunc(td_cuda_stream_of(s)->s, fn, arg), "call");
}

static enum td_status cuda_enter(struct td_device *d) { return td_cuda_status(use(d), "enter"); }

static enum td_status cuda_stream_sync(struct td_stream *s)
{
    return td_cuda_status(cudaStreamSynchronize(td_cuda_stream_of(s)->s), "stream");
}

static enum td_status cuda_copy_in(struct td_stream *s, void *to, const void *from, size_t bytes)
{
    /* The first call of a pass: the thread that runs it may be new to the runtime. */
    cudaError_t e = use(s->device);
    if (e == cudaSuccess) e = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, td_cuda_stream_of(s)->s);
    return td_cuda_status(e, "copy to the device");
}

static enum td_status cuda_copy_out(struct td_stream *s, void *to, const void *from, size_t bytes)
{
    return td_cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, td_cuda_stream_of(s)->s),
                          "copy from the device");
}

static enum td_status cuda_copy(struct td_stream *s, void *to, const void *from, size_t bytes)
{
    return td_cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, td_cuda_stream_of(s)->s),
                          "copy on the device");
}

/* ---- marks ---- */

/* In recorded work an event is a node of the graph, so that every replay records it. */
static enum td_status cuda_mark(struct td_stream *base, uint32_t i)
{
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (s->marks == NULL) s->marks = (cudaEvent_t *)calloc(TD_STREAM_MARKS, sizeof *s->marks);
    if (s->marks == NULL) return TD_E_NO_MEMORY;
    cudaError_t e = cudaStreamIsCapturing(s->s, &capture);
    if (e == cudaSuccess && s->marks[i] == NULL) e = cudaEventCreate(&s->marks[i]);
    if (e == cudaSuccess)
        e = cudaEventRecordWithFlags(s->marks[i], s->s,
                                     capture == cudaStreamCaptureStatusNone ? cudaEventRecordDefault
                                                                            : cudaEventRecordExternal);
    return td_cuda_status(e, "mark");
}

static enum td_status cuda_mark_us(struct td_stream *base, uint32_t from, uint32_t to, double *out)
{
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    if (s->marks == NULL || s->marks[from] == NULL || s->marks[to] == NULL) return TD_E_INVALID;
    float ms = 0;
    cudaError_t e = cudaEventElapsedTime(&ms, s->marks[from], s->marks[to]);
    *out = ms * 1e3;
    return td_cuda_status(e, "mark");
}

static enum td_status cuda_has_passed(struct td_stream *base, uint32_t mark, bool *out)
{
    struct td_cuda_stream *s = td_cuda_stream_of(base);
    if (s->marks == NULL || s->marks[mark] == NULL) return TD_E_INVALID;
    cudaError_t e = cudaEventQuery(s->marks[mark]);
    *out = e != cudaErrorNotReady;
    return *out ? td_cuda_status(e, "mark") : TD_OK;
}

/* ---- graphs ---- */

static enum td_status cuda_graph_begin(struct td_stream *s)
{
    return td_cuda_status(cudaStreamBeginCapture(td_cuda_stream_of(s)->s, cudaStreamCaptureModeThreadLocal), "capture");
}

static enum td_status cuda_graph_end(struct td_stream *s, struct td_graph **out)
{
    cudaGraph_t g = NULL;
    cudaGraphExec_t exec = NULL;
    cudaError_t e = cudaStreamEndCapture(td_cuda_stream_of(s)->s, &g);
    if (e == cudaSuccess) e = cudaGraphInstantiate(&exec, g, 0);
    if (g != NULL) cudaGraphDestroy(g);
    if (e == cudaSuccess) *out = (struct td_graph *)exec;
    return td_cuda_status(e, "capture");
}

static enum td_status cuda_graph_launch(struct td_stream *s, struct td_graph *g)
{
    return td_cuda_status(cudaGraphLaunch((cudaGraphExec_t)g, td_cuda_stream_of(s)->s), "graph");
}

static void cuda_graph_destroy(struct td_device *d, struct td_graph *g)
{
    if (use(d) == cudaSuccess) cudaGraphExecDestroy((cudaGraphExec_t)g);
}

static const char *cuda_last_error(const struct td_device *d)
{
    (void)d;
    return td_cuda_last_error();
}

/* ---- the table ---- */

static const struct td_backend backend = {
    .name = "cuda",
    .act_bytes = TD_BF16_BYTES,
    .open = cuda_open,
    .close = cuda_close,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .upload = cuda_upload,
    .download = cuda_download,
    .alloc_host = cuda_alloc_host,
    .free_host = cuda_free_host,
    .pin_host = cuda_pin_host,
    .unpin_host = cuda_unpin_host,
    .packed_bytes = cuda_packed_bytes,
    .scratch_bytes = cuda_scratch_bytes,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_sync = cuda_stream_sync,
    .copy_in = cuda_copy_in,
    .copy_out = cuda_copy_out,
    .copy = cuda_copy,
    .side_stream_create = cuda_side_stream_create,
    .enter = cuda_enter,
    .follow = cuda_follow,
    .call = cuda_call,
    .scatter = td_cuda_scatter,
    .graph_begin = cuda_graph_begin,
    .graph_end = cuda_graph_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
    .last_error = cuda_last_error,
    .memory = cuda_memory,
    .packed = td_cuda_packed,
    .mark = cuda_mark,
    .mark_us = cuda_mark_us,
    .has_passed = cuda_has_passed,
    .sample = td_cuda_sample,
    .explain = td_cuda_explain,
    .n_saturated = cuda_n_saturated,
    .ops =
        {
#define X(op, meaning) .op = td_cuda_##op,
#include "kernels/ops.def"
#undef X
        },
};

td_backend_entry_fn td_backend_entry;
const struct td_backend *td_backend_entry(uint64_t abi) { return abi == TD_BACKEND_ABI ? &backend : NULL; }
