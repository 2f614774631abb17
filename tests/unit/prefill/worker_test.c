/* The prefill worker's decisions with an engine that the test drives, against a real receiver in watched memory: every
 * KV byte that becomes READY is compared, every page must come back. */
#include "common/base/log.h"
#include "prefill/worker.h"
#include "tests/unit/common/handoff/pair.h"

#define N_SRC_SLIDING 12u
#define N_SRC_FULL    24u
#define CHUNK         8u
#define VOCAB         1000u
#define STOP_ID       999u

struct call { /* what a client sees */
    unsigned n_first, n_done, n_finish;
    Tandem__V1__FirstToken first;
    Tandem__V1__RunDone done;
    char transport[16], text[512];
    enum td_status st;
    bool is_slow;
};
struct bench {
    struct pair *pair;
    struct td_xfer x;
    struct td_kv_pages *kv;
    struct td_prefill_send *send;
    struct td_prefill_worker *w;
    struct td_model_config model;
    struct td_descriptor d;
    struct td_batch *batches[8];
    unsigned n_batches, n_drained;
    enum td_status submit_st;
    struct call calls[64];
    unsigned n_calls;
};

static enum td_status on_submit(void *self, struct td_batch *b)
{
    struct bench *t = self;
    if (t->submit_st != TD_OK) return t->submit_st;
    assert_true(t->n_batches < 8);
    t->batches[t->n_batches++] = b;
    return TD_OK;
}
static enum td_status on_event(void *self, void *call, const Tandem__V1__RunEvent *ev)
{
    (void)self;
    struct call *c = call;
    assert_int_equal(c->n_finish, 0);
    if (c->is_slow) return TD_E_BUSY;
    if (ev->event_case == TANDEM__V1__RUN_EVENT__EVENT_FIRST) {
        assert_int_equal(c->n_first++ + c->n_done, 0);
        c->first = *ev->first;
    } else {
        assert_int_equal(c->n_done++, 0);
        assert_int_equal(c->n_first, 1);
        c->done = *ev->done;
        snprintf(c->transport, sizeof c->transport, "%s", ev->done->transport);
    }
    return TD_OK;
}
static void on_finish(void *self, void *call, enum td_status st, const char *text)
{
    (void)self;
    struct call *c = call;
    assert_int_equal(c->n_finish++, 0);
    c->st = st;
    snprintf(c->text, sizeof c->text, "%s", text != NULL ? text : "");
}
static void on_drained(void *self) { ((struct bench *)self)->n_drained++; }
/* As main.c does, which knows the worker only after the sender. */
static void on_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t bytes)
{
    td_prefill_worker_on_send_ended(((struct bench *)self)->w, s, st, bytes);
}

/* In the place of the one before, if there is one. */
static void make_worker(struct bench *t, uint32_t chunk, uint32_t max_batch)
{
    td_prefill_worker_destroy(t->w);
    struct td_prefill_worker_options o = {.model = &t->model,
                                          .max_context_tokens = 4 * N_SRC_FULL,
                                          .chunk_tokens = chunk,
                                          .max_batch = max_batch,
                                          .max_waiting = 4};
    memcpy(o.kv, t->pair->src_layout, sizeof o.kv);
    struct td_prefill_ports ports = {&t->pair->env, t, on_submit, on_event, on_finish, on_drained};
    assert_int_equal(td_prefill_worker_create(&o, t->kv, t->send, &ports, &t->w), TD_OK);
}

static int make_as(void **state, bool is_staged)
{
    struct bench *t = calloc(1, sizeof *t);
    t->pair = pair_create(1);
    pair_kill_sender(t->pair); /* the bench brings its own */
    t->pair->p_reachable = true;
    t->x.pair = t->pair;
    t->model = (struct td_model_config){.n_layers = 3,
                                        .n_kv_heads = 2,
                                        .head_dim = 2,
                                        .vocab = VOCAB,
                                        .window = WINDOW,
                                        .is_sliding = {false, true, false},
                                        .layer_in_group = {0, 0, 1}};
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    memcpy(kv, t->pair->src_layout, sizeof kv);
    uint32_t n_pages[TD_KV_N_GROUPS] = {N_SRC_SLIDING, N_SRC_FULL};
    assert_int_equal(td_kv_pages_create(n_pages, &t->kv), TD_OK);
    struct td_prefill_send_options so = {
        .env = &t->pair->env, .xfer = &fake_xfer, .incarnation = t->pair->p_inc, .self = t, .ended = on_ended};
    so.is_staged = is_staged;
    td_peer_layout_of(&t->model, "f1n6e4", "bf16", kv, &so.layout);
    memcpy(so.source.kv, kv, sizeof kv);
    so.source.n_ranks = 1;
    so.source.base[0][0] = t->pair->src[0];
    so.source.base[0][1] = t->pair->src[1];
    assert_int_equal(td_prefill_send_create(&t->send), TD_OK);
    assert_int_equal(td_prefill_send_start(t->send, &t->x, &so), TD_OK);
    t->pair->tx = td_prefill_send_tx(t->send);
    make_worker(t, CHUNK, 1);
    t->d = (struct td_descriptor){.incarnation = D_INC, .name = "decode", .layout = so.layout, .n_ranks = 1};
    t->d.ranks[0] = (struct td_peer_rank){
        .address = "addr", .n_address = 4, .pools = {{1, "k", 1}, {2, "k", 1}}, .n_pages = {N_DST_SLIDING, N_DST_FULL}};
    *state = t;
    return 0;
}
static int make(void **state) { return make_as(state, false); }
static int make_staged(void **state) { return make_as(state, true); }

