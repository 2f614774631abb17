/* The twin of common/rpc: calls between the hosts of one world. A call has two ends; each has an inbox, which holds
 * what is on its way to it, in order. The first packet of an inbox arrives by a timer of the network; it waits on if
 * the host stands still.
 *
 * What a break leaves: of each inbox some beginning arrives, then a RESET. A process that died calls nothing back. */
#include "common/rpc/rpc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "tests/sim/world.h"

enum packet_kind { OPEN, MESSAGE, HALF_CLOSE, STATUS, RESET };

struct packet {
    struct td_list link;
    enum packet_kind kind;
    uint64_t due_ns;
    struct td_rpc_call *from; /* whose queue it counts in; NULL: gone */
    enum td_status st;        /* STATUS, RESET */
    char text[200];
    size_t n;
    uint8_t data[];
};

struct td_rpc_channel {
    struct td_rpc *rpc;
    struct td_list link;
    uint32_t place;
};

struct td_rpc_call {
    struct td_loop *host; /* NULL: a server's end whose OPEN is still under way */
    uint32_t place, peer_place;
    struct td_rpc *rpc;
    struct td_rpc_channel *channel; /* client */
    struct td_rpc_call *peer;       /* NULL: gone */
    struct td_list link;            /* rpc->calls, or unborn */
    uint64_t id;
    bool is_server, is_accepted, is_ending, has_message, is_parked;
    const char *path;
    const struct td_rpc_method *method;
    const ProtobufCMessageDescriptor *in;
    struct td_rpc_handlers h;
    void *user;
    uint64_t deadline_ns; /* of the host's clock */
    struct td_timer deadline, closing, writable;
    struct td_list inbox;
    struct td_timer arrival;
    uint64_t last_due_ns; /* of the inbox */
    uint64_t stalled_till_ns;
    uint64_t queued_bytes; /* ours, in the peer's inbox */
    enum td_status end_st;
    char end_text[200];
};

struct td_rpc {
    struct td_loop *host;
    struct td_rpc_options o;
    struct td_list link; /* world's servers */
    const struct td_rpc_method *methods;
    void *service;
    bool is_listening;
    struct td_list calls, channels;
    struct td_timer grace, ended;
    void (*done)(void *user);
    void *done_user;
};

static void (*watch)(void *user, const struct td_rpc_call *c, const ProtobufCMessage *m);
static void *watch_user;
static uint64_t last_id;
static struct td_list unborn = {&unborn, &unborn};

static struct sim_world *world_of(const struct td_rpc_call *c) { return c->rpc->host->world; }
static struct td_env *net(struct sim_world *w) { return &w->network.env; }

/* --- packets ----------------------------------------------------------------------------------------------- */

static void discount(struct packet *p)
{
    struct td_rpc_call *from = p->from;
    if (from == NULL || p->kind != MESSAGE) return;
    from->queued_bytes -= p->n;
    if (from->queued_bytes == 0 && !from->is_ending && from->h.on_writable != NULL)
        from->host->env.timer_start(&from->host->env, &from->writable, 0);
}

static void drop(struct packet *p)
{
    td_list_remove(&p->link);
    discount(p);
    free(p);
}

/* The first packet of to's inbox decides when something arrives next. */
static void schedule(struct sim_world *w, struct td_rpc_call *to)
{
    if (td_list_is_empty(&to->inbox) || to->is_parked) return;
    uint64_t due = TD_LIST_ENTRY(to->inbox.next, struct packet, link)->due_ns;
    if (due < to->stalled_till_ns) due = to->stalled_till_ns;
    net(w)->timer_start(net(w), &to->arrival, due > w->now_ns ? due - w->now_ns : 0);
}

