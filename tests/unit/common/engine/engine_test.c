/* The engine's thread and its mail. */
#include "common/engine/engine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "tests/support/tiny_model.h"

#define MAX_EVENTS 256u

struct fixture {
    struct tiny t;
    struct td_loop *loop;
    struct td_engine *engine;
    struct {
        struct td_batch *b;
        int32_t layer; /* -1: done */
        enum td_status st;
    } events[MAX_EVENTS];
    uint32_t n_events, n_done, stop_after;
    uint64_t oldest_step_ns;
    bool destroys_engine;
    struct td_engine_handlers engine_handlers;
};

static void on_layer(struct td_engine *e, struct td_batch *b, uint32_t layer, void *user)
{
    struct fixture *f = user;
    uint64_t age = td_engine_step_age_ns(e);
    if (age > f->oldest_step_ns) f->oldest_step_ns = age;
    assert_true(f->n_events < MAX_EVENTS);
    f->events[f->n_events].b = b;
    f->events[f->n_events++].layer = (int32_t)layer;
}

static void on_done(struct td_engine *e, struct td_batch *b, enum td_status st, void *user)
{
    struct fixture *f = user;
    assert_true(f->n_events < MAX_EVENTS);
    f->events[f->n_events].b = b;
    f->events[f->n_events].st = st;
    f->events[f->n_events++].layer = -1;
    if (f->destroys_engine) {
        td_engine_destroy(e);
        f->engine = NULL;
    }
    if (++f->n_done == f->stop_after) td_loop_stop(f->loop);
}

static void open_fixture(struct fixture *f, uint32_t layer_delay_ms)
{
    struct td_err err = {0};
    *f = (struct fixture){0};
    tiny_open(&f->t, &(struct tiny_options){.kv_type = TD_BF16, .max_tokens = 1024, .max_batch_tokens = 256});
    assert_int_equal(td_loop_create(&f->loop), TD_OK);
    struct td_engine_options o = f->t.engine;
    o.layer_delay_ms = layer_delay_ms;
    f->engine_handlers = (struct td_engine_handlers){.on_layer = on_layer, .on_done = on_done};
    if (td_engine_create(f->t.model, &o, f->loop, &f->engine_handlers, f, &f->engine, &err) != TD_OK)
        fail_msg("%s", err.text);
}

static void close_fixture(struct fixture *f)
{
    td_engine_destroy(f->engine);
    td_loop_destroy(f->loop);
    tiny_close(&f->t);
}

static const uint32_t words[8] = {2024, 17, 300, 512, 9, 1000, 41, 7};

static void results_come_back_as_mail_layers_first(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 0);
    struct tiny_seq s;
    tiny_seq_open(&f.t, &s, 64);
    float *logits = calloc(f.t.c->vocab, sizeof *logits), *again = calloc(f.t.c->vocab, sizeof *again);
    assert_true(logits != NULL && again != NULL);
    struct td_segment seg = tiny_next(&f.t, &s, words, 8, logits);
    struct td_batch b = {.segments = &seg, .n_segments = 1, .want_layers = true};
    assert_int_equal(td_engine_submit(f.engine, &b), TD_OK);
    f.stop_after = 1;
    assert_int_equal(td_loop_run(f.loop), TD_OK);
    assert_int_equal(f.n_events, f.t.c->n_layers + 1);
    for (uint32_t i = 0; i < f.t.c->n_layers; i++) assert_int_equal(f.events[i].layer, i);
    assert_int_equal(f.events[f.t.c->n_layers].layer, -1);
    assert_int_equal(f.events[f.t.c->n_layers].st, TD_OK);
    assert_ptr_equal(f.events[0].b, &b);

    /* The same at once, on this thread. */
    seg.logits_out = again;
    assert_int_equal(td_engine_run_now(f.engine, &b, NULL, NULL), TD_OK);
    assert_memory_equal(logits, again, f.t.c->vocab * sizeof *logits);
    tiny_seq_close(&s);
    free(logits);
    free(again);
    close_fixture(&f);
}