static void assert_source_free(const struct bench *t, bool all)
{
    bool are = td_kv_pages_n_free(t->kv, TD_KV_SLIDING) == N_SRC_SLIDING &&
               td_kv_pages_n_free(t->kv, TD_KV_FULL) == N_SRC_FULL;
    assert_int_equal(are, all);
}
static int unmake(void **state)
{
    struct bench *t = *state;
    settle(t->pair);
    assert_int_equal(td_prefill_worker_n_runs(t->w), 0);
    assert_source_free(t, true);
    for (unsigned i = 0; i < t->pair->n_wants; i++)
        if (t->pair->wants[i].r != NULL) td_rx_end(t->pair->rx, t->pair->wants[i].r);
    settle(t->pair);
    assert_pages_free(t->pair, true);
    td_prefill_send_detach(t->send);
    turn(t->pair);
    TD_LIST_FOREACH_SAFE (it, &t->pair->peers) {
        td_list_remove(it);
        free(TD_LIST_ENTRY(it, struct td_xfer_peer, link));
    }
    td_prefill_send_destroy(t->send);
    t->pair->tx = NULL;
    td_prefill_worker_destroy(t->w);
    td_kv_pages_destroy(t->kv);
    pair_destroy(t->pair);
    free(t);
    return 0;
}

/* --- a Run ----------------------------------------------------------------------------------------------------------
 */
struct run_msg {
    Tandem__V1__RunRequest m;
    Tandem__V1__TokenRequest request;
    Tandem__V1__Sampling sampling;
    Tandem__V1__KvTarget target;
    Tandem__V1__PageList lists[TD_KV_N_GROUPS];
    uint32_t tokens[200], stops[1];
    struct td_descriptor_msg descriptor;
};
static void run_msg(const struct bench *t, const struct want *q, struct run_msg *out)
{
    tandem__v1__run_request__init(&out->m);
    tandem__v1__token_request__init(&out->request);
    tandem__v1__sampling__init(&out->sampling);
    tandem__v1__kv_target__init(&out->target);
    /* Every token names the generation, so that the engine below knows whose KV it writes. */
    for (uint32_t i = 0; i < q->n_tokens; i++) out->tokens[i] = (uint32_t)q->generation;
    out->stops[0] = STOP_ID;
    out->request.request_id = "r1";
    out->request.token_ids = out->tokens;
    out->request.n_token_ids = q->n_tokens;
    out->request.n_prompt = q->n_tokens;
    out->request.max_tokens = 10;
    out->request.stop_ids = out->stops;
    out->request.n_stop_ids = 1;
    out->request.sampling = &out->sampling;
    out->sampling.seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
    out->sampling.temperature_opt_case = TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE;
    out->target.incarnation = D_INC;
    out->target.generation = q->generation;
    out->target.lowest_live_generation = q->target.lowest_live_generation;
    out->target.cached_tokens = q->cached;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        tandem__v1__page_list__init(&out->lists[g]);
        out->lists[g].first_block = q->target.first_block[g];
        out->lists[g].n_pages = q->target.n_pages[g];
        out->lists[g].pages = (uint32_t *)q->pages[g];
    }
    out->target.sliding = &out->lists[TD_KV_SLIDING];
    out->target.full = &out->lists[TD_KV_FULL];
    td_descriptor_to_msg(&t->d, &out->descriptor);
    out->m.request = &out->request;
    out->m.target = &out->target;
    out->m.descriptor = &out->descriptor.peer;
}
static struct call *new_call(struct bench *t) { return &t->calls[t->n_calls++]; }
static struct call *start(struct bench *t, struct want *q, struct td_prefill_run **run_out)
{
    struct run_msg m;
    struct call *c = new_call(t);
    run_msg(t, q, &m);
    struct td_prefill_run *r = td_prefill_worker_on_run(t->w, c, TD_NEVER_NS, &m.m);
    if (run_out != NULL) *run_out = r;
    return c;
}

/* --- the engine
 * ------------------------------------------------------------------------------------------------------- */
/* Layer l's KV of a segment, of which what earlier ones stored must still be there. */
static void store(struct bench *t, struct td_segment *s, uint32_t l, enum td_kv_group g)
{
    const struct td_kv_group_layout *lay = &t->pair->src_layout[g];
    const struct td_page_table *pt = &s->table[g];
    uint32_t seen = g == TD_KV_FULL || s->start < WINDOW ? 0 : s->start - (WINDOW - 1);
    assert_true(pt->first_block <= seen / 4);
    assert_int_equal(pt->first_block + pt->n_blocks, (s->start + s->n_tokens + 3) / 4);
    for (uint32_t i = 0; i < pt->n_blocks; i++) {
        uint32_t block = pt->first_block + i;
        assert_int_not_equal(pt->pages[i], TD_NO_PAGE);
        assert_int_equal(td_kv_pages_refs(t->kv, g, pt->pages[i]), 1);
        uint8_t *at = t->pair->src[g] + td_kv_offset(lay, t->model.layer_in_group[l], pt->pages[i], 0, false, 0);
        if (block < s->start / 4) { /* of an earlier chunk: still there */
            assert_int_equal(at[0], pattern(s->tokens[0], g, t->model.layer_in_group[l], block, 0));
            continue;
        }
        for (size_t k = 0; k < td_kv_page_bytes(lay); k++)
            at[k] = pattern(s->tokens[0], g, t->model.layer_in_group[l], block, k);
    }
}