static struct packet *send_packet(struct sim_world *w, struct td_rpc_call *to, enum packet_kind kind, uint64_t delay_ns,
                                  size_t n)
{
    struct packet *p = calloc(1, sizeof *p + n);
    TD_CHECK(p != NULL);
    p->kind = kind;
    p->n = n;
    p->due_ns = w->now_ns + delay_ns;
    if (p->due_ns < to->last_due_ns) p->due_ns = to->last_due_ns;
    to->last_due_ns = p->due_ns;
    td_list_push_back(&to->inbox, &p->link);
    if (to->inbox.next == &p->link) schedule(w, to);
    return p;
}

static struct packet *send_to_peer(struct td_rpc_call *c, enum packet_kind kind, size_t n)
{
    if (c->peer == NULL) return NULL;
    struct packet *p = send_packet(world_of(c), c->peer, kind, sim_latency(world_of(c), c->place, c->peer_place), n);
    p->from = c;
    return p;
}

static void send_end(struct td_rpc_call *c, enum packet_kind kind, enum td_status st, const char *text)
{
    struct packet *p = send_to_peer(c, kind, 0);
    if (p == NULL) return;
    p->st = st;
    snprintf(p->text, sizeof p->text, "%s", text != NULL ? text : "");
}

/* Neither end reaches the other from here on. */
static void part(struct td_rpc_call *c)
{
    struct td_rpc_call *peer = c->peer;
    if (peer == NULL) return;
    struct td_rpc_call *const ends[] = {c, peer};
    for (int i = 0; i < 2; i++)
        TD_LIST_FOREACH (it, &ends[i]->inbox) {
            struct packet *p = TD_LIST_ENTRY(it, struct packet, link);
            discount(p);
            p->from = NULL;
        }
    c->peer = peer->peer = NULL;
}

/* --- the end of a call ------------------------------------------------------------------------------------- */

static void check_shutdown(struct td_rpc *r)
{
    if (r->done == NULL || r->ended.is_armed) return;
    TD_LIST_FOREACH (it, &r->calls)
        if (TD_LIST_ENTRY(it, struct td_rpc_call, link)->is_server) return;
    r->host->env.timer_stop(&r->host->env, &r->grace);
    r->host->env.timer_start(&r->host->env, &r->ended, 0);
}

static void stop_timers(struct td_rpc_call *c)
{
    struct td_env *env = &c->rpc->host->env;
    env->timer_stop(env, &c->deadline);
    env->timer_stop(env, &c->closing);
    env->timer_stop(env, &c->writable);
    net(world_of(c))->timer_stop(net(world_of(c)), &c->arrival);
}

static void free_call(struct td_rpc_call *c)
{
    stop_timers(c);
    part(c);
    td_list_remove(&c->link);
    TD_LIST_FOREACH_SAFE (it, &c->inbox) drop(TD_LIST_ENTRY(it, struct packet, link));
    free(c);
}

static void close_now(struct td_rpc_call *c)
{
    struct td_rpc *r = c->rpc;
    td_list_remove(&c->link); /* it is nobody's any more while its owner hears of it */
    if (c->h.on_closed != NULL) c->h.on_closed(c, c->end_st, c->end_text);
    free_call(c);
    check_shutdown(r);
}

static void on_closing(struct td_timer *t) { close_now(TD_CONTAINER_OF(t, struct td_rpc_call, closing)); }

/* From here on only on_closed comes. */
static void begin_close(struct td_rpc_call *c, enum td_status st, const char *text)
{
    c->is_ending = true;
    if (c->closing.is_armed) return;
    c->end_st = st;
    snprintf(c->end_text, sizeof c->end_text, "%s", text != NULL ? text : "");
    c->closing.fire = on_closing;
    c->host->env.timer_start(&c->host->env, &c->closing, 0);
}

static void on_deadline(struct td_timer *t)
{
    struct td_rpc_call *c = TD_CONTAINER_OF(t, struct td_rpc_call, deadline);
    if (c->closing.is_armed) return;
    if (!c->is_server) send_end(c, RESET, TD_E_CANCELED, "");
    begin_close(c, TD_E_DEADLINE, td_status_text(TD_E_DEADLINE));
}

