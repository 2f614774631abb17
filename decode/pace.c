#include "decode/pace.h"

#define FOLLOW  16.0 /* the share of itself by which a median follows, which outliers do not move */
#define KEEP    0.95 /* of what earlier steps weigh */
#define OUTLIER 3.0  /* times what was expected: more counts as that */
#define STEER   8.0  /* the share of itself by which the number of tokens moves in a step */
#define VARIETY 0.02 /* of the mean's square: less variance says nothing about what each token costs */

/* Where a row costs what a row costs, a quarter more are never too many. */
static double least_beside(uint32_t n_decoding) { return n_decoding / 4 > 0 ? n_decoding / 4 : 1; }

static double at_least(double x, double least) { return x > least ? x : least; }
static double at_most(double x, double most) { return x < most ? x : most; }

static double variance(const struct td_decode_pace *p)
{
    double mean = p->sums.n / p->sums.w;
    return p->sums.nn / p->sums.w - mean * mean;
}

static int has_variety(const struct td_decode_pace *p)
{
    double mean = p->sums.n / p->sums.w;
    return variance(p) > VARIETY * mean * mean;
}

/* What prompt tokens cost at all, and each: a line through what was seen. */
static void cost_of(const struct td_decode_pace *p, double *fixed, double *each)
{
    double n = p->sums.n / p->sums.w, e = p->sums.e / p->sums.w, most = e / n;
    *each = most; /* as if nothing were fixed */
    if (has_variety(p)) *each = at_most(at_least((p->sums.ne / p->sums.w - n * e) / variance(p), 0), most);
    *fixed = e - *each * n;
}

static double target_of(const struct td_decode_pace *p, double most)
{
    double fixed, each;
    cost_of(p, &fixed, &each);
    double room = at_least(TD_PACE_SHARE * p->decode_ns - fixed, fixed);
    return room >= each * most ? most : room / each;
}

void td_decode_pace_note(struct td_decode_pace *p, uint32_t n_decoding, uint32_t n_prompt, uint32_t most, uint64_t ns)
{
    if (ns == 0 || n_decoding == 0) return;
    double took = (double)ns;
    if (n_prompt == 0) {
        if (p->decode_ns == 0)
            p->decode_ns = took;
        else
            p->decode_ns += (took > p->decode_ns ? p->decode_ns : -p->decode_ns) / FOLLOW;
        return;
    }
    if (p->decode_ns == 0) return;
    double n = n_prompt, added = at_least(took - p->decode_ns, 0);
    if (p->sums.w > 0) {
        double fixed, each;
        cost_of(p, &fixed, &each);
        added = at_most(added, OUTLIER * at_least(fixed + each * n, p->decode_ns / n_decoding));
    }
    p->sums.w = p->sums.w * KEEP + 1;
    p->sums.n = p->sums.n * KEEP + n;
    p->sums.nn = p->sums.nn * KEEP + n * n;
    p->sums.e = p->sums.e * KEEP + added;
    p->sums.ne = p->sums.ne * KEEP + n * added;
    p->n_mixed++;
    double least = least_beside(n_decoding);
    if (p->n_tokens < least) p->n_tokens = least;
    double target = target_of(p, most), by = p->n_tokens / STEER;
    p->n_tokens += at_most(at_least(target - p->n_tokens, -by), by);
    p->n_tokens = at_most(at_least(p->n_tokens, least), most);
}

uint32_t td_decode_pace_budget(const struct td_decode_pace *p, uint32_t n_decoding, uint32_t most)
{
    double n = at_least(p->n_tokens, least_beside(n_decoding));
    /* Always the same number teaches nothing about what a token costs; fewer hurt nobody. */
    if (p->sums.w > 0 && p->n_mixed % 4 == 3 && !has_variety(p)) n /= 2;
    n = at_least(at_most(n, most), 1);
    return (uint32_t)n;
}