/* The layers of the batch that was submitted first, [from, end). */
static void layers(struct bench *t, uint32_t from, uint32_t end)
{
    struct td_batch *b = t->batches[0];
    assert_true(t->n_batches > 0);
    for (uint32_t l = from; l < end; l++) {
        enum td_kv_group g = t->model.is_sliding[l] ? TD_KV_SLIDING : TD_KV_FULL;
        for (uint32_t i = 0; i < b->n_segments; i++) store(t, &b->segments[i], l, g);
        if (b->want_layers) td_prefill_worker_on_layer(t->w, b, l);
    }
}
static void done(struct bench *t, uint32_t token, enum td_status st)
{
    struct td_batch *b = t->batches[0];
    assert_true(t->n_batches > 0);
    memmove(t->batches, t->batches + 1, --t->n_batches * sizeof t->batches[0]);
    for (uint32_t i = 0; i < b->n_segments; i++) b->segments[i].token = token;
    td_prefill_worker_on_done(t->w, b, st);
}
/* One whole batch. Its pages are scribbled over when nobody holds them: a put that reads later would carry that. */
static void compute(struct bench *t, uint32_t token)
{
    layers(t, 0, 3);
    done(t, token, TD_OK);
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t p = 0; p < (g == TD_KV_SLIDING ? N_SRC_SLIDING : N_SRC_FULL); p++)
            for (uint32_t l = 0; l < t->pair->src_layout[g].n_layers && td_kv_pages_refs(t->kv, g, p) == 0; l++)
                memset(t->pair->src[g] + td_kv_offset(&t->pair->src_layout[g], l, p, 0, false, 0), 0xdd,
                       td_kv_page_bytes(&t->pair->src_layout[g]));
}

/* --- the tests
 * ---------------------------------------------------------------------------------------------------------- */

static void a_prompt_becomes_a_first_token_and_kv_elsewhere(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 21, 0);
    struct call *c = start(t, q, NULL);
    assert_int_equal(t->batches[0]->segments[0].n_tokens, CHUNK);
    assert_false(t->batches[0]->segments[0].want_token);
    compute(t, 0);
    assert_int_equal(t->batches[0]->segments[0].start, 8);
    advance_ms(t->pair, 7);
    compute(t, 0);
    struct td_segment *last = t->batches[0]->segments;
    assert_int_equal(last->n_tokens, 5);
    assert_true(last->want_token);
    assert_int_equal(last->draw_index, 0);
    assert_int_equal(last->n_history, 21);
    compute(t, 123);
    assert_int_equal(c->n_first, 1); /* before the KV is there */
    assert_int_equal(c->n_done, 0);
    assert_int_equal(c->first.token_id, 123);
    assert_int_equal(c->first.finish_reason, TANDEM__V1__FINISH_REASON__FINISH_NONE);
    assert_int_equal(c->first.prefill_us, 7000);
    advance_ms(t->pair, 2);
    settle(t->pair);
    assert_int_equal(q->n_ready, 1); /* compared byte by byte */
    assert_int_equal(q->complete.first_token, 123);
    assert_int_equal(c->n_done, 1);
    assert_int_equal(c->n_finish, 1);
    assert_int_equal(c->st, TD_OK);
    assert_int_equal(c->done.kv_bytes, td_handoff_bytes(t->pair->layout, WINDOW, 21, 0));
    assert_int_equal(c->done.handoff_us, 2000);
    assert_string_equal(c->transport, "fake");
}

static void a_way_through_host_memory_says_so(void **state)
{
    struct bench *t = *state;
    assert_string_equal(td_prefill_send_transport(t->send, D_INC), "?");
    struct want *q = reserve(t->pair, 5, 0);
    struct call *c = start(t, q, NULL);
    compute(t, 123);
    settle(t->pair);
    assert_int_equal(c->n_done, 1);
    assert_string_equal(c->transport, "fake staged");
}

static void every_length_arrives_whole(void **state)
{
    struct bench *t = *state;
    for (uint32_t n = 1; n <= 48; n++) {
        uint32_t cached = n % 3 == 0 ? n / 2 : 0;
        struct want *q = reserve(t->pair, n, cached);
        t->n_calls = 0;
        memset(t->calls, 0, sizeof t->calls);
        struct call *c = start(t, q, NULL);
        while (t->n_batches > 0) {
            compute(t, 5);
            if (n % 2) happen_nth(t->pair, n);
        }
        settle(t->pair);
        assert_int_equal(q->n_ready, 1);
        assert_int_equal(c->st, TD_OK);
        assert_int_equal(c->done.kv_bytes, td_handoff_bytes(t->pair->layout, WINDOW, n, cached));
        assert_source_free(t, true);
    }
}

static void layers_leave_while_the_next_are_computed(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    start(t, q, NULL);
    layers(t, 0, 1);
    assert_int_equal(n_ops(t->pair), 1);
    layers(t, 1, 2);
    assert_int_equal(n_ops(t->pair), 2);
    happen_all(t->pair);
    layers(t, 2, 3);
    done(t, 5, TD_OK);
    settle(t->pair);
    assert_int_equal(q->n_ready, 1);
}

static void the_next_prompt_is_computed_while_the_last_is_sent(void **state)
{
    struct bench *t = *state;
    struct want *a = reserve(t->pair, 8, 0), *b = reserve(t->pair, 8, 0);
    struct call *ca = start(t, a, NULL), *cb = start(t, b, NULL);
    assert_int_equal(t->n_batches, 1); /* one at a time */
    compute(t, 5);
    assert_int_equal(ca->n_first, 1);
    assert_int_equal(t->n_batches, 1);
    compute(t, 6);
    assert_int_equal(cb->n_first, 1);
    settle(t->pair);
    assert_int_equal(a->n_ready + b->n_ready, 2);
}

