#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/handoff/sender.h"

#define N_HEADS 8u

static struct td_kv_group_layout layout(uint32_t n_heads, uint32_t n_pages)
{
    return (struct td_kv_group_layout){
        .n_layers = 3, .n_pages = n_pages, .n_heads = n_heads, .head_dim = 4, .page_tokens = 2, .dtype = TD_BF16};
}

static void neighbours_on_both_sides_melt_together(void **state)
{
    (void)state;
    struct td_kv_group_layout src = layout(2, 20), dst = layout(2, 30);
    static const uint8_t memory[1 << 15];
    struct td_tx_geometry geo = {.src = &src, .dst = &dst, .src_base = memory};
    static const uint32_t from[] = {4, 5, 6, 9, 10, 3}, to[] = {7, 8, 9, 10, 11, 2};
    struct td_xfer_seg segs[6];
    uint64_t bytes;
    uint64_t page = td_kv_page_bytes(&src);
    assert_int_equal(td_tx_segments(&geo, 1, from, to, 6, segs, &bytes), 3);
    assert_int_equal(bytes, 6 * page);
    assert_int_equal(segs[0].n_bytes, 3 * page);
    assert_int_equal(segs[1].n_bytes, 2 * page); /* breaks at the source, not at the target */
    assert_int_equal(segs[2].n_bytes, page);
    assert_int_equal(segs[0].dst_offset, (30 + 7) * page);
    assert_ptr_equal(segs[0].src, memory + (20 + 4) * page);
}

/* Every pair of tensor-parallel widths: each head of each page arrives where it belongs, whoever sent it. */
static void any_split_of_heads_reaches_any_other(void **state)
{
    (void)state;
    static const uint32_t from[] = {4, 5, 9}, to[] = {7, 8, 2};
    for (uint32_t tp_src = 1; tp_src <= N_HEADS; tp_src *= 2)
        for (uint32_t tp_dst = 1; tp_dst <= N_HEADS; tp_dst *= 2) {
            struct td_kv_group_layout src = layout(N_HEADS / tp_src, 10), dst = layout(N_HEADS / tp_dst, 12);
            size_t n_src = td_kv_pool_bytes(&src), n_dst = td_kv_pool_bytes(&dst), head = td_kv_head_bytes(&src);
            uint64_t sum = 0;
            for (uint32_t d = 0; d < tp_dst; d++) {
                uint8_t *pool = calloc(1, n_dst);
                for (uint32_t s = 0; s < tp_src; s++) {
                    uint8_t *mine = malloc(n_src);
                    memset(mine, 0xee, n_src);
                    for (uint32_t p = 0; p < 3; p++) /* byte = block and head over the whole model */
                        for (uint32_t h = 0; h < src.n_heads; h++)
                            memset(mine + td_kv_offset(&src, 2, from[p], h, false, 0),
                                   (int)(1 + p * N_HEADS + s * src.n_heads + h), head);
                    struct td_tx_geometry geo = {.src = &src,
                                                 .dst = &dst,
                                                 .src_base = mine,
                                                 .src_first_head = s * src.n_heads,
                                                 .dst_first_head = d * dst.n_heads};
                    struct td_xfer_seg segs[3];
                    uint64_t bytes;
                    uint32_t n = td_tx_segments(&geo, 2, from, to, 3, segs, &bytes);
                    assert_true(n <= 3);
                    assert_int_equal(n == 0, bytes == 0);
                    for (uint32_t i = 0; i < n; i++) {
                        assert_true(segs[i].dst_offset + segs[i].n_bytes <= n_dst);
                        memcpy(pool + segs[i].dst_offset, segs[i].src, segs[i].n_bytes);
                    }
                    sum += bytes;
                    free(mine);
                }
                for (uint32_t p = 0; p < 3; p++)
                    for (uint32_t h = 0; h < dst.n_heads; h++)
                        for (size_t b = 0; b < head; b++)
                            assert_int_equal(pool[td_kv_offset(&dst, 2, to[p], h, false, 0) + b],
                                             1 + p * N_HEADS + d * dst.n_heads + h);
                free(pool);
            }
            assert_int_equal(sum, 3 * N_HEADS * head);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(neighbours_on_both_sides_melt_together),
        cmocka_unit_test(any_split_of_heads_reaches_any_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
