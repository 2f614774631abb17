/* A matrix as stored becomes panels of 16 output columns, each [n_in][16] in bf16. That is exact for every released
 * weight: an MXFP4 element is 0.5 .. 6 times a power of two. Missing columns of the last panel are zero. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu_int.h"
#include "kernels/device_cpu.h"

/* Column of the packed matrix for output row r. Unit i of a gate_up matrix: gate in panel 2 (i / 16), up in the next;
 * if no more than 8 units are left for the last pair, gates and ups share its one panel. */
static uint32_t packed_col(enum td_row_order order, uint32_t n_out, uint32_t r)
{
    if (order != TD_ROWS_GATE_UP) return r;
    uint32_t unit = r / 2, n_units = n_out / 2, first = unit / TD_LANES * TD_LANES;
    uint32_t to_up = td_cpu_is_half_pair(n_units - first) ? TD_LANES / 2 : TD_LANES;
    return 2 * first + (r % 2) * to_up + unit - first;
}

/* What each code stands for under each scale; NOT_FINITE where that is not finite in bf16. */
#define NOT_FINITE 0x7f80u
struct mxfp4 {
    uint16_t value[256][16];
};

static void make_mxfp4(struct mxfp4 *t)
{
    static const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (int scale = 0; scale < 256; scale++)
        for (uint32_t code = 0; code < 16; code++) {
            float v = ldexpf(magnitude[code & 7], scale - 127);
            bool is_finite = scale != 255 && isfinite(v);
            t->value[scale][code] = is_finite ? td_f32_to_bf16(code & 8 ? -v : v) : NOT_FINITE;
        }
}

static uint16_t mxfp4_element(const struct td_pack_weight_args *a, const struct mxfp4 *t, size_t row, size_t col)
{
    size_t group = row * (a->ld / 32) + col / 32;
    uint8_t byte = ((const uint8_t *)a->data)[group * 16 + col % 32 / 2];
    return t->value[a->scales[group]][col % 2 == 0 ? byte & 15 : byte >> 4];
}

enum td_status td_cpu_pack_weight(struct td_stream *s, const struct td_pack_weight_args *a)
{
    (void)s;
    size_t bias_bytes;
    size_t bytes = td_backend_cpu.packed_bytes(NULL, a->n_out, a->n_in, a->order, &bias_bytes);
    uint16_t *out = a->out;
    struct mxfp4 mxfp4;
    if (a->source == TD_SRC_MXFP4) make_mxfp4(&mxfp4);
    memset(out, 0, bytes);
    for (uint32_t r = 0; r < a->n_out; r++) {
        uint32_t col = packed_col(a->order, a->n_out, r);
        uint16_t *to = out + (size_t)(col / TD_LANES) * TD_LANES * a->n_in + td_panel_slot(col % TD_LANES);
        size_t row = (size_t)a->row_begin + r;
        for (uint32_t k = 0; k < a->n_in; k++) {
            size_t c = (size_t)a->col_begin + k;
            uint16_t v = 0;
            switch (a->source) {
            case TD_SRC_BF16_ROWS: v = ((const uint16_t *)a->data)[row * a->ld + c]; break;
            case TD_SRC_BF16_COLS: v = ((const uint16_t *)a->data)[c * a->ld + row]; break;
            case TD_SRC_MXFP4:
                v = mxfp4_element(a, &mxfp4, row, c);
                if (v == NOT_FINITE) return TD_E_INVALID;
                break;
            }
            to[(size_t)k * TD_LANES] = v;
        }
    }
    if (a->bias == NULL) return TD_OK;
    memset(a->bias_out, 0, bias_bytes);
    for (uint32_t r = 0; r < a->n_out; r++) a->bias_out[packed_col(a->order, a->n_out, r)] = a->bias[r];
    return TD_OK;
}