static void prompts_share_a_pass_if_told_to(void **state)
{
    struct bench *t = *state;
    make_worker(t, CHUNK, 3);
    struct want *q[4];
    struct call *c[4];
    for (int i = 0; i < 4; i++) q[i] = reserve(t->pair, i == 0 ? 13 : 2 + (uint32_t)i, 0);
    for (int i = 0; i < 4; i++) c[i] = start(t, q[i], NULL);
    assert_int_equal(t->n_batches, 1);
    assert_int_equal(t->batches[0]->n_segments, 1); /* the others came later, and the first takes all of the budget */
    compute(t, 5);
    /* 5 left of the first; 3 of the 3 of the second; nothing for the third. */
    assert_int_equal(t->batches[0]->n_segments, 2);
    assert_int_equal(t->batches[0]->segments[0].n_tokens, 5);
    assert_int_equal(t->batches[0]->segments[1].n_tokens, 3);
    compute(t, 5);
    assert_int_equal(c[0]->n_first + c[1]->n_first, 2);
    assert_int_equal(t->batches[0]->n_segments, 2);
    assert_int_equal(t->batches[0]->segments[0].n_tokens, 4);
    assert_int_equal(t->batches[0]->segments[1].n_tokens, 4); /* of 5 */
    compute(t, 5);
    compute(t, 5);
    assert_int_equal(t->n_batches, 0);
    settle(t->pair);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(q[i]->n_ready, 1); /* compared byte by byte */
        assert_int_equal(c[i]->st, TD_OK);
    }
}

static void one_that_leaves_a_shared_pass_does_not_disturb_the_others(void **state)
{
    struct bench *t = *state;
    make_worker(t, 20, 4);
    struct want *blocker = reserve(t->pair, 3, 0), *q[3];
    struct td_prefill_run *r[3];
    start(t, blocker, NULL);
    for (int i = 0; i < 3; i++) q[i] = reserve(t->pair, 6, 0);
    for (int i = 0; i < 3; i++) start(t, q[i], &r[i]);
    compute(t, 5);
    assert_int_equal(t->batches[0]->n_segments, 3);
    layers(t, 0, 1);
    td_prefill_worker_on_gone(t->w, r[1], TD_E_CANCELED);
    assert_false(atomic_load(&t->batches[0]->is_abandoned));
    layers(t, 1, 3);
    done(t, 5, TD_OK);
    settle(t->pair);
    assert_int_equal(q[0]->n_ready + q[1]->n_ready * 10 + q[2]->n_ready, 2);
    /* Once nobody is left the pass is given up. */
    struct want *last[2] = {reserve(t->pair, 6, 0), reserve(t->pair, 6, 0)};
    start(t, last[0], &r[0]);
    start(t, last[1], &r[1]);
    td_prefill_worker_on_gone(t->w, r[1], TD_E_CANCELED);
    assert_false(atomic_load(&t->batches[0]->is_abandoned));
    td_prefill_worker_on_gone(t->w, r[0], TD_E_CANCELED);
    assert_true(atomic_load(&t->batches[0]->is_abandoned));
    done(t, 5, TD_E_CANCELED);
}

static void a_deadline_that_cannot_be_met_is_refused_at_once(void **state)
{
    struct bench *t = *state;
    make_worker(t, 40, 1);
    start(t, reserve(t->pair, 40, 0), NULL);
    advance_ms(t->pair, 40); /* a token takes a millisecond */
    compute(t, 5);
    settle(t->pair);
    uint64_t now = t->pair->now;
    struct run_msg m;
    struct call *c = new_call(t);
    run_msg(t, reserve(t->pair, 40, 0), &m);
    assert_null(td_prefill_worker_on_run(t->w, c, now + 39 * TD_NS_PER_MS, &m.m));
    assert_int_equal(c->st, TD_E_DEADLINE);
    assert_non_null(strstr(c->text, "40 tokens"));
    assert_int_equal(t->n_batches, 0);
    settle(t->pair);
    /* What is before it counts, but not what has been computed of that. */
    c = new_call(t);
    run_msg(t, reserve(t->pair, 40, 0), &m);
    assert_non_null(td_prefill_worker_on_run(t->w, c, now + 41 * TD_NS_PER_MS, &m.m));
    struct call *behind = new_call(t);
    run_msg(t, reserve(t->pair, 36, 0), &m);
    assert_null(td_prefill_worker_on_run(t->w, behind, now + 75 * TD_NS_PER_MS, &m.m));
    assert_int_equal(behind->st, TD_E_DEADLINE);
    compute(t, 5);
    settle(t->pair);
    assert_int_equal(c->st, TD_OK);
    settle(t->pair);
}

