/* The rule, for one request:
 *   decode worker: live, wired, not draining, not full. The one with the fewest sequences (its report or our own count,
 *     whichever is larger, since a report is up to a heartbeat old); then the most free pages; then the one chosen
 *     longest ago.
 *   prefill worker: live, not draining, with room for one more. The one with the fewest runs; then the fewest prompt
 *     tokens; then the one chosen longest ago.
 * A worker whose engine step has lasted longer than a worker may be silent is taken only if there is no other.
 *
 * A retry avoids what failed. A decode worker that failed is not asked again unless waiting may help. A failed run does
 * not tell which end of the hand-off was at fault: another prefill worker is preferred; if there is none, the same one
 * may try with another decode worker. */
#include "router/place.h"

static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

static bool is_usable(const struct td_worker *w, Tandem__V1__Role role)
{
    return w->role == role && w->is_live && w->is_wired && !w->load.is_draining;
}

static bool is_stuck(const struct td_fleet *f, const struct td_worker *w)
{
    return w->load.last_step_age_us * 1000 > f->timeout_ns;
}

/* -1: a is the better, 1: b is. */
#define PREFER_LESS(x, y)                                                                                              \
    do {                                                                                                               \
        if ((x) != (y)) return (x) < (y);                                                                              \
    } while (0)

static bool is_better_decode(const struct td_fleet *f, const struct td_worker *a, const struct td_worker *b)
{
    PREFER_LESS(is_stuck(f, a), is_stuck(f, b));
    PREFER_LESS(max_u32(a->n_requests, a->load.n_running + a->load.n_waiting),
                max_u32(b->n_requests, b->load.n_running + b->load.n_waiting));
    PREFER_LESS(b->load.free_full_pages, a->load.free_full_pages);
    return a->last_pick < b->last_pick;
}

static bool is_better_prefill(const struct td_fleet *f, const struct td_worker *a, const struct td_worker *b)
{
    PREFER_LESS(is_stuck(f, a), is_stuck(f, b));
    PREFER_LESS(a->n_prefilling, b->n_prefilling);
    PREFER_LESS(a->load.n_running + a->load.n_waiting, b->load.n_running + b->load.n_waiting);
    PREFER_LESS(a->prefill_tokens, b->prefill_tokens);
    return a->last_pick < b->last_pick;
}

enum td_status td_place_choose(struct td_fleet *f, const struct td_place_query *q, struct td_place *out,
                               struct td_err *err)
{
    uint32_t n_decode = 0, n_prefill = 0, n_other_decode = 0, n_other_prefill = 0;
    TD_LIST_FOREACH (it, &f->workers) {
        const struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (is_usable(w, TANDEM__V1__ROLE__ROLE_DECODE)) {
            n_decode++;
            n_other_decode += w->incarnation != q->failed_decode;
        } else if (is_usable(w, TANDEM__V1__ROLE__ROLE_PREFILL)) {
            n_prefill++;
            n_other_prefill += w->incarnation != q->failed_prefill;
        }
    }
    if (n_decode == 0) return td_err_set(err, TD_E_UNAVAILABLE, "no decode worker is available");
    if (n_prefill == 0) return td_err_set(err, TD_E_UNAVAILABLE, "no prefill worker is available");

    bool is_retry = q->failed_decode != 0;
    bool avoid_prefill = is_retry && !q->decode_failed && n_other_prefill > 0;
    bool avoid_decode = is_retry && (q->decode_failed ? !(q->same_ok && n_other_decode == 0)
                                                      : n_other_prefill == 0 && !(q->same_ok && n_other_decode == 0));
    if (avoid_decode && n_other_decode == 0)
        return td_err_set(err, TD_E_UNAVAILABLE, "no other %s worker to try again with",
                          q->decode_failed ? "decode" : "prefill");

    struct td_worker *d = NULL, *p = NULL;
    TD_LIST_FOREACH (it, &f->workers) {
        struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (is_usable(w, TANDEM__V1__ROLE__ROLE_DECODE)) {
            if (w->is_full || (avoid_decode && w->incarnation == q->failed_decode)) continue;
            if (d == NULL || is_better_decode(f, w, d)) d = w;
        } else if (is_usable(w, TANDEM__V1__ROLE__ROLE_PREFILL)) {
            if (w->is_full || (avoid_prefill && w->incarnation == q->failed_prefill)) continue;
            if (w->n_prefilling >= TD_PLACE_PREFILL_DEPTH) continue;
            if (p == NULL || is_better_prefill(f, w, p)) p = w;
        }
    }
    if (d == NULL || p == NULL)
        return td_err_set(err, TD_E_BUSY, "no %s worker has room", d == NULL ? "decode" : "prefill");
    *out = (struct td_place){.decode = d, .prefill = p};
    return TD_OK;
}