static void on_writable(struct td_timer *t)
{
    struct td_rpc_call *c = TD_CONTAINER_OF(t, struct td_rpc_call, writable);
    if (!c->is_ending) c->h.on_writable(c);
}

/* --- arrivals ---------------------------------------------------------------------------------------------- */

static struct td_rpc *server_at(struct sim_world *w, uint32_t place)
{
    TD_LIST_FOREACH (it, &w->servers) {
        struct td_rpc *r = TD_LIST_ENTRY(it, struct td_rpc, link);
        if (r->host->place == place && r->is_listening) return r;
    }
    return NULL;
}

static void on_open(struct sim_world *w, struct td_rpc_call *c, uint64_t timeout_ns)
{
    struct td_rpc *r = server_at(w, c->place);
    const struct td_rpc_method *m = r != NULL ? r->methods : NULL;
    while (m != NULL && m->path != NULL && strcmp(m->path, c->path) != 0) m++;
    if (r == NULL || m->path == NULL) { /* nobody listens */
        struct td_rpc_call *peer = c->peer;
        if (peer != NULL) {
            struct packet *p = send_packet(w, peer, RESET, sim_latency(w, c->place, c->peer_place), 0);
            p->st = TD_E_PEER_LOST;
            snprintf(p->text, sizeof p->text, "connection refused");
        }
        c->rpc = peer != NULL ? peer->rpc : NULL;
        part(c);
        td_list_remove(&c->link);
        net(w)->timer_stop(net(w), &c->arrival);
        TD_LIST_FOREACH_SAFE (it, &c->inbox) drop(TD_LIST_ENTRY(it, struct packet, link));
        free(c);
        return;
    }
    c->rpc = r;
    c->host = r->host;
    td_list_remove(&c->link);
    td_list_push_back(&r->calls, &c->link);
    c->method = m;
    c->in = m->request;
    struct td_env *env = &c->host->env;
    c->deadline_ns = timeout_ns == TD_NEVER_NS ? TD_NEVER_NS : env->now_ns(env) + timeout_ns;
    c->deadline.fire = on_deadline;
    if (timeout_ns != TD_NEVER_NS) env->timer_start(env, &c->deadline, timeout_ns);
    m->on_open(c, r->service);
}

static void on_message(struct td_rpc_call *c, const struct packet *p)
{
    if (c->is_server && c->has_message && !c->method->takes_stream) return;
    c->has_message = true;
    ProtobufCMessage *m = protobuf_c_message_unpack(c->in, NULL, p->n, p->data);
    TD_CHECK(m != NULL);
    if (c->h.on_message != NULL) c->h.on_message(c, m);
    protobuf_c_message_free_unpacked(m, NULL);
}

static void handle(struct sim_world *w, struct td_rpc_call *c, struct packet *p)
{
    if (p->kind == OPEN) {
        uint64_t timeout_ns;
        memcpy(&timeout_ns, p->data, sizeof timeout_ns);
        on_open(w, c, timeout_ns);
        return;
    }
    if (c->is_ending && p->kind != RESET) return;
    switch (p->kind) {
    case MESSAGE: on_message(c, p); break;
    case HALF_CLOSE:
        if (c->h.on_half_close != NULL) c->h.on_half_close(c);
        break;
    case STATUS:
        if (p->from != NULL) begin_close(p->from, TD_OK, "");
        begin_close(c, p->st, p->text);
        break;
    case RESET: begin_close(c, p->st, p->text); break;
    default: break;
    }
}