static void prompts_wait_for_pages(void **state)
{
    struct bench *t = *state;
    struct want *a = reserve(t->pair, 60, 0), *b = reserve(t->pair, 36, 0); /* 15 and 9 pages of 24 */
    struct want *c = reserve(t->pair, 4, 0);
    assert_null(c);
    struct call *ca = start(t, a, NULL);
    while (t->n_batches > 0) compute(t, 5);
    uint32_t some[4];
    assert_int_equal(td_kv_pages_alloc(t->kv, TD_KV_FULL, 4, "test", some), TD_OK);
    struct call *cb = start(t, b, NULL);
    assert_int_equal(t->n_batches, 0);
    assert_int_equal(cb->n_finish, 0);
    while (ca->n_done == 0) {
        happen_nth(t->pair, 0);
        turn(t->pair);
    }
    assert_int_equal(t->n_batches, 1);
    for (int i = 0; i < 4; i++) td_kv_pages_unref(t->kv, TD_KV_FULL, some[i]);
    while (t->n_batches > 0) compute(t, 5);
    settle(t->pair);
    assert_int_equal(b->n_ready, 1);
}

static void a_prompt_that_no_page_will_ever_serve_fails(void **state)
{
    struct bench *t = *state;
    uint32_t all[N_SRC_FULL];
    assert_int_equal(td_kv_pages_alloc(t->kv, TD_KV_FULL, N_SRC_FULL, "leak", all), TD_OK);
    struct want *q = reserve(t->pair, 8, 0);
    struct call *c = start(t, q, NULL);
    assert_int_equal(c->st, TD_E_NO_PAGES);
    settle(t->pair);
    assert_int_equal(q->failed_st, TD_E_NO_PAGES);
    for (uint32_t i = 0; i < N_SRC_FULL; i++) td_kv_pages_unref(t->kv, TD_KV_FULL, all[i]);
}

static void a_stop_id_ends_it_without_kv(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    struct call *c = start(t, q, NULL);
    compute(t, STOP_ID);
    assert_int_equal(c->first.finish_reason, TANDEM__V1__FINISH_REASON__FINISH_STOP);
    assert_int_equal(c->n_finish, 1);
    assert_int_equal(c->st, TD_OK);
    assert_int_equal(c->n_done, 0);
    settle(t->pair);
    assert_int_equal(q->n_ready, 0);
    assert_int_equal(q->n_rx_ended, 1);
    assert_int_equal(q->failed_st, TD_E_CANCELED);
}

static void max_tokens_one_ends_it_without_kv(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    struct run_msg m;
    run_msg(t, q, &m);
    m.request.max_tokens = 1;
    struct call *c = new_call(t);
    td_prefill_worker_on_run(t->w, c, TD_NEVER_NS, &m.m);
    compute(t, 7);
    assert_int_equal(c->first.finish_reason, TANDEM__V1__FINISH_REASON__FINISH_LENGTH);
    settle(t->pair);
    assert_int_equal(q->n_rx_ended, 1);
}

static void a_client_that_leaves_stops_the_work_within_a_step(void **state)
{
    struct bench *t = *state;
    struct want *a = reserve(t->pair, 24, 0), *b = reserve(t->pair, 4, 0);
    struct td_prefill_run *run;
    struct call *c = start(t, a, &run);
    start(t, b, NULL);
    layers(t, 0, 2);
    happen_all(t->pair);
    assert_false(atomic_load(&t->batches[0]->is_abandoned));
    td_prefill_worker_on_gone(t->w, run, TD_E_CANCELED);
    assert_true(atomic_load(&t->batches[0]->is_abandoned));
    happen_all(t->pair);
    assert_int_equal(t->n_batches, 1); /* one at a time: what waits can still be cancelled */
    assert_source_free(t, false);      /* the engine still writes there */
    layers(t, 2, 3);
    assert_int_equal(n_ops(t->pair), 0); /* but nothing is put any more */
    done(t, 0, TD_E_CANCELED);
    assert_int_equal(t->n_batches, 1); /* no second chunk of a: b's first */
    assert_int_equal(t->batches[0]->segments[0].n_tokens, 4);
    assert_false(atomic_load(&t->batches[0]->is_abandoned));
    compute(t, 5);
    settle(t->pair);
    assert_int_equal(c->n_finish, 0);
    assert_int_equal(a->n_ready, 0);
    assert_int_equal(a->failed_st, TD_E_STALE); /* given up, which the router learns from the run itself */
    assert_int_equal(b->n_ready, 1);
}

static void a_client_that_leaves_while_waiting_or_sending_costs_nothing(void **state)
{
    struct bench *t = *state;
    struct want *a = reserve(t->pair, 8, 0), *b = reserve(t->pair, 8, 0);
    struct td_prefill_run *ra, *rb;
    start(t, a, &ra);
    start(t, b, &rb);
    td_prefill_worker_on_gone(t->w, rb, TD_E_CANCELED);
    compute(t, 5);
    assert_int_equal(t->n_batches, 0);
    td_prefill_worker_on_gone(t->w, ra, TD_E_CANCELED);
    settle(t->pair);
    assert_int_equal(a->n_ready + b->n_ready, 0);
    assert_int_equal(a->n_rx_ended + b->n_rx_ended, 2);
}

static void a_deadline_ends_it_in_any_state(void **state)
{
    struct bench *t = *state;
    struct want *q[3];
    struct call *c[3];
    for (int i = 0; i < 3; i++) {
        q[i] = reserve(t->pair, 8, 0);
        struct run_msg m;
        run_msg(t, q[i], &m);
        m.request.timeout_us = 50 * 1000;
        c[i] = new_call(t);
        assert_non_null(td_prefill_worker_on_run(t->w, c[i], t->pair->now + 80 * TD_NS_PER_MS, &m.m));
    }
    compute(t, 5); /* 0 sends, 1 computes, 2 waits */
    advance_ms(t->pair, 49);
    assert_int_equal(c[0]->n_finish + c[1]->n_finish + c[2]->n_finish, 0);
    advance_ms(t->pair, 1);
    for (int i = 0; i < 3; i++) assert_int_equal(c[i]->st, TD_E_DEADLINE);
    done(t, 5, TD_OK);
    assert_int_equal(t->n_batches, 0);
    settle(t->pair);
    for (int i = 0; i < 3; i++) assert_int_equal(q[i]->failed_st, TD_E_DEADLINE);
}

