/* What one router's Decode.Generate stream is still to be told. News is collected and leaves as one DecodeEvents
 * message: a step's tokens of all requests together. A router that reads too slowly makes it pile up, to a limit. Pure;
 * loop thread only. */
#ifndef TD_DECODE_STREAM_H
#define TD_DECODE_STREAM_H

#include "common/base/list.h"
#include "common/base/status.h"
#include "common/engine/batch.h"
#include "common/handoff/receiver.h"
#include "proto/worker.pb-c.h"

#define TD_DECODE_MAX_PENDING_BYTES (1u << 20) /* beside what rpc itself queues */
#define TD_DECODE_STREAM_BUCKETS    64u

struct td_decode_finish {
    uint64_t stream_id;
    Tandem__V1__FinishReason reason;
    enum td_status status;
    bool is_lost, is_handoff;
    uint32_t cached_tokens;
    uint64_t handoff_bytes, handoff_us, decode_us;
    char transport[32], message[512];
};

struct td_decode_pending_token;
struct td_decode_pending_reserved;

struct td_decode_stream {
    void *call;      /* of whoever opened it */
    uint64_t router; /* incarnation; 0 until its hello */
    bool has_hello;
    enum td_status ending; /* not OK: to be closed with this */
    char ending_text[128];
    struct td_list link;                               /* the worker's */
    struct td_list requests[TD_DECODE_STREAM_BUCKETS]; /* by stream_id */

    /* news; the arrays keep their memory */
    size_t n_pending_bytes; /* roughly, as packed */
    bool has_failed;        /* over the limit, or out of memory: the stream cannot be kept truthful */
    struct td_decode_pending_token *tokens;
    struct td_decode_pending_reserved *reserved;
    struct td_decode_finish *finished;
    size_t n_tokens, cap_tokens, n_reserved, cap_reserved, n_finished, cap_finished;
    bool has_logprobs;
    struct td_decode_message *message;
};

struct td_decode_stream *td_decode_stream_create(void *call); /* NULL: out of memory */
void td_decode_stream_destroy(struct td_decode_stream *s);

/* These never fail where they are called: see has_failed. */
void td_decode_stream_token(struct td_decode_stream *s, uint64_t stream_id, const struct td_segment *seg);
void td_decode_stream_reserved(struct td_decode_stream *s, uint64_t stream_id, uint64_t incarnation,
                               const struct td_rx_target *target);
void td_decode_stream_finished(struct td_decode_stream *s, const struct td_decode_finish *f);

bool td_decode_stream_has_news(const struct td_decode_stream *s);
/* Hands over everything pending as one message; it is forgotten if send says OK and kept otherwise. NO_MEMORY too. */
enum td_status
td_decode_stream_flush(struct td_decode_stream *s,
                       enum td_status (*send)(void *user, void *call, const Tandem__V1__DecodeEvents *ev), void *user);

#endif