/* Packets that were held up together are not handled together always: pollers hand them over one by one. */
static void spread(struct sim_world *w, struct td_rpc_call *c)
{
    if (td_list_is_empty(&c->inbox)) return;
    struct packet *next = TD_LIST_ENTRY(c->inbox.next, struct packet, link);
    struct sim_draws d = {.seed = w->seed, .n = w->n_latency++ * 2, .stream = 3};
    uint64_t ns = sim_chance(&d, next->kind == RESET ? 40 : 10) ? sim_draw(&d, SIM_US(50), SIM_MS(15)) : 0;
    if (next->due_ns < w->now_ns + ns) next->due_ns = w->now_ns + ns;
}

static void on_arrival(struct td_timer *t)
{
    struct td_rpc_call *c = TD_CONTAINER_OF(t, struct td_rpc_call, arrival);
    struct sim_world *w = sim_world_now;
    struct td_rpc *r = c->host != NULL ? c->rpc : server_at(w, c->place);
    if (r != NULL && r->host->is_paused) {
        c->is_parked = true;
        return;
    }
    if (w->now_ns < c->stalled_till_ns) {
        schedule(w, c);
        return;
    }
    struct packet *p = TD_LIST_ENTRY(c->inbox.next, struct packet, link);
    td_list_remove(&p->link);
    spread(w, c);
    schedule(w, c); /* before the handler, in which c may go */
    if (r != NULL) w->running = r->host;
    discount(p);
    handle(w, c, p);
    free(p);
}

/* --- trouble ----------------------------------------------------------------------------------------------- */

/* Some beginning of what is under way arrives, then the connection's end. */
static void cut_inbox(struct sim_world *w, struct td_rpc_call *c, uint64_t notice_ns, enum td_status st)
{
    struct sim_draws d = {.seed = w->seed, .n = w->n_latency++ * 2, .stream = 2};
    bool is_lost = false;
    TD_LIST_FOREACH_SAFE (it, &c->inbox) {
        struct packet *p = TD_LIST_ENTRY(it, struct packet, link);
        is_lost = is_lost || sim_chance(&d, 25);
        /* An OPEN goes with what follows it, as one stream. */
        if (is_lost && p->kind != OPEN) drop(p);
    }
    struct packet *p = send_packet(w, c, RESET, notice_ns, 0);
    p->st = st;
    snprintf(p->text, sizeof p->text, "connection broke");
}

static void break_call(struct sim_world *w, struct td_rpc_call *c)
{
    struct td_rpc_call *peer = c->peer;
    if (peer == NULL) return;
    part(c);
    cut_inbox(w, c, sim_latency(w, peer->place, c->place), c->is_server ? TD_E_CANCELED : TD_E_PEER_LOST);
    cut_inbox(w, peer, sim_latency(w, c->place, peer->place), peer->is_server ? TD_E_CANCELED : TD_E_PEER_LOST);
}

void sim_rpc_block(struct sim_world *w, uint32_t a, uint32_t b, uint64_t till_ns)
{
    sim_link_of(w, a, b)->blocked_till = till_ns;
    TD_LIST_FOREACH (h, &w->hosts) {
        const struct td_rpc *r = TD_LIST_ENTRY(h, struct td_loop, link)->rpc;
        if (r == NULL || (r->host->place != a && r->host->place != b)) continue;
        TD_LIST_FOREACH (it, &r->calls) {
            struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
            if (!(c->place == a && c->peer_place == b) && !(c->place == b && c->peer_place == a)) continue;
            sim_rpc_stall(c, till_ns);
            if (c->peer == NULL) continue;
            c->peer->stalled_till_ns = till_ns; /* it may not be born yet */
            schedule(w, c->peer);
        }
    }
}

void sim_rpc_break(struct sim_world *w, uint32_t a, uint32_t b)
{
    TD_LIST_FOREACH (h, &w->hosts) {
        const struct td_rpc *r = TD_LIST_ENTRY(h, struct td_loop, link)->rpc;
        if (r == NULL || (r->host->place != a && r->host->place != b)) continue;
        TD_LIST_FOREACH (it, &r->calls) {
            struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
            if (c->is_server) continue; /* the client's end stands for both */
            if ((c->place == a && c->peer_place == b) || (c->place == b && c->peer_place == a)) break_call(w, c);
        }
    }
}

