#include "common/engine/sample.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/rng.h"

enum td_status td_sampling_check(const struct td_sampling *s, uint32_t n_vocab, struct td_err *err)
{
    /* Written so that NaN fails: every comparison with it is false. */
    if (!(s->temperature >= 0 && s->temperature <= TD_MAX_TEMPERATURE))
        return td_err_set(err, TD_E_INVALID, "temperature: %g is not between 0 and %g", (double)s->temperature,
                          (double)TD_MAX_TEMPERATURE);
    if (s->top_k > TD_MAX_TOP_K) return td_err_set(err, TD_E_INVALID, "top_k: %u is above %u", s->top_k, TD_MAX_TOP_K);
    if (!(s->top_p > 0 && s->top_p <= 1))
        return td_err_set(err, TD_E_INVALID, "top_p: %g is not above 0 and at most 1", (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return td_err_set(err, TD_E_INVALID, "min_p: %g is not between 0 and 1", (double)s->min_p);
    if (!(s->repetition_penalty > 0 && s->repetition_penalty <= TD_MAX_PENALTY))
        return td_err_set(err, TD_E_INVALID, "repetition_penalty: %g is not above 0 and at most %g",
                          (double)s->repetition_penalty, (double)TD_MAX_PENALTY);
    if (!(fabsf(s->presence_penalty) <= TD_MAX_PENALTY))
        return td_err_set(err, TD_E_INVALID, "presence_penalty: %g is not between -%g and %g",
                          (double)s->presence_penalty, (double)TD_MAX_PENALTY, (double)TD_MAX_PENALTY);
    if (!(fabsf(s->frequency_penalty) <= TD_MAX_PENALTY))
        return td_err_set(err, TD_E_INVALID, "frequency_penalty: %g is not between -%g and %g",
                          (double)s->frequency_penalty, (double)TD_MAX_PENALTY, (double)TD_MAX_PENALTY);
    for (uint32_t i = 0; i < s->n_logit_bias; i++) {
        uint32_t id = s->bias_ids[i];
        float v = s->bias_values[i];
        if (id >= n_vocab)
            return td_err_set(err, TD_E_INVALID, "logit_bias: %u is not a token id (there are %u)", id, n_vocab);
        if (i > 0 && id == s->bias_ids[i - 1])
            return td_err_set(err, TD_E_INVALID, "logit_bias: token %u appears twice", id);
        if (i > 0 && id < s->bias_ids[i - 1])
            return td_err_set(err, TD_E_INVALID, "logit_bias: ids are not in rising order at %u", id);
        if (!(fabsf(v) <= TD_MAX_LOGIT_BIAS))
            return td_err_set(err, TD_E_INVALID, "logit_bias: %g for token %u is not between -%g and %g", (double)v, id,
                              (double)TD_MAX_LOGIT_BIAS, (double)TD_MAX_LOGIT_BIAS);
    }
    return TD_OK;
}

/* Keeps every later difference of two logits a number: inf - inf is none. */
static float tame(double x)
{
    if (!(x > -INFINITY)) return -INFINITY; /* NaN too */
    if (x > FLT_MAX) return FLT_MAX;
    if (x < -FLT_MAX) return -FLT_MAX;
    return (float)x;
}

/* --- log-probabilities ------------------------------------------------------------------------------------- */

static float logprob_of(float logit, double log_sum)
{
    double lp = (double)tame(logit) - log_sum;
    return lp > (double)TD_LOGPROB_FLOOR ? (float)lp : TD_LOGPROB_FLOOR;
}

/* ln of the sum of e^logit, -inf if no logit is above -inf. */
static double log_sum_exp(const float *logits, uint32_t n)
{
    float max = -INFINITY;
    for (uint32_t i = 0; i < n; i++) max = fmaxf(max, tame(logits[i]));
    if (max == -INFINITY) return -INFINITY;
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += exp((double)tame(logits[i]) - max);
    return (double)max + log(sum);
}

static void top_logprobs(const float *logits, uint32_t n_vocab, double log_sum, struct td_segment *seg)
{
    if (seg->n_top_logprobs > TD_MAX_LOGPROBS) seg->n_top_logprobs = TD_MAX_LOGPROBS;
    if (seg->n_top_logprobs > n_vocab) seg->n_top_logprobs = n_vocab;
    float best[TD_MAX_LOGPROBS];
    uint32_t n = 0, want = seg->n_top_logprobs;
    if (want == 0) return;
    for (uint32_t id = 0; id < n_vocab; id++) {
        float x = tame(logits[id]);
        if (n == want && !(x > best[n - 1])) continue; /* on a tie the lower id, seen earlier, stays in front */
        uint32_t at = n < want ? n++ : n - 1;
        for (; at > 0 && x > best[at - 1]; at--) {
            best[at] = best[at - 1];
            seg->top[at].id = seg->top[at - 1].id;
        }
        best[at] = x;
        seg->top[at].id = id;
    }
    for (uint32_t i = 0; i < n; i++) seg->top[i].logprob = logprob_of(best[i], log_sum);
}

/* --- what can be drawn, and how likely --------------------------------------------------------------------- */

static bool mask_allows(const struct td_segment *seg, uint32_t id)
{
    return seg->mask == NULL || (seg->mask[id / 32] >> (id % 32) & 1u) != 0;
}

static bool is_banned(const struct td_segment *seg, uint32_t id)
{
    for (uint32_t i = 0; i < seg->n_banned; i++)
        if (seg->banned_ids[i] == id) return true;
    return false;
}

/* The answer where no logit helps. A mask outranks a ban: it is what keeps the output well-formed. */
static uint32_t lowest_allowed(const struct td_segment *seg, uint32_t n_vocab)
{
    for (uint32_t id = 0; id < n_vocab; id++)
        if (mask_allows(seg, id) && !is_banned(seg, id)) return id;
    for (uint32_t id = 0; id < n_vocab; id++)
        if (mask_allows(seg, id)) return id;
    return 0;
}

static void penalise(float *x, uint32_t n_vocab, const struct td_segment *seg, uint32_t *counts)
{
    const uint32_t done = UINT32_MAX;
    const struct td_sampling *s = seg->sampling;
    if (!td_sampling_has_penalties(s)) return;
    /* Only the entries of ids that occur are ever touched: the history is short beside the vocabulary. */
    for (uint32_t i = 0; i < seg->n_history; i++)
        if (seg->history[i] < n_vocab) counts[seg->history[i]] = 0;
    for (uint32_t i = seg->n_prompt; i < seg->n_history; i++)
        if (seg->history[i] < n_vocab) counts[seg->history[i]]++;
    for (uint32_t i = 0; i < seg->n_history; i++) {
        uint32_t id = seg->history[i];
        if (id >= n_vocab || counts[id] == done) continue;
        double v = x[id];
        v = v > 0 ? v / s->repetition_penalty : v * s->repetition_penalty;
        v -= (double)s->frequency_penalty * counts[id];
        if (counts[id] > 0) v -= s->presence_penalty;
        x[id] = tame(v);
        counts[id] = done;
    }
}

/* x = logits with everything done to them except temperature; -inf where an id cannot be drawn. */
static void adjust(const float *logits, uint32_t n_vocab, const struct td_segment *seg, float *x, uint32_t *counts)
{
    const struct td_sampling *s = seg->sampling;
    for (uint32_t id = 0; id < n_vocab; id++) x[id] = mask_allows(seg, id) ? tame(logits[id]) : -INFINITY;
    for (uint32_t i = 0; i < seg->n_banned; i++)
        if (seg->banned_ids[i] < n_vocab) x[seg->banned_ids[i]] = -INFINITY;
    for (uint32_t i = 0; i < s->n_logit_bias; i++)
        if (s->bias_ids[i] < n_vocab) x[s->bias_ids[i]] = tame((double)x[s->bias_ids[i]] + s->bias_values[i]);
    penalise(x, n_vocab, seg, counts);
}

static uint32_t highest(const float *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t id = 1; id < n; id++)
        if (x[id] > x[best]) best = id;
    return best;
}

/* Unnormalised probability; 1 for the most likely. */
static double weight(float x, float max, double temperature) { return exp(((double)x - max) / temperature); }

/* --- top-k and top-p: a heap of ids, popped most likely first, as far as needed
 * ----------------------------------------- */

static bool is_before(const float *x, uint32_t a, uint32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); }

