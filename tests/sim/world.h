/* The simulated world: one virtual clock, hosts that live by it, and the links between them. A *place* is an address
 * where one process after another may live; a *host* is one life of a process there. Everything random comes from the
 * seed, everything happens as a timer, one at a time, so a run is the same again from the same seed.
 *
 * The modules under test are the ones the daemons link. What they stand on is replaced by twins of the same headers,
 * chosen by the linker: common/loop (host.c), common/rpc (rpc.c), the engine's thread (engine.c), and the in-memory
 * transfer. Nothing in the tree knows that it is simulated.
 *
 * What may happen to whom:
 *   gRPC between two places   messages are late (each call keeps its own order, calls overtake each other); a link is
 *                             slow, stands still, or breaks: then every call on it ends at both ends, and of what was
 *                             under way each end still gets a beginning. No message is lost, doubled or reordered
 *                             within a call: TCP and HTTP/2 do not do that.
 *   transfer between workers  puts land late and in any order until flushed; messages are late, but in order per way;
 *                             they are lost when a process dies, and, which the real one does only when it is out of
 *                             memory, now and then without a death; they arrive twice (no transport does that to us;
 *                             the protocol bears it)
 *   a process                 dies with its sockets (peers know within a round trip) or silently (peers find out by
 *                             keepalive, heartbeats, or the transfer); leaves by SIGTERM; comes back at its address as
 *                             a new incarnation; stands still (SIGSTOP: what was due happens when it goes on, puts
 *                             into its memory land meanwhile)
 *   a clock                   jumps ahead, as that of a machine that was suspended; monotonic clocks do not go back
 *   an engine                 is slow, fails a step, hangs in one
 *   a client                  leaves, brings a deadline, does not read */
#ifndef TESTS_SIM_WORLD_H
#define TESTS_SIM_WORLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

#include "common/base/clock.h"
#include "common/base/env.h"
#include "common/base/list.h"
#include "common/loop/loop.h"

#define SIM_MAX_PLACES 12u
#define SIM_US(n)      ((uint64_t)(n)*1000)
#define SIM_MS(n)      ((uint64_t)(n)*TD_NS_PER_MS)

struct sim_world;
struct td_rpc;

/* One life of a process. The loop's twin is the host itself: td_loop_env gives its env. */
struct td_loop {
    struct td_env env;
    struct sim_world *world;
    struct td_list link;
    char name[24]; /* "D1.2": the second life at place D1 */
    uint32_t place;
    uint64_t skew_ns; /* how far its clock has jumped ahead of the world's */
    bool is_paused, is_dead;
    bool has_stopped;    /* td_loop_stop was called: its main returns */
    struct td_list held; /* timers that came due while it was paused */
    uint64_t n_random;
    struct td_rpc *rpc;
};

struct sim_link {
    uint32_t slowness;     /* multiplies latencies; 1: as usual */
    uint64_t blocked_till; /* nothing gets through before that; what was sent waits */
};

struct sim_heap_entry {
    uint64_t due_ns, order;
    struct td_timer *timer;
};

struct sim_world {
    uint64_t seed, now_ns;
    struct sim_heap_entry *heap;
    uint32_t n_heap, cap_heap;
    uint64_t n_timers, n_events;
    struct td_loop network; /* a host that no trouble befalls: carries what is on the wire */
    struct td_list hosts, servers;
    const char *place_names[SIM_MAX_PLACES];
    uint32_t n_places;
    struct sim_link links[SIM_MAX_PLACES][SIM_MAX_PLACES];
    const struct td_loop *running; /* whose timer fires now; for the trace */
    const struct td_loop *ran;     /* whose fired last; the network's may have changed anybody */
    bool is_traced;
    uint64_t n_latency;
};

void sim_world_init(struct sim_world *w, uint64_t seed, bool is_traced);
/* Fires the next timer; false: none is armed, or the next is after until_ns (the clock stands there then). */
bool sim_world_step(struct sim_world *w, uint64_t until_ns);
uint32_t sim_add_place(struct sim_world *w, const char *name);

/* Draw i of a stream of decisions: faults, arrivals and the like each have a stream, so that one more draw in one of
 * them leaves the others as they were. */
struct sim_draws {
    uint64_t seed, n;
    uint32_t stream;
};
uint64_t sim_draw(struct sim_draws *d, uint64_t min, uint64_t max); /* both included */
bool sim_chance(struct sim_draws *d, uint32_t percent);

uint64_t sim_latency(struct sim_world *w, uint32_t from, uint32_t to); /* of the next message */
struct sim_link *sim_link_of(struct sim_world *w, uint32_t a, uint32_t b);

/* --- hosts (host.c) -------------------------------------------------------------------------------------- */
void sim_host_init(struct td_loop *h, struct sim_world *w, uint32_t place, uint32_t life);
void sim_host_pause(struct td_loop *h, bool is_paused); /* its timers; calls and transfer have their own */
void sim_host_jump(struct td_loop *h, uint64_t ns);
void sim_host_kill(struct td_loop *h); /* none of its timers fires any more */

/* --- gRPC between places (rpc.c) ------------------------------------------------------------------------- */
void sim_rpc_break(struct sim_world *w, uint32_t a, uint32_t b); /* every call between two places breaks */
void sim_rpc_block(struct sim_world *w, uint32_t a, uint32_t b, uint64_t till_ns); /* what is under way, too */
/* The process is gone: its calls end at the other ends, after notice_ns. Nothing of it is called back. */
void sim_rpc_kill(struct td_loop *h, uint64_t notice_ns);
void sim_rpc_resume(struct td_loop *h); /* what waited while it was paused arrives */
struct td_rpc_call;
void sim_rpc_stall(struct td_rpc_call *c, uint64_t till_ns); /* this end does not read before then */
/* Every message that is sent, for those who watch that the rules are kept. */
void sim_rpc_watch(void (*watch)(void *user, const struct td_rpc_call *c, const ProtobufCMessage *m), void *user);
void sim_rpc_places(const struct td_rpc_call *c, uint32_t *ours_out, uint32_t *theirs_out);
uint64_t sim_rpc_call_id(const struct td_rpc_call *c); /* the same at both ends, never used twice */

/* --- judgement ------------------------------------------------------------------------------------------- */
/* A rule is broken: says so with the seed and the time, and ends the process. */
void sim_fail(const struct sim_world *w, const char *fmt, ...) __attribute__((format(printf, 2, 3), noreturn));
void sim_trace(const struct sim_world *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
extern struct sim_world *sim_world_now; /* the one that runs */

#endif