void sim_rpc_kill(struct td_loop *h, uint64_t notice_ns)
{
    struct td_rpc *r = h->rpc;
    if (r == NULL) return;
    r->is_listening = false;
    td_list_remove(&r->link);
    TD_LIST_FOREACH (it, &r->calls) {
        struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
        struct td_rpc_call *peer = c->peer;
        net(h->world)->timer_stop(net(h->world), &c->arrival);
        if (peer == NULL) continue;
        part(c);
        uint64_t ns = sim_latency(h->world, c->place, peer->place);
        cut_inbox(h->world, peer, ns + notice_ns, peer->is_server ? TD_E_CANCELED : TD_E_PEER_LOST);
    }
    TD_LIST_FOREACH (it, &unborn) { /* that waited for it to go on */
        struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
        if (c->place != h->place) continue;
        c->is_parked = false;
        schedule(h->world, c);
    }
    h->rpc = NULL;
}

void sim_rpc_resume(struct td_loop *h)
{
    struct td_list *const lists[] = {h->rpc != NULL ? &h->rpc->calls : &unborn, &unborn};
    for (int i = 0; i < 2; i++)
        TD_LIST_FOREACH (it, lists[i]) {
            struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
            if (!c->is_parked || c->place != h->place) continue;
            c->is_parked = false;
            schedule(h->world, c);
        }
}

void sim_rpc_stall(struct td_rpc_call *c, uint64_t till_ns)
{
    c->stalled_till_ns = till_ns;
    schedule(world_of(c), c);
}

void sim_rpc_watch(void (*fn)(void *user, const struct td_rpc_call *c, const ProtobufCMessage *m), void *user)
{
    watch = fn;
    watch_user = user;
}

void sim_rpc_places(const struct td_rpc_call *c, uint32_t *ours_out, uint32_t *theirs_out)
{
    *ours_out = c->place;
    *theirs_out = c->peer_place;
}
uint64_t sim_rpc_call_id(const struct td_rpc_call *c) { return c->id; }

/* --- the contract: process --------------------------------------------------------------------------------- */

static void on_ended(struct td_timer *t)
{
    struct td_rpc *r = TD_CONTAINER_OF(t, struct td_rpc, ended);
    void (*done)(void *user) = r->done;
    r->done = NULL;
    done(r->done_user);
}

static void on_grace(struct td_timer *t)
{
    struct td_rpc *r = TD_CONTAINER_OF(t, struct td_rpc, grace);
    TD_LIST_FOREACH (it, &r->calls) {
        struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
        if (c->is_server && !c->closing.is_armed) {
            send_end(c, RESET, TD_E_PEER_LOST, "the server leaves");
            begin_close(c, TD_E_CANCELED, "");
        }
    }
}

enum td_status td_rpc_create(struct td_loop *loop, const struct td_rpc_options *o, struct td_rpc **out)
{
    struct td_rpc *r = calloc(1, sizeof *r);
    if (r == NULL) return TD_E_NO_MEMORY;
    r->host = loop;
    r->o = *o;
    if (r->o.max_queued_bytes == 0) r->o.max_queued_bytes = 1u << 20;
    td_list_init(&r->calls);
    td_list_init(&r->channels);
    td_list_init(&r->link);
    r->grace.fire = on_grace;
    r->ended.fire = on_ended;
    loop->rpc = r;
    *out = r;
    return TD_OK;
}

