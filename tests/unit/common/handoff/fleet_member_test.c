/* A worker and a router over real gRPC on loopback. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/handoff/fleet_member.h"
#include "common/loop/loop.h"

struct fleet { /* the router's side, and what the member was told */
    struct td_loop *loop;
    struct td_rpc *server, *client;
    char address[64];
    struct td_rpc_call *call;
    unsigned n_opened, n_closed, n_identities, n_loads, n_joined, n_left;
    bool is_mute; /* never replies */
    char name[64], fingerprint[64];
    uint64_t incarnation;
    uint32_t last_running, heartbeat_ms;
    struct td_fleet_member *m;
    struct td_descriptor d;
    struct td_fleet_identity id;
    uint32_t n_running;
    unsigned n_asked_from_start, n_news, n_all; /* of the prefix cache; n_pieces are left to tell */
    uint32_t n_pieces;
    uint64_t last_change;
};

static void on_update(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct fleet *f = td_rpc_call_user(c);
    const Tandem__V1__JoinUpdate *u = (const Tandem__V1__JoinUpdate *)msg;
    if (u->update_case == TANDEM__V1__JOIN_UPDATE__UPDATE_LOAD) {
        f->n_loads++;
        f->last_running = u->load->n_running;
        return;
    }
    if (u->update_case == TANDEM__V1__JOIN_UPDATE__UPDATE_PREFIXES) {
        assert_int_equal(f->n_loads > 0, true);
        f->n_news++;
        f->n_all += u->prefixes->is_all;
        assert_int_equal(u->prefixes->n_changes, 2);
        f->last_change = u->prefixes->changes[1];
        return;
    }
    assert_int_equal(u->update_case, TANDEM__V1__JOIN_UPDATE__UPDATE_IDENTITY);
    assert_int_equal(u->identity->role, TANDEM__V1__ROLE__ROLE_PREFILL);
    assert_int_equal(u->identity->n_eos_ids, 2);
    f->n_identities++;
    snprintf(f->name, sizeof f->name, "%s", u->identity->name);
    snprintf(f->fingerprint, sizeof f->fingerprint, "%s", u->identity->descriptor->layout->model_fingerprint);
    f->incarnation = u->identity->descriptor->incarnation;
    if (f->is_mute) return;
    Tandem__V1__JoinReply reply = TANDEM__V1__JOIN_REPLY__INIT;
    reply.router = 77;
    reply.heartbeat_ms = f->heartbeat_ms;
    assert_int_equal(td_rpc_send(c, &reply.base), TD_OK);
}
static void on_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct fleet *f = td_rpc_call_user(c);
    (void)st, (void)text;
    f->n_closed++;
    if (f->call == c) f->call = NULL;
}
static void on_open(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {.on_message = on_update, .on_closed = on_closed};
    struct fleet *f = service;
    f->n_opened++;
    f->call = c;
    td_rpc_call_accept(c, &h, f);
}
static const struct td_rpc_method methods[] = {
    {.path = "/tandem.v1.Fleet/Join",
     .request = &tandem__v1__join_update__descriptor,
     .reply = &tandem__v1__join_reply__descriptor,
     .max_request_bytes = 1 << 20,
     .on_open = on_open,
     .takes_stream = true},
    {0},
};
static void serve(struct fleet *f)
{
    struct td_err err;
    assert_int_equal(td_rpc_create(f->loop, &(struct td_rpc_options){0}, &f->server), TD_OK);
    assert_int_equal(td_rpc_serve(f->server, f->address, methods, f, &err), TD_OK);
    snprintf(f->address, sizeof f->address, "127.0.0.1:%u", td_rpc_port(f->server));
}
static void stop_serving(struct fleet *f)
{
    td_rpc_destroy(f->server);
    f->server = NULL;
}

