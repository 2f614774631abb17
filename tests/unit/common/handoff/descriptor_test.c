#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "common/base/check.h"
#include "common/handoff/descriptor.h"

static struct td_descriptor example(void)
{
    struct td_model_config c = {.n_kv_heads = 8, .head_dim = 64, .window = 128};
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        kv[g] = (struct td_kv_group_layout){
            .n_layers = 12, .n_pages = 5, .n_heads = 4, .head_dim = 64, .page_tokens = 64, .dtype = TD_BF16};
    struct td_descriptor d = {.incarnation = 7, .name = "decode-0", .n_ranks = 2};
    td_peer_layout_of(&c, "0123456789abcdef0123456789abcdef", "mxfp4", kv, &d.layout);
    for (uint32_t r = 0; r < 2; r++)
        d.ranks[r] = (struct td_peer_rank){
            .address = "address",
            .n_address = 7,
            .pools = {{0x1000 + r, "skey", 4}, {0x2000 + r, "full-key", 8}},
            .n_pages = {10 + r, 20 + r},
        };
    return d;
}

static void a_descriptor_survives_the_message(void **state)
{
    (void)state;
    struct td_descriptor d = example(), got;
    struct td_descriptor_msg m;
    struct td_err err;
    td_descriptor_to_msg(&d, &m);
    uint8_t packed[1024];
    size_t n = tandem__v1__peer_descriptor__pack(&m.peer, packed);
    assert_true(n <= sizeof packed);
    Tandem__V1__PeerDescriptor *there = tandem__v1__peer_descriptor__unpack(NULL, n, packed);
    assert_int_equal(td_descriptor_from_msg(there, &got, &err), TD_OK);
    assert_int_equal(got.incarnation, 7);
    assert_string_equal(got.name, "decode-0");
    assert_int_equal(td_peer_layout_check(&d.layout, &got.layout, &err), TD_OK);
    assert_int_equal(got.ranks[1].pools[TD_KV_FULL].base, 0x2001);
    assert_memory_equal(got.ranks[1].pools[TD_KV_FULL].key, "full-key", 8);
    assert_int_equal(got.ranks[0].pools[TD_KV_SLIDING].n_key, 4);
    struct td_kv_group_layout rank[TD_KV_N_GROUPS];
    td_peer_rank_layout(&got, 1, rank);
    assert_int_equal(rank[TD_KV_SLIDING].n_heads, 4);
    assert_int_equal(rank[TD_KV_SLIDING].n_pages, 11);
    assert_int_equal(rank[TD_KV_FULL].n_pages, 21);
    tandem__v1__peer_descriptor__free_unpacked(there, NULL);
}

static void a_mismatch_names_the_field(void **state)
{
    (void)state;
    struct td_descriptor a = example(), b;
    struct td_err err;
#define DIFFERS(change, field)                                                                                         \
    do {                                                                                                               \
        b = example();                                                                                                 \
        change;                                                                                                        \
        assert_int_equal(td_peer_layout_check(&a.layout, &b.layout, &err), TD_E_MISMATCH);                             \
        assert_memory_equal(err.text, field " ", strlen(field " "));                                                   \
    } while (0)
    DIFFERS(b.layout.version++, "layout_version");
    DIFFERS(b.layout.kv[TD_KV_FULL].page_tokens = 32, "page_tokens");
    DIFFERS(b.layout.kv[TD_KV_SLIDING].n_layers++, "n_sliding_layers");
    DIFFERS(b.layout.kv[TD_KV_FULL].n_layers++, "n_full_layers");
    DIFFERS(b.layout.kv[TD_KV_FULL].n_heads = 4, "n_kv_heads");
    DIFFERS(b.layout.kv[TD_KV_FULL].head_dim = 128, "head_dim");
    DIFFERS(b.layout.window_tokens = 64, "window_tokens");
    DIFFERS(b.layout.kv[TD_KV_SLIDING].dtype = TD_F32, "kv_dtype_sliding");
    DIFFERS(b.layout.kv[TD_KV_FULL].dtype = TD_E4M3, "kv_dtype_full");
    DIFFERS(b.layout.fingerprint[0] = 'f', "model_fingerprint");
    DIFFERS(b.layout.weight_form[0] = 'b', "weight_form");
    assert_non_null(strstr(err.text, "mxfp4 here, bxfp4 there"));
}

static void nonsense_is_refused_by_name(void **state)
{
    (void)state;
    struct td_descriptor d = example(), got;
    struct td_descriptor_msg m;
    struct td_err err;
#define REFUSED(change, field)                                                                                         \
    do {                                                                                                               \
        td_descriptor_to_msg(&d, &m);                                                                                  \
        change;                                                                                                        \
        assert_int_equal(td_descriptor_from_msg(&m.peer, &got, &err), TD_E_INVALID);                                   \
        assert_non_null(strstr(err.text, field));                                                                      \
    } while (0)
    REFUSED(m.peer.incarnation = 0, "incarnation");
    REFUSED(m.peer.layout = NULL, "layout");
    REFUSED(m.layout.page_tokens = 0, "page_tokens");
    REFUSED(m.layout.head_dim = 1u << 31, "head_dim");
    REFUSED(m.layout.n_kv_heads = 0, "n_kv_heads");
    REFUSED(m.layout.n_kv_heads = 7, "n_kv_heads");
    REFUSED(m.layout.n_full_layers = UINT32_MAX, "n_full_layers");
    REFUSED(m.layout.window_tokens = 0, "window_tokens");
    REFUSED(m.layout.kv_dtype_full = "int3", "kv_dtype_full");
    REFUSED(m.peer.n_ranks = 0, "ranks");
    REFUSED(m.peer.n_ranks = TD_MAX_RANKS + 1, "ranks");
    REFUSED(m.ranks[1].worker_address.len = 0, "worker_address");
    REFUSED(m.ranks[1].full_rkey.len = TD_XFER_ADDRESS_MAX + 1, "full_rkey");
    REFUSED(m.ranks[0].n_full_pages = UINT32_MAX, "n_full_pages");
    char quoted[] = "a\"b\\c\n";
    td_descriptor_to_msg(&d, &m);
    m.peer.name = quoted;
    assert_int_equal(td_descriptor_from_msg(&m.peer, &got, &err), TD_OK);
    assert_string_equal(got.name, "a?b?c?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_descriptor_survives_the_message),
        cmocka_unit_test(a_mismatch_names_the_field),
        cmocka_unit_test(nonsense_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
