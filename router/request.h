/* One client request from its tokens to its end: which state it is in, what each piece of news means, what happens when
 * something fails. Pure: it knows time through td_env and acts through struct td_router_ports; tests give it a virtual
 * clock and ports that record. The states and transitions are the tables at the top of request.c; what news means is in
 * request_news.c, what a failure leads to in request_failure.c. Loop thread only.
 *
 * Every request ends with exactly one call of ports->done. News may come in any order that several connections can
 * produce (a token before the first token, a worker's end after ours): what the state does not expect is dropped. */
#ifndef TD_ROUTER_REQUEST_H
#define TD_ROUTER_REQUEST_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/base/env.h"
#include "common/base/status.h"
#include "proto/worker.pb-c.h"
#include "router/fleet.h"
#include "router/place.h"

#define TD_ROUTER_ID_MAX 64u /* bytes of a request id; workers keep as many */
/* After each of these a request ends; tokens from a decode worker set the first two back to 0. */
#define TD_ROUTER_MAX_RETRIES 2u /* tries again after failures */
#define TD_ROUTER_MAX_TURNED  8u /* tries again after workers that leave in good order */
#define TD_ROUTER_MAX_DEATHS  2u /* workers that died with it: it may be what kills them */

struct td_request;

/* What a request asks of the world. None of these may call back into the request before it returns. */
struct td_router_ports {
    struct td_env *env;
    void *self;
    /* A pair of workers. OK: r->decode and r->prefill are set and claimed; no prefill worker: the decode worker
     * computes the prompt itself. IN_PROGRESS: it waits in the queue (in front if it had its turn before);
     * td_request_on_placed or td_request_on_refused follows. Else refused, err says why. */
    enum td_status (*place)(void *self, struct td_request *r, struct td_err *err);
    void (*leave_queue)(void *self, struct td_request *r);
    /* Commands to r->decode, on the router's shared stream. start gives the request a stream id of its own, cancel and
     * first end it: no news of it comes after them. Not OK: not sent. */
    enum td_status (*decode_start)(void *self, struct td_request *r, struct td_err *err);
    void (*decode_cancel)(void *self, struct td_request *r);
    void (*decode_first)(void *self, struct td_request *r); /* the first token was the last: drop the reservation */
    /* The run at r->prefill for r->target; introduce: with the decode worker's descriptor. Ended by run_end: cancelled,
     * or left alone to say what it still has to say to nobody. */
    enum td_status (*run_start)(void *self, struct td_request *r, bool introduce, struct td_err *err);
    void (*run_end)(void *self, struct td_request *r, bool cancel);
    /* The decode worker refused for want of room: leave it alone until something changes. true: nothing of anybody's is
     * left there that could end and make room. */
    bool (*decode_full)(void *self, struct td_request *r);
    /* Who computes r's prompt (r->prefill, else r->decode) may take another. */
    void (*prefilled)(void *self, struct td_request *r);
    /* r names w no more. made_room: it may have held something there. */
    void (*release)(void *self, struct td_request *r, struct td_worker *w, bool made_room);
    /* New tokens of the answer for the client: r->tokens[n_tokens - n ..), logprobs parallel or NULL (borrowed). Not OK
     * ends the request with that status; OK with r->is_stopped set ends it well, as if a stop id had come. */
    enum td_status (*emit)(void *self, struct td_request *r, uint32_t n, Tandem__V1__PositionLogprobs *const *logprobs);
    /* The end. st OK: finish_reason, usage and timing are there to be read. text: for the client, "" if none. r may be
     * destroyed inside: nothing touches it afterwards. */
    void (*done)(void *self, struct td_request *r, enum td_status st, const char *text);
};

struct td_request {
    /* The order. Set by the owner between init and td_request_on_ready; pointers are taken over and freed by deinit. */
    char id[TD_ROUTER_ID_MAX + 1];
    uint32_t *tokens; /* prompt, then the answer so far: all that another worker needs to go on */
    uint32_t n_tokens, n_prompt, cap_tokens;
    Tandem__V1__Sampling *sampling; /* seed set */
    uint32_t max_tokens, min_tokens;
    uint32_t *stop_ids, n_stop_ids; /* complete list */
    bool want_logprobs;
    uint32_t n_logprobs;
    uint64_t deadline_ns; /* TD_NEVER_NS: none */

