#include "tests/sim/planted.h"

#include <string.h>

#include "common/engine/kv_pages.h"
#include "common/engine/request.h"
#include "common/handoff/receiver.h"
#include "common/handoff/refused.h"
#include "common/handoff/wire.h"
#include "common/transfer/memory_int.h"
#include "decode/worker_int.h"
#include "prefill/sched.h"
#include "router/answer.h"
#include "router/link.h"

enum planted {
    NONE,
#define X(name, what) name,
    SIM_PLANTED(X)
#undef X
};
static enum planted planted;
static uint32_t n_calls;

bool sim_plant(const char *name)
{
#define X(n, what)                                                                                                     \
    if (strcmp(name, #n) == 0) planted = n;
    SIM_PLANTED(X)
#undef X
    return planted != NONE;
}

void sim_planted_list(FILE *to, bool with_meaning)
{
#define X(name, what) fprintf(to, with_meaning ? "  %-16s %s\n" : "%s\n", #name, what);
    SIM_PLANTED(X)
#undef X
}

/* Every so often. */
static bool now_and_then(uint32_t every) { return ++n_calls % every == 0; }

#define WRAP(type, name, ...)                                                                                          \
    type __real_##name(__VA_ARGS__);                                                                                   \
    type __wrap_##name(__VA_ARGS__);                                                                                   \
    type __wrap_##name(__VA_ARGS__)

/* early_release: as if the sender had confirmed. */
WRAP(void, td_rx_end, struct td_rx *rx, struct td_rx_reservation *r)
{
    struct td_decode_request *owner = td_rx_owner(r);
    struct td_wire m = {.to = owner->w->o.incarnation, .generation = td_rx_generation(r)};
    uint64_t from = owner->prefill;
    __real_td_rx_end(rx, r);
    if (planted != early_release) return;
    struct td_buf b = {0};
    td_wire_encode(TD_WIRE_STOPPED, &m, &b);
    td_rx_on_message(rx, from, TD_WIRE_STOPPED, b.data, b.n);
    td_buf_free(&b);
}

WRAP(bool, td_refused_has, const struct td_refused *r, uint64_t generation)
{
    return planted != no_generation && __real_td_refused_has(r, generation);
}

WRAP(enum td_status, td_rx_create, const struct td_rx_options *o, struct td_kv_pages *kv,
     const struct td_rx_ports *ports, struct td_rx **out)
{
    struct td_rx_options mine = *o;
    if (planted == no_quarantine) mine.quarantine_ms = 0;
    return __real_td_rx_create(&mine, kv, ports, out);
}

WRAP(void, td_decode_sched_add, struct td_decode_sched *s, struct td_decode_seq *q)
{
    struct td_decode_request *r = TD_CONTAINER_OF(q, struct td_decode_request, seq);
    struct td_segment seg = {.token = q->req->tokens[q->req->n_tokens - 1]};
    if (planted == first_twice && r->prefill != 0) td_decode_stream_token(r->stream, r->stream_id, &seg);
    __real_td_decode_sched_add(s, q);
}

/* Of a sequence that left while a step was in flight: as if none were. */
WRAP(void, td_decode_sched_remove, struct td_decode_sched *s, struct td_decode_seq *q)
{
    bool is_early = planted == early_pages && q->n_in_flight > 0;
    uint32_t n = q->n_in_flight;
    if (is_early) td_decode_seq_drop(q, s);
    TD_CHECK(q->n_in_flight == n);
    __real_td_decode_sched_remove(s, q);
}

WRAP(void, td_decode_stream_token, struct td_decode_stream *s, uint64_t stream_id, const struct td_segment *seg)
{
    if (planted == lost_token && now_and_then(100)) return;
    __real_td_decode_stream_token(s, stream_id, seg);
}

WRAP(void, td_decode_stream_finished, struct td_decode_stream *s, const struct td_decode_finish *f)
{
    __real_td_decode_stream_finished(s, f);
    if (planted == double_end) __real_td_decode_stream_finished(s, f);
}

WRAP(enum td_status, td_answer_end, struct td_answer *a, const struct td_request *r)
{
    if (planted == double_terminal) __real_td_answer_end(a, r);
    return __real_td_answer_end(a, r);
}

WRAP(void, td_kv_pages_unref, struct td_kv_pages *kv, enum td_kv_group g, uint32_t page)
{
    if (planted == page_leak && now_and_then(200)) return;
    __real_td_kv_pages_unref(kv, g, page);
}

WRAP(void, td_token_request_want_token, const struct td_token_request *r, uint32_t n_coming, struct td_segment *seg)
{
    __real_td_token_request_want_token(r, planted == late_index ? 0 : n_coming, seg);
    if (planted == wrong_draw && seg->draw_index > 0) seg->draw_index--;
}

WRAP(enum td_status, td_link_start, struct td_request *r, struct td_err *err)
{
    bool goes_on = r->n_tokens > r->n_prompt;
    uint32_t n_tokens = r->n_tokens, n_prompt = r->n_prompt;
    if (goes_on && planted == lost_migrating) r->n_tokens--;
    if (goes_on && planted == forgotten_draws) r->n_prompt = r->n_tokens;
    enum td_status st = __real_td_link_start(r, err);
    r->n_tokens = n_tokens;
    r->n_prompt = n_prompt;
    return st;
}

WRAP(uint32_t, td_prefill_seq_copies, const struct td_prefill_seq *q, struct td_page_copy out[TD_KV_N_GROUPS])
{
    return planted == no_copy ? 0 : __real_td_prefill_seq_copies(q, out);
}

WRAP(enum td_status, td_memory_flush, struct td_xfer_peer *p, struct td_xfer_req *req)
{
    /* An empty put waits for no other. */
    if (planted == no_flush && td_memory_put(p, 0, NULL, 0, req) == TD_OK) return TD_OK;
    return __real_td_memory_flush(p, req);
}
