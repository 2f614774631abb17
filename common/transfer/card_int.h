/* What a process hands out so that others can reach it: its address card (who it is, where it runs, how UCX reaches it)
 * and a key card per pool. UCX trusts the bytes it unpacks, so they travel in an envelope with a length and a checksum,
 * and damage is refused here. A checksum stops accidents, not a forger: whoever may join the fleet is decided
 * elsewhere. */
#ifndef TD_TRANSFER_CARD_INT_H
#define TD_TRANSFER_CARD_INT_H

#include "common/base/bytes.h"
#include "common/transfer/liveness_int.h"
#include "common/transfer/xfer.h"

struct td_card_address {
    uint64_t incarnation;
    struct td_process_id process;
    const uint8_t *worker; /* view into the card */
    uint32_t n_worker;
};

/* Where a pool's memory comes from; decides whether puts into it can be direct. */
enum td_pool_kind { TD_POOL_SYSV = 1, TD_POOL_POSIX, TD_POOL_HEAP, TD_POOL_DEVICE, TD_POOL_N_KINDS };

struct td_card_key {
    uint64_t base, n_bytes;
    uint64_t secret; /* who shows it may have bytes written here (ucx_emulate.c) */
    enum td_pool_kind kind;
    const uint8_t *rkey; /* view into the card */
    uint32_t n_rkey;
};

void td_card_pack_address(const struct td_card_address *a, struct td_buf *out); /* check out->failed */
void td_card_pack_key(const struct td_card_key *k, struct td_buf *out);
/* INVALID with a message when it is not what we pack. */
enum td_status td_card_read_address(const void *p, size_t n, struct td_card_address *out, struct td_err *err);
enum td_status td_card_read_key(const void *p, size_t n, struct td_card_key *out, struct td_err *err);

#endif
