/* What the router's tests share: a clock that moves when told, and workers that say sensible things of themselves. */
#ifndef TESTS_UNIT_ROUTER_ROUTER_WORLD_H
#define TESTS_UNIT_ROUTER_ROUTER_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/env.h"
#include "common/base/mem.h"
#include "proto/fleet.pb-c.h"

/* --- the clock ------------------------------------------------------------------------------------------- */

struct virtual_env {
    struct td_env env;
    uint64_t now_ns, n_random;
    struct td_list timers; /* armed, by due time */
};

static inline uint64_t virtual_now(struct td_env *env) { return ((struct virtual_env *)(void *)env)->now_ns; }
static inline void virtual_stop(struct td_env *env, struct td_timer *t)
{
    (void)env;
    if (!t->is_armed) return;
    t->is_armed = false;
    td_list_remove(&t->link);
}
static inline void virtual_start(struct td_env *env, struct td_timer *t, uint64_t delay_ns)
{
    struct virtual_env *v = (struct virtual_env *)(void *)env;
    virtual_stop(env, t);
    assert_non_null(t->fire);
    t->due_ns = v->now_ns + delay_ns;
    t->is_armed = true;
    struct td_list *at = &v->timers;
    while (at->prev != &v->timers && TD_LIST_ENTRY(at->prev, struct td_timer, link)->due_ns > t->due_ns) at = at->prev;
    td_list_push_back(at, &t->link);
}
static inline uint64_t virtual_random(struct td_env *env) { return ++((struct virtual_env *)(void *)env)->n_random; }

static inline void virtual_env_init(struct virtual_env *v)
{
    *v = (struct virtual_env){
        .env = {.now_ns = virtual_now,
                .timer_start = virtual_start,
                .timer_stop = virtual_stop,
                .random = virtual_random},
        .now_ns = 1000 * TD_NS_PER_S,
    };
    td_list_init(&v->timers);
}

/* Moves the clock and fires what falls due on the way, in order. 0: what is due now. */
static inline void virtual_pass_ms(struct virtual_env *v, uint64_t ms)
{
    uint64_t end = v->now_ns + ms * TD_NS_PER_MS;
    while (!td_list_is_empty(&v->timers)) {
        struct td_timer *t = TD_LIST_ENTRY(v->timers.next, struct td_timer, link);
        if (t->due_ns > end) break;
        if (t->due_ns > v->now_ns) v->now_ns = t->due_ns;
        virtual_stop(&v->env, t);
        t->fire(t);
    }
    v->now_ns = end;
}

/* --- workers --------------------------------------------------------------------------------------------- */

struct identity_message {
    Tandem__V1__Identity id;
    Tandem__V1__PeerDescriptor descriptor;
    Tandem__V1__KvLayout layout;
    uint32_t eos[2];
    char name[32], address[32];
};

/* A worker that fits to all others made here. Points into itself. */
static inline void identity_init(struct identity_message *m, Tandem__V1__Role role, uint64_t incarnation)
{
    memset(m, 0, sizeof *m);
    tandem__v1__identity__init(&m->id);
    tandem__v1__peer_descriptor__init(&m->descriptor);
    tandem__v1__kv_layout__init(&m->layout);
    snprintf(m->name, sizeof m->name, "%s-%u", role == TANDEM__V1__ROLE__ROLE_DECODE ? "decode" : "prefill",
             (unsigned)incarnation);
    snprintf(m->address, sizeof m->address, "127.0.0.1:%u", (unsigned)(7000 + incarnation));
    m->eos[0] = 90;
    m->eos[1] = 91;
    m->layout.page_tokens = 64;
    m->layout.n_sliding_layers = m->layout.n_full_layers = 3;
    m->layout.n_kv_heads = 8;
    m->layout.head_dim = 64;
    m->layout.window_tokens = 128;
    m->layout.kv_dtype_sliding = m->layout.kv_dtype_full = (char *)"bf16";
    m->layout.model_fingerprint = (char *)"f1f2";
    m->layout.weight_form = (char *)"mxfp4";
    m->layout.layout_version = 1;
    m->descriptor.incarnation = incarnation;
    m->descriptor.name = m->name;
    m->descriptor.layout = &m->layout;
    m->id.role = role;
    m->id.name = m->name;
    m->id.rpc_address = m->address;
    m->id.model = (char *)"model";
    m->id.max_context_tokens = 1000;
    m->id.vocab_size = 100;
    m->id.eos_ids = m->eos;
    m->id.n_eos_ids = 2;
    m->id.descriptor = &m->descriptor;
}

#define PREFILL TANDEM__V1__ROLE__ROLE_PREFILL
#define DECODE  TANDEM__V1__ROLE__ROLE_DECODE

#endif