static void load(void *user, Tandem__V1__Load *out) { out->n_running = ((struct fleet *)user)->n_running; }
static uint32_t prefixes(void *user, bool from_start, uint64_t *out, bool *is_all_out)
{
    struct fleet *f = user;
    f->n_asked_from_start += from_start;
    *is_all_out = from_start;
    if (f->n_pieces == 0) {
        *is_all_out = false;
        return 0;
    }
    out[0] = 0xabcdef0123456788;
    out[1] = f->n_pieces--;
    return 2;
}
static void on_joined(void *user, bool is_joined, uint64_t router)
{
    struct fleet *f = user;
    if (is_joined) {
        assert_int_equal(router, 77);
        f->n_joined++;
    } else {
        f->n_left++;
    }
}
static void join(struct fleet *f)
{
    static const struct td_fleet_handlers h = {.load = load, .on_joined = on_joined, .prefixes = prefixes};
    assert_int_equal(td_fleet_member_create(f->client, td_loop_env(f->loop), f->address, &f->id, &h, f, &f->m), TD_OK);
}

static struct td_timer guard;
static void too_long(struct td_timer *t)
{
    (void)t;
    fprintf(stderr, "30 s without what the test waits for\n");
    abort();
}
#define UNTIL(f, cond)                                                                                                 \
    do {                                                                                                               \
        guard.fire = too_long;                                                                                         \
        td_loop_env((f)->loop)->timer_start(td_loop_env((f)->loop), &guard, 30 * TD_NS_PER_S);                         \
        while (!(cond)) td_loop_run_once((f)->loop, true);                                                             \
        td_loop_env((f)->loop)->timer_stop(td_loop_env((f)->loop), &guard);                                            \
    } while (0)

static int make(void **state)
{
    static const uint32_t eos[] = {1, 2};
    struct fleet *f = calloc(1, sizeof *f);
    assert_int_equal(td_loop_create(&f->loop), TD_OK);
    assert_int_equal(td_rpc_create(f->loop, &(struct td_rpc_options){0}, &f->client), TD_OK);
    snprintf(f->address, sizeof f->address, "127.0.0.1:0");
    f->heartbeat_ms = 20;
    struct td_model_config c = {.n_kv_heads = 8, .head_dim = 64, .window = 128};
    struct td_kv_group_layout kv[TD_KV_N_GROUPS] = {{.dtype = TD_BF16, .page_tokens = 64, .head_dim = 64},
                                                    {.dtype = TD_BF16, .page_tokens = 64, .head_dim = 64}};
    td_peer_layout_of(&c, "abcdef", "bf16", kv, &f->d.layout);
    f->d.incarnation = 99;
    f->d.n_ranks = 1;
    f->d.ranks[0].address = "a";
    f->d.ranks[0].n_address = 1;
    f->id = (struct td_fleet_identity){.role = TANDEM__V1__ROLE__ROLE_PREFILL,
                                       .name = "prefill-7",
                                       .rpc_address = "h:1",
                                       .http_address = "h:2",
                                       .model = "m",
                                       .version = "1",
                                       .max_context_tokens = 10,
                                       .vocab_size = 20,
                                       .eos_ids = eos,
                                       .n_eos = 2,
                                       .descriptor = &f->d};
    *state = f;
    return 0;
}
static int unmake(void **state)
{
    struct fleet *f = *state;
    td_fleet_member_leave(f->m);
    td_rpc_destroy(f->client);
    td_rpc_destroy(f->server);
    td_loop_destroy(f->loop);
    free(f);
    return 0;
}

static void identity_comes_first_then_heartbeats_with_load(void **state)
{
    struct fleet *f = *state;
    serve(f);
    join(f);
    f->n_running = 3;
    UNTIL(f, f->n_loads >= 3);
    assert_int_equal(f->n_identities, 1);
    assert_string_equal(f->name, "prefill-7");
    assert_string_equal(f->fingerprint, "abcdef");
    assert_int_equal(f->incarnation, 99);
    assert_int_equal(f->last_running, 3);
    assert_int_equal(f->n_joined, 1);
    assert_true(td_fleet_member_is_joined(f->m));
}