void td_rpc_destroy(struct td_rpc *r)
{
    if (r == NULL) return;
    r->is_listening = false;
    td_list_remove(&r->link);
    while (!td_list_is_empty(&r->calls)) {
        struct td_rpc_call *c = TD_LIST_ENTRY(r->calls.next, struct td_rpc_call, link);
        if (!c->closing.is_armed) {
            send_end(c, RESET, c->is_server ? TD_E_PEER_LOST : TD_E_CANCELED, "the other end leaves");
            c->is_ending = true;
            c->end_st = TD_E_CANCELED;
        }
        close_now(c);
    }
    TD_LIST_FOREACH_SAFE (it, &r->channels) td_rpc_channel_close(TD_LIST_ENTRY(it, struct td_rpc_channel, link));
    r->host->env.timer_stop(&r->host->env, &r->grace);
    r->host->env.timer_stop(&r->host->env, &r->ended);
    r->host->rpc = NULL;
    free(r);
}

enum td_status td_rpc_serve(struct td_rpc *r, const char *address, const struct td_rpc_method *methods, void *service,
                            struct td_err *err)
{
    (void)address;
    (void)err;
    r->methods = methods;
    r->service = service;
    r->is_listening = true;
    td_list_push_back(&r->host->world->servers, &r->link);
    return TD_OK;
}

uint16_t td_rpc_port(const struct td_rpc *r) { return (uint16_t)r->host->place; }
void td_rpc_set_serving(struct td_rpc *r, bool is_serving)
{
    (void)r;
    (void)is_serving;
}

void td_rpc_shutdown(struct td_rpc *r, uint32_t grace_ms, void (*done)(void *user), void *user)
{
    r->is_listening = false;
    if (r->done == NULL) {
        r->done = done;
        r->done_user = user;
    }
    struct td_env *env = &r->host->env;
    env->timer_start(env, &r->grace, grace_ms * TD_NS_PER_MS);
    check_shutdown(r);
}

/* --- the contract: calls ----------------------------------------------------------------------------------- */

void td_rpc_call_accept(struct td_rpc_call *c, const struct td_rpc_handlers *h, void *user)
{
    TD_CHECK(c->is_server && !c->is_accepted && h->on_closed != NULL);
    c->is_accepted = true;
    c->h = *h;
    c->user = user;
}

void *td_rpc_call_user(const struct td_rpc_call *c) { return c->user; }
uint64_t td_rpc_call_deadline_ns(const struct td_rpc_call *c) { return c->deadline_ns; }
const char *td_rpc_call_metadata(const struct td_rpc_call *c, const char *key)
{
    (void)c;
    (void)key;
    return NULL;
}
const char *td_rpc_call_peer(const struct td_rpc_call *c) { return world_of(c)->place_names[c->peer_place]; }
uint64_t td_rpc_queued_bytes(const struct td_rpc_call *c) { return c->queued_bytes; }

enum td_status td_rpc_send(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    if (c->is_ending) return TD_E_CANCELED;
    size_t n = protobuf_c_message_get_packed_size(msg);
    if (c->queued_bytes > 0 && c->queued_bytes + n > c->rpc->o.max_queued_bytes) return TD_E_BUSY;
    if (watch != NULL) watch(watch_user, c, msg);
    struct packet *p = send_to_peer(c, MESSAGE, n);
    if (p == NULL) return TD_OK; /* the connection is broken, and we do not know yet */
    protobuf_c_message_pack(msg, p->data);
    c->queued_bytes += n;
    return TD_OK;
}

void td_rpc_finish(struct td_rpc_call *c, enum td_status st, const char *text)
{
    TD_CHECK(c->is_server);
    if (c->is_ending) return;
    c->is_ending = true;
    if (c->peer == NULL)
        begin_close(c, TD_OK, "");
    else
        send_end(c, STATUS, st, text != NULL ? text : st == TD_OK ? "" : td_status_text(st));
}

void td_rpc_half_close(struct td_rpc_call *c) { send_end(c, HALF_CLOSE, TD_OK, ""); }

void td_rpc_cancel(struct td_rpc_call *c) { td_rpc_abort(c, TD_E_CANCELED, ""); }