static void two_batches_may_wait_and_run_in_order(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 0);
    struct tiny_seq s;
    tiny_seq_open(&f.t, &s, 64);
    struct td_segment segs[3];
    struct td_batch b[3];
    for (uint32_t i = 0; i < 3; i++) {
        segs[i] = tiny_next(&f.t, &s, words + i, 1, NULL);
        b[i] = (struct td_batch){.segments = &segs[i], .n_segments = 1};
    }
    assert_int_equal(td_engine_submit(f.engine, &b[0]), TD_OK);
    assert_int_equal(td_engine_submit(f.engine, &b[1]), TD_OK);
    assert_int_equal(td_engine_submit(f.engine, &b[2]), TD_E_BUSY);
    f.stop_after = 2;
    assert_int_equal(td_loop_run(f.loop), TD_OK);
    assert_int_equal(f.n_events, 2); /* no layers were asked for */
    assert_ptr_equal(f.events[0].b, &b[0]);
    assert_ptr_equal(f.events[1].b, &b[1]);
    assert_int_equal(td_engine_submit(f.engine, &b[2]), TD_OK);
    f.stop_after = 3;
    assert_int_equal(td_loop_run(f.loop), TD_OK);
    assert_ptr_equal(f.events[2].b, &b[2]);
    tiny_seq_close(&s);
    close_fixture(&f);
}

static void abandon_at_the_first_layer(struct td_engine *e, struct td_batch *b, uint32_t layer, void *user)
{
    on_layer(e, b, layer, user);
    atomic_store(&b->is_abandoned, true);
}

static const struct td_sampling greedy = {.top_p = 1, .repetition_penalty = 1};

/* Two sequences; the second batch has them the other way round. */
static void a_batch_goes_on_from_what_the_one_before_it_draws(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 0);
    struct tiny_seq s[2];
    uint32_t want[3][2] = {{0}};
    for (int round = 0; round < 2; round++) { /* the token is told; the token is not known yet */
        struct td_segment segs[3][2];
        struct td_batch b[3];
        for (uint32_t i = 0; i < 2; i++) {
            if (round == 0) tiny_seq_open(&f.t, &s[i], 64);
            s[i].n = 0;
        }
        for (uint32_t k = 0; k < 3; k++) {
            for (uint32_t i = 0; i < 2; i++) {
                uint32_t who = k % 2 == 0 ? i : 1 - i;
                struct td_segment *seg = &segs[k][i];
                *seg = k == 0 ? tiny_next(&f.t, &s[who], words + who, 5, NULL)
                              : tiny_next(&f.t, &s[who], round == 0 ? &want[k - 1][who] : NULL, 1, NULL);
                seg->want_token = true;
                seg->sampling = &greedy;
                seg->is_fed = k > 0 && round == 1;
                seg->fed_by = 1 - i;
            }
            b[k] = (struct td_batch){.segments = segs[k], .n_segments = 2};
            if (round == 0) assert_int_equal(td_engine_run_now(f.engine, &b[k], NULL, NULL), TD_OK);
            for (uint32_t i = 0; i < 2 && round == 0; i++) want[k][k % 2 == 0 ? i : 1 - i] = segs[k][i].token;
        }
        if (round == 0) continue;
        assert_int_equal(td_engine_submit(f.engine, &b[0]), TD_OK);
        assert_int_equal(td_engine_submit(f.engine, &b[1]), TD_OK);
        f.stop_after = 1; /* the second may be done as well when the loop comes to stop */
        assert_int_equal(td_loop_run(f.loop), TD_OK);
        assert_int_equal(td_engine_submit(f.engine, &b[2]), TD_OK);
        f.stop_after = 3;
        assert_int_equal(td_loop_run(f.loop), TD_OK);
        for (uint32_t k = 0; k < 3; k++)
            for (uint32_t i = 0; i < 2; i++) assert_int_equal(segs[k][i].token, want[k][k % 2 == 0 ? i : 1 - i]);
    }
    assert_true(want[0][0] != want[0][1]);
    for (uint32_t i = 0; i < 2; i++) tiny_seq_close(&s[i]);
    close_fixture(&f);
}

