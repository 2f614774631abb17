/* What a client sees of its request's tokens: the events of Generate (tokens, their text, log-probabilities) or of Chat
 * (typed deltas of messages). Holds the stream decoder or the chat parser between events. Knows no call: events leave
 * through a function. Pure; one thread. */
#ifndef TD_ROUTER_ANSWER_H
#define TD_ROUTER_ANSWER_H

#include "common/base/bytes.h"
#include "common/text/chat.h"
#include "common/text/detok.h"
#include "proto/inference.pb-c.h"
#include "router/request.h"

#define TD_ANSWER_N_CHANNELS 5 /* of enum ChatChannel */

struct td_answer_delta;

struct td_answer {
    enum td_status (*send)(void *user, const ProtobufCMessage *event); /* borrows the event for the call */
    void *user;
    bool has_sent; /* the first event carries the request's id */
    struct td_buf text;
    struct td_detok detok;          /* Generate */
    struct td_chat_parser *parser;  /* Chat; else NULL */
    struct td_answer_delta *deltas; /* what the parser made since the last event */
    size_t n_deltas, cap_deltas;
    bool failed;                                 /* no memory for deltas */
    uint32_t last_message[TD_ANSWER_N_CHANNELS]; /* 1 + index of the last message with text on each channel */
};

/* a is zeroed. */
void td_answer_init(struct td_answer *a, const struct td_tokenizer *t,
                    enum td_status (*send)(void *user, const ProtobufCMessage *event), void *user);
enum td_status td_answer_init_chat(struct td_answer *a, const struct td_chat_format *f); /* after td_answer_init */
void td_answer_deinit(struct td_answer *a);

/* The last n of r's tokens are new; logprobs parallel or NULL. Chat sends nothing as long as there is nothing to show,
 * except once: the client learns the id, and that the model has begun. NO_MEMORY, or what send said. */
enum td_status td_answer_tokens(struct td_answer *a, const struct td_request *r, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs);
/* r ended well: what is left of the text, and the last event. */
enum td_status td_answer_end(struct td_answer *a, const struct td_request *r);

#endif