static void sift_down(uint32_t *heap, uint32_t n, uint32_t at, const float *x)
{
    uint32_t id = heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= n) break;
        if (child + 1 < n && is_before(x, heap[child + 1], heap[child])) child++;
        if (!is_before(x, heap[child], id)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = id;
}

/* Moves the most likely id of heap[0..n) to heap[n - 1]; what is left of it is heap[0..n - 1). */
static uint32_t pop(uint32_t *heap, uint32_t n, const float *x)
{
    uint32_t id = heap[0];
    heap[0] = heap[n - 1];
    sift_down(heap, n - 1, 0, x);
    heap[n - 1] = id;
    return id;
}

/* Whether top-k and top-p cut anything off, and the least likely id that they keep: it and all before it stay. At least
 * one id is above -inf. */
static bool find_cut(const float *x, uint32_t n_vocab, const struct td_sampling *s, float max, uint32_t *heap,
                     uint32_t *last_kept)
{
    if (s->top_k == 0 && s->top_p >= 1) return false;
    uint32_t n = 0;
    for (uint32_t id = 0; id < n_vocab; id++)
        if (x[id] > -INFINITY) heap[n++] = id;
    uint32_t n_kept = s->top_k > 0 && s->top_k < n ? s->top_k : n;
    if (n_kept == n && s->top_p >= 1) return false;
    for (uint32_t i = n / 2; i-- > 0;) sift_down(heap, n, i, x);

    double total = 0; /* of what top-k keeps */
    uint32_t n_popped = 0;
    if (n_kept < n) {
        for (; n_popped < n_kept; n_popped++) total += weight(x[pop(heap, n - n_popped, x)], max, s->temperature);
    } else {
        for (uint32_t i = 0; i < n; i++) total += weight(x[heap[i]], max, s->temperature);
    }
    double sum = 0;
    uint32_t n_seen = 0;
    do { /* popped ids lie at the end, the most likely last */
        if (n_seen == n_popped) pop(heap, n - n_popped++, x);
        *last_kept = heap[n - 1 - n_seen++];
        sum += weight(x[*last_kept], max, s->temperature);
    } while (n_seen < n_kept && (s->top_p >= 1 || sum < s->top_p * total));
    return true;
}

