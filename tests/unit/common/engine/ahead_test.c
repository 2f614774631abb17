/* Passes that run while the host goes on, on a device that says late that it is done: the CPU's, which in truth is done
 * at once, so that whatever a pass needs must be there when it is begun. It draws, which the CPU leaves to the host. */
#include "tests/kernels/ahead.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/engine/engine.h"
#include "kernels/device_cpu.h"
#include "tests/support/tiny_model.h"

#define ASKS 3u /* until a mark is passed */

static struct td_backend late;
static uint32_t n_asked[TD_STREAM_MARKS];

static enum td_status late_mark(struct td_stream *s, uint32_t i)
{
    n_asked[i] = 0;
    return td_backend_cpu.mark(s, i);
}

static enum td_status late_has_passed(struct td_stream *s, uint32_t i, bool *out)
{
    (void)s;
    *out = ++n_asked[i] > ASKS;
    return TD_OK;
}

static bool is_banned(const struct td_sample_args *a, const struct td_sample_row *r, uint32_t id)
{
    for (uint32_t i = 0; i < r->n_edits; i++)
        if (a->edits[r->first_edit + i].id == id && (a->edits[r->first_edit + i].how & TD_EDIT_BANNED) != 0)
            return true;
    return false;
}

/* Some token that depends on the row's logits and settings; UINT32_MAX where all are banned. */
static void draw(const struct td_sample_args *a, uint32_t row)
{
    const struct td_sample_row *r = &a->rows[row];
    const float *x = a->logits + (size_t)row * a->vocab;
    uint32_t best = UINT32_MAX, skip = r->temperature > 0 ? (uint32_t)(r->u * 3) : 0;
    for (uint32_t k = 0; k <= skip; k++) {
        uint32_t last = best;
        best = UINT32_MAX;
        for (uint32_t id = 0; id < a->n_ids; id++) {
            bool is_behind = last == UINT32_MAX || x[id] < x[last] || (x[id] == x[last] && id > last);
            if (is_behind && (best == UINT32_MAX || x[id] > x[best]) && !is_banned(a, r, id)) best = id;
        }
    }
    a->out[row] = (struct td_sampled){.token = best};
}

static enum td_status late_sample(struct td_stream *s, const struct td_sample_args *a)
{
    (void)s;
    if (a->n_filtered == a->n_rows)
        for (uint32_t i = 0; i < a->n_filtered; i++) draw(a, a->filtered[i]);
    else
        for (uint32_t i = 0; i < a->n_rows; i++)
            if (!a->rows[i].is_filtered) draw(a, i);
    return TD_OK;
}

static void make_late(struct td_device *d)
{
    late = td_backend_cpu;
    late.mark = late_mark;
    late.has_passed = late_has_passed;
    late.sample = late_sample;
    d->backend = &late;
}

static void steps_begun_ahead_give_the_tokens_of_steps_one_by_one(void **state)
{
    (void)state;
    struct pair p = {0};
    struct td_err err = {0};
    assert_int_equal(td_device_open(&(struct td_device_options){0}, &p.gpu, &err), TD_OK);
    make_late(p.gpu);
    check_ahead(&p);
    assert_true(p.n_checks > 0);
    assert_int_equal(p.n_failed, 0);
    td_device_close(p.gpu);
}

/* --- through the engine's thread --------------------------------------------------------------------------- */

#define N_SEQS  3u
#define N_STEPS 60u

struct chain {
    struct tiny t;
    struct tiny_seq seqs[N_SEQS];
    struct td_loop *loop;
    struct td_engine *engine;
    struct td_segment segments[2][N_SEQS];
    struct td_batch batches[2];
    uint32_t n_submitted, n_done, n_timed, tokens[N_STEPS][N_SEQS];
    bool is_deep;
};

static const struct td_sampling drawn = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 5};

