#include "tests/kernels/moves.h"

#include <stdatomic.h>
#include <stdlib.h>

#define UNIT 32768u /* what a block moves in a turn */

static void tell(void *arg) { atomic_fetch_add((atomic_uint *)arg, 1); }

/* n pieces of awkward sizes, shuffled, with a vector between any two that must stay as it was. */
static void check_scatter(struct pair *p, struct td_stream *side, uint32_t n)
{
    static const uint32_t sizes[] = {16, UNIT, 0, UNIT - 16, UNIT + 16, 4096, 3 * UNIT + 48, 16384};
    enum { N_SIZES = sizeof sizes / sizeof sizes[0] };
    struct td_piece *cpu = calloc(n + 1, sizeof *cpu), *gpu = calloc(n + 1, sizeof *gpu);
    uint32_t *order = malloc((n + 1) * sizeof *order);
    size_t bytes = 16;
    atomic_uint told = 0;
    for (uint32_t i = 0; i < n; i++) {
        bytes += sizes[i % N_SIZES] + 16;
        order[i] = i;
    }
    for (uint32_t i = n; i > 1; i--) {
        uint32_t k = (uint32_t)((pair_random(p) + 8) * 65536) % i, t = order[i - 1];
        order[i - 1] = order[k];
        order[k] = t;
    }
    uint8_t *noise = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) noise[i] = (uint8_t)(i * 2654435761u >> 13);
    struct both from = pair_raw(p, noise, bytes), to = pair_out(p, RAW, bytes);
    size_t at = 16, dst = 16;
    for (uint32_t i = 0; i < n; i++) {
        cpu[i] = (struct td_piece){.from = (char *)from.cpu + at, .n_bytes = sizes[i % N_SIZES]};
        gpu[i] = (struct td_piece){.from = from.gpu + at, .n_bytes = cpu[i].n_bytes};
        at += cpu[i].n_bytes + 16;
    }
    for (uint32_t i = 0; i < n; i++) {
        cpu[order[i]].to = (char *)to.cpu + dst;
        gpu[order[i]].to = to.gpu + dst;
        dst += cpu[order[i]].n_bytes + 16;
    }
    enum td_status st = td_stream_follow(side, p->gpu_stream);
    if (st == TD_OK) st = td_stream_scatter(side, gpu, n);
    if (st == TD_OK) st = td_stream_call(side, tell, &told);
    if (st == TD_OK) st = td_stream_sync(side);
    pair_status(p, td_stream_scatter(p->cpu_stream, cpu, n), st, "scatter");
    if (atomic_load(&told) != 1) pair_fail(p, "scatter of %u pieces: told %u times before the sync", n, told);
    pair_same(p, &to, "scatter");
    pair_free_all(p);
    free(noise);
    free(order);
    free(cpu);
    free(gpu);
}

/* Calls come in order; a stream that follows another comes after what that had got. */
static void check_order(struct pair *p, struct td_stream *side)
{
    enum { BYTES = 8 << 20, ROUNDS = 20 };
    char *noise = malloc(BYTES), *back = malloc(BYTES);
    atomic_uint told = 0;
    for (int i = 0; i < BYTES; i++) noise[i] = (char)(i * 7 >> 3);
    struct both first = pair_raw(p, noise, BYTES), middle = pair_out(p, RAW, BYTES), last = pair_out(p, RAW, BYTES);
    enum td_status st = TD_OK;
    struct td_piece piece = {.from = middle.gpu, .to = last.gpu, .n_bytes = BYTES};
    for (int i = 0; i < ROUNDS && st == TD_OK; i++) { /* busy with it; the last copy makes `middle` whole */
        st = td_stream_copy(p->gpu_stream, middle.gpu, first.gpu, BYTES);
        if (st == TD_OK) st = td_stream_call(side, tell, &told);
    }
    if (st == TD_OK) st = td_stream_follow(side, p->gpu_stream);
    if (st == TD_OK) st = td_stream_scatter(side, &piece, 1);
    if (st == TD_OK) st = td_stream_call(side, tell, &told);
    if (st == TD_OK) st = td_stream_sync(side);
    if (st == TD_OK) st = td_device_download(p->gpu, back, last.gpu, BYTES);
    pair_status(p, TD_OK, st, "follow");
    int n_wrong = 0;
    for (int i = 0; i < BYTES; i++) n_wrong += noise[i] != back[i];
    if (n_wrong != 0) pair_fail(p, "a scatter came before what it follows: %d bytes differ", n_wrong);
    if (atomic_load(&told) != ROUNDS + 1) pair_fail(p, "told %u times instead of %d", told, ROUNDS + 1);
    pair_free_all(p);
    free(noise);
    free(back);
}

void check_moves(struct pair *p)
{
    struct td_stream *side = NULL;
    static const uint32_t counts[] = {0, 1, 2, 7, 169, 170, 171, 400};
    enum td_status st = td_side_stream_create(p->gpu, &side);
    pair_status(p, TD_OK, st, "side stream");
    if (st != TD_OK) return;
    for (unsigned i = 0; i < sizeof counts / sizeof counts[0]; i++) check_scatter(p, side, counts[i]);
    check_order(p, side);
    td_stream_destroy(side);
}