static void the_calls_own_deadline_counts_too(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    struct run_msg m;
    run_msg(t, q, &m);
    struct call *c = new_call(t);
    td_prefill_worker_on_run(t->w, c, t->pair->now + 10 * TD_NS_PER_MS, &m.m);
    advance_ms(t->pair, 10);
    assert_int_equal(c->st, TD_E_DEADLINE);
    done(t, 0, TD_OK);
}

static void a_stop_of_the_decode_worker_ends_the_run(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 24, 0);
    struct call *c = start(t, q, NULL);
    compute(t, 0);
    td_rx_end(t->pair->rx, q->r);
    settle(t->pair);
    assert_int_equal(c->st, TD_E_STALE);
    assert_int_equal(q->n_rx_ended, 1); /* its pages are back though the engine still computes */
    assert_source_free(t, false);
    done(t, 0, TD_OK);
    assert_source_free(t, true);
}

static void a_lost_decode_worker_ends_its_runs(void **state)
{
    struct bench *t = *state;
    struct want *a = reserve(t->pair, 8, 0), *b = reserve(t->pair, 8, 0);
    struct call *ca = start(t, a, NULL), *cb = start(t, b, NULL);
    layers(t, 0, 1);
    td_prefill_send_handlers().on_lost(&t->x, NULL, D_INC, t->send);
    happen(t->pair, TD_LIST_ENTRY(t->pair->ops.next, struct op, link), TD_E_PEER_LOST);
    turn(t->pair);
    assert_int_equal(ca->st, TD_E_TARGET_LOST); /* PEER_LOST would be ourselves */
    assert_int_equal(cb->st, TD_E_TARGET_LOST);
    while (t->n_batches > 0) done(t, 0, TD_OK);
    assert_source_free(t, true);
    td_rx_on_peer_lost(t->pair->rx, t->pair->p_inc); /* the test's receiver lives on: let it forget */
    advance_ms(t->pair, 250);
}

static void a_failed_pass_fails_the_run_and_not_the_next(void **state)
{
    struct bench *t = *state;
    struct want *a = reserve(t->pair, 8, 0), *b = reserve(t->pair, 8, 0);
    struct call *ca = start(t, a, NULL), *cb = start(t, b, NULL);
    layers(t, 0, 1);
    done(t, 0, TD_E_DEVICE);
    assert_int_equal(ca->st, TD_E_DEVICE);
    compute(t, 5);
    settle(t->pair);
    assert_int_equal(a->failed_st, TD_E_DEVICE);
    assert_int_equal(b->n_ready, 1);
    assert_int_equal(cb->st, TD_OK);
}

static void a_busy_engine_is_tried_again(void **state)
{
    struct bench *t = *state;
    struct want *a = reserve(t->pair, 8, 0), *b = reserve(t->pair, 8, 0);
    t->submit_st = TD_E_BUSY;
    struct call *ca = start(t, a, NULL);
    assert_int_equal(t->n_batches, 0);
    t->submit_st = TD_OK;
    struct call *cb = start(t, b, NULL); /* any event tries again, in order */
    assert_int_equal(t->n_batches, 1);
    compute(t, 5);
    compute(t, 5);
    settle(t->pair);
    assert_int_equal(ca->st, TD_OK);
    assert_int_equal(cb->st, TD_OK);
}

static void a_first_token_that_cannot_be_told_ends_the_run(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    struct call *c = start(t, q, NULL);
    c->is_slow = true;
    compute(t, 5);
    assert_int_equal(c->st, TD_E_SLOW_CLIENT);
    settle(t->pair);
    assert_int_equal(q->n_ready, 0);
    assert_int_equal(q->n_rx_ended, 1);
}

static void more_than_may_wait_is_refused(void **state)
{
    struct bench *t = *state;
    struct want *q[6];
    struct call *c[6];
    for (int i = 0; i < 6; i++) {
        q[i] = reserve(t->pair, 1, 0);
        c[i] = start(t, q[i], NULL);
    }
    assert_int_equal(c[5]->st, TD_E_BUSY); /* one computes, four wait */
    for (int i = 0; i < 5; i++) {
        assert_int_equal(c[i]->n_finish, 0);
        compute(t, 5);
    }
    settle(t->pair);
}

static void draining_lets_requests_finish_and_refuses_new_ones(void **state)
{
    struct bench *t = *state;
    struct want *a = reserve(t->pair, 8, 0), *b = reserve(t->pair, 8, 0);
    struct call *ca = start(t, a, NULL);
    td_prefill_worker_drain(t->w);
    assert_int_equal(t->n_drained, 0);
    struct call *cb = start(t, b, NULL);
    assert_int_equal(cb->st, TD_E_DRAINING);
    compute(t, 5);
    settle(t->pair);
    assert_int_equal(ca->st, TD_OK);
    assert_true(t->n_drained > 0);
}

