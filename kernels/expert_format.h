/* How an expert's matrix [n_out, n_in] lies in a GPU's memory when it is not bf16: tiles of 128 x 128, one power-of-two
 * scale each, in the order in which a tensor core takes them, so that a tile is one contiguous copy. Plain C, shared by
 * the kernels, the packing and the tests.
 *
 * FP8: a tile row is 128 bytes of E4M3, its 16-byte pieces swizzled (piece c of row r at c ^ r % 8).
 * MXFP4: 16 rows are 1,088 bytes: for rows 0-7, then 8-15, a lane's (4 g + t: row g) four words; then 4 bytes a row.
 * Word s holds columns 32 s + 16 h + 4 t + j: magnitude of (h, j) in bits 16 h + 4 j .. + 2, its sign in bit 8 j + (h ?
 * 3 : 7): so a byte permute of a table widens four at once. Byte s of a row says how far group s lies below the tile's
 * largest exponent: 6 - (e - s_tile), the table to use.
 *
 * Rows are padded to 16, columns to 128, with zeros. The last tile row is as short as the rows leave it. Gate and up of
 * a unit lie 8 rows apart, units in eights: both are in one lane's accumulators. */
#ifndef TD_KERNELS_EXPERT_FORMAT_H
#define TD_KERNELS_EXPERT_FORMAT_H

#include <math.h>
#include <string.h>

#include "kernels/device.h"
#include "kernels/e4m3.h"

#define TD_XT            128u  /* rows and columns of a tile */
#define TD_XT_FP8        128u  /* bytes of a tile row */
#define TD_XT_MXFP4      1088u /* bytes of 16 tile rows */
#define TD_X_TABLES      20u   /* from 6 - d: at 19 even 6 * 2^d rounds to nothing */
#define TD_X_MAX_K       (32u * TD_XT)
#define TD_X_MIN_SCALE   (-126)
#define TD_X_GROUP       32u
#define TD_X_ROUND(a, b) (((a) + (b)-1) / (b) * (b))

struct td_expert_layout {
    enum td_expert_form form;
    uint32_t n_rows, row_tiles, k_tiles; /* rows padded */
    size_t tile_bytes;                   /* of a full one */
    size_t scales_at, bytes;             /* of the whole: codes, then float [row_tiles][k_tiles] */
};

TD_BOTH_SIDES uint32_t td_expert_tile_rows(const struct td_expert_layout *l, uint32_t tile)
{
    uint32_t left = l->n_rows - tile * TD_XT;
    return left < TD_XT ? left : TD_XT;
}
TD_BOTH_SIDES size_t td_expert_rows_bytes(enum td_expert_form form, uint32_t rows)
{
    return form == TD_EXPERTS_FP8 ? (size_t)rows * TD_XT_FP8 : (size_t)(rows / 16) * TD_XT_MXFP4;
}
TD_BOTH_SIDES struct td_expert_layout td_expert_layout(enum td_expert_form form, uint32_t n_out, uint32_t n_in)
{
    struct td_expert_layout l;
    l.form = form;
    l.n_rows = TD_X_ROUND(n_out, 16u);
    l.row_tiles = (l.n_rows + TD_XT - 1) / TD_XT;
    l.k_tiles = (n_in + TD_XT - 1) / TD_XT;
    l.tile_bytes = td_expert_rows_bytes(form, TD_XT);
    l.scales_at = TD_X_ROUND(td_expert_rows_bytes(form, l.n_rows) * l.k_tiles, (size_t)256);
    l.bytes = TD_X_ROUND(l.scales_at + (size_t)l.row_tiles * l.k_tiles * sizeof(float), (size_t)1024);
    return l;
}
TD_BOTH_SIDES size_t td_expert_tile_at(const struct td_expert_layout *l, uint32_t tile, uint32_t k_tile)
{
    return (size_t)tile * l->k_tiles * l->tile_bytes +
           (size_t)k_tile * td_expert_rows_bytes(l->form, td_expert_tile_rows(l, tile));
}
/* A byte of an FP8 tile. */
TD_BOTH_SIDES uint32_t td_expert_fp8_at(uint32_t row, uint32_t col)
{
    return row * TD_XT_FP8 + ((col / 16) ^ (row % 8)) * 16 + col % 16;
}
/* The row of the matrix that packed row p holds. */
TD_BOTH_SIDES uint32_t td_expert_row(enum td_row_order order, uint32_t p)
{
    return order == TD_ROWS_GATE_UP ? 2 * (p / 16 * 8 + p % 8) + p % 16 / 8 : p;
}

/* The units of an expert that rank `rank` of n_ranks has: an even share, or, since MXFP4 keeps whole groups, shares
 * that differ by one group where an even one would cut some. */
TD_BOTH_SIDES void td_expert_slice(enum td_expert_form form, uint32_t intermediate, uint32_t n_ranks, uint32_t rank,
                                   uint32_t *first, uint32_t *n_units)
{
    const uint32_t step = form == TD_EXPERTS_MXFP4 ? TD_X_GROUP : 8, n = intermediate / step, more = n % n_ranks;
    *first = (rank * (n / n_ranks) + (rank < more ? rank : more)) * step;
    *n_units = (n / n_ranks + (rank < more)) * step;
}

/* ---- elements of a stored matrix ---- */

/* An FP4 code's magnitude. */
TD_BOTH_SIDES float td_fp4_magnitude(uint32_t code)
{
    uint32_t e = code >> 1 & 3, m = code & 1;
    return e == 0 ? 0.5f * (float)m : (1.0f + 0.5f * (float)m) * (float)(1u << (e - 1));
}

