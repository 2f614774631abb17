/* A TokenRequest as both workers hold it: checked, owned, and with room for every token it can still get, so that a
 * step allocates nothing. Pure; one thread at a time. */
#ifndef TD_ENGINE_REQUEST_H
#define TD_ENGINE_REQUEST_H

#include "common/base/status.h"
#include "common/engine/batch.h"
#include "proto/worker.pb-c.h"

#define TD_REQUEST_ID_MAX 64u
#define TD_MAX_STOP_IDS   256u

struct td_token_request {
    char id[TD_REQUEST_ID_MAX + 1]; /* for logs and holders: printable ASCII without quotes, cut if longer */
    uint32_t *tokens;               /* prompt, then generated */
    uint32_t n_tokens, n_prompt;
    uint32_t n_tokens_max;           /* when the request ends at the latest; the room of tokens */
    struct td_sampling sampling;     /* bias arrays are ours */
    uint32_t max_tokens, min_tokens; /* of generated tokens */
    uint32_t *stop_ids, n_stop_ids;  /* rising, each once */
    bool want_logprobs;
    uint32_t n_logprobs;
    uint64_t timeout_us; /* from receipt; 0: none */
    uint64_t age_us;     /* at receipt */
};

/* INVALID: err names the field. NO_MEMORY. On failure out holds nothing. max_context_tokens: of prompt and generated
 * tokens together; a prompt that leaves no room for one more token is INVALID. */
enum td_status td_token_request_parse(const Tandem__V1__TokenRequest *msg, uint32_t n_vocab,
                                      uint32_t max_context_tokens, struct td_token_request *out, struct td_err *err);
void td_token_request_deinit(struct td_token_request *r); /* also of one that is all zero */

static inline uint32_t td_token_request_n_generated(const struct td_token_request *r)
{
    return r->n_tokens - r->n_prompt;
}

/* Takes a generated token and says whether the request is over: STOP if it is a stop id, LENGTH at max_tokens or the
 * context's end, else NONE. Only while n_tokens < n_tokens_max. */
Tandem__V1__FinishReason td_token_request_append(struct td_token_request *r, uint32_t token);

/* Fills what a segment needs to draw the next token: want_token, log-probabilities, sampling, draw_index, history,
 * banned ids. tokens, n_tokens, start and table are the scheduler's. The segment points into r. n_coming: tokens that
 * are being drawn and will stand before this one; without penalties the draw needs no more than their number. */
void td_token_request_want_token(const struct td_token_request *r, uint32_t n_coming, struct td_segment *seg);

/* A segment's log-probabilities as a message that lives in the caller's storage (pointers into itself: do not copy). */
struct td_logprobs_msg {
    Tandem__V1__PositionLogprobs msg;
    Tandem__V1__TokenLogprob chosen, top[TD_MAX_LOGPROBS];
    Tandem__V1__TokenLogprob *top_ptrs[TD_MAX_LOGPROBS];
};
void td_logprobs_msg_init(struct td_logprobs_msg *m, struct td_logprob chosen, const struct td_logprob *top,
                          uint32_t n_top);

#endif
