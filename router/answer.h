/* What a client of Generate sees of its request's tokens: events with tokens, their text, log-probabilities. Holds the
 * stream decoder between events. Knows no call: events leave through a function. Pure; one thread. */
#ifndef TD_ROUTER_ANSWER_H
#define TD_ROUTER_ANSWER_H

#include "common/base/bytes.h"
#include "common/text/detok.h"
#include "proto/inference.pb-c.h"
#include "router/request.h"

struct td_answer {
    enum td_status (*send)(void *user, const ProtobufCMessage *event); /* borrows the event for the call */
    void *user;
    bool has_sent; /* the first event carries the request's id */
    struct td_buf text;
    struct td_detok detok;
};

/* a is zeroed. */
void td_answer_init(struct td_answer *a, const struct td_tokenizer *t,
                    enum td_status (*send)(void *user, const ProtobufCMessage *event), void *user);
void td_answer_deinit(struct td_answer *a);

/* The last n of r's tokens are new; logprobs parallel or NULL. NO_MEMORY, or what send said. */
enum td_status td_answer_tokens(struct td_answer *a, const struct td_request *r, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs);
/* r ended well: what is left of the text, and the last event. */
enum td_status td_answer_end(struct td_answer *a, const struct td_request *r);

#endif
