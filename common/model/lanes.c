#include "common/model/lanes_int.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "common/model/dummy_int.h"
#include "kernels/cpu/pool.h"

#define N_LANES     4u
#define MAX_THREADS 16u
#define PIECE       (1u << 20) /* bytes that a thread fills at a time */
#define ALIGN       256u

struct lane {
    struct td_stream *stream;
    uint8_t *host;
    size_t used;
};

struct td_lanes {
    struct td_device *device;
    struct td_pool *threads; /* NULL until something has to be filled */
    uint64_t dummy_seed;
    size_t n_bytes;
    uint32_t n_lanes, turn;
    struct lane lanes[N_LANES];
};

enum td_status td_lanes_create(struct td_device *d, size_t n_bytes, uint64_t dummy_seed, struct td_lanes **out,
                               struct td_err *err)
{
    enum td_status st = TD_E_NO_MEMORY;
    struct td_lanes *l = td_calloc(1, sizeof *l);
    if (l == NULL) goto out;
    l->device = d;
    l->dummy_seed = dummy_seed;
    l->n_bytes = n_bytes;
    l->n_lanes = td_device_is_on_host(d) ? 1 : N_LANES;
    for (uint32_t i = 0; i < l->n_lanes; i++) {
        TD_TRY(td_stream_create(d, 1, &l->lanes[i].stream));
        if (!td_device_is_on_host(d)) TD_TRY(td_device_alloc_host(d, n_bytes, (void **)&l->lanes[i].host));
    }
    *out = l;
    return TD_OK;
out:
    td_lanes_destroy(l);
    return td_err_set(err, st, "no memory to load weights with (%u buffers of %zu bytes)", N_LANES, n_bytes);
}

void td_lanes_destroy(struct td_lanes *l)
{
    if (l == NULL) return;
    for (uint32_t i = 0; i < l->n_lanes; i++) {
        td_stream_destroy(l->lanes[i].stream);
        td_device_free_host(l->device, l->lanes[i].host);
    }
    td_pool_destroy(l->threads);
    free(l);
}

size_t td_lanes_room(const struct td_lanes *l) { return l->n_bytes; }

enum td_status td_lanes_turn(struct td_lanes *l, struct td_stream **out)
{
    l->turn = (l->turn + 1) % l->n_lanes;
    struct lane *lane = &l->lanes[l->turn];
    lane->used = 0;
    *out = lane->stream;
    return td_stream_sync(lane->stream);
}

/* ---- filling ---- */

struct filling {
    const struct td_lanes *l;
    const struct td_tensor *t;
    uint64_t at, n;
    uint8_t *to;
};

static void fill_piece(void *ctx, uint32_t index, uint32_t thread)
{
    (void)thread;
    const struct filling *f = ctx;
    uint64_t begin = (uint64_t)index * PIECE, n = f->n - begin < PIECE ? f->n - begin : PIECE;
    if (f->t->data != NULL)
        memcpy(f->to + begin, f->t->data + f->at + begin, n);
    else
        td_dummy_bytes(f->l->dummy_seed, f->t, f->at + begin, n, f->to + begin);
}

static enum td_status fill(struct td_lanes *l, struct filling *f)
{
    uint32_t n = (uint32_t)((f->n + PIECE - 1) / PIECE);
    if (n > 1 && l->threads == NULL) {
        long here = sysconf(_SC_NPROCESSORS_ONLN);
        enum td_status st = td_pool_create(here > 0 && here < MAX_THREADS ? (uint32_t)here : MAX_THREADS, &l->threads);
        if (st != TD_OK) return st;
    }
    if (n > 1)
        td_pool_run(l->threads, fill_piece, f, n);
    else if (n == 1)
        fill_piece(f, 0, 0);
    return TD_OK;
}

/* The lane's memory; on a device that shares the host's it comes with the first need of it. */
static enum td_status reserve(struct td_lanes *l, size_t n, uint8_t **out)
{
    struct lane *lane = &l->lanes[l->turn];
    size_t at = (lane->used + ALIGN - 1) / ALIGN * ALIGN;
    TD_CHECK(at + n <= l->n_bytes);
    if (lane->host == NULL) {
        enum td_status st = td_device_alloc_host(l->device, l->n_bytes, (void **)&lane->host);
        if (st != TD_OK) return st;
    }
    *out = lane->host + at;
    lane->used = at + n;
    return TD_OK;
}

enum td_status td_lanes_bytes(struct td_lanes *l, const struct td_tensor *t, uint64_t at, uint64_t n,
                              const uint8_t **out)
{
    TD_CHECK(at + n <= t->n_bytes);
    if (td_device_is_on_host(l->device) && t->data != NULL &&
        (uintptr_t)(t->data + at) % td_tensor_type_bytes(t->type) == 0) {
        *out = t->data + at;
        return TD_OK;
    }
    struct filling f = {.l = l, .t = t, .at = at, .n = n};
    enum td_status st = reserve(l, (size_t)n, &f.to);
    if (st == TD_OK) st = fill(l, &f);
    *out = f.to;
    return st;
}

enum td_status td_lanes_put(struct td_lanes *l, const void *from, size_t n, const void **out)
{
    uint8_t *to;
    *out = from;
    if (td_device_is_on_host(l->device)) return TD_OK;
    enum td_status st = reserve(l, n, &to);
    if (st != TD_OK) return st;
    memcpy(to, from, n);
    *out = to;
    return TD_OK;
}

enum td_status td_lanes_finish(struct td_lanes *l, uint64_t *n_inexact_out)
{
    enum td_status st = TD_OK;
    *n_inexact_out = 0;
    for (uint32_t i = 0; i < l->n_lanes; i++) { /* all, so that nothing is left for the next tensor */
        uint64_t n = 0;
        enum td_status one = td_stream_packed(l->lanes[i].stream, &n);
        *n_inexact_out += n;
        if (st == TD_OK) st = one;
    }
    return st;
}
