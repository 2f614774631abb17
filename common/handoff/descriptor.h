/* Who a worker is to its peers: memory, layout, model. One struct in our own words, and its way to and from
 * worker.proto's PeerDescriptor. Both workers build theirs at start, send it in Fleet.Join, and check what they are
 * handed of others. Pure; any thread. */
#ifndef TD_HANDOFF_DESCRIPTOR_H
#define TD_HANDOFF_DESCRIPTOR_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/handoff/wire.h"
#include "common/model/model.h"
#include "common/transfer/xfer.h"
#include "kernels/kv_layout.h"
#include "proto/worker.pb-c.h"

#define TD_MAX_PEER_PAGES 0x10000000u /* a pool of more pages than this is refused as nonsense */

/* How a worker's KV is arranged and what computed it. */
struct td_peer_layout {
    /* n_layers, head_dim, page_tokens, dtype as they are; n_heads counts the whole model's KV heads; n_pages is 0 (per
     * rank below). */
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    uint32_t window_tokens;
    uint32_t version;     /* TD_KV_LAYOUT_VERSION */
    char fingerprint[65]; /* td_model_fingerprint */
    char weight_form[16]; /* of the experts: "bf16", "fp8", "mxfp4"; "+dense8" behind it: other matrices in FP8 */
};
struct td_peer_rank {
    const void *address; /* of its transfer worker; borrowed */
    size_t n_address;
    struct td_xfer_remote pools[TD_KV_N_GROUPS]; /* in the order of enum td_kv_group; keys borrowed */
    uint32_t n_pages[TD_KV_N_GROUPS];
};
struct td_descriptor {
    uint64_t incarnation;
    char name[128];
    struct td_peer_layout layout;
    uint32_t n_ranks;
    struct td_peer_rank ranks[TD_MAX_RANKS];
};

/* The layout of a worker of this model whose ranks have these groups. */
void td_peer_layout_of(const struct td_model_config *c, const char *fingerprint, const char *weight_form,
                       const struct td_kv_group_layout kv[TD_KV_N_GROUPS], struct td_peer_layout *out);
/* What one rank of a peer has: its groups with heads per rank and pages. */
void td_peer_rank_layout(const struct td_descriptor *d, uint32_t rank, struct td_kv_group_layout out[TD_KV_N_GROUPS]);

/* The message. Points into d and into itself: both must stay while it is in use; nothing to free. */
struct td_descriptor_msg {
    Tandem__V1__PeerDescriptor peer;
    Tandem__V1__KvLayout layout;
    Tandem__V1__RankMemory ranks[TD_MAX_RANKS];
    Tandem__V1__RankMemory *rank_list[TD_MAX_RANKS];
};
void td_descriptor_to_msg(const struct td_descriptor *d, struct td_descriptor_msg *out);
/* Checks every field; addresses and keys are borrowed from m. INVALID: err names the field. */
enum td_status td_descriptor_from_msg(const Tandem__V1__PeerDescriptor *m, struct td_descriptor *out,
                                      struct td_err *err);

/* May these two move KV to each other? MISMATCH: err names the first field that differs, with both values. */
enum td_status td_peer_layout_check(const struct td_peer_layout *ours, const struct td_peer_layout *theirs,
                                    struct td_err *err);

const char *td_kv_dtype_name(enum td_dtype t);                          /* "bf16" */
enum td_status td_kv_dtype_parse(const char *name, enum td_dtype *out); /* INVALID: not a KV type */

#endif