static void an_abandoned_batch_ends_between_two_layers(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 50); /* time for the loop to abandon it before the second layer */
    f.engine_handlers.on_layer = abandon_at_the_first_layer;
    td_engine_destroy(f.engine);
    struct td_engine_options o = f.t.engine;
    o.layer_delay_ms = 50;
    assert_int_equal(td_engine_create(f.t.model, &o, f.loop, &f.engine_handlers, &f, &f.engine, NULL), TD_OK);
    struct tiny_seq s;
    tiny_seq_open(&f.t, &s, 64);
    struct td_segment seg = tiny_next(&f.t, &s, words, 8, NULL);
    struct td_batch b = {.segments = &seg, .n_segments = 1, .want_layers = true};
    assert_int_equal(td_engine_submit(f.engine, &b), TD_OK);
    f.stop_after = 1;
    assert_int_equal(td_loop_run(f.loop), TD_OK);
    assert_true(f.n_events < f.t.c->n_layers + 1);
    assert_int_equal(f.events[f.n_events - 1].layer, -1);
    assert_int_equal(f.events[f.n_events - 1].st, TD_E_CANCELED);
    tiny_seq_close(&s);
    close_fixture(&f);
}

static void a_bad_batch_is_refused_and_takes_no_place(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 0);
    struct tiny_seq s;
    tiny_seq_open(&f.t, &s, 64);
    uint32_t token = f.t.c->vocab;
    struct td_segment seg = tiny_next(&f.t, &s, &token, 1, NULL);
    struct td_batch b = {.segments = &seg, .n_segments = 1};
    for (int i = 0; i < 5; i++) assert_int_equal(td_engine_submit(f.engine, &b), TD_E_INVALID);
    assert_int_equal(td_engine_run_now(f.engine, &b, NULL, NULL), TD_E_INVALID);
    token = 5;
    assert_int_equal(td_engine_submit(f.engine, &b), TD_OK);
    f.stop_after = 1;
    assert_int_equal(td_loop_run(f.loop), TD_OK);
    tiny_seq_close(&s);
    close_fixture(&f);
}

static void a_running_step_has_an_age_and_an_idle_engine_none(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 5);
    assert_int_equal(td_engine_step_age_ns(f.engine), 0);
    struct tiny_seq s;
    tiny_seq_open(&f.t, &s, 64);
    struct td_segment seg = tiny_next(&f.t, &s, words, 1, NULL);
    struct td_batch b = {.segments = &seg, .n_segments = 1, .want_layers = true};
    uint64_t begin = td_clock_ns();
    assert_int_equal(td_engine_submit(f.engine, &b), TD_OK);
    f.stop_after = 1;
    assert_int_equal(td_loop_run(f.loop), TD_OK);
    assert_true(td_clock_ns() - begin >= 5 * f.t.c->n_layers * TD_NS_PER_MS); /* the delay after each layer */
    assert_true(f.oldest_step_ns > 0);
    assert_int_equal(td_engine_step_age_ns(f.engine), 0);
    tiny_seq_close(&s);
    close_fixture(&f);
}

