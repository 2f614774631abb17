#include "decode/recv.h"

#include "common/handoff/descriptor.h"
#include "common/transfer/memory.h"
#include "tests/unit/decode/decode_world.h"

/* The world's worker with a real receiver and the in-process transfer; prefill workers are transfers of their own. */
struct fixture {
    struct world *w;
    struct td_decode_recv *rv;
    struct td_xfer *x;
    struct td_model_config config;
    struct td_peer_layout layout;
};
struct prefill {
    struct td_xfer *x;
    struct td_xfer_peer *to_decode;
    struct td_xfer_pool *pools[TD_KV_N_GROUPS];
    struct td_descriptor d;
    uint8_t last_id;
    unsigned n_messages;
};

static void p_on_message(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t n, void *user)
{
    struct prefill *p = user;
    (void)x, (void)data, (void)n;
    assert_int_equal(from, DECODE_ID);
    p->last_id = id;
    p->n_messages++;
}

static void open_prefill(struct fixture *f, struct prefill *p, uint64_t incarnation)
{
    *p = (struct prefill){0};
    struct td_err err;
    struct td_xfer_handlers h = {.on_message = p_on_message};
    assert_int_equal(td_xfer_memory_open_env(&f->w->env, 1, NULL, &(struct td_xfer_options){.incarnation = incarnation},
                                             &h, p, &p->x, &err),
                     TD_OK);
    size_t n;
    const void *address = td_xfer_memory.address(f->x, &n);
    assert_int_equal(td_xfer_memory.peer_open(p->x, DECODE_ID, address, n, NULL, 0, &p->to_decode, &err), TD_OK);
    p->d.incarnation = incarnation;
    snprintf(p->d.name, sizeof p->d.name, "p");
    p->d.layout = f->layout;
    p->d.n_ranks = 1;
    struct td_peer_rank *r = &p->d.ranks[0];
    r->address = td_xfer_memory.address(p->x, &r->n_address);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        assert_int_equal(td_xfer_memory.pool_create(p->x, 4096, &p->pools[g], &err), TD_OK);
        r->pools[g].base = (uint64_t)(uintptr_t)td_xfer_memory.pool_base(p->pools[g]);
        r->pools[g].key = td_xfer_memory.pool_key(p->pools[g], &r->pools[g].n_key);
        r->n_pages[g] = 5;
    }
}

static void introduce(struct fixture *f, const struct prefill *p)
{
    struct td_descriptor_msg m;
    td_descriptor_to_msg(&p->d, &m);
    td_decode_recv_introduce(f->rv, &m.peer);
}

static struct fixture *make(void)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct td_err err;
    f->w = make_world((struct shape){0});
    f->config = (struct td_model_config){.n_kv_heads = 2, .head_dim = 8, .window = WINDOW};
    struct td_kv_group_layout kv[TD_KV_N_GROUPS] = {f->w->kv[0], f->w->kv[1]};
    td_peer_layout_of(&f->config, "0123456789abcdef0123456789abcdef", "bf16", kv, &f->layout);
    assert_int_equal(td_decode_recv_create(&td_xfer_memory, &f->layout, &f->rv), TD_OK);
    struct td_xfer_handlers h = td_decode_recv_handlers();
    assert_int_equal(td_xfer_memory_open_env(&f->w->env, 2, NULL, &(struct td_xfer_options){.incarnation = DECODE_ID},
                                             &h, f->rv, &f->x, &err),
                     TD_OK);
    td_decode_recv_start(f->rv, f->x, f->w->worker);
    return f;
}

static void destroy(struct fixture *f)
{
    td_decode_recv_destroy(f->rv);
    td_xfer_memory.destroy(f->x);
    free_world(f->w);
    free(f);
}

static void an_introduced_prefill_worker_is_known_and_can_be_spoken_to(void **state)
{
    (void)state;
    struct fixture *f = make();
    struct prefill p;
    struct td_err err;
    open_prefill(f, &p, PREFILL_ID);
    assert_int_equal(td_decode_recv_check(f->rv, PREFILL_ID, &err), TD_E_UNKNOWN_PEER);
    assert_int_equal(td_decode_recv_send(f->rv, PREFILL_ID, TD_WIRE_STOP, "x", 1), TD_E_UNKNOWN_PEER);
    introduce(f, &p);
    introduce(f, &p); /* by another router */
    assert_int_equal(td_decode_recv_check(f->rv, PREFILL_ID, &err), TD_OK);
    assert_int_equal(td_decode_recv_send(f->rv, PREFILL_ID, TD_WIRE_STOP, "x", 1), TD_OK);
    advance_ms(f->w, 1);
    assert_int_equal(p.n_messages, 1);
    assert_int_equal(p.last_id, TD_WIRE_STOP);
    td_xfer_memory.destroy(p.x);
    destroy(f);
}