/* x has an id above -inf. */
static uint32_t draw(const float *x, uint32_t n_vocab, const struct td_segment *seg, uint32_t *heap)
{
    const struct td_sampling *s = seg->sampling;
    uint32_t best = highest(x, n_vocab), cut = 0;
    if (s->temperature == 0) return best;
    float max = x[best];
    bool is_cut = find_cut(x, n_vocab, s, max, heap, &cut);

    double total = 0;
    for (int pass = 0;; pass++) { /* first the total, then the id where the running sum passes the target */
        double target = pass == 0 ? INFINITY : td_rng_uniform(s->seed, seg->draw_index, 0) * total;
        double sum = 0;
        uint32_t last = best;
        for (uint32_t id = 0; id < n_vocab; id++) {
            if (is_cut && is_before(x, cut, id)) continue;
            double w = weight(x[id], max, s->temperature);
            if (w < s->min_p || w == 0) continue;
            sum += w;
            last = id;
            if (sum > target) return id;
        }
        if (pass == 1) return last; /* the product rounded up to the total */
        total = sum;
    }
}

void td_sample(const float *logits, uint32_t n_vocab, struct td_segment *seg, float *scratch)
{
    TD_CHECK(n_vocab > 0 && seg->sampling != NULL && seg->n_prompt <= seg->n_history);
    float *x = scratch;
    uint32_t *ids = (uint32_t *)(void *)(scratch + n_vocab); /* counts of penalise, then the heap of last_kept */

    adjust(logits, n_vocab, seg, x, ids);
    uint32_t best = highest(x, n_vocab);
    seg->token = x[best] == -INFINITY ? lowest_allowed(seg, n_vocab) : draw(x, n_vocab, seg, ids);
    if (seg->want_logprobs) {
        double log_sum = log_sum_exp(logits, n_vocab);
        seg->chosen.id = seg->token;
        seg->chosen.logprob = logprob_of(logits[seg->token], log_sum);
        top_logprobs(logits, n_vocab, log_sum, seg);
    }
}

/* --- draws that a backend does ------------------------------------------------------------------------------ */

bool td_sample_is_plain(const struct td_segment *seg)
{
    const struct td_sampling *s = seg->sampling;
    bool is_whole = s->temperature == 0 || (s->top_k == 0 && s->top_p >= 1 && s->min_p == 0);
    bool is_untouched =
        seg->mask == NULL && seg->n_banned == 0 && s->n_logit_bias == 0 && !td_sampling_has_penalties(s);
    return is_whole && is_untouched && (!seg->want_logprobs || seg->n_top_logprobs == 0);
}

