/* How many prompt tokens a decode step bears, learned from how long steps take. Pure; one thread.
 *
 * Beside the sequences that decode, prompt tokens cost something whatever their number (on a GPU such a step is not a
 * replayed graph) and something each. They may add TD_PACE_SHARE of the time of a step that only decodes; where what
 * they cost at all is more than half of that, each token's part may grow to as much again: fewer tokens would only mean
 * more such steps. */
#ifndef TD_DECODE_PACE_H
#define TD_DECODE_PACE_H

#include <stdint.h>

/* With what a measurement may be off, a step stays within twice the time of one that only decodes. */
#define TD_PACE_SHARE 0.7

struct td_decode_pace { /* all zero: nothing is known */
    double decode_ns;   /* median of a step that only decodes; 0: not known */
    double n_tokens;    /* prompt tokens beside; 0: not known */
    struct {            /* weighted sums over steps with prompt tokens: steps, tokens, added ns, products of these */
        double w, n, nn, e, ne;
    } sums;
    uint32_t n_mixed;
};

/* A step took so long. n_decoding, n_prompt: its tokens; most: of prompts that a step may ever have. */
void td_decode_pace_note(struct td_decode_pace *p, uint32_t n_decoding, uint32_t n_prompt, uint32_t most, uint64_t ns);

/* Prompt tokens for the next step beside n_decoding > 0 others: 1 .. most. */
uint32_t td_decode_pace_budget(const struct td_decode_pace *p, uint32_t n_decoding, uint32_t most);

#endif
