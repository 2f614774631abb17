/* The prefill worker's decisions: requests from their Run to their RunDone. Events come in, actions leave through
 * struct td_prefill_ports; no loop, socket or clock is called. The states are told at the top of worker.c. Loop thread
 * only. */
#ifndef TD_PREFILL_WORKER_H
#define TD_PREFILL_WORKER_H

#include "common/base/bytes.h"
#include "common/base/env.h"
#include "common/base/status.h"
#include "common/engine/batch.h"
#include "common/engine/kv_pages.h"
#include "common/model/model.h"
#include "prefill/send.h"
#include "proto/fleet.pb-c.h"
#include "proto/worker.pb-c.h"

struct td_prefill_worker;
struct td_prefill_run; /* one request */

struct td_prefill_ports {
    struct td_env *env;
    void *self;
    /* Engine: at most one batch is in flight. BUSY: later (after the next td_prefill_worker_on_done). */
    enum td_status (*submit)(void *self, struct td_batch *b);
    /* The client's stream. Not OK: it is going away (td_prefill_worker_on_gone may follow). */
    enum td_status (*event)(void *self, void *call, const Tandem__V1__RunEvent *ev);
    /* The last word on it; call is not used after this. text may be NULL. */
    void (*finish)(void *self, void *call, enum td_status st, const char *text);
    void (*drained)(void *self); /* draining, and no request is left; may come more than once */
};

struct td_prefill_worker_options {
    const struct td_model_config *model; /* outlives the worker */
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    bool has_prefix_cache;
    uint32_t max_context_tokens;
    uint32_t chunk_tokens; /* of all prompts of a pass */
    uint32_t max_batch;    /* prompts in a pass; 0: 1 */
    uint32_t max_waiting;  /* requests beside the one that is computed; more are refused with BUSY */
};

enum td_status td_prefill_worker_create(const struct td_prefill_worker_options *o, struct td_kv_pages *kv,
                                        struct td_prefill_send *send, const struct td_prefill_ports *ports,
                                        struct td_prefill_worker **out);
/* After the engine and the transfer are gone: nothing is in flight. Calls get no answer any more. NULL is fine. */
void td_prefill_worker_destroy(struct td_prefill_worker *w);

/* A Run arrived on `call`. deadline_ns: of the call, on env's clock. NULL: it was refused (finish was called). */
struct td_prefill_run *td_prefill_worker_on_run(struct td_prefill_worker *w, void *call, uint64_t deadline_ns,
                                                const Tandem__V1__RunRequest *m);
/* The client left (CANCELED) or its deadline passed (DEADLINE); call is gone, finish is not called for it. */
void td_prefill_worker_on_gone(struct td_prefill_worker *w, struct td_prefill_run *r, enum td_status why);
void td_prefill_worker_on_layer(struct td_prefill_worker *w, struct td_batch *b, uint32_t layer);
void td_prefill_worker_on_done(struct td_prefill_worker *w, struct td_batch *b, enum td_status st);
/* For td_prefill_send_options.ended; self is the worker. */
void td_prefill_worker_on_send_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t kv_bytes);

void td_prefill_worker_drain(struct td_prefill_worker *w); /* refuses new requests from here on */
/* Every request ends with st for its client; pages come back when batch and transfer let go of them. */
void td_prefill_worker_end_all(struct td_prefill_worker *w, enum td_status st, const char *text);
uint32_t td_prefill_worker_n_runs(const struct td_prefill_worker *w);
const struct td_kv_prefix *td_prefill_worker_prefix(const struct td_prefill_worker *w); /* NULL: no cache */
void td_prefill_worker_load(const struct td_prefill_worker *w, Tandem__V1__Load *out); /* all but last_step_age_us */
void td_prefill_worker_describe(const struct td_prefill_worker *w, struct td_buf *json_out);

#endif
