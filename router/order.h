/* What a client asks for, whatever wire form it came in: a conversation or prompts, how to sample, when to stop, what
 * to report. Readers of wire forms fill it (api_chat.c from Chat Completions' JSON, ...); a run (run.h) carries it out.
 * It owns all the memory that its texts point into. Immutable once its run has begun: a pool thread reads it. */
#ifndef TD_ROUTER_ORDER_H
#define TD_ROUTER_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/arena.h"
#include "common/text/chat_json.h"
#include "proto/inference.pb-c.h"

#define TD_ORDER_MAX_CHOICES      128u
#define TD_ORDER_MAX_STOP_STRINGS 16u
#define TD_ORDER_MAX_STOP_BYTES   256u /* of one */
#define TD_ORDER_MAX_LOGPROBS     20u

/* One text, or token ids. */
struct td_order_prompt {
    struct td_text text;
    const uint32_t *ids; /* NULL: text */
    size_t n_ids;
};

struct td_order {
    bool is_chat;                     /* chat and what belongs to it; else prompts */
    struct td_chat_conversation chat; /* current_date NULL: the server's. response_format steers, nothing enforces it */
    enum td_tool_choice tool_choice;
    const char *tool_name; /* without namespace */
    bool one_call;         /* end after the first tool call (parallel_tool_calls false) */
    bool hides_reasoning;  /* no events of reasoning */
    const struct td_order_prompt *prompts;
    size_t n_prompts;
    bool parse_special; /* special tokens' names in a prompt's text become the tokens */

    const char *chat_field; /* what the client calls the conversation: "messages" or "input" */
    const char *model;      /* "": the one served */
    const char *request_id; /* NULL or "": one is made */
    uint64_t deadline_ns;   /* TD_NEVER_NS: the server's */
    uint32_t n_choices;     /* per prompt, 1 .. */
    Tandem__V1__Sampling sampling;
    Tandem__V1__Stop stop; /* max_tokens 0: the server's default; its ceiling applies in any case */
    const struct td_text *stop_strings;
    size_t n_stop_strings;
    bool want_logprobs;  /* of each token of the answer's content */
    uint32_t n_logprobs; /* alternatives */

    struct td_arena arena; /* td_order_alloc's */
    struct json_t *doc;    /* texts may point into it; NULL: none. One reference is ours */
};

void td_order_init(struct td_order *o);
void td_order_deinit(struct td_order *o);
/* Zeroed memory that lives as long as o. NULL: none left. */
void *td_order_alloc(struct td_order *o, size_t n, size_t size);

#endif