static void its_messages_reach_the_hand_off(void **state)
{
    (void)state;
    struct fixture *f = make();
    struct prefill p;
    open_prefill(f, &p, PREFILL_ID);
    introduce(f, &p);
    struct told *t = start(f->w, 0, 1, (struct ask){.n_prompt = 6, .max_tokens = 4});
    struct td_wire m = {.to = DECODE_ID, .generation = t->generation, .status = TD_E_DEVICE};
    struct td_buf b = {0};
    td_wire_encode(TD_WIRE_ABORTED, &m, &b);
    assert_int_equal(td_xfer_memory.send(p.to_decode, TD_WIRE_ABORTED, b.data, b.n), TD_OK);
    td_buf_free(&b);
    advance_ms(f->w, 1);
    expect_finished(t, NONE, "DEVICE", true);
    td_xfer_memory.destroy(p.x);
    destroy(f);
}

static void its_death_is_told_to_the_worker_and_remembered(void **state)
{
    (void)state;
    struct fixture *f = make();
    struct prefill p;
    struct td_err err;
    open_prefill(f, &p, PREFILL_ID);
    introduce(f, &p);
    struct told *t = start(f->w, 0, 1, (struct ask){.n_prompt = 6, .max_tokens = 4});
    td_xfer_memory_kill(p.x);
    advance_ms(f->w, 1000);
    expect_finished(t, NONE, "PEER_LOST", true);
    expect_pages_back(f->w);
    assert_int_equal(td_decode_recv_check(f->rv, PREFILL_ID, &err), TD_E_PEER_LOST);
    assert_int_equal(td_decode_recv_send(f->rv, PREFILL_ID, TD_WIRE_STOP, "x", 1), TD_E_PEER_LOST);
    introduce(f, &p); /* a router that has not heard: the dead stay dead */
    assert_int_equal(td_decode_recv_check(f->rv, PREFILL_ID, &err), TD_E_PEER_LOST);
    td_xfer_memory.destroy(p.x);
    destroy(f);
}

static void one_that_does_not_fit_is_refused_by_field_until_it_does(void **state)
{
    (void)state;
    struct fixture *f = make();
    struct prefill p;
    struct td_err err;
    open_prefill(f, &p, PREFILL_ID);
    struct td_peer_layout good = p.d.layout;
    p.d.layout.kv[TD_KV_FULL].page_tokens = p.d.layout.kv[TD_KV_SLIDING].page_tokens = 2 * PAGE;
    introduce(f, &p);
    assert_int_equal(td_decode_recv_check(f->rv, PREFILL_ID, &err), TD_E_MISMATCH);
    assert_non_null(strstr(err.text, "page_tokens"));
    p.d.layout = good;
    introduce(f, &p);
    assert_int_equal(td_decode_recv_check(f->rv, PREFILL_ID, &err), TD_OK);
    td_xfer_memory.destroy(p.x);
    destroy(f);
}

static void nonsense_and_too_many_are_survived(void **state)
{
    (void)state;
    struct fixture *f = make();
    struct prefill p;
    struct td_err err;
    Tandem__V1__PeerDescriptor empty = TANDEM__V1__PEER_DESCRIPTOR__INIT;
    td_decode_recv_introduce(f->rv, &empty);
    open_prefill(f, &p, PREFILL_ID);
    introduce(f, &p);
    p.d.layout.window_tokens++; /* from here on they do not fit, and are forgotten oldest first */
    for (uint64_t i = 0; i < 3000; i++) {
        p.d.incarnation = 0x10000 + i;
        introduce(f, &p);
    }
    assert_int_equal(td_decode_recv_check(f->rv, PREFILL_ID, &err), TD_OK);
    assert_int_equal(td_decode_recv_check(f->rv, 0x10000, &err), TD_E_UNKNOWN_PEER);
    assert_int_equal(td_decode_recv_check(f->rv, 0x10000 + 2999, &err), TD_E_MISMATCH);
    struct td_buf b = {0};
    td_decode_recv_describe(f->rv, &b);
    assert_non_null(strstr(td_buf_cstr(&b), "window_tokens"));
    td_buf_free(&b);
    td_xfer_memory.destroy(p.x);
    destroy(f);
}

int main(void)
{
    td_log_open("test", TD_LOG_OFF);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_introduced_prefill_worker_is_known_and_can_be_spoken_to),
        cmocka_unit_test(its_messages_reach_the_hand_off),
        cmocka_unit_test(its_death_is_told_to_the_worker_and_remembered),
        cmocka_unit_test(one_that_does_not_fit_is_refused_by_field_until_it_does),
        cmocka_unit_test(nonsense_and_too_many_are_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
