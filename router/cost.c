/* The cost of a choice is all the waiting that it causes, this request's own and that of others:
 *
 *   remote   what P has still to compute, and this prompt, at P's pace; the way there and the hand-off as they were
 *            measured lately; and each request that waits in the router waits for this prompt too, at its share of the
 *            prefill workers
 *   local    the prompts that D computes already, and this one, at D's pace (which its own decode steps slow down); and
 *            each sequence that D decodes waits as long as this prompt takes
 *
 * So a short rest of a prompt is computed where its answer is, a long one is not put before running streams, and what
 * would queue for prefill workers for too long is taken by decode workers that have little else to do. Either way by
 * itself is one end of this scale: whichever of them is better for a load, the sum over requests is not above it but
 * for what the estimates are off. */
#include "router/cost.h"

static uint64_t us_for(uint64_t n_tokens, uint32_t tokens_per_s) { return n_tokens * 1000000 / tokens_per_s; }

uint64_t td_cost_remote_us(const struct td_fleet *f, const struct td_worker *prefill, const struct td_cost_query *q)
{
    uint32_t pace = prefill->load.prefill_tokens_per_s;
    if (pace == 0) return TD_COST_UNKNOWN;
    uint32_t n_prefill = td_fleet_n(f, TANDEM__V1__ROLE__ROLE_PREFILL);
    uint64_t others_us = us_for(q->n_remote, pace) * q->n_behind / (n_prefill > 0 ? n_prefill : 1);
    return us_for(prefill->prefill_tokens + q->n_remote, pace) + (uint64_t)f->handoff_us + others_us;
}

uint64_t td_cost_local_us(const struct td_worker *decode, const struct td_worker *prefill,
                          const struct td_cost_query *q)
{
    uint32_t pace = decode->load.prefill_tokens_per_s;
    if (pace == 0 && prefill != NULL) pace = prefill->load.prefill_tokens_per_s;
    if (pace == 0) return TD_COST_UNKNOWN;
    /* Its report is up to a heartbeat old. */
    uint32_t n_running = decode->load.n_running > decode->n_requests ? decode->load.n_running : decode->n_requests;
    return us_for(decode->prefill_tokens + q->n_local, pace) + us_for(q->n_local, pace) * n_running;
}
