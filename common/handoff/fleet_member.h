/* A worker's membership in the fleet: the Fleet.Join stream to the router, with the identity first and heartbeats with
 * load after it. Comes back for ever (backoff 100 ms to 2 s, with jitter) when the router is not there yet, restarts,
 * or stops answering. Loop thread only. */
#ifndef TD_HANDOFF_FLEET_MEMBER_H
#define TD_HANDOFF_FLEET_MEMBER_H

#include "common/base/bytes.h"
#include "common/base/env.h"
#include "common/base/status.h"
#include "common/handoff/descriptor.h"
#include "common/rpc/rpc.h"
#include "proto/fleet.pb-c.h"

struct td_fleet_member;

#define TD_FLEET_MAX_CHANGES 4096u /* in a message */

struct td_fleet_identity { /* strings and arrays are borrowed for the member's life */
    Tandem__V1__Role role;
    const char *name, *rpc_address, *http_address, *model, *version;
    uint32_t max_context_tokens, vocab_size, step_timeout_ms;
    const uint32_t *eos_ids;
    uint32_t n_eos;
    const struct td_descriptor *descriptor;
};
struct td_fleet_handlers {
    /* Fills the load (initialised, all 0) just before it is sent. */
    void (*load)(void *user, Tandem__V1__Load *out);
    /* The router answered (true, with its incarnation) or the stream broke (false). May be NULL. */
    void (*on_joined)(void *user, bool is_joined, uint64_t router);
    /* What a router should hear of the prefix cache: up to TD_FLEET_MAX_CHANGES of td_kv_prefix_tell. from_start: this
     * one knows nothing yet. Called after each load until it says 0 and not is_all. NULL: no cache. */
    uint32_t (*prefixes)(void *user, bool from_start, uint64_t *out, bool *is_all_out);
};

/* router: "host:port". Starts to join at once. rpc and env outlive the member. */
enum td_status td_fleet_member_create(struct td_rpc *rpc, struct td_env *env, const char *router,
                                      const struct td_fleet_identity *id, const struct td_fleet_handlers *h, void *user,
                                      struct td_fleet_member **out);
/* Sends the load now rather than at the next heartbeat: for changes that the router should know at once (draining). */
void td_fleet_member_report(struct td_fleet_member *m);
/* Leaves: the stream is cancelled, no callback runs any more. The memory goes once the stream's last callback came,
 * which td_rpc_destroy guarantees. NULL is fine. */
void td_fleet_member_leave(struct td_fleet_member *m);
bool td_fleet_member_is_joined(const struct td_fleet_member *m);
void td_fleet_member_describe(const struct td_fleet_member *m, struct td_buf *json_out);

#endif
