/* The rule, for one request:
 *   decode worker: live, wired, not draining, not full. The one with the fewest sequences (its report or our own count,
 *     whichever is larger, since a report is up to a heartbeat old); then the most free pages; then the one chosen
 *     longest ago. One whose prefix cache knows more of the prompt goes before, if it has at most a quarter more
 *     sequences, or two more: that saves transfer, or computing if it computes the prompt itself.
 *   prefill worker: live, not draining, with room for one more. The one that would be done first, by its pace, what
 *     it has to compute, and what its prefix cache knows of the prompt. Where that is much the same, or nothing was
 *     measured yet: the one with the fewest runs; then the fewest tokens; then the one chosen longest ago.
 *   which of the two computes the prompt: whoever costs less by cost.c, the prefill worker if nothing is known yet.
 *     The decode worker if there is no prefill worker at all. If all of them have enough to do and waiting costs less,
 *     the request waits.
 * A worker whose engine step has lasted longer than a worker may be silent is taken only if there is no other.
 *
 * A request that had to give its pages up comes back where all it needs now is free, and one page more for each
 * sequence that may grow meanwhile; or to a worker that has nothing else, and knows best whether it ever fits.
 *
 * A retry avoids what failed. A decode worker that failed is not asked again unless waiting may help. After a failed
 * run another prefill worker is preferred; if there is none, or this is the last try, the decode worker does it alone:
 * that needs no hand-off. */
#include "router/place.h"

#include <string.h>

#include "common/base/check.h"
#include "router/cost.h"

static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