static void end_of_grace_ends_everything(void **state)
{
    struct bench *t = *state;
    struct want *q[3];
    struct call *c[3];
    for (int i = 0; i < 3; i++) {
        q[i] = reserve(t->pair, 8, 0);
        c[i] = start(t, q[i], NULL);
    }
    compute(t, 5);
    td_prefill_worker_drain(t->w);
    td_prefill_worker_end_all(t->w, TD_E_DRAINING, "grace is over");
    for (int i = 0; i < 3; i++) assert_int_equal(c[i]->st, TD_E_DRAINING);
    assert_int_equal(t->n_batches, 1);
    done(t, 0, TD_OK);
    assert_int_equal(t->n_batches, 0);
    settle(t->pair);
    assert_true(t->n_drained > 0);
}

static void an_unknown_decode_worker_needs_its_descriptor(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    struct run_msg m;
    run_msg(t, q, &m);
    m.m.descriptor = NULL;
    struct call *c = new_call(t);
    assert_null(td_prefill_worker_on_run(t->w, c, TD_NEVER_NS, &m.m));
    assert_int_equal(c->st, TD_E_UNKNOWN_PEER);
    assert_int_equal(t->pair->n_peer_opens, 0);
    struct call *c2 = start(t, q, NULL); /* the router comes again with it */
    compute(t, 5);
    settle(t->pair);
    assert_int_equal(c2->st, TD_OK);
    q = reserve(t->pair, 8, 0);
    run_msg(t, q, &m);
    m.m.descriptor = NULL; /* known from here on */
    struct call *c3 = new_call(t);
    assert_non_null(td_prefill_worker_on_run(t->w, c3, TD_NEVER_NS, &m.m));
    compute(t, 5);
    settle(t->pair);
    assert_int_equal(c3->st, TD_OK);
    assert_int_equal(t->pair->n_peer_opens, 1);
}

static void another_layout_is_refused_by_name(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    t->d.layout.kv[0].page_tokens = t->d.layout.kv[1].page_tokens = 64;
    struct call *c = start(t, q, NULL);
    assert_int_equal(c->st, TD_E_MISMATCH);
    assert_non_null(strstr(c->text, "page_tokens differs: 4 here, 64 there"));
    assert_int_equal(t->pair->n_peer_opens, 0);
}

static void a_generation_runs_once(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    start(t, q, NULL);
    struct call *again = start(t, q, NULL);
    assert_int_equal(again->st, TD_E_STALE);
    compute(t, 5);
    settle(t->pair);
    again = start(t, q, NULL);
    assert_int_equal(again->st, TD_E_STALE);
}

static void bad_requests_are_refused_by_field(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 21, 0);
    struct run_msg m;
    struct call *c;
    uint32_t page;
#define REFUSED(change, field)                                                                                         \
    do {                                                                                                               \
        run_msg(t, q, &m);                                                                                             \
        change;                                                                                                        \
        c = new_call(t);                                                                                               \
        assert_null(td_prefill_worker_on_run(t->w, c, TD_NEVER_NS, &m.m));                                             \
        assert_int_equal(c->st, TD_E_INVALID);                                                                         \
        assert_non_null(strstr(c->text, field));                                                                       \
    } while (0)
    REFUSED(m.m.request = NULL, "request");
    REFUSED(m.request.n_token_ids = 0, "token_ids");
    REFUSED(m.tokens[3] = VOCAB, "token_ids");
    REFUSED(m.request.n_prompt = 22, "n_prompt");
    REFUSED(m.request.max_tokens = 0, "max_tokens");
    REFUSED(m.m.target = NULL, "target");
    REFUSED(m.target.incarnation = 0, "incarnation");
    REFUSED(m.target.generation = 0, "generation");
    REFUSED(m.target.lowest_live_generation = q->generation + 1, "generation");
    REFUSED(m.target.cached_tokens = 21, "cached_tokens");
    REFUSED(m.target.cached_tokens = UINT32_MAX, "cached_tokens");
    REFUSED(m.target.sliding = NULL, "target.sliding");
    REFUSED(m.target.full = NULL, "target.full");
    REFUSED(m.lists[TD_KV_FULL].n_pages--, "target.full");
    REFUSED(m.lists[TD_KV_SLIDING].first_block++, "target.sliding");
    REFUSED(m.target.cached_tokens = 8, "target.full"); /* does not go with these lists */
    REFUSED((page = q->pages[TD_KV_FULL][0], m.lists[TD_KV_FULL].pages[0] = N_DST_FULL), "page");
    q->pages[TD_KV_FULL][0] = page;
    REFUSED(m.descriptor.peer.incarnation++; m.target.incarnation += 2, "incarnation");
    REFUSED(m.sampling.top_p_opt_case = TANDEM__V1__SAMPLING__TOP_P_OPT_TOP_P; m.sampling.top_p = 7, "top_p");
    assert_int_equal(t->n_batches, 0);
    run_msg(t, q, &m);
    c = start(t, q, NULL); /* nothing of that stuck */
    while (t->n_batches > 0) compute(t, 5);
    settle(t->pair);
    assert_int_equal(c->st, TD_OK);
}

static void generated_tokens_of_a_migration_are_history(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    struct run_msg m;
    run_msg(t, q, &m);
    m.request.n_prompt = 5; /* three were generated elsewhere */
    m.request.want_logprobs = true;
    struct call *c = new_call(t);
    td_prefill_worker_on_run(t->w, c, TD_NEVER_NS, &m.m);
    struct td_segment *s = t->batches[0]->segments;
    assert_int_equal(s->draw_index, 3);
    assert_int_equal(s->n_prompt, 5);
    assert_int_equal(s->n_history, 8);
    assert_true(s->want_logprobs);
    compute(t, 5);
    assert_non_null(c->first.logprobs);
    settle(t->pair);
    assert_int_equal(c->st, TD_OK);
}

