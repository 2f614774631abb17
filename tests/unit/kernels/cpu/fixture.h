/* What the kernel tests share: a device and stream, random numbers, packed weights, outputs between guard bands. */
#ifndef TESTS_UNIT_KERNELS_CPU_FIXTURE_H
#define TESTS_UNIT_KERNELS_CPU_FIXTURE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/check.h"
#include "kernels/cpu/micro.h"
#include "kernels/device.h"

static uint32_t random_state = 1;
static inline uint32_t random_u32(void) { return random_state = random_state * 1664525u + 1013904223u; }
static inline float random_float(float size) { return ((float)(random_u32() >> 8) / 8388608.0f - 1.0f) * size; }

#define GUARD     64u
#define GUARD_BIT 0x7fc0deadu /* a NaN nobody computes */

/* n floats between guard bands; contents start as NaN, so that an element nobody wrote shows. */
static inline float *guarded(size_t n)
{
    uint32_t *p = malloc((n + 2 * GUARD) * sizeof *p);
    assert_non_null(p);
    for (size_t i = 0; i < n + 2 * GUARD; i++) p[i] = GUARD_BIT;
    return (float *)(void *)(p + GUARD);
}

static inline void check_guards(const float *x, size_t n, const char *what)
{
    const uint32_t *p = (const uint32_t *)(const void *)x;
    for (size_t i = 0; i < GUARD; i++)
        if (p[-1 - (ptrdiff_t)i] != GUARD_BIT || p[n + i] != GUARD_BIT)
            fail_msg("%s: written outside its bounds", what);
    for (size_t i = 0; i < n; i++)
        if (p[i] == GUARD_BIT) fail_msg("%s: element %zu was not written", what, i);
}

static inline void guarded_free(float *x) { free(x - GUARD); }

static inline float *random_floats(size_t n, float size)
{
    float *p = malloc((n + 1) * sizeof *p);
    assert_non_null(p);
    for (size_t i = 0; i < n; i++) p[i] = random_float(size);
    return p;
}

static inline uint16_t *random_bf16(size_t n, float size)
{
    uint16_t *p = malloc((n + 1) * sizeof *p);
    assert_non_null(p);
    for (size_t i = 0; i < n; i++) p[i] = td_f32_to_bf16(random_float(size));
    return p;
}

/* Prints the error as a share of the allowance. */
static inline void check_near(double have, double want, double allowed, const char *what, size_t at)
{
    if (!(fabs(have - want) <= allowed))
        fail_msg("%s[%zu]: %.9g, want %.9g: %.2f of the allowance", what, at, have, want, fabs(have - want) / allowed);
}

static inline void check_same_bits(const float *a, const float *b, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0) fail_msg("%s[%zu]: %a and %a", what, i, (double)a[i], (double)b[i]);
}

struct kit {
    struct td_device *device;
    struct td_stream *stream;
    const struct td_ops *ops;
};

static inline void kit_open(struct kit *k, const char *path)
{
    struct td_err err = {0};
    struct td_device_options o = {.cpu_path = path};
    if (td_device_open(&o, &k->device, &err) != TD_OK) fail_msg("%s", err.text);
    assert_int_equal(td_stream_create(k->device, 2, &k->stream), TD_OK);
    k->ops = td_device_ops(k->device);
}

static inline void kit_close(struct kit *k)
{
    td_stream_destroy(k->stream);
    td_device_close(k->device);
}

static inline enum td_status pack_as(struct kit *k, struct td_pack_weight_args a, struct td_weight *out)
{
    size_t bias_bytes, bytes = td_device_packed_bytes(k->device, a.n_out, a.n_in, a.order, &bias_bytes);
    void *bias = NULL;
    assert_int_equal(td_device_alloc(k->device, bytes, &a.out), TD_OK);
    if (a.bias != NULL) assert_int_equal(td_device_alloc(k->device, bias_bytes, &bias), TD_OK);
    a.bias_out = bias;
    enum td_status st = k->ops->pack_weight(k->stream, &a);
    *out = (struct td_weight){.data = a.out, .bias = bias, .n_out = a.n_out, .n_in = a.n_in};
    return st;
}

static inline struct td_weight pack_rows(struct kit *k, const uint16_t *w, uint32_t n_out, uint32_t n_in,
                                         const float *bias)
{
    struct td_weight out;
    struct td_pack_weight_args a = {
        .source = TD_SRC_BF16_ROWS, .data = w, .ld = n_in, .n_out = n_out, .n_in = n_in, .bias = bias};
    assert_int_equal(pack_as(k, a, &out), TD_OK);
    return out;
}

static inline void unpack(struct kit *k, struct td_weight *w)
{
    td_device_free(k->device, (void *)(uintptr_t)w->data);
    td_device_free(k->device, (void *)(uintptr_t)w->bias);
}

static inline double dot(const float *x, const uint16_t *w, uint32_t n, double *size)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        double p = (double)x[i] * (double)td_bf16_to_f32(w[i]);
        sum += p;
        *size += fabs(p);
    }
    return sum;
}

#endif