struct td_expert_element {
    float v;       /* MXFP4: without its group's scale */
    int e;         /* the exponent of that; 0 for bf16 */
    uint32_t code; /* MXFP4 */
    uint32_t rank; /* what the tile's scale is chosen from: the largest; 0 for a zero */
    bool is_bad;
};

/* Row and column of the window; outside it: zero. */
TD_BOTH_SIDES struct td_expert_element td_expert_element(const struct td_pack_weight_args *a, uint32_t row,
                                                         uint32_t col)
{
    struct td_expert_element x;
    x.v = 0, x.e = 0, x.code = 0, x.rank = 0, x.is_bad = false;
    if (row >= a->n_out || col >= a->n_in) return x;
    size_t r = (size_t)a->row_begin + row, c = (size_t)a->col_begin + col;
    if (a->source != TD_SRC_MXFP4) {
        size_t at = a->source == TD_SRC_BF16_ROWS ? r * a->ld + c : c * a->ld + r;
        x.v = td_bits_f32((uint32_t)((const uint16_t *)a->data)[at] << 16);
        x.rank = td_f32_bits(x.v) & 0x7fffffffu;
        x.is_bad = x.rank >= 0x7f800000u;
        return x;
    }
    size_t group = r * (a->ld / TD_X_GROUP) + c / TD_X_GROUP;
    uint8_t byte = ((const uint8_t *)a->data)[group * 16 + c % TD_X_GROUP / 2], scale = a->scales[group];
    x.code = c % 2 == 0 ? byte & 15u : (uint32_t)byte >> 4;
    x.e = (int)scale - 127;
    x.v = td_fp4_magnitude(x.code & 7) * (x.code & 8 ? -1.0f : 1.0f);
    x.rank = (x.code & 7) == 0 ? 0 : (uint32_t)(x.e + 512);
    /* 4 and 6 have another two in them. */
    x.is_bad = scale == 255 || (x.e == 127 && (x.code & 7) > 3) || (x.e == 126 && (x.code & 7) > 5);
    return x;
}

/* The exponent s of a tile's scale 2^s. From MXFP4: 6 times the largest group becomes 384. From bf16: the smallest that
 * brings the largest element to 448 or less. */
TD_BOTH_SIDES int td_expert_scale(enum td_weight_source source, uint32_t rank)
{
    if (rank == 0) return 0;
    int s = source == TD_SRC_MXFP4 ? (int)rank - 512 - 6
                                   : (int)(rank >> 23) - 127 - ((rank & 0x7fffffu) <= 0x600000u ? 8 : 7);
    return s < TD_X_MIN_SCALE ? TD_X_MIN_SCALE : s;
}

TD_BOTH_SIDES uint8_t td_expert_code(const struct td_expert_element *x, int s, bool *is_exact)
{
    float v = ldexpf(x->v, x->e - s);
    uint8_t code = td_e4m3_encode(v);
    *is_exact = x->rank == 0 || ((code & 0x7f) != 0 && td_e4m3_decode(code) == v);
    return code;
}

/* Which table a group of exponent e takes in a tile of scale 2^s. A group of zeros may lie above the scale. */
TD_BOTH_SIDES uint32_t td_expert_table(int e, int s)
{
    int i = 6 - (e - s);
    return i < 0 ? 0 : i >= (int)TD_X_TABLES ? TD_X_TABLES - 1 : (uint32_t)i;
}
/* Table i: the codes of the eight magnitudes times 2^(6 - i), magnitude 0 in the lowest byte. */
TD_BOTH_SIDES uint64_t td_expert_table_bytes(uint32_t i)
{
    uint64_t out = 0;
    for (uint32_t m = 0; m < 8; m++) out |= (uint64_t)td_e4m3_encode(ldexpf(td_fp4_magnitude(m), 6 - (int)i)) << 8 * m;
    return out;
}

/* One word of 16 MXFP4 rows: plane 0 or 1, lane, s as above; row, col: of the 16 rows' and the tile's origin. */
TD_BOTH_SIDES uint32_t td_expert_word(const struct td_pack_weight_args *a, uint32_t row, uint32_t col, uint32_t plane,
                                      uint32_t lane, uint32_t s)
{
    uint32_t out = 0, r = td_expert_row(a->order, row + 8 * plane + lane / 4);
    for (uint32_t h = 0; h < 2; h++)
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t code = td_expert_element(a, r, col + 32 * s + 16 * h + 4 * (lane % 4) + j).code;
            out |= (code & 7) << (16 * h + 4 * j) | (code >> 3) << (8 * j + (h ? 3 : 7));
        }
    return out;
}

/* Can these be packed so? MXFP4 keeps whole groups of what is MXFP4 already. */
TD_BOTH_SIDES bool td_expert_can_pack(enum td_expert_form form, const struct td_pack_weight_args *a)
{
    if (a->n_in > TD_X_MAX_K || a->n_in % 8 != 0 || a->n_out % 8 != 0) return false;
    return form == TD_EXPERTS_FP8 ||
           (a->source == TD_SRC_MXFP4 && a->col_begin % TD_X_GROUP == 0 && a->n_in % TD_X_GROUP == 0);
}

/* ---- on the host: the definition, for tests ---- */

/* out: l.bytes. INVALID for what is not finite. *n_inexact: elements that the form cannot hold exactly. */
enum td_status td_expert_pack(enum td_expert_form form, const struct td_pack_weight_args *a, uint8_t *out,
                              uint64_t *n_inexact);
/* The value a packed matrix has at packed row p. */
float td_expert_at(const struct td_expert_layout *l, const uint8_t *packed, uint32_t p, uint32_t col);
/* The same as the E4M3 code that the tensor core sees, and the tile's scale. */
uint8_t td_expert_code_at(const struct td_expert_layout *l, const uint8_t *packed, uint32_t p, uint32_t col,
                          float *scale_out);

#endif
