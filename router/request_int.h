/* What the files of the request share. request.c: states, transitions, what entering a state does. request_news.c: what
 * news means. request_failure.c: what a worker's failure leads to. request_held.c: tokens that wait for their turn. */
#ifndef TD_ROUTER_REQUEST_INT_H
#define TD_ROUTER_REQUEST_INT_H

#include "router/request.h"

enum td_request_event {
    EV_NONE,
    EV_BEGIN,
    EV_READY,
    EV_PLACED,
    EV_PLACED_LOCAL, /* the decode worker computes the prompt too */
    EV_NO_ROOM,      /* D refused for want of pages, or took them back */
    EV_RESERVED,
    EV_UNKNOWN_PEER, /* P has never heard of D */
    EV_FIRST,
    EV_TOKENS,
    EV_FINISHED,
    EV_STOPPED,    /* the client has all it wants: the workers are told, and that was the answer */
    EV_RUN_FAILED, /* P's call failed after the first token: r->doubt_status */
    EV_RETRY,      /* failed, and another try may help */
    EV_FATAL,      /* failed for good: r->fail_status, r->fail */
    EV_GONE,       /* nobody waits for the answer: client left, deadline */
    EV_TIMEOUT,    /* the state's own */
    TD_REQUEST_N_EVENTS
};

#define TD_REQUEST_STATES(X)                                                                                           \
    X(NEW)                                                                                                             \
    X(TOKENIZING)                                                                                                      \
    X(QUEUED)                                                                                                          \
    X(RESERVING)                                                                                                       \
    X(PREFILLING)                                                                                                      \
    X(INTRODUCING)                                                                                                     \
    X(HANDOFF)                                                                                                         \
    X(DOUBT)                                                                                                           \
    X(LOCAL)                                                                                                           \
    X(DECODING)                                                                                                        \
    X(BACKOFF)                                                                                                         \
    X(DONE)                                                                                                            \
    X(FAILED)
enum td_request_state {
#define X(name) RQ_##name,
    TD_REQUEST_STATES(X)
#undef X
        RQ_N_STATES
};

static inline uint64_t td_request_now(const struct td_request *r) { return r->ports->env->now_ns(r->ports->env); }
static inline bool td_request_is_prefilling(const struct td_request *r)
{
    return r->state == RQ_PREFILLING || r->state == RQ_INTRODUCING;
}

/* --- request.c --------------------------------------------------------------------------------------------- */
/* Nothing may touch r after this: it may be gone. */
void td_request_step(struct td_request *r, enum td_request_event ev);
/* Takes tokens into the answer and to the client. */
enum td_request_event td_request_emit(struct td_request *r, const uint32_t *ids,
                                      Tandem__V1__PositionLogprobs *const *logprobs, uint32_t n);
void td_request_copy_name(char *out, size_t n, const char *name);
/* Its place in the prefill is free, if it had one. */
void td_request_give_place(struct td_request *r);

/* --- request_failure.c ------------------------------------------------------------------------------------- */
enum td_request_event td_request_fatal(struct td_request *r, enum td_status st, const char *text);
/* A worker failed us: EV_RETRY or EV_FATAL. can_go_on: it says itself that others can, whatever the status. */
enum td_request_event td_request_failed(struct td_request *r, enum td_blame blame, enum td_status st, bool can_go_on,
                                        const char *text);
/* The run failed: its worker did, unless it says that the decode worker is lost, which it may know long before we do.
 */
enum td_request_event td_request_run_failed(struct td_request *r, enum td_status st, bool can_go_on, const char *text);
/* The decode worker has no pages for it, or not any more: EV_NO_ROOM or EV_FATAL. */
enum td_request_event td_request_no_room(struct td_request *r, enum td_status st, const char *text);
/* A decode worker's tokens reached the client: what failed before is overcome. */
void td_request_advanced(struct td_request *r);

/* --- request_held.c ---------------------------------------------------------------------------------------- */
/* front: ahead of everything held. logprobs are copied, if they were asked for. false: out of memory. */
bool td_request_hold(struct td_request *r, uint32_t id, const Tandem__V1__PositionLogprobs *logprobs, bool front);
void td_request_drop_held(struct td_request *r);
void td_request_free_held(struct td_request *r); /* the arrays too */
/* Everything held, in order, to the client as one piece. */
enum td_request_event td_request_emit_held(struct td_request *r);

#endif
