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

/* Whether a draw depends on the tokens before it. */
static inline bool td_sampling_has_penalties(const struct td_sampling *s)
{
    return s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0;
}

/* Draws that a backend does, of one turn: rows as they are asked for, in the host's copies of what td_sample_args
 * points to. max_*: room there. */
struct td_sample_asked {
    struct td_sample_row *rows;
    uint32_t *filtered;
    struct td_sample_edit *edits;
    uint32_t *masks; /* mask_words each */
    uint32_t n_rows, n_filtered, n_edits, n_masks;
    uint32_t max_edits, max_masks, mask_words;
    uint32_t n_ids;
};
/* Whether a segment's draw is plain: nothing but temperature, and at most the token's own log-probability. */
bool td_sample_is_plain(const struct td_segment *seg);
/* Adds a row for the segment's draw. false: there is no room for what it edits, and the row is a dummy; the host draws.
 * marks: n_ids of scratch. */
bool td_sample_ask(struct td_sample_asked *to, const struct td_segment *seg, uint32_t *marks);
void td_sample_ask_nothing(struct td_sample_asked *to); /* a dummy, for a row whose segment wants no token */
/* What the backend found, as td_sample would leave it in the segment. top: the row's. */
void td_sample_take(struct td_segment *seg, uint32_t n_ids, const struct td_sampled *found,
                    const struct td_sample_top *top);

/* Size of td_sample's scratch, in floats. It must be heap memory (it is used as floats and as integers); its contents
 * do not matter before or after. */
static inline size_t td_sample_scratch_floats(uint32_t n_vocab) { return (size_t)2 * n_vocab; }

/* Draws seg->token and fills seg->chosen and seg->top as seg asks (sampling, draw_index, history, banned_ids, mask,
 * want_logprobs, n_top_logprobs). logits [n_vocab], n_vocab >= 1, are not changed. seg->sampling has passed
 * td_sampling_check. n_top_logprobs is lowered to n_vocab if that is less. */
void td_sample(const float *logits, uint32_t n_vocab, struct td_segment *seg, float *scratch);

#endif
