/* The JSON API: OpenAI's, over HTTP. An endpoint is a row of functions: it reads the body into an order (order.h), gets
 * the run's events (choice.h), and writes its own wire form. What all share is here: routes, reading and parsing the
 * body (a large one on a pool thread), errors, server-sent events, clients that leave or read too slowly.
 *
 *   body -> JSON -> endpoint->read -> td_run -> endpoint->on_event ... -> endpoint->on_end
 *
 * To add an endpoint: a file api_<noun>.c with a const struct td_api_endpoint, and a line in api.c's list. Loop thread
 * only, but for read. */
#ifndef TD_ROUTER_API_H
#define TD_ROUTER_API_H

#include "common/base/bytes.h"
#include "common/base/json.h"
#include "common/http/http.h"
#include "common/text/chat_json.h"
#include "router/order.h"
#include "router/run.h"

struct td_router;
struct td_api_call;

struct td_api_endpoint {
    const char *path;   /* POST; the body is a JSON object */
    size_t state_bytes; /* of call->state: the endpoint's own memory, zeroed */
    /* Fills call->order, call->state and call->is_stream from f. The body's JSON lives as long as the order. Maybe on a
     * pool thread: touches nothing but the call. Errors stick in f. */
    void (*read)(struct td_api_call *call, struct td_fields *f);
    /* Instead of a run: answers at once (td_api_respond, td_api_fail). The three below are not used then. */
    void (*answer)(struct td_api_call *call);
    /* Not OK ends the run and the answer. Of a stream: write with td_api_send. */
    enum td_status (*on_event)(struct td_api_call *call, uint32_t choice, const struct td_choice_event *e);
    /* All choices have ended well. Ends the answer: td_api_respond, or td_api_send and td_api_end_stream. */
    void (*on_end)(struct td_api_call *call);
    /* A stream that has begun fails; api.c sends nothing but this before it ends the stream. NULL: the error object as
     * an unnamed event, then [DONE]. */
    void (*on_failure)(struct td_api_call *call, enum td_status st, const char *text);
    /* The call is over, however. Frees what state holds. May be NULL. */
    void (*drop)(struct td_api_call *call);
};

struct td_api_call {
    struct td_router *router;
    const struct td_api_endpoint *endpoint;
    struct td_http_req *http; /* NULL: answered, or the client has gone */
    struct td_order order;    /* until the run begins, then td_run_order */
    struct td_run *run;       /* NULL: none yet, or over */
    void *state;
    struct td_buf out;  /* scratch for one event or answer: td_api_send and td_api_respond send it and clear it */
    uint64_t created_s; /* wall clock, when the request came */
    uint64_t random;    /* for ids */
    bool is_stream;     /* set by read: the answer is a stream of events */
    bool has_begun;     /* its headers are out */
};

enum td_status td_api_add_routes(struct td_router *ro, struct td_http *h); /* once a process; before td_http_listen */

/* Sends call->out as one event (event NULL: unnamed); the first one begins the stream. SLOW_CLIENT, CANCELED: pass it
 * on, nothing else is to be done. */
enum td_status td_api_send(struct td_api_call *call, const char *event);
/* After the last event; with_done: [DONE] goes first. */
void td_api_end_stream(struct td_api_call *call, bool with_done);
/* Sends call->out as the whole answer, JSON with status 200. */
void td_api_respond(struct td_api_call *call);
/* An error object, or whatever becomes of a stream that has begun. text as in td_run_sink: a field's name in front of
 * its ": " becomes the object's param. */
void td_api_fail(struct td_api_call *call, enum td_status st, const char *text);
/* The error object alone, {"message":...,"type":...,"param":...,"code":...}. Returns the HTTP status. */
unsigned td_api_put_error(struct td_buf *out, const struct td_api_call *call, enum td_status st, const char *text);

/* --- readers that endpoints share (api_options.c) -----------------------------------------------------
 */

/* model, sampling, stop and what every endpoint ignores or refuses. max_tokens, n, logprobs and prompts are the
 * endpoint's. */
void td_api_read_options(struct td_order *o, struct td_fields *f);
/* stream -> call->is_stream, stream_options.include_usage. */
void td_api_read_stream(struct td_api_call *call, struct td_fields *f, bool *includes_usage_out);
/* tools, tool_choice and parallel_tool_calls, as chat_json.h reads them. */
void td_api_read_tools(struct td_order *o, struct td_fields *f, bool is_flat);

/* --- writers that endpoints share -----------------------------------------------------------------------------------
 */

static inline void td_api_put_text(struct td_buf *b, struct td_text t) { td_json_quote(b, t.p, t.n); }
/* {"token":"..","logprob":-0.1,"bytes":[..],"top_logprobs":[..]}: an entry as Chat Completions and Responses have it.
 */
void td_api_put_logprobs(struct td_buf *b, const struct td_router *ro, const struct td_token_logprobs *t);
void td_api_put_number(struct td_buf *b, double d); /* finite always: -9999 stands for minus infinity */
/* {"prompt_tokens":..,"completion_tokens":..,...} as both kinds of completions have it. */
void td_api_put_usage(struct td_buf *b, const struct td_run *run);

#endif
