/* TCP on the loop, as a server needs it: listen, accept, read, write with a bounded view of what is unsent, see the
 * peer leave. Everything runs on the loop thread. A connection is an object of this module from on_accept to on_closed.
 */
#ifndef TD_LOOP_TCP_H
#define TD_LOOP_TCP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/loop/loop.h"

struct td_tcp_listener;
struct td_tcp;

struct td_tcp_handlers {
    /* Bytes from the peer, borrowed for the call. Reading may be paused and the connection closed from here. */
    void (*on_read)(struct td_tcp *c, const uint8_t *p, size_t n);
    void (*on_eof)(struct td_tcp *c);     /* the peer sends no more; it may still read. At most once */
    void (*on_drained)(struct td_tcp *c); /* what was unsent after a write has been taken by the kernel */
    /* The last callback, exactly once, never from within a call into this module; c is freed when it returns. OK:
     * closed by us; PEER_LOST: reset or gone; anything else as it was given to td_tcp_reset. */
    void (*on_closed)(struct td_tcp *c, enum td_status why);
};

/* --- listening -----------------------------------------------------------------------------------------------------
 */
/* address is "host:port", "[v6]:port" or ":port" (all interfaces); port 0 picks a free one. on_accept must accept or
 * refuse each connection before it returns, with td_tcp_accept or td_tcp_reset. err names the address. */
enum td_status td_tcp_listen(struct td_loop *l, const char *address,
                             void (*on_accept)(struct td_tcp_listener *s, struct td_tcp *c), void *user,
                             struct td_tcp_listener **out, struct td_err *err);
void *td_tcp_listener_user(const struct td_tcp_listener *s);
/* "127.0.0.1:8080" as bound, port filled in; lives as long as s. */
const char *td_tcp_listener_address(const struct td_tcp_listener *s);
void td_tcp_unlisten(struct td_tcp_listener *s); /* the port closes at once; s is gone for the caller. NULL is fine */

/* --- a connection --------------------------------------------------------------------------------------------------
 */
/* h outlives c; every callback must be set. sndbuf_bytes: the kernel's send buffer, so that a slow reader is noticed
 * before megabytes went to it; 0: the system's. Starts reading. */
void td_tcp_accept(struct td_tcp *c, const struct td_tcp_handlers *h, void *user, int sndbuf_bytes);
void *td_tcp_user(const struct td_tcp *c);
const char *td_tcp_peer(const struct td_tcp *c); /* "10.0.0.7:51234" */
void td_tcp_pause(struct td_tcp *c);             /* no on_read and no on_eof until resumed */
void td_tcp_resume(struct td_tcp *c);

struct td_tcp_vec {
    const void *p;
    size_t n;
};
/* Sends what the kernel takes now and copies the rest: order is kept, nothing is borrowed. After a failure (memory, or
 * the peer is gone) on_closed follows and further writes are dropped. */
void td_tcp_write(struct td_tcp *c, const struct td_tcp_vec *v, unsigned n_vecs);
size_t td_tcp_unsent_bytes(const struct td_tcp *c); /* accepted by td_tcp_write, not yet taken by the kernel */
uint64_t
td_tcp_sent_bytes(const struct td_tcp *c); /* taken by the kernel, ever: a stalled peer is one where this stands */

/* Ends in order: sends what is unsent, then FIN, then throws away what the peer still sends until its FIN or linger_ms
 * (so that no reset destroys our last words). on_closed follows. No on_read, on_eof or on_drained any more. */
void td_tcp_finish(struct td_tcp *c, uint32_t linger_ms);
/* Ends now; what is unsent is lost, the peer sees a reset. on_closed(why) follows. The first why counts. */
void td_tcp_reset(struct td_tcp *c, enum td_status why);

#endif