    /* Where it is */
    const struct td_router_ports *ports;
    uint8_t state; /* enum td_request_state in request.c */
    struct td_timer deadline, timeout;
    struct td_worker *decode, *prefill; /* claimed, until release; no prefill: decode computes the prompt */
    struct td_block_names names;        /* of its tokens, for prefix caches; admit.c */
    uint32_t n_charged;                 /* tokens that who computes the prompt was charged with; admit.c */
    uint64_t stream_id;                 /* ours at decode: decode_start's */
    void *run;                          /* run_start's */
    bool has_start, has_run,
        has_place;                /* what is open at the workers; its place in the prefill, until the first token */
    bool had_turn;                /* was placed before: waits in front */
    bool is_back;                 /* had to give its pages up: comes back only where there is room to grow */
    bool is_resumed;              /* its client has tokens of another try, but none of this one yet */
    Tandem__V1__KvTarget *target; /* copy: a run may have to be repeated */
    uint32_t *held_ids; /* tokens that came before their turn; logprobs are ours, there if they were asked for */
    Tandem__V1__PositionLogprobs **held_logprobs;
    uint32_t n_held, cap_held;
    bool has_first, has_finish; /* of this try: the prefill worker's token, the decode worker's end */
    bool is_stopped;            /* the client has all it wants (emit) */
    Tandem__V1__FinishReason finish_reason;
    struct td_list queue_link; /* admit.c */

    /* Failures */
    uint32_t n_tries, n_retries, n_turned, n_deaths, n_refused_alone;
    uint32_t n_migrations, n_preempted;     /* went on elsewhere with tokens that its client has; gave up its pages */
    uint64_t failed_decode, failed_prefill; /* the last pair that failed, and how */
    enum td_blame blame;
    bool same_ok;
    enum td_status fail_status; /* of the last failure; OK: none, or overcome */
    struct td_err fail;
    enum td_status doubt_status; /* how the run ended, until the decode worker says whether it has the KV */
    struct td_err doubt;

    /* What it cost. t_run: the first try; t_prefilled, t_first_decoded, handoff_us, transport: the last one. 0: did not
     * happen. */
    uint64_t t_received, t_state, t_run, t_first, t_prefilled, t_first_decoded, t_last;
    uint32_t cached_tokens;
    uint64_t prefill_us, handoff_us, handoff_bytes, decode_us;
    uint64_t past_handoff_bytes; /* of tries before this one */
    char transport[32], prefill_name[64], decode_name[64];
};

/* r is zeroed. The deadline may be set later, before begin. */
void td_request_init(struct td_request *r, const struct td_router_ports *ports);
void td_request_deinit(struct td_request *r); /* of one that is done or has not begun */

/* The life, in the order of a good one. */
void td_request_begin(struct td_request *r);    /* accepted; its tokens are on their way. Starts the deadline */
void td_request_on_ready(struct td_request *r); /* the order is complete */
void td_request_on_placed(struct td_request *r);
void td_request_on_reserved(struct td_request *r, const Tandem__V1__KvTarget *target);
void td_request_on_first(struct td_request *r, const Tandem__V1__FirstToken *first);
void td_request_on_run_done(struct td_request *r, const Tandem__V1__RunDone *done);
void td_request_on_tokens(struct td_request *r, const uint32_t *ids, Tandem__V1__PositionLogprobs *const *logprobs,
                          uint32_t n);
void td_request_on_finished(struct td_request *r, const Tandem__V1__DecodeFinished *f);
/* And the other ways. */
void td_request_on_bad(struct td_request *r, enum td_status st, const char *text);     /* no order can be made of it */
void td_request_on_refused(struct td_request *r, enum td_status st, const char *text); /* out of the queue */
void td_request_on_run_closed(struct td_request *r, enum td_status st, const char *text); /* the run's call ended */
void td_request_on_worker_lost(struct td_request *r, struct td_worker *w, const char *why);
void td_request_on_client_gone(struct td_request *r, enum td_status st); /* CANCELED or DEADLINE */

static inline uint32_t td_request_n_generated(const struct td_request *r) { return r->n_tokens - r->n_prompt; }
bool td_request_is_done(const struct td_request *r);
bool td_request_is_queued(const struct td_request *r);
const char *td_request_state_name(const struct td_request *r);
/* Strings point into r. */
void td_request_timing(const struct td_request *r, Tandem__V1__Timing *out);
/* What the hand-off added to computing the prompt: the way there, and the wait for the decode worker's first token.
 * UINT64_MAX: there was none, or not in one piece. */
uint64_t td_request_handoff_extra_us(const struct td_request *r);
void td_request_usage(const struct td_request *r, Tandem__V1__Usage *out);
void td_request_describe(const struct td_request *r, struct td_buf *json_out);

#endif
