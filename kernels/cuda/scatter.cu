/* Many runs of bytes at once, each from its place to its place: the pages of a layer into a peer's pool. A copy a page
 * costs a call each (some 6 us); this is one launch for up to MAX_PIECES, whose list travels as the kernel's argument.
 *
 * What the writes need for a reader elsewhere: nothing here. A kernel's end makes its writes visible to the whole
 * system before an event, a callback or a later kernel of the stream can be seen to have come, so whoever is told after
 * that reads them: on this device (one L2), over NVLink (the writes have been acknowledged by the device that holds the
 * memory), or on the host. */
#include "kernels/cuda/cuda_int.h"

#define MAX_PIECES 170u         /* 4 KiB of arguments, which every driver takes; 8,192 tokens are 128 pages */
#define THREADS    256u
#define PER_THREAD 8u           /* vectors that a thread has in flight */
#define UNIT       (THREADS * PER_THREAD) /* vectors of 16 bytes that a block moves in a turn: 32 KiB */
/* As many blocks as bytes in flight need: 64 x 32 KiB cover 2 MiB, what NVLink moves in 4 us. More would only take room
 * from the kernels beside. */
#define MAX_BLOCKS 64u

struct scatter_piece {
    const uint4 *from;
    uint4 *to;
    uint32_t n;          /* vectors */
    uint32_t first_unit; /* of all pieces' units */
};
struct scatter_list {
    uint32_t n_pieces, n_units;
    struct scatter_piece piece[MAX_PIECES];
};

static __global__ void __launch_bounds__(THREADS) scatter(const __grid_constant__ struct scatter_list l)
{
    for (uint32_t unit = blockIdx.x; unit < l.n_units; unit += gridDim.x) {
        uint32_t low = 0, high = l.n_pieces; /* the last piece that begins at or before this unit */
        while (high - low > 1) {
            uint32_t mid = (low + high) / 2;
            if (l.piece[mid].first_unit <= unit)
                low = mid;
            else
                high = mid;
        }
        uint32_t at = (unit - l.piece[low].first_unit) * UNIT + threadIdx.x, n = l.piece[low].n;
        const uint4 *from = l.piece[low].from;
        uint4 *to = l.piece[low].to, v[PER_THREAD];
#pragma unroll
        for (uint32_t i = 0; i < PER_THREAD; i++)
            if (at + i * THREADS < n) v[i] = __ldcs(from + at + i * THREADS);
#pragma unroll
        for (uint32_t i = 0; i < PER_THREAD; i++)
            if (at + i * THREADS < n) __stcs(to + at + i * THREADS, v[i]);
    }
}

enum td_status td_cuda_scatter(struct td_stream *s, const struct td_piece *pieces, uint32_t n)
{
    struct scatter_list l;
    for (uint32_t i = 0; i < n;) {
        l.n_pieces = l.n_units = 0;
        for (; i < n && l.n_pieces < MAX_PIECES; i++) {
            uint64_t vectors = pieces[i].n_bytes / sizeof(uint4);
            if (vectors == 0) continue;
            if (vectors > UINT32_MAX - UNIT) return TD_E_UNSUPPORTED;
            struct scatter_piece *p = &l.piece[l.n_pieces++];
            p->from = (const uint4 *)pieces[i].from;
            p->to = (uint4 *)pieces[i].to;
            p->n = (uint32_t)vectors;
            p->first_unit = l.n_units;
            l.n_units += (uint32_t)((vectors + UNIT - 1) / UNIT);
        }
        if (l.n_units == 0) continue;
        scatter<<<td_min_u32(l.n_units, MAX_BLOCKS), THREADS, 0, td_cuda_stream_of(s)->s>>>(l);
        cudaError_t e = cudaGetLastError();
        if (e != cudaSuccess) return td_cuda_status(e, "scatter");
    }
    return TD_OK;
}