static void a_report_does_not_wait_for_the_heartbeat(void **state)
{
    struct fleet *f = *state;
    f->heartbeat_ms = 10000;
    serve(f);
    join(f);
    UNTIL(f, f->n_loads == 1); /* right after the reply */
    f->n_running = 9;
    td_fleet_member_report(f->m);
    UNTIL(f, f->n_loads == 2);
    assert_int_equal(f->last_running, 9);
}

static void a_router_hears_of_the_prefix_cache_from_the_start_then_what_changes(void **state)
{
    struct fleet *f = *state;
    f->n_pieces = 3;
    serve(f);
    join(f);
    UNTIL(f, f->n_news == 3); /* all of it with the first load, in pieces */
    assert_int_equal(f->n_all, 1);
    assert_int_equal(f->last_change, 1);
    f->n_pieces = 2;
    UNTIL(f, f->n_news == 5);
    assert_int_equal(f->n_all, 1);
    stop_serving(f);
    UNTIL(f, f->n_left == 1);
    f->n_pieces = 1;
    serve(f); /* another router */
    UNTIL(f, f->n_news == 6);
    assert_int_equal(f->n_all, 2);
}

static void a_router_that_comes_later_or_again_is_joined(void **state)
{
    struct fleet *f = *state;
    serve(f); /* for its port */
    stop_serving(f);
    join(f);
    uint64_t until = td_clock_ns() + 300 * TD_NS_PER_MS;
    UNTIL(f, td_clock_ns() >= until);
    assert_false(td_fleet_member_is_joined(f->m));
    for (unsigned life = 1; life <= 3; life++) {
        serve(f);
        UNTIL(f, f->n_joined == life);
        assert_int_equal(f->n_identities, life);
        stop_serving(f);
        UNTIL(f, f->n_left == life);
        assert_false(td_fleet_member_is_joined(f->m));
    }
}

static void a_stream_that_the_router_ends_is_opened_again(void **state)
{
    struct fleet *f = *state;
    serve(f);
    join(f);
    UNTIL(f, f->n_joined == 1);
    td_rpc_finish(f->call, TD_E_MISMATCH, "another model is served here");
    UNTIL(f, f->n_joined == 2);
    assert_int_equal(f->n_opened, 2);
}

static void a_router_that_never_replies_is_asked_again(void **state)
{
    struct fleet *f = *state;
    f->is_mute = true;
    serve(f);
    join(f);
    UNTIL(f, f->n_opened == 2); /* after 5 s */
    assert_int_equal(f->n_loads, 0);
    f->is_mute = false;
    UNTIL(f, f->n_opened == 3 || f->n_joined == 1);
}

static void leaving_ends_the_stream_and_says_nothing_more(void **state)
{
    struct fleet *f = *state;
    serve(f);
    join(f);
    UNTIL(f, f->n_loads >= 1);
    td_fleet_member_leave(f->m);
    f->m = NULL;
    UNTIL(f, f->n_closed == 1);
    assert_int_equal(f->n_left, 0);
}

int main(void)
{
    td_log_open("fleet_member_test", TD_LOG_OFF); /* routers come and go on purpose */
#define T(name) cmocka_unit_test_setup_teardown(name, make, unmake)
    const struct CMUnitTest tests[] = {
        T(identity_comes_first_then_heartbeats_with_load),
        T(a_report_does_not_wait_for_the_heartbeat),

        T(a_router_hears_of_the_prefix_cache_from_the_start_then_what_changes),
        T(a_router_that_comes_later_or_again_is_joined),
        T(a_stream_that_the_router_ends_is_opened_again),
        T(a_router_that_never_replies_is_asked_again),
        T(leaving_ends_the_stream_and_says_nothing_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