static void the_token_is_drawn_from_ids_that_name_one(void **state)
{
    (void)state;
    struct fixture f;
    open_fixture(&f, 0);
    struct tiny_seq s;
    tiny_seq_open(&f.t, &s, 64);
    /* Hot enough that every id is about as likely: rows without a token would be drawn soon. */
    struct td_sampling hot = {.temperature = 100, .top_p = 1, .repetition_penalty = 1};
    assert_true(f.t.c->n_token_ids < f.t.c->vocab);
    struct td_segment seg = tiny_next(&f.t, &s, words, 4, NULL);
    seg.want_token = true;
    seg.sampling = &hot;
    struct td_batch b = {.segments = &seg, .n_segments = 1};
    for (uint32_t i = 0; i < 1000; i++) {
        seg.draw_index = i;
        assert_int_equal(td_engine_run_now(f.engine, &b, NULL, NULL), TD_OK);
        assert_true(seg.token < f.t.c->n_token_ids);
    }
    tiny_seq_close(&s);
    close_fixture(&f);
}

static void an_engine_may_be_destroyed_with_mail_under_way(void **state)
{
    (void)state;
    for (int round = 0; round < 3; round++) {
        struct fixture f;
        open_fixture(&f, 1);
        struct tiny_seq s;
        tiny_seq_open(&f.t, &s, 64);
        struct td_segment segs[2] = {tiny_next(&f.t, &s, words, 1, NULL), tiny_next(&f.t, &s, words + 1, 1, NULL)};
        struct td_batch b[2];
        for (uint32_t i = 0; i < 2; i++) {
            b[i] = (struct td_batch){.segments = &segs[i], .n_segments = 1, .want_layers = true};
            assert_int_equal(td_engine_submit(f.engine, &b[i]), TD_OK);
        }
        if (round == 0) { /* with mail for a loop that never runs again */
            while (td_engine_step_age_ns(f.engine) == 0) {
            }
            td_engine_destroy(f.engine);
        } else if (round == 1) { /* with mail that is delivered later */
            while (td_engine_step_age_ns(f.engine) == 0) {
            }
            td_engine_destroy(f.engine);
            td_loop_stop(f.loop);
            (void)td_loop_run(f.loop);
            assert_int_equal(f.n_events, 0);
        } else { /* from a handler */
            f.destroys_engine = true;
            f.stop_after = 1;
            assert_int_equal(td_loop_run(f.loop), TD_OK);
            assert_int_equal(f.n_done, 1);
        }
        f.engine = NULL;
        tiny_seq_close(&s);
        close_fixture(&f);
    }
}

static void settings_that_do_not_fit_the_model_are_named(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t, &(struct tiny_options){.kv_type = TD_BF16, .max_tokens = 256, .max_batch_tokens = 64});
    struct td_engine *e = NULL;
    struct td_err err;
    struct td_engine_options o = t.engine;
    o.kv[TD_KV_FULL].n_heads++;
    assert_int_equal(td_engine_create(t.model, &o, NULL, NULL, NULL, &e, &err), TD_E_BAD_CONFIG);
    assert_non_null(strstr(err.text, "full"));
    o = t.engine;
    o.kv[TD_KV_SLIDING].dtype = TD_E4M3;
    assert_int_equal(td_engine_create(t.model, &o, NULL, NULL, NULL, &e, &err), TD_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "sliding"));
    o = t.engine;
    o.max_batch_tokens = 0;
    assert_int_equal(td_engine_create(t.model, &o, NULL, NULL, NULL, &e, &err), TD_E_BAD_CONFIG);
    assert_null(e);
    tiny_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_come_back_as_mail_layers_first),
        cmocka_unit_test(two_batches_may_wait_and_run_in_order),
        cmocka_unit_test(a_batch_goes_on_from_what_the_one_before_it_draws),
        cmocka_unit_test(an_abandoned_batch_ends_between_two_layers),
        cmocka_unit_test(a_bad_batch_is_refused_and_takes_no_place),
        cmocka_unit_test(a_running_step_has_an_age_and_an_idle_engine_none),
        cmocka_unit_test(the_token_is_drawn_from_ids_that_name_one),
        cmocka_unit_test(an_engine_may_be_destroyed_with_mail_under_way),
        cmocka_unit_test(settings_that_do_not_fit_the_model_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