static bool is_usable(const struct td_worker *w, Tandem__V1__Role role)
{
    return w->role == role && td_fleet_is_usable(w);
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

static uint32_t n_sequences(const struct td_worker *w)
{
    return max_u32(w->n_requests, w->load.n_running + w->load.n_waiting);
}

/* Tokens of the prompt that w's prefix cache knows, as far as it has told. */
static uint32_t n_known(const struct td_place_query *q, const struct td_worker *w)
{
    uint64_t n = td_prefixes_match(&w->prefixes, q->names, q->n_names);
    n *= w->identity->descriptor->layout->page_tokens;
    return n < q->n_tokens ? (uint32_t)n : q->n_tokens - 1; /* somebody computes the last */
}

static bool is_better_decode(const struct td_fleet *f, const struct td_worker *a, const struct td_worker *b)
{
    PREFER_LESS(is_stuck(f, a), is_stuck(f, b));
    PREFER_LESS(n_sequences(a), n_sequences(b));
    PREFER_LESS(b->load.free_full_pages, a->load.free_full_pages);
    return a->last_pick < b->last_pick;
}

/* Would a be done clearly before b? By a tenth: paces are measured. */
static bool is_done_first(const struct td_place_query *q, const struct td_worker *a, const struct td_worker *b)
{
    uint64_t pace_a = a->load.prefill_tokens_per_s, pace_b = b->load.prefill_tokens_per_s;
    if (pace_a == 0 || pace_b == 0) pace_a = pace_b = 1;
    double s_a = (double)(a->prefill_tokens + q->n_tokens - n_known(q, a)) / (double)pace_a;
    double s_b = (double)(b->prefill_tokens + q->n_tokens - n_known(q, b)) / (double)pace_b;
    return s_a < 0.9 * s_b;
}

static bool is_better_prefill(const struct td_fleet *f, const struct td_place_query *q, const struct td_worker *a,
                              const struct td_worker *b)
{
    PREFER_LESS(is_stuck(f, a), is_stuck(f, b));
    PREFER_LESS(is_done_first(q, b, a), is_done_first(q, a, b));
    PREFER_LESS(a->n_prefilling, b->n_prefilling);
    PREFER_LESS(a->load.n_running + a->load.n_waiting, b->load.n_running + b->load.n_waiting);
    PREFER_LESS(a->prefill_tokens, b->prefill_tokens);
    return a->last_pick < b->last_pick;
}

/* Room for all of it, and for what the others may need next. */
static bool has_room_to_grow(const struct td_worker *w, uint32_t n_tokens)
{
    uint32_t page_tokens = w->identity->descriptor->layout->page_tokens;
    uint32_t n_others = n_sequences(w);
    if (n_others == 0 || page_tokens == 0) return true;
    return w->load.free_full_pages >= (uint64_t)n_tokens / page_tokens + 1 + n_others;
}

static bool may_decode(const struct td_place_query *q, const struct td_worker *w, bool avoid)
{
    if (!is_usable(w, TANDEM__V1__ROLE__ROLE_DECODE) || w->is_full) return false;
    if (avoid && w->incarnation == q->failed_decode) return false;
    return !q->is_back || has_room_to_grow(w, q->n_tokens);
}

static struct td_worker *choose_decode(struct td_fleet *f, const struct td_place_query *q, bool avoid)
{
    struct td_worker *least = NULL;
    TD_LIST_FOREACH (it, &f->workers) {
        struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (may_decode(q, w, avoid) && (least == NULL || is_better_decode(f, w, least))) least = w;
    }
    if (least == NULL || q->n_names == 0) return least;
    struct td_worker *d = least;
    uint32_t limit = n_sequences(least) + max_u32(n_sequences(least) / 4, 2), most = n_known(q, least);
    TD_LIST_FOREACH (it, &f->workers) {
        struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (!may_decode(q, w, avoid) || is_stuck(f, w) || n_sequences(w) > limit) continue;
        uint32_t known = n_known(q, w);
        if (known < most || (known == most && !is_better_decode(f, w, d))) continue;
        most = known;
        d = w;
    }
    return d;
}

/* has_room: with room for one more. Else the one that has room first. */
static struct td_worker *choose_prefill(struct td_fleet *f, const struct td_place_query *q, bool avoid, bool has_room)
{
    struct td_worker *p = NULL;
    TD_LIST_FOREACH (it, &f->workers) {
        struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (!is_usable(w, TANDEM__V1__ROLE__ROLE_PREFILL)) continue;
        if (avoid && w->incarnation == q->failed_prefill) continue;
        if (has_room && (w->is_full || w->n_prefilling >= TD_PLACE_PREFILL_DEPTH)) continue;
        if (p == NULL || is_better_prefill(f, q, w, p)) p = w;
    }
    return p;
}

/* Should d compute the prompt itself? p: whom it would be given to else, now or as soon as it has room. */
static bool is_local_cheaper(const struct td_fleet *f, const struct td_place_query *q, const struct td_worker *d,
                             const struct td_worker *p)
{
    if (q->on != TD_PREFILL_ON_AUTO) return q->on == TD_PREFILL_ON_DECODE;
    struct td_cost_query cost = {
        .n_remote = q->n_tokens - n_known(q, p), .n_local = q->n_tokens - n_known(q, d), .n_behind = q->n_behind};
    uint64_t remote_us = td_cost_remote_us(f, p, &cost), local_us = td_cost_local_us(d, p, &cost);
    return remote_us != TD_COST_UNKNOWN && local_us < remote_us;
}

bool td_place_parse_on(const char *word, enum td_prefill_on *out)
{
    static const char *const words[] = {
        [TD_PREFILL_ON_AUTO] = "auto", [TD_PREFILL_ON_PREFILL] = "prefill", [TD_PREFILL_ON_DECODE] = "decode"};
    for (unsigned i = 0; i < TD_COUNT(words); i++) {
        if (strcmp(word, words[i]) != 0) continue;
        *out = (enum td_prefill_on)i;
        return true;
    }
    return false;
}

enum td_status td_place_choose(struct td_fleet *f, const struct td_place_query *q, struct td_place *out,
                               struct td_err *err)
{
    uint32_t n_decode = 0, n_other_decode = 0, n_prefill = 0, n_other_prefill = 0;
    bool is_retry = q->failed_decode != 0;
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
    bool avoid_decode = is_retry && q->blame == TD_BLAME_DECODE && !(q->same_ok && n_other_decode == 0);
    if (avoid_decode && n_other_decode == 0)
        return td_err_set(err, TD_E_UNAVAILABLE, "no other decode worker to try again with");

    bool avoid_prefill = is_retry && q->blame == TD_BLAME_PREFILL && !(q->same_ok && n_other_prefill == 0);
    bool is_local = (avoid_prefill ? n_other_prefill : n_prefill) == 0 ||
                    (is_retry && q->is_last_try && q->blame == TD_BLAME_PREFILL);
    struct td_worker *d = choose_decode(f, q, avoid_decode);
    if (d == NULL) return td_err_set(err, TD_E_BUSY, "no decode worker has room");
    struct td_worker *p = is_local ? NULL : choose_prefill(f, q, avoid_prefill, true);
    struct td_worker *later = is_local || p != NULL ? p : choose_prefill(f, q, avoid_prefill, false);
    is_local = is_local || is_local_cheaper(f, q, d, later);
    if (is_local)
        p = NULL;
    else if (p == NULL)
        return td_err_set(err, TD_E_BUSY, "no prefill worker has room");
    *out = (struct td_place){.decode = d, .prefill = p, .n_compute = q->n_tokens - n_known(q, p != NULL ? p : d)};
    return TD_OK;
}
