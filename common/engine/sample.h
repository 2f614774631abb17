/* Choosing a token from one row of logits: the definition that every backend matches. Pure functions, no allocation,
 * any thread. The result depends on (logits, settings, history, seed, draw_index) alone, so it does not matter which
 * worker draws.
 *
 * Order of steps:
 *   1. log-probabilities of the raw logits (softmax in double), if asked for
 *   2. banned ids and ids outside the mask cannot be drawn
 *   3. logit bias; repetition penalty (prompt and generated tokens: a positive logit is divided, a negative
 * multiplied); frequency penalty times count, then presence penalty (generated tokens)
 *   4. temperature 0: the highest logit, the lowest id on a tie. Otherwise p = softmax(logit / temperature), and
 *      top-k keeps the k most likely (ties: lower id first),
 *      top-p keeps the shortest run of those, most likely first, whose share of what top-k kept is >= top_p; at least
 * one, min-p keeps p >= min_p * the highest p
 *   5. one draw u in [0, 1): the first kept id, in rising order of ids, at which the running sum of p exceeds u * total
 * A NaN logit counts as -inf. If nothing has a finite logit, the lowest id that is allowed is taken. */
#ifndef TD_ENGINE_SAMPLE_H
#define TD_ENGINE_SAMPLE_H

#include <stddef.h>

#include "common/base/status.h"
#include "common/engine/batch.h"
#include "kernels/args.h"

/* Reported in place of a log-probability that is lower or -inf: what follows (JSON) knows no infinity. */
#define TD_LOGPROB_FLOOR (-9999.0f)

#define TD_MAX_TEMPERATURE 100.0f
#define TD_MAX_PENALTY     100.0f
#define TD_MAX_LOGIT_BIAS  1000.0f
#define TD_MAX_TOP_K       (1u << 24)

/* INVALID: a value is NaN, out of range, or a bias id is not a token or not above the one before it. err names the
 * field as in common.proto. */
enum td_status td_sampling_check(const struct td_sampling *s, uint32_t n_vocab, struct td_err *err);

/* Whether a segment's draw is one that a backend can do: nothing but temperature, and at most the token's own
 * log-probability. The segment wants a token. */
bool td_sample_is_plain(const struct td_segment *seg);
/* The backend's row and, afterwards, what it found, as td_sample would leave it in the segment. */
void td_sample_ask(const struct td_segment *seg, struct td_sample_row *out);
void td_sample_take(struct td_segment *seg, const struct td_sampled *found);

/* Size of td_sample's scratch, in floats. It must be heap memory (it is used as floats and as integers); its contents
 * do not matter before or after. */
static inline size_t td_sample_scratch_floats(uint32_t n_vocab) { return (size_t)2 * n_vocab; }

/* Draws seg->token and fills seg->chosen and seg->top as seg asks (sampling, draw_index, history, banned_ids, mask,
 * want_logprobs, n_top_logprobs). logits [n_vocab], n_vocab >= 1, are not changed. seg->sampling has passed
 * td_sampling_check. n_top_logprobs is lowered to n_vocab if that is less. */
void td_sample(const float *logits, uint32_t n_vocab, struct td_segment *seg, float *scratch);

#endif
