/* One answer in the making: tokens in, events out. Holds the chat parser (or, for a plain prompt, the stream decoder),
 * the stop strings and the log-probabilities between tokens. What leaves here is fit for clients of any API: hidden
 * messages are left out, messages without text too (but not calls), text is whole characters and holds no part of a
 * stop string. Pure; one thread. */
#ifndef TD_ROUTER_CHOICE_H
#define TD_ROUTER_CHOICE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/text/chat.h"
#include "common/text/detok.h"
#include "common/text/stop.h"
#include "proto/inference.pb-c.h"
#include "router/order.h"

#define TD_CALL_ID_BYTES 32u /* "call_", 24 letters and digits, NUL */

enum td_choice_event_type {
    TD_CHOICE_BEGIN,         /* the first token is there; nothing to show yet */
    TD_CHOICE_MESSAGE_START, /* kind, message; of a call: call, call_id, function */
    TD_CHOICE_TEXT,          /* text, starts_line, tokens. text may be empty when tokens are there */
    TD_CHOICE_MESSAGE_END,   /* is_complete */
    TD_CHOICE_END,           /* finish; once, last */
};
enum td_finish { TD_FINISH_STOP, TD_FINISH_LENGTH, TD_FINISH_TOOL_CALLS };
const char *td_finish_name(enum td_finish f); /* "stop", "length", "tool_calls" */

struct td_token_logprobs {
    uint32_t id;
    float logprob;
    uint32_t at; /* where the token's text begins, counted from the start of the event's text; a token whose first bytes
                  * were part of an earlier event: 0 */
    uint32_t n_top;
    struct {
        uint32_t id;
        float logprob;
    } top[TD_ORDER_MAX_LOGPROBS];
};

/* All pointers are borrowed for the callback. TEXT and MESSAGE_END repeat what MESSAGE_START said. */
struct td_choice_event {
    enum td_choice_event_type type;
    enum td_chat_kind kind; /* REASONING, CONTENT, PREAMBLE or CALL */
    uint32_t message;       /* index among the messages shown, from 0 */
    uint32_t call;          /* index among the calls, from 0 */
    const char *call_id, *function;
    struct td_text text;
    bool starts_line; /* the first text of a second or later message of its kind (content with preamble): who joins them
                       * puts "\n" before it */
    const struct td_token_logprobs *tokens; /* asked for, and of content only */
    size_t n_tokens;
    bool is_complete;
    enum td_finish finish;
};

struct td_choice {
    const struct td_order *order;
    const struct td_tokenizer *tokenizer;
    enum td_status (*on_event)(void *user, const struct td_choice_event *e); /* not OK: no more events, it is kept */
    void *user;
    uint64_t random; /* call ids are made of it */

    struct td_chat_parser *parser; /* NULL: a plain prompt */
    struct td_text *functions;     /* declared */
    struct td_detok detok;
    struct td_stop *stop;

    struct td_choice_event open;             /* the message that is open; its texts are in the buffers below */
    bool is_hidden, is_open, has_shown_text; /* is_open: MESSAGE_START was sent */
    bool had_reasoning, had_content;
    char call_id[TD_CALL_ID_BYTES];
    struct td_buf function;
    uint32_t n_shown, n_calls;
    struct td_buf text;               /* released, not yet sent */
    uint64_t n_fed, n_sent;           /* bytes of the open message given to stops, and sent */
    struct td_token_logprobs *tokens; /* whose text is not yet sent */
    struct token_place {
        uint64_t start, end; /* their bytes among those fed */
    } * places;
    size_t n_tokens, cap_tokens;

    const uint32_t *forced; /* to be fed before the first token */
    size_t n_forced;
    bool is_stopped; /* ended by us: a stop string, or the one call is complete */
    bool has_begun, has_ended;
    enum td_status st; /* what on_event said, or NO_MEMORY */
};

/* c is zeroed; order, format and tokenizer are borrowed until deinit. */
enum td_status td_choice_init(struct td_choice *c, const struct td_order *order, const struct td_chat_format *format,
                              const struct td_tokenizer *tokenizer, uint64_t random,
                              enum td_status (*on_event)(void *user, const struct td_choice_event *e), void *user);
void td_choice_deinit(struct td_choice *c);
/* The beginning of the answer that the prompt forces; borrowed until the first token. */
void td_choice_force(struct td_choice *c, const uint32_t *ids, size_t n);
/* n new tokens, logprobs parallel or NULL; at most one TEXT event per message comes of them. Afterwards is_stopped says
 * that no more are wanted. Returns c->st. */
enum td_status td_choice_tokens(struct td_choice *c, const uint32_t *ids, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs);
/* No token follows. hit_limit: ended for length. */
enum td_status td_choice_end(struct td_choice *c, bool hit_limit);
uint64_t td_choice_reasoning_tokens(const struct td_choice *c);

#endif