void td_rpc_abort(struct td_rpc_call *c, enum td_status st, const char *text)
{
    if (c->closing.is_armed) return;
    if (c->peer != NULL) { /* what is queued is given up: the end is all that still goes out */
        struct sim_world *w = world_of(c);
        struct sim_draws d = {.seed = w->seed, .n = w->n_latency++ * 2, .stream = 2};
        bool is_lost = false;
        TD_LIST_FOREACH_SAFE (it, &c->peer->inbox) {
            struct packet *p = TD_LIST_ENTRY(it, struct packet, link);
            is_lost = is_lost || sim_chance(&d, 50);
            if (is_lost && p->kind != OPEN) drop(p);
        }
    }
    send_end(c, RESET, c->is_server ? st : TD_E_CANCELED, text);
    begin_close(c, st, text);
}

/* --- the contract: channels -------------------------------------------------------------------------------- */

enum td_status td_rpc_channel_open(struct td_rpc *r, const char *address, struct td_rpc_channel **out)
{
    struct td_rpc_channel *ch = calloc(1, sizeof *ch);
    if (ch == NULL) return TD_E_NO_MEMORY;
    struct sim_world *w = r->host->world;
    for (uint32_t i = 0; i < w->n_places; i++)
        if (strcmp(w->place_names[i], address) == 0) ch->place = i;
    TD_CHECK(ch->place != 0);
    ch->rpc = r;
    td_list_push_back(&r->channels, &ch->link);
    *out = ch;
    return TD_OK;
}

void td_rpc_channel_close(struct td_rpc_channel *ch)
{
    if (ch == NULL) return;
    TD_LIST_FOREACH (it, &ch->rpc->calls) {
        struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
        if (c->channel != ch) continue;
        c->channel = NULL;
        td_rpc_cancel(c);
    }
    td_list_remove(&ch->link);
    free(ch);
}

enum td_status td_rpc_call_start(struct td_rpc_channel *ch, const char *path, const ProtobufCMessageDescriptor *reply,
                                 uint64_t deadline_ns, bool wait_for_ready, const struct td_rpc_metadata *md,
                                 const struct td_rpc_handlers *h, void *user, struct td_rpc_call **out)
{
    (void)wait_for_ready;
    (void)md;
    struct td_loop *host = ch->rpc->host;
    struct td_rpc_call *c = calloc(1, sizeof *c), *s = calloc(1, sizeof *s);
    TD_CHECK(c != NULL && s != NULL);
    *c = (struct td_rpc_call){.host = host,
                              .place = host->place,
                              .peer_place = ch->place,
                              .rpc = ch->rpc,
                              .channel = ch,
                              .peer = s,
                              .path = path,
                              .in = reply,
                              .h = *h,
                              .user = user,
                              .deadline_ns = deadline_ns,
                              .deadline.fire = on_deadline,
                              .writable.fire = on_writable,
                              .arrival.fire = on_arrival};
    *s = (struct td_rpc_call){.place = ch->place,
                              .peer_place = host->place,
                              .peer = c,
                              .is_server = true,
                              .path = path,
                              .writable.fire = on_writable,
                              .arrival.fire = on_arrival};
    c->id = s->id = ++last_id;
    td_list_init(&c->inbox);
    td_list_init(&s->inbox);
    td_list_push_back(&ch->rpc->calls, &c->link);
    td_list_push_back(&unborn, &s->link);
    uint64_t timeout_ns = TD_NEVER_NS, now = host->env.now_ns(&host->env);
    if (deadline_ns != TD_NEVER_NS) {
        timeout_ns = deadline_ns > now ? deadline_ns - now : 0;
        host->env.timer_start(&host->env, &c->deadline, timeout_ns);
    }
    struct packet *p = send_to_peer(c, OPEN, sizeof timeout_ns);
    memcpy(p->data, &timeout_ns, sizeof timeout_ns);
    *out = c;
    return TD_OK;
}
