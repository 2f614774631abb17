/* What the files of the worker share: the worker itself, and a request. worker.c handles events, request.c decides
 * about one request, report.c tells others. */
#ifndef TD_DECODE_WORKER_INT_H
#define TD_DECODE_WORKER_INT_H

#include "common/base/clock.h"
#include "common/base/list.h"
#include "common/engine/pace.h"
#include "common/engine/request.h"
#include "decode/sched.h"
#include "decode/stream.h"
#include "decode/worker.h"

/* clang-format off */
#define DECODE_STATES(X)                                                              \
    X(NEW)      /* being checked */                                                   \
    X(RESERVED) /* waits for its KV */                                                \
    X(OVER)     /* the prefill worker says that its first token ended it; the router will say so too */ \
    X(QUEUED)   /* waits for a place in the batch */                                  \
    X(RUNNING)  /* in the batch */                                                    \
    X(LEAVING)  /* over and reported; a step in flight may still read its pages */
/* clang-format on */
enum decode_state {
#define X(name) DS_##name,
    DECODE_STATES(X)
#undef X
        DS_N
};
struct td_decode_request {
    enum decode_state state;
    struct td_decode_worker *w;
    struct td_decode_stream *stream; /* NULL: LEAVING, nobody to tell */
    uint64_t stream_id;
    struct td_token_request req;
    struct td_decode_seq seq;
    struct td_rx_reservation *reservation; /* RESERVED */
    struct td_rx_target target;            /* its pages */
    uint64_t prefill;                      /* incarnation; 0: computed here */
    struct td_timer deadline;
    uint64_t deadline_ns;
    uint64_t started_ns, entered_ns, complete_ns; /* start, this state, KV complete */
    uint64_t stalled_ns;                          /* waits for pages since, with stalled_at tokens computed */
    uint32_t stalled_at;
    uint64_t handoff_bytes;
    bool has_handoff_failed;  /* for whoever asks whose failure it was */
    struct td_list in_worker; /* oldest first */
    struct td_list in_stream;
};

struct td_decode_worker {
    struct td_decode_worker_options o;
    struct td_decode_ports ports;
    struct td_kv_pages *kv;
    struct td_rx *rx;
    struct td_kv_prefix *prefix; /* NULL: no cache */
    struct td_decode_sched *sched;
    struct td_list requests, streams;
    uint32_t n_requests; /* not LEAVING */
    uint32_t n_reserved;
    uint64_t next_order;
    uint64_t step_started_ns;
    uint64_t n_steps, n_tokens_drawn;
    struct td_pace prompts, steps; /* prompt tokens in steps that have some; steps that have none */
    bool is_draining, has_drained, is_broken, is_destroying;
    unsigned depth; /* of events being handled: what follows from them is done once, at the end */
    struct td_timer stall_timer;
};

static inline uint64_t td_decode_now(const struct td_decode_worker *w) { return w->ports.env->now_ns(w->ports.env); }
static inline uint64_t td_ms_between(uint64_t from_ns, uint64_t to_ns)
{
    return to_ns > from_ns ? (to_ns - from_ns) / TD_NS_PER_MS : 0;
}

/* --- worker.c ---------------------------------------------------------------------------------------------- */
/* Around every event: what follows from it (the next step, news to routers) is done by the outermost leave. */
void td_decode_worker_enter(struct td_decode_worker *w);
void td_decode_worker_leave(struct td_decode_worker *w);
void td_decode_worker_end_stream(struct td_decode_worker *w, struct td_decode_stream *s, enum td_status st,
                                 const char *text);

/* --- request.c --------------------------------------------------------------------------------------------- */
void td_decode_request_start(struct td_decode_worker *w, struct td_decode_stream *s, const Tandem__V1__DecodeStart *m);
struct td_decode_request *td_decode_request_find(struct td_decode_stream *s, uint64_t stream_id);
/* The request is over: its router is told (once), its resources go back as soon as they can. r may be gone then. */
void td_decode_request_finish(struct td_decode_request *r, Tandem__V1__FinishReason reason, enum td_status st,
                              bool is_lost, const char *why);
/* Lost only if somebody else can do it or we can later: the status says so. */
void td_decode_request_refuse(struct td_decode_request *r, enum td_status st, const char *why);
void td_decode_request_lose(struct td_decode_request *r, enum td_status st, const char *why);
const char *td_decode_request_state(const struct td_decode_request *r);
struct td_decode_sched_owner td_decode_request_sched_owner(struct td_decode_worker *w);
struct td_rx_ports td_decode_request_rx_ports(struct td_decode_worker *w);

#endif
