#include "kernels/device_cpu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/mem.h"
#include "kernels/cpu/cpu_int.h"

#define HUGE_PAGE ((size_t)2 << 20)

struct cpu_device {
    struct td_device base;
    const struct td_micro *micro;
};

static enum td_status cpu_open(const struct td_device_options *o, struct td_device **out, struct td_err *err)
{
    const struct td_micro *micro = td_micro_find(o->cpu_path);
    if (micro == NULL)
        return td_err_set(err, TD_E_UNSUPPORTED, "this processor cannot run the CPU path \"%s\"", o->cpu_path);
    if (o->experts != TD_EXPERTS_BF16)
        return td_err_set(err, TD_E_UNSUPPORTED, "the CPU computes experts in bf16 only, not in FP8 or MXFP4");
    if (o->is_dense_fp8)
        return td_err_set(err, TD_E_UNSUPPORTED, "the CPU holds dense weights in bf16 only, not in FP8");
    struct cpu_device *d = td_calloc(1, sizeof *d);
    if (d == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the CPU device");
    d->base.backend = &td_backend_cpu;
    d->micro = micro;
    *out = &d->base;
    return TD_OK;
}

static void cpu_close(struct td_device *d) { free(d); }

/* Large blocks start on huge pages: weights are read once a step, and looking up small pages costs as much as the
 * reading. */
static enum td_status cpu_alloc(struct td_device *d, size_t bytes, void **out)
{
    (void)d;
    size_t align = bytes >= HUGE_PAGE / 2 ? HUGE_PAGE : 64;
    if (td_fault_hit(TD_FAULT_ALLOC) || bytes > SIZE_MAX - align) return TD_E_NO_MEMORY;
    size_t n = bytes == 0 ? align : (bytes + align - 1) / align * align;
    void *p = aligned_alloc(align, n);
    if (p == NULL) return TD_E_NO_MEMORY;
    if (align == HUGE_PAGE) (void)madvise(p, n, MADV_HUGEPAGE); /* a wish: kernels without it do without */
    *out = p;
    return TD_OK;
}

static enum td_status cpu_alloc_host(struct td_device *d, size_t bytes, void **out)
{
    enum td_status st = cpu_alloc(d, bytes, out);
    if (st == TD_OK) memset(*out, 0, bytes);
    return st;
}

static void cpu_free(struct td_device *d, void *p)
{
    (void)d;
    free(p);
}

static enum td_status cpu_copy(struct td_device *d, void *to, const void *from, size_t bytes)
{
    (void)d;
    memcpy(to, from, bytes);
    return TD_OK;
}

/* Panels of 16 columns. */
static size_t cpu_packed_bytes(const struct td_device *d, uint32_t n_out, uint32_t n_in, enum td_row_order order,
                               size_t *bias_out)
{
    (void)d;
    size_t cols =
        order == TD_ROWS_GATE_UP ? td_cpu_gate_up_cols(n_out / 2) : (size_t)td_ceil_div(n_out, TD_LANES) * TD_LANES;
    *bias_out = cols * sizeof(float);
    return cols * n_in * sizeof(uint16_t);
}

static size_t cpu_scratch_bytes(const struct td_device *d, const struct td_scratch_shape *s)
{
    (void)d;
    return td_cpu_moe_scratch_bytes(s->n_rows, s->top_k, s->n_experts, s->intermediate);
}

static void cpu_stream_destroy(struct td_stream *s)
{
    struct td_cpu_stream *c = td_cpu_stream(s);
    td_pool_destroy(c->pool);
    free(c->scratch);
    free(c->marks);
    free(c);
}

static enum td_status cpu_stream_create(struct td_device *d, uint32_t n_threads, struct td_stream **out)
{
    struct td_cpu_stream *s = td_calloc(1, sizeof *s);
    if (s == NULL) return TD_E_NO_MEMORY;
    s->base.device = d;
    s->micro = ((struct cpu_device *)(void *)d)->micro;
    void *scratch = NULL;
    enum td_status st = td_pool_create(n_threads, &s->pool);
    if (st == TD_OK) st = cpu_alloc(d, td_pool_n_threads(s->pool) * sizeof *s->scratch, &scratch);
    if (st != TD_OK) {
        cpu_stream_destroy(&s->base);
        return st;
    }
    s->scratch = scratch;
    *out = &s->base;
    return TD_OK;
}

static enum td_status cpu_stream_copy(struct td_stream *s, void *to, const void *from, size_t bytes)
{
    return cpu_copy(s->device, to, from, bytes);
}

static enum td_status cpu_stream_sync(struct td_stream *s)
{
    (void)s;
    return TD_OK;
}

/* All before it is done: ops run at once. */
static enum td_status cpu_mark(struct td_stream *base, uint32_t i)
{
    struct td_cpu_stream *s = td_cpu_stream(base);
    if (s->marks == NULL) s->marks = td_calloc(TD_STREAM_MARKS, sizeof *s->marks);
    if (s->marks == NULL) return TD_E_NO_MEMORY;
    s->marks[i] = td_clock_ns();
    return TD_OK;
}

static enum td_status cpu_mark_us(struct td_stream *base, uint32_t from, uint32_t to, double *out)
{
    const struct td_cpu_stream *s = td_cpu_stream(base);
    if (s->marks == NULL || s->marks[from] == 0 || s->marks[to] == 0) return TD_E_INVALID;
    *out = ((double)s->marks[to] - (double)s->marks[from]) / 1e3;
    return TD_OK;
}

static enum td_status cpu_side_stream_create(struct td_device *d, struct td_stream **out)
{
    return cpu_stream_create(d, 1, out);
}

static enum td_status cpu_follow(struct td_stream *s, struct td_stream *other)
{
    (void)s, (void)other; /* it has done all it got */
    return TD_OK;
}

static enum td_status cpu_call(struct td_stream *s, void (*fn)(void *arg), void *arg)
{
    (void)s;
    fn(arg);
    return TD_OK;
}

static enum td_status cpu_scatter(struct td_stream *s, const struct td_piece *pieces, uint32_t n)
{
    (void)s;
    for (uint32_t i = 0; i < n; i++) memcpy(pieces[i].to, pieces[i].from, pieces[i].n_bytes);
    return TD_OK;
}

static uint64_t cpu_n_saturated(const struct td_device *d)
{
    (void)d;
    return td_cpu_n_saturated();
}

const struct td_backend td_backend_cpu = {
    .name = "cpu",
    .act_bytes = sizeof(float),
    .is_on_host = true,
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_copy,
    .download = cpu_copy,
    .alloc_host = cpu_alloc_host,
    .free_host = cpu_free,
    .packed_bytes = cpu_packed_bytes,
    .scratch_bytes = cpu_scratch_bytes,
    .stream_create = cpu_stream_create,
    .stream_destroy = cpu_stream_destroy,
    .stream_sync = cpu_stream_sync,
    .mark = cpu_mark,
    .mark_us = cpu_mark_us,
    .copy_in = cpu_stream_copy,
    .copy_out = cpu_stream_copy,
    .copy = cpu_stream_copy,
    .side_stream_create = cpu_side_stream_create,
    .follow = cpu_follow,
    .call = cpu_call,
    .scatter = cpu_scatter,
    .n_saturated = cpu_n_saturated,
    .ops =
        {
#define X(op, meaning) .op = td_cpu_##op,
#include "kernels/ops.def"
#undef X
        },
};
