#include "kernels/expert_format.h"

#include "common/base/status.h"

/* The scale's exponent of a tile. */
static int choose_scale(const struct td_pack_weight_args *a, uint32_t tile, uint32_t k_tile, bool *is_bad)
{
    uint32_t top = 0;
    for (uint32_t p = tile * TD_XT; p < (tile + 1) * TD_XT; p++)
        for (uint32_t c = k_tile * TD_XT; c < (k_tile + 1) * TD_XT; c++) {
            struct td_expert_element x = td_expert_element(a, td_expert_row(a->order, p), c);
            if (x.rank > top) top = x.rank;
            *is_bad |= x.is_bad;
        }
    return td_expert_scale(a->source, top);
}

static void pack_mxfp4(const struct td_pack_weight_args *a, uint32_t row, uint32_t col, int s, uint8_t *to)
{
    for (uint32_t plane = 0; plane < 2; plane++)
        for (uint32_t lane = 0; lane < 32; lane++)
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t word = td_expert_word(a, row, col, plane, lane, i);
                memcpy(to + (plane * 32 + lane) * 16 + i * 4, &word, sizeof word);
            }
    for (uint32_t r = 0; r < 16; r++)
        for (uint32_t i = 0; i < 4; i++) {
            int e = td_expert_element(a, td_expert_row(a->order, row + r), col + TD_X_GROUP * i).e;
            to[1024 + r * 4 + i] = (uint8_t)td_expert_table(e, s);
        }
}

enum td_status td_expert_pack(enum td_expert_form form, const struct td_pack_weight_args *a, uint8_t *out,
                              uint64_t *n_inexact)
{
    struct td_expert_layout l = td_expert_layout(form, a->n_out, a->n_in);
    float *scales = (float *)(void *)(out + l.scales_at);
    bool is_bad = false;
    *n_inexact = 0;
    if (!td_expert_can_pack(form, a)) return TD_E_UNSUPPORTED;
    memset(out, 0, l.bytes);
    for (uint32_t t = 0; t < l.row_tiles; t++)
        for (uint32_t k = 0; k < l.k_tiles; k++) {
            int s = choose_scale(a, t, k, &is_bad);
            uint8_t *tile = out + td_expert_tile_at(&l, t, k);
            scales[t * l.k_tiles + k] = ldexpf(1, s);
            for (uint32_t r = 0; r < td_expert_tile_rows(&l, t); r++) {
                uint32_t p = t * TD_XT + r;
                if (form == TD_EXPERTS_MXFP4 && r % 16 == 0)
                    pack_mxfp4(a, p, k * TD_XT, s, tile + (size_t)r / 16 * TD_XT_MXFP4);
                for (uint32_t c = 0; c < TD_XT; c++) {
                    bool is_exact;
                    struct td_expert_element x = td_expert_element(a, td_expert_row(a->order, p), k * TD_XT + c);
                    uint8_t code = td_expert_code(&x, s, &is_exact);
                    if (form == TD_EXPERTS_FP8) tile[td_expert_fp8_at(r, c)] = code;
                    *n_inexact += !is_exact;
                }
            }
        }
    return is_bad ? TD_E_INVALID : TD_OK;
}

uint8_t td_expert_code_at(const struct td_expert_layout *l, const uint8_t *packed, uint32_t p, uint32_t col,
                          float *scale_out)
{
    uint32_t t = p / TD_XT, k = col / TD_XT, r = p % TD_XT, c = col % TD_XT;
    const uint8_t *tile = packed + td_expert_tile_at(l, t, k);
    *scale_out = ((const float *)(const void *)(packed + l->scales_at))[t * l->k_tiles + k];
    if (l->form == TD_EXPERTS_FP8) return tile[td_expert_fp8_at(r, c)];
    const uint8_t *rows = tile + (size_t)r / 16 * TD_XT_MXFP4;
    uint32_t s = c / 32, h = c % 32 / 16, t4 = c % 16 / 4, j = c % 4, word;
    memcpy(&word, rows + (r % 16 / 8 * 32 + r % 8 * 4 + t4) * 16 + s * 4, sizeof word);
    /* As the kernel does it. */
    uint64_t table = td_expert_table_bytes(rows[1024 + r % 16 * 4 + s]);
    uint32_t magnitude = (word & 0x77777777u) >> 16 * h >> 4 * j & 7;
    uint32_t sign = ((h ? word << 4 : word) & 0x80808080u) >> 8 * j & 0x80;
    return (uint8_t)((table >> 8 * magnitude & 0xff) | sign);
}

float td_expert_at(const struct td_expert_layout *l, const uint8_t *packed, uint32_t p, uint32_t col)
{
    float scale;
    uint8_t code = td_expert_code_at(l, packed, p, col, &scale);
    return td_e4m3_decode(code) * scale;
}
