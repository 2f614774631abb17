/* Who is alive: the workers that have joined, what they said of themselves and their load, and what this router has
 * given them to do. Pure apart from its ports: joins, loads and goodbyes come in as calls, silence is noticed by a
 * timer. Loop thread only.
 *
 * A worker is one life of a process, known by its incarnation. It is LIVE while its Join stream stands and its reports
 * are fresh; requests are given to live workers alone. It becomes GONE when the stream ends (its requests may go on:
 * their own streams tell), or when it is silent, reports an engine step that hangs, or another life appears at its
 * address (its requests are told that it is lost). A GONE worker that says the same incarnation again is LIVE again. It
 * is forgotten once it is GONE and no request names it, always from a timer, so that nobody up the call stack is left
 * holding freed memory. */
#ifndef TD_ROUTER_FLEET_H
#define TD_ROUTER_FLEET_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/base/env.h"
#include "common/base/list.h"
#include "common/base/status.h"
#include "proto/fleet.pb-c.h"
#include "router/prefixes.h"

struct td_worker {
    struct td_list link;
    Tandem__V1__Identity *identity; /* ours */
    uint64_t incarnation;
    Tandem__V1__Role role;
    bool is_live;
    bool is_wired; /* decode: its shared stream is up; prefill: always */
    bool has_reported;
    bool is_full; /* it refused for want of room: nothing more until its next report or a request of ours ends */
    Tandem__V1__Load load;       /* last report; all 0 before the first */
    struct td_prefixes prefixes; /* what it says its prefix cache holds */
    uint64_t joined_ns, seen_ns;
    void *join;              /* the owner of its Join stream; NULL: ended */
    void *wire;              /* the router's channel to it (link.h) */
    uint32_t n_requests;     /* of this router, that name it */
    uint32_t n_prefilling;   /* that it prefills: they have not brought their first token */
    uint64_t prefill_tokens; /* tokens of those */
    uint64_t last_pick;      /* when it was last chosen, as a count of choices: breaks ties in turn */
};

struct td_fleet_ports {
    struct td_env *env;
    void *self;
    /* The worker is LIVE (again): open the channel unless it is open. */
    void (*up)(void *self, struct td_worker *w);
    /* It can do nothing for anybody any more: end its requests' dealings with it, close its channel and its Join stream
     * (w->join, NULL if ended already). */
    void (*lost)(void *self, struct td_worker *w, const char *why);
    void (*forget)(void *self, struct td_worker *w); /* about to be freed: close what is still open */
    void (*changed)(void *self);                     /* the pool or a load changed: somebody waiting may get a place */
};

struct td_fleet {
    const struct td_fleet_ports *ports;
    struct td_list workers;
    const char *model; /* borrowed */
    uint64_t timeout_ns;
    struct td_timer tick, reap;
    uint64_t n_picks;
    double
        handoff_us; /* what a hand-off adds to computing: calls on the way, and the wait for its KV; measured lately */
};

/* timeout_ms: silence after which a worker is lost. model: the only name accepted. Both ports and model outlive f. */
void td_fleet_init(struct td_fleet *f, const struct td_fleet_ports *ports, const char *model, uint32_t timeout_ms);
void td_fleet_deinit(struct td_fleet *f); /* forgets everybody, calling forget; requests must be gone */

/* A worker says who it is. identity is copied. INVALID: it makes no sense; MISMATCH: it contradicts the workers that
 * are live (model, vocabulary, stop ids, KV layout, weights); err names the field and both values. On success any other
 * life at the same address is lost, and join replaces the owner of an older stream of the same life, which
 * *old_join_out names. */
enum td_status td_fleet_join(struct td_fleet *f, const Tandem__V1__Identity *identity, void *join,
                             struct td_worker **out, void **old_join_out, struct td_err *err);
void td_fleet_report(struct td_fleet *f, struct td_worker *w, const Tandem__V1__Load *load);
void td_fleet_prefixes(struct td_fleet *f, struct td_worker *w, const Tandem__V1__PrefixNews *news);
void td_fleet_leave(struct td_fleet *f, struct td_worker *w); /* its Join stream ended */
void td_fleet_lose(struct td_fleet *f, struct td_worker *w, const char *why);
void td_fleet_wired(struct td_fleet *f, struct td_worker *w, bool is_wired);

/* A hand-off took that much more than computing its prompt, up to the decode worker's first token. */
void td_fleet_note_handoff(struct td_fleet *f, uint64_t us);

/* A request with n_tokens to prefill takes a pair of workers (prefill NULL: decode computes them), its prefill is over
 * at who computed it (first token, or its run ended), and it lets go of one. */
void td_fleet_claim(struct td_fleet *f, struct td_worker *decode, struct td_worker *prefill, uint32_t n_tokens);
void td_fleet_prefilled(struct td_fleet *f, struct td_worker *w, uint32_t n_tokens);
void td_fleet_release(struct td_fleet *f, struct td_worker *w, bool made_room);

struct td_worker *td_fleet_find(struct td_fleet *f, uint64_t incarnation); /* LIVE or GONE; NULL: unknown */
/* Live, wired, not draining; and if it watches its steps, a first report has told how the present one does. */
bool td_fleet_is_usable(const struct td_worker *w);
uint32_t td_fleet_n(const struct td_fleet *f, Tandem__V1__Role role); /* usable */
/* Tokens to a block of the prefix caches; 0: nobody is live. */
uint32_t td_fleet_page_tokens(const struct td_fleet *f);
/* What every live worker agrees on, from one of them; NULL: nobody is live. */
const Tandem__V1__Identity *td_fleet_facts(const struct td_fleet *f);
/* Context of the live worker that takes least, and of the one that takes most; 0: nobody is live. */
uint32_t td_fleet_least_context(const struct td_fleet *f);
uint32_t td_fleet_most_context(const struct td_fleet *f);
void td_fleet_describe(const struct td_fleet *f, struct td_buf *json_out);

#endif