static void state_shows_requests(void **state)
{
    struct bench *t = *state;
    struct want *q = reserve(t->pair, 8, 0);
    start(t, q, NULL);
    struct td_buf b = {0};
    td_prefill_worker_describe(t->w, &b);
    assert_non_null(strstr(td_buf_cstr(&b), "\"state\":\"COMPUTING\""));
    td_buf_free(&b);
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    td_prefill_worker_load(t->w, &load);
    assert_int_equal(load.n_running, 1);
    assert_int_equal(load.free_full_pages, N_SRC_FULL - 2);
    compute(t, 5);
}

/* Any order of anything that clients, engine, network and decode worker can do. */
static void any_order_of_events_returns_every_page(void **state)
{
    struct bench *t = *state;
    struct pair *w = t->pair;
    struct td_prefill_run *runs[64] = {0};
    unsigned n_ready = 0;
    for (int i = 0; i < 20000; i++) {
        uint64_t pick = w->n_wants > 0 ? draw(w) % w->n_wants : 0;
        switch (draw(w) % 12) {
        case 0:
            if (w->n_wants >= 60) break;
            struct want *q = reserve(w, 1 + (uint32_t)(draw(w) % 50), 0);
            if (q == NULL) break;
            (void)start(t, q, &runs[w->n_wants - 1]);
            break;
        case 1:
        case 2:
        case 3:
            if (t->n_batches > 0) compute(t, draw(w) % 5 == 0 ? STOP_ID : 5);
            break;
        case 4:
            if (t->n_batches > 0 && draw(w) % 8 == 0) done(t, 0, TD_E_DEVICE);
            break;
        case 5:
            if (w->n_wants > 0 && runs[pick] != NULL && draw(w) % 6 == 0 && t->calls[pick].n_finish == 0) {
                struct td_prefill_run *r = runs[pick];
                runs[pick] = NULL;
                t->calls[pick].n_finish = 1;
                td_prefill_worker_on_gone(t->w, r, TD_E_CANCELED);
            }
            break;
        case 6:
            if (w->n_wants > 0 && w->wants[pick].r != NULL && draw(w) % 6 == 0) td_rx_end(w->rx, w->wants[pick].r);
            break;
        case 7: (void)deliver_to_d(w); break;
        case 8: (void)deliver_to_p(w); break;
        case 9: turn(w); break;
        default: (void)happen_nth(w, draw(w)); break;
        }
        if (w->n_wants >= 60 && td_prefill_worker_n_runs(t->w) == 0) { /* another round */
            settle(w);
            for (unsigned k = 0; k < w->n_wants; k++) {
                n_ready += w->wants[k].n_ready;
                if (w->wants[k].r != NULL) td_rx_end(w->rx, w->wants[k].r);
            }
            settle(w);
            assert_source_free(t, true);
            assert_pages_free(w, true);
            for (unsigned k = 0; k < w->n_wants; k++) assert_int_equal(w->wants[k].n_rx_ended, 1);
            memset(w->wants, 0, sizeof w->wants);
            memset(t->calls, 0, sizeof t->calls);
            memset(runs, 0, sizeof runs);
            w->n_wants = t->n_calls = 0;
        }
    }
    while (t->n_batches > 0) compute(t, 5);
    settle(w);
    while (t->n_batches > 0) {
        compute(t, 5);
        settle(w);
    }
    assert_true(n_ready > 100);
}

int main(void)
{
    td_log_open("worker_test", TD_LOG_OFF); /* refusals and losses are on purpose */
#define T(name) cmocka_unit_test_setup_teardown(name, make, unmake)
    const struct CMUnitTest tests[] = {
        T(a_prompt_becomes_a_first_token_and_kv_elsewhere),
        cmocka_unit_test_setup_teardown(a_way_through_host_memory_says_so, make_staged, unmake),
        T(every_length_arrives_whole),
        T(layers_leave_while_the_next_are_computed),
        T(the_next_prompt_is_computed_while_the_last_is_sent),
        T(prompts_share_a_pass_if_told_to),
        T(one_that_leaves_a_shared_pass_does_not_disturb_the_others),
        T(a_deadline_that_cannot_be_met_is_refused_at_once),
        T(prompts_wait_for_pages),
        T(a_prompt_that_no_page_will_ever_serve_fails),
        T(a_stop_id_ends_it_without_kv),
        T(max_tokens_one_ends_it_without_kv),
        T(a_client_that_leaves_stops_the_work_within_a_step),
        T(a_client_that_leaves_while_waiting_or_sending_costs_nothing),
        T(a_deadline_ends_it_in_any_state),
        T(the_calls_own_deadline_counts_too),
        T(a_stop_of_the_decode_worker_ends_the_run),
        T(a_lost_decode_worker_ends_its_runs),
        T(a_failed_pass_fails_the_run_and_not_the_next),
        T(a_busy_engine_is_tried_again),
        T(a_first_token_that_cannot_be_told_ends_the_run),
        T(more_than_may_wait_is_refused),
        T(draining_lets_requests_finish_and_refuses_new_ones),
        T(end_of_grace_ends_everything),
        T(an_unknown_decode_worker_needs_its_descriptor),
        T(another_layout_is_refused_by_name),
        T(a_generation_runs_once),
        T(bad_requests_are_refused_by_field),
        T(generated_tokens_of_a_migration_are_history),
        T(state_shows_requests),
        T(any_order_of_events_returns_every_page),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