/* One entry an id: bans, bias and the history meet in it. marks[id] is the entry's number once it has one. */
static bool list_edits(struct td_sample_asked *to, const struct td_segment *seg, uint32_t *marks)
{
    const uint32_t none = UINT32_MAX;
    const struct td_sampling *s = seg->sampling;
    uint32_t n_history = td_sampling_has_penalties(s) ? seg->n_history : 0;
    for (uint32_t i = 0; i < seg->n_banned; i++)
        if (seg->banned_ids[i] < to->n_ids) marks[seg->banned_ids[i]] = none;
    for (uint32_t i = 0; i < s->n_logit_bias; i++)
        if (s->bias_ids[i] < to->n_ids) marks[s->bias_ids[i]] = none;
    for (uint32_t i = 0; i < n_history; i++)
        if (seg->history[i] < to->n_ids) marks[seg->history[i]] = none;

#define EDIT_OF(id_)                                                                                                   \
    {                                                                                                                  \
        uint32_t id = (id_);                                                                                           \
        if (id >= to->n_ids) continue;                                                                                 \
        if (marks[id] == none) {                                                                                       \
            if (to->n_edits == to->max_edits) return false;                                                            \
            marks[id] = to->n_edits;                                                                                   \
            to->edits[to->n_edits++] = (struct td_sample_edit){.id = id};                                              \
        }                                                                                                              \
        e = &to->edits[marks[id]];                                                                                     \
    }
    struct td_sample_edit *e;
    for (uint32_t i = 0; i < seg->n_banned; i++) {
        EDIT_OF(seg->banned_ids[i])
        e->how |= TD_EDIT_BANNED;
    }
    for (uint32_t i = 0; i < s->n_logit_bias; i++) {
        EDIT_OF(s->bias_ids[i])
        e->bias = s->bias_values[i];
    }
    for (uint32_t i = 0; i < n_history; i++) {
        EDIT_OF(seg->history[i])
        e->how |= TD_EDIT_PENALISED;
        if (i >= seg->n_prompt) e->how++; /* a count never reaches the flags: contexts are far shorter */
    }
#undef EDIT_OF
    return true;
}

void td_sample_ask_nothing(struct td_sample_asked *to)
{
    to->rows[to->n_rows++] = (struct td_sample_row){.top_p = 1, .mask = TD_SAMPLE_NO_MASK};
}

bool td_sample_ask(struct td_sample_asked *to, const struct td_segment *seg, uint32_t *marks)
{
    const struct td_sampling *s = seg->sampling;
    struct td_sample_row *r = &to->rows[to->n_rows];
    td_sample_ask_nothing(to);
    uint32_t first_edit = to->n_edits;
    bool is_plain = td_sample_is_plain(seg);
    if (!is_plain && ((seg->mask != NULL && to->n_masks == to->max_masks) || !list_edits(to, seg, marks))) {
        to->n_edits = first_edit;
        return false;
    }
    r->u = td_rng_uniform(s->seed, seg->draw_index, 0);
    r->temperature = s->temperature;
    if (is_plain) return true;
    r->is_filtered = 1;
    to->filtered[to->n_filtered++] = to->n_rows - 1;
    r->top_p = s->top_p;
    r->min_p = s->min_p;
    r->top_k = s->top_k;
    r->repetition = s->repetition_penalty;
    r->presence = s->presence_penalty;
    r->frequency = s->frequency_penalty;
    r->first_edit = first_edit;
    r->n_edits = to->n_edits - first_edit;
    if (seg->want_logprobs) r->n_top = seg->n_top_logprobs < TD_SAMPLE_TOPS ? seg->n_top_logprobs : TD_SAMPLE_TOPS;
    if (r->n_top > to->n_ids) r->n_top = to->n_ids;
    if (seg->mask != NULL) {
        r->mask = to->n_masks++;
        memcpy(to->masks + (size_t)r->mask * to->mask_words, seg->mask,
               ((size_t)to->n_ids + 31) / 32 * sizeof *seg->mask);
    }
    return true;
}

void td_sample_take(struct td_segment *seg, uint32_t n_ids, const struct td_sampled *found,
                    const struct td_sample_top *top)
{
    seg->token = found->token;
    if (!seg->want_logprobs) return;
    seg->chosen = (struct td_logprob){.id = found->token, .logprob = logprob_of(found->logit, found->log_sum)};
    if (seg->n_top_logprobs > TD_SAMPLE_TOPS) seg->n_top_logprobs = TD_SAMPLE_TOPS;
    if (seg->n_top_logprobs > n_ids) seg->n_top_logprobs = n_ids;
    for (uint32_t i = 0; i < seg->n_top_logprobs; i++)
        seg->top[i] = (struct td_logprob){.id = top[i].id, .logprob = logprob_of(top[i].logit, found->log_sum)};
}
