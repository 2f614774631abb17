/* Continuous batching: which sequences compute what in the next step, and the pages they need for it. Sequences join
 * and leave between any two steps. Pure; loop thread only.
 *
 * A sequence has tokens whose KV is in pages (n_cached) and tokens still to compute. One to compute is a decode step;
 * more are a prompt that is prefilled here, in chunks between the decode steps of the others.
 *
 * What is prefilled here must not hold up those that decode: beside them a chunk is as long as may double the step, as
 * measured, and no longer than chunk_tokens.
 *
 * Steps ahead. With a depth of 2 the next step is planned while one runs, before its tokens are known: a sequence whose
 * token is being drawn goes on from it (td_segment.is_fed), and if that token turns out to have been its last, what it
 * computed is dropped. Its pages stay its own until no step in flight has it. Two things are not done ahead:
 *   - where a draw depends on the tokens before it (penalties), the next step waits until they are known, for all
 *     sequences: leaving that one out would halve its speed, waiting costs the others tens of microseconds;
 *   - nobody is made to give way: pages of a step in flight do not come back. Where a page is missing, the step waits
 *     until nothing is in flight.
 *
 * Pages grow with the sequence and pages of sliding layers that left the window go back. When none is free, the
 * youngest sequence gives up its own, so that the oldest always advances. Age is that of the request, not of its stay
 * here: one that gave way keeps its rank when it comes back. */
#ifndef TD_DECODE_SCHED_H
#define TD_DECODE_SCHED_H

#include "common/base/list.h"
#include "common/base/status.h"
#include "common/engine/batch.h"
#include "common/engine/kv_pages.h"
#include "common/engine/kv_prefix.h"
#include "common/engine/request.h"

/* Lives in its request. All zero before td_decode_seq_init. */
struct td_decode_seq {
    struct td_token_request *req;
    uint64_t born_ns, order;                             /* age: born before, then arrived before (older_than) */
    uint32_t *pages[TD_KV_N_GROUPS];                     /* by block (position / page_tokens) */
    uint32_t first[TD_KV_N_GROUPS], end[TD_KV_N_GROUPS]; /* blocks held */
    uint32_t n_cached;                                   /* positions whose KV is in pages */
    uint32_t n_ahead, n_draws;                           /* of steps in flight: positions, tokens that are drawn */
    struct td_kv_hit hit;                                /* what the prefix cache knew of it */
    uint32_t n_step;                                     /* tokens in the step that is planned */
    uint32_t segment;                                    /* its place in the last step it was in */
    uint32_t n_in_flight;                                /* steps */
    bool is_queued, is_in_batch;
    struct td_list link;
};

struct td_decode_sched_owner {
    void *self;
    void (*joined)(void *self, struct td_decode_seq *s);                             /* queue to batch */
    void (*drew)(void *self, struct td_decode_seq *s, const struct td_segment *seg); /* a token; may remove s */
    void (*broke)(void *self, struct td_decode_seq *s, enum td_status st); /* its step failed; must remove s */
    /* No page for s; must remove s. gave_way: to an older sequence, so that it may come back when there is room. */
    void (*no_pages)(void *self, struct td_decode_seq *s, bool gave_way);
    /* s needs a page and no younger sequence holds one. True: pages are on their way back, s waits. */
    bool (*relieve)(void *self, struct td_decode_seq *s);
    /* s was removed and holds no page, and no step reads it any more: it may be freed. */
    void (*released)(void *self, struct td_decode_seq *s);
};

#define TD_DECODE_MAX_DEPTH 2u

struct td_decode_sched_options {
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    uint32_t window_tokens;
    struct td_kv_prefix *prefix; /* NULL: no cache */
    uint32_t max_batch;          /* sequences in a step */
    uint32_t chunk_tokens;       /* prompt tokens in a step, of all sequences that prefill here */
    uint32_t depth;              /* steps in flight at a time, 1 to TD_DECODE_MAX_DEPTH */
};

struct td_decode_sched;
enum td_status td_decode_sched_create(const struct td_decode_sched_options *o, struct td_kv_pages *kv,
                                      const struct td_decode_sched_owner *owner, struct td_decode_sched **out);
void td_decode_sched_destroy(struct td_decode_sched *s); /* its sequences were removed before */

/* Pages that a prompt of n_tokens and the token after it need to begin. is_local: computed here, in chunks. */
void td_decode_sched_need(const struct td_decode_sched *s, uint32_t n_tokens, bool is_local,
                          uint32_t need[TD_KV_N_GROUPS]);
/* Enough free pages for that, with one left for each of the n_others that may grow meanwhile, and for n_margin tokens
 * more: what gave way once should not do so again at once. hit: of the pages that are needed it holds some already.
 * NO_PAGES: not now. TOO_LARGE: never. */
enum td_status td_decode_sched_room(const struct td_decode_sched *s, uint32_t n_tokens, bool is_local,
                                    const struct td_kv_hit *hit, uint32_t n_others, uint32_t n_margin);

enum td_status td_decode_seq_init(struct td_decode_seq *q, const struct td_decode_sched *s,
                                  struct td_token_request *req, uint64_t born_ns, uint64_t order);
void td_decode_seq_deinit(struct td_decode_seq *q); /* holds no pages */
bool td_decode_seq_is_older(const struct td_decode_seq *a, const struct td_decode_seq *b);
/* Shares what the cache knows of the sequence's tokens: q->hit, pages. is_local: to compute the rest here, which begins
 * behind it. Before anything else is taken. */
void td_decode_seq_find(struct td_decode_seq *q, const struct td_decode_sched *s, bool is_local);
/* Gives everything back that it shares or has taken; not added, or removed. */
void td_decode_seq_drop(struct td_decode_seq *q, const struct td_decode_sched *s);
/* As if the cache had known nothing: after a find, before anything else is taken. */
void td_decode_seq_forget(struct td_decode_seq *q, const struct td_decode_sched *s);
/* All tokens' KV is in pages: enters what is whole into the cache. */
void td_decode_seq_filled(struct td_decode_seq *q, const struct td_decode_sched *s);
/* Takes over pages of blocks first_block .. (their counts too), right behind those it shares, before it is added. */
void td_decode_seq_take_pages(struct td_decode_seq *q, enum td_kv_group g, uint32_t first_block, uint32_t n_pages,
                              const uint32_t *pages);

void td_decode_sched_add(struct td_decode_sched *s, struct td_decode_seq *q); /* to the queue */
/* Leaves queue or batch. Its pages go back and released runs: now, or when the last step in flight that has it is done.
 */
void td_decode_sched_remove(struct td_decode_sched *s, struct td_decode_seq *q);

/* The next step, or NULL if there is nothing to compute, or nothing before a step in flight is done. Only if fewer than
 * the depth are in flight. */
struct td_batch *td_decode_sched_plan(struct td_decode_sched *s);
/* The first of the steps in flight is over; it took so long (0: not known). */
void td_decode_sched_done(struct td_decode_sched *s, enum td_status st, uint64_t took_ns);
/* The step planned last will not be computed: ends everything in it. */
void td_decode_sched_refused(struct td_decode_sched *s, enum td_status st);
uint32_t td_decode_sched_n_in_flight(const struct td_decode_sched *s);
uint32_t td_decode_sched_n_step_prompt(const struct td_decode_sched *s); /* prompt tokens in the first step in flight */
bool td_decode_sched_has_stalled(
    const struct td_decode_sched *s); /* the last plan left a sequence out for want of pages */
uint32_t td_decode_sched_n_queued(const struct td_decode_sched *s);
uint32_t td_decode_sched_n_running(const struct td_decode_sched *s);

#endif