static void submit(struct chain *c)
{
    uint32_t step = c->n_submitted, turn = step % 2;
    static const uint32_t words[] = {2024, 17, 300, 512, 9, 1000};
    for (uint32_t i = 0; i < N_SEQS; i++) {
        struct td_segment *s = &c->segments[turn][i];
        const uint32_t *tokens = step == 0 ? words + i : c->is_deep ? NULL : &c->tokens[step - 1][i];
        *s = tiny_next(&c->t, &c->seqs[i], tokens, step == 0 ? 3 : 1, NULL);
        s->want_token = true;
        s->sampling = &drawn;
        s->draw_index = step;
        s->is_fed = step > 0 && c->is_deep;
        s->fed_by = i;
    }
    c->batches[turn] = (struct td_batch){.segments = c->segments[turn], .n_segments = N_SEQS};
    assert_int_equal(td_engine_submit(c->engine, &c->batches[turn]), TD_OK);
    c->n_submitted++;
}

static void on_done(struct td_engine *e, struct td_batch *b, enum td_status st, void *user)
{
    struct chain *c = user;
    (void)e;
    assert_int_equal(st, TD_OK);
    assert_ptr_equal(b, &c->batches[c->n_done % 2]);
    for (uint32_t i = 0; i < N_SEQS; i++) c->tokens[c->n_done][i] = b->segments[i].token;
    c->n_done++;
    if (c->n_submitted < N_STEPS) submit(c);
    if (c->n_done == N_STEPS) td_loop_stop(c->loop);
}

static void on_timed(void *user, const struct td_batch *b, double busy_us, double gap_us)
{
    struct chain *c = user;
    assert_int_equal(b->n_segments, N_SEQS);
    assert_true(busy_us >= 0);
    (void)gap_us;
    c->n_timed++;
}

static void run_chain(struct chain *c, bool is_deep)
{
    struct td_err err = {0};
    c->is_deep = is_deep;
    c->n_submitted = c->n_done = 0;
    for (uint32_t i = 0; i < N_SEQS; i++) c->seqs[i].n = 0;
    assert_int_equal(td_loop_create(&c->loop), TD_OK);
    struct td_engine_handlers h = {.on_done = on_done};
    struct td_engine_options o = c->t.engine;
    o.timed = on_timed;
    o.timed_user = c;
    assert_int_equal(td_engine_create(c->t.model, &o, c->loop, &h, c, &c->engine, &err), TD_OK);
    submit(c);
    if (is_deep) submit(c);
    assert_int_equal(td_loop_run(c->loop), TD_OK);
    assert_int_equal(td_engine_step_age_ns(c->engine), 0);
    if (is_deep) { /* and one is left to run while the engine goes */
        c->n_submitted = 1;
        for (uint32_t i = 0; i < N_SEQS; i++) c->seqs[i].n = 3;
        submit(c);
    }
    td_engine_destroy(c->engine);
    td_loop_destroy(c->loop);
}

static void the_thread_keeps_a_second_batch_behind_the_first(void **state)
{
    (void)state;
    static struct chain c;
    uint32_t want[N_STEPS][N_SEQS];
    tiny_open(&c.t, &(struct tiny_options){.kv_type = TD_BF16, .max_tokens = 1024, .max_batch_tokens = 256});
    make_late(c.t.device);
    for (uint32_t i = 0; i < N_SEQS; i++) tiny_seq_open(&c.t, &c.seqs[i], 64);
    run_chain(&c, false);
    memcpy(want, c.tokens, sizeof want);
    run_chain(&c, true);
    assert_memory_equal(want, c.tokens, sizeof want);
    assert_true(c.n_timed >= 2 * N_STEPS);
    for (uint32_t i = 0; i < N_SEQS; i++) tiny_seq_close(&c.seqs[i]);
    tiny_close(&c.t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_begun_ahead_give_the_tokens_of_steps_one_by_one),
        cmocka_unit_test(the_thread_keeps_a_second_batch_behind_the_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
