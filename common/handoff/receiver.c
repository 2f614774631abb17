/* One KV hand-off, both ends (the sender's half is sender.c; the messages are wire.h).
 *
 * D, the decode worker, owns pages and their generation; P, the prefill worker, computes and puts.
 *
 * The happy path
 *   1. D reserves pages for a prompt under a new generation and tells the router, who tells P.
 *   2. P sends BEGUN and puts the pages of each layer as soon as the layer is computed.
 *   3. P flushes: its puts are visible at D. Only then it sends COMPLETE(generation, first token, bytes per rank).
 *   4. D compares the bytes with the closed form; the pages belong to the sequence now.
 *
 * What can go wrong
 *   D wants no KV any more (cancel, deadline, client gone)
 *       D sends STOP(generation). P drops what it has not posted, waits for what it has, flushes, answers STOPPED; only
 * then the pages go back to the pool. STOP also reaches a P that never heard of the generation, or of D: it remembers
 * it, so that a Run that comes later is refused, and answers at the address in the message. STOP or STOPPED is lost, P
 * cannot be reached yet, P is silent (hung, stopped) STOP is sent again every stop_retry_ms and whenever P becomes
 * reachable. The pages stay pinned, are counted (kv_pages_quarantined), and come back when P answers or dies: P lives,
 * so it may still write. COMPLETE crosses STOP on its way It is as good as STOPPED: all puts are flushed. The pages go
 * back; nothing becomes ready. P fails or is cancelled ABORTED(generation, status) after its last put: the pages go
 * back at once. Status OK says that the first token ended the request, so that no KV is needed. P dies Its process is
 * known dead (endpoint failed, new incarnation registered). The network may still hold a put, hence a short quarantine
 * before the pages go back. COMPLETE with other bytes than the closed form, other ranks, or no valid token P broke the
 * protocol: never READY. D stops the generation like any other, since P may still write. A message for a generation
 * that has ended, from another P, for another life of D, or not understood Counted (handoff_stale) and dropped.
 *
 * Generations rise; one is used once. D's lowest live generation goes along with Runs and STOPs: below it P need not
 * remember what was stopped, since it refuses everything there. */
#include "common/handoff/receiver.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/handoff/handoff_int.h"
#include "common/handoff/wire.h"
#include "common/metrics/metrics.h"

#define N_REMEMBERED_DEAD     256u /* incarnations; a reservation for one of them would never be answered */
#define STOPS_UNTIL_ALARM     5u
#define DEFAULT_STOP_RETRY_MS 1000u

/* X(state, on entering). The timer of STOPPING is stop_retry_ms, that of SENDER_LOST quarantine_ms; no other state
 * waits: a request's deadline is its owner's, who calls td_rx_end. */
/* clang-format off */
#define RX_STATES(X)                                                                                                   \
    X(IDLE, NULL)                    /* no such reservation */                                                         \
    X(RESERVED, NULL)                /* pages are pinned; the sender may put into them from here on */                 \
    X(FILLING, NULL)                 /* the sender said that it began */                                               \
    X(STOPPING, ask_sender_to_stop)  /* pages stay pinned until it confirms that every put is done or was never made */\
    X(SENDER_LOST, start_quarantine) /* its process is known dead */                                                   \
    X(READY, commit_pages)           /* terminal: the pages are the owner's */                                         \
    X(FAILED, give_back)             /* terminal: the pages are the pool's */

#define RX_EVENTS(X)                                                                                                   \
    X(OFFER)        /* the owner reserved */                                                                           \
    X(BEGUN)        /* from here to STOPPED: messages of the sender */                                                 \
    X(COMPLETE)                                                                                                        \
    X(BAD_COMPLETE) /* not what the closed form says */                                                                \
    X(ABORTED)                                                                                                         \
    X(STOPPED)                                                                                                         \
    X(END)          /* the owner wants no KV */                                                                        \
    X(SENDER_DEAD)                                                                                                     \
    X(TIMEOUT)      /* this state's timer */                                                                           \
    X(REACHABLE)    /* the sender can be reached (again) */
/* clang-format on */

enum rx_state {
#define X(name, enter) RX_##name,
    RX_STATES(X)
#undef X
        RX_N_STATES
};
enum rx_event {
#define X(name) EV_##name,
    RX_EVENTS(X)
#undef X
        RX_N_EVENTS
};
static const char *const state_names[] = {
#define X(name, enter) #name,
    RX_STATES(X)
#undef X
};
static const char *const event_names[] = {
#define X(name) #name,
    RX_EVENTS(X)
#undef X
};

/* 0 (IDLE): not expected here: count, drop. The state itself: nothing to do, except that STOPPING asks again. */
#define FROM_OWNER_OR_FATE [EV_END] = RX_STOPPING, [EV_SENDER_DEAD] = RX_SENDER_LOST
#define FROM_SENDER        [EV_COMPLETE] = RX_READY, [EV_BAD_COMPLETE] = RX_STOPPING, [EV_ABORTED] = RX_FAILED
static const uint8_t rx_next[RX_N_STATES][RX_N_EVENTS] = {
    [RX_IDLE] = {[EV_OFFER] = RX_RESERVED},
    /* COMPLETE without BEGUN is as true: what counts is the flush before it. */
    [RX_RESERVED] = {[EV_BEGUN] = RX_FILLING, FROM_SENDER, FROM_OWNER_OR_FATE, [EV_REACHABLE] = RX_RESERVED},
    [RX_FILLING] = {FROM_SENDER, FROM_OWNER_OR_FATE, [EV_REACHABLE] = RX_FILLING},
    [RX_STOPPING] = {[EV_STOPPED] = RX_FAILED,
                     [EV_ABORTED] = RX_FAILED,
                     [EV_COMPLETE] = RX_FAILED,
                     [EV_BAD_COMPLETE] = RX_STOPPING,
                     [EV_BEGUN] = RX_STOPPING, /* crossed our STOP */
                     [EV_TIMEOUT] = RX_STOPPING,
                     [EV_REACHABLE] = RX_STOPPING,
                     FROM_OWNER_OR_FATE},
    [RX_SENDER_LOST] = {[EV_TIMEOUT] = RX_FAILED, [EV_END] = RX_SENDER_LOST, [EV_SENDER_DEAD] = RX_SENDER_LOST},
    /* Only while its last callbacks run: the owner may end or disown from within. */
    [RX_READY] = {[EV_END] = RX_READY},
    [RX_FAILED] = {[EV_END] = RX_FAILED},
};

struct td_rx_reservation {
    struct td_rx *rx;
    struct td_list link;
    enum rx_state state;
    bool is_wanted; /* the owner has neither ended it nor been told of its end */
    bool is_disowned;
    void *owner;
    uint64_t generation, prefill;
    uint64_t bytes_per_rank;          /* closed form */
    uint64_t reserved_ns, entered_ns; /* the reservation, this state */
    uint32_t n_stops;                 /* sent */
    uint32_t first_block[TD_KV_N_GROUPS], n_pages[TD_KV_N_GROUPS];
    uint32_t *pages[TD_KV_N_GROUPS]; /* into storage */
    struct td_timer timer;
    char holder[HOLDER_BYTES];
    uint32_t storage[]; /* page numbers, sliding then full */
};

struct td_rx {
    struct td_rx_options o;
    struct td_rx_ports ports;
    struct td_kv_pages *kv;
    struct td_list live; /* reservations by rising generation */
    uint64_t next_generation;
    uint64_t dead[N_REMEMBERED_DEAD]; /* ring of incarnations known dead */
    uint32_t n_dead;
};

/* What came along with an event. */
struct happening {
    const struct td_wire *msg; /* messages of the sender */
    enum td_status status;     /* why the owner gets no KV */
    const char *why;
};

static uint64_t now(const struct td_rx *rx) { return rx->ports.env->now_ns(rx->ports.env); }
static uint64_t age_ms(const struct td_rx *rx, uint64_t since_ns) { return (now(rx) - since_ns) / TD_NS_PER_MS; }
static bool is_quarantined(const struct td_rx_reservation *r)
{
    return r->state == RX_STOPPING || r->state == RX_SENDER_LOST;
}

uint32_t td_rx_n_quarantined_pages(const struct td_rx *rx)
{
    uint32_t n = 0;
    TD_LIST_FOREACH (it, &rx->live) {
        const struct td_rx_reservation *r = TD_LIST_ENTRY(it, struct td_rx_reservation, link);
        if (is_quarantined(r)) n += r->n_pages[TD_KV_SLIDING] + r->n_pages[TD_KV_FULL];
    }
    return n;
}

static void count_stale(const struct td_rx *rx, uint64_t from, uint64_t generation, const char *what)
{
    (void)rx;
    td_metric_add(TD_M_handoff_stale, 1);
    TD_DEBUG("handoff_stale", "from=%016" PRIx64 " generation=%" PRIu64 " %s", from, generation, what);
}

/* ---- entering a state ------------------------------------------------------------------------------------------- */

/* The owner learns, once, that no KV will come. Its callback may end or disown r, not free it. */
static void tell_owner(struct td_rx_reservation *r, const struct happening *h)
{
    if (!r->is_wanted) return;
    r->is_wanted = false;
    td_metric_add(TD_M_handoffs_failed, 1);
    r->rx->ports.failed(r->rx->ports.self, r, h->status, h->why);
}

static void send_stop(struct td_rx_reservation *r)
{
    struct td_rx *rx = r->rx;
    struct td_wire m = {
        .to = r->prefill,
        .generation = r->generation,
        .lowest_live = td_rx_lowest_live_generation(rx),
        .address = rx->o.address,
        .n_address = (uint32_t)rx->o.n_address,
    };
    struct td_buf b = {0};
    td_wire_encode(TD_WIRE_STOP, &m, &b);
    enum td_status st =
        b.failed ? TD_E_NO_MEMORY : rx->ports.send(rx->ports.self, r->prefill, TD_WIRE_STOP, b.data, b.n);
    td_buf_free(&b);
    r->n_stops++;
    if (r->n_stops == STOPS_UNTIL_ALARM)
        TD_WARN("handoff_sender_silent", "req=%s generation=%" PRIu64 " prefill=%016" PRIx64 " pages=%u last_send=%s",
                r->holder, r->generation, r->prefill, r->n_pages[TD_KV_SLIDING] + r->n_pages[TD_KV_FULL],
                td_status_name(st));
}

static void ask_sender_to_stop(struct td_rx_reservation *r, const struct happening *h)
{
    struct td_rx *rx = r->rx;
    send_stop(r);
    rx->ports.env->timer_start(rx->ports.env, &r->timer, rx->o.stop_retry_ms * TD_NS_PER_MS);
    tell_owner(r, h);
}

static void start_quarantine(struct td_rx_reservation *r, const struct happening *h)
{
    struct td_rx *rx = r->rx;
    rx->ports.env->timer_start(rx->ports.env, &r->timer, rx->o.quarantine_ms * TD_NS_PER_MS);
    tell_owner(r, h);
}

static void end(struct td_rx_reservation *r)
{
    if (!r->is_disowned) r->rx->ports.ended(r->rx->ports.self, r);
    free(r);
}

static void commit_pages(struct td_rx_reservation *r, const struct happening *h)
{
    struct td_rx *rx = r->rx;
    td_list_remove(&r->link);
    r->is_wanted = false;
    struct td_rx_complete c = {.first_token = h->msg->first_token, .kv_bytes = r->bytes_per_rank * rx->o.n_ranks};
    td_metric_add(TD_M_handoffs_completed, 1);
    td_metric_add(TD_M_handoff_bytes, c.kv_bytes);
    td_metric_observe(TD_M_handoff_seconds, (double)(now(rx) - r->reserved_ns) / (double)TD_NS_PER_S);
    if (rx->ports.arrived != NULL)
        rx->ports.arrived(rx->ports.self, (const uint32_t *const[]){r->pages[TD_KV_SLIDING], r->pages[TD_KV_FULL]},
                          r->n_pages);
    rx->ports.ready(rx->ports.self, r, &c);
    end(r);
}

static void unref_pages(struct td_rx_reservation *r)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t i = 0; i < r->n_pages[g]; i++) td_kv_pages_unref(r->rx->kv, (enum td_kv_group)g, r->pages[g][i]);
}

static void give_back(struct td_rx_reservation *r, const struct happening *h)
{
    td_list_remove(&r->link);
    unref_pages(r);
    tell_owner(r, h);
    end(r);
}

/* ---- the one transition ----------------------------------------------------------------------------------------- */

static void (*const on_enter[])(struct td_rx_reservation *r, const struct happening *h) = {
#define X(name, enter) enter,
    RX_STATES(X)
#undef X
};

/* r may be gone when this returns. */
static void step(struct td_rx_reservation *r, enum rx_event ev, const struct happening *h)
{
    struct td_rx *rx = r->rx;
    enum rx_state from = r->state, to = (enum rx_state)rx_next[from][ev];
    if (to == RX_IDLE) {
        count_stale(rx, r->prefill, r->generation, event_names[ev]);
        return;
    }
    if (ev == EV_END) r->is_wanted = false;
    bool asks_again = to == RX_STOPPING && (ev == EV_TIMEOUT || ev == EV_REACHABLE);
    if (to == from && !asks_again) return;
    TD_DEBUG("handoff_rx", "req=%s generation=%" PRIu64 " event=%s from=%s to=%s", r->holder, r->generation,
             event_names[ev], state_names[from], state_names[to]);
    rx->ports.env->timer_stop(rx->ports.env, &r->timer);
    if (to != from) r->entered_ns = now(rx);
    r->state = to;
    if (on_enter[to] != NULL) on_enter[to](r, h);
    td_metric_set(TD_M_kv_pages_quarantined, td_rx_n_quarantined_pages(rx));
}

static void on_timer(struct td_timer *t)
{
    struct td_rx_reservation *r = TD_CONTAINER_OF(t, struct td_rx_reservation, timer);
    step(r, EV_TIMEOUT, &(struct happening){.status = TD_E_PEER_LOST, .why = "prefill worker lost"});
}

/* ---- owner ------------------------------------------------------------------------------------------------------ */

enum td_status td_rx_create(const struct td_rx_options *o, struct td_kv_pages *kv, const struct td_rx_ports *ports,
                            struct td_rx **out)
{
    TD_CHECK(o->n_ranks >= 1 && o->n_ranks <= TD_MAX_RANKS && o->n_address <= TD_WIRE_MAX_ADDRESS);
    struct td_rx *rx = td_calloc(1, sizeof *rx);
    if (rx == NULL) return TD_E_NO_MEMORY;
    rx->o = *o;
    if (rx->o.stop_retry_ms == 0) rx->o.stop_retry_ms = DEFAULT_STOP_RETRY_MS;
    rx->ports = *ports;
    rx->kv = kv;
    rx->next_generation = 1;
    td_list_init(&rx->live);
    *out = rx;
    return TD_OK;
}

void td_rx_destroy(struct td_rx *rx)
{
    if (rx == NULL) return;
    TD_LIST_FOREACH_SAFE (it, &rx->live) {
        struct td_rx_reservation *r = TD_LIST_ENTRY(it, struct td_rx_reservation, link);
        rx->ports.env->timer_stop(rx->ports.env, &r->timer);
        td_list_remove(&r->link);
        unref_pages(r);
        free(r);
    }
    free(rx);
}

static bool is_known_dead(const struct td_rx *rx, uint64_t prefill)
{
    uint32_t n = rx->n_dead < N_REMEMBERED_DEAD ? rx->n_dead : N_REMEMBERED_DEAD;
    for (uint32_t i = 0; i < n; i++)
        if (rx->dead[i] == prefill) return true;
    return false;
}

enum td_status td_rx_reserve(struct td_rx *rx, uint64_t prefill, uint32_t n_tokens, uint32_t cached_tokens,
                             const char *holder, void *owner, struct td_rx_reservation **out,
                             struct td_rx_target *target_out)
{
    uint32_t first[TD_KV_N_GROUPS], n_pages[TD_KV_N_GROUPS], n_all = 0;
    if (n_tokens == 0 || cached_tokens >= n_tokens) return TD_E_INVALID;
    if (is_known_dead(rx, prefill)) return TD_E_PEER_LOST;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        uint32_t end_block;
        td_handoff_blocks(&rx->o.kv[g], (enum td_kv_group)g, rx->o.window_tokens, n_tokens, cached_tokens, &first[g],
                          &end_block);
        n_pages[g] = end_block - first[g];
        n_all += n_pages[g];
    }
    struct td_rx_reservation *r = td_calloc(1, sizeof *r + n_all * sizeof r->storage[0]);
    if (r == NULL) return TD_E_NO_MEMORY;
    r->rx = rx;
    td_list_init(&r->link);
    r->timer.fire = on_timer;
    holder_copy(r->holder, holder);
    uint32_t *pages = r->storage;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        r->pages[g] = pages;
        r->first_block[g] = first[g];
        enum td_status st = td_kv_pages_alloc(rx->kv, (enum td_kv_group)g, n_pages[g], r->holder, r->pages[g]);
        if (st != TD_OK) {
            unref_pages(r);
            free(r);
            return st;
        }
        r->n_pages[g] = n_pages[g];
        pages += n_pages[g];
    }
    r->generation = rx->next_generation++;
    r->prefill = prefill;
    r->owner = owner;
    r->is_wanted = true;
    r->bytes_per_rank = td_handoff_bytes(rx->o.kv, rx->o.window_tokens, n_tokens, cached_tokens);
    r->reserved_ns = now(rx);
    td_list_push_back(&rx->live, &r->link);
    td_metric_add(TD_M_handoffs, 1);
    step(r, EV_OFFER, NULL);
    *target_out = (struct td_rx_target){
        .generation = r->generation,
        .lowest_live_generation = td_rx_lowest_live_generation(rx),
        .cached_tokens = cached_tokens,
    };
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        target_out->first_block[g] = r->first_block[g];
        target_out->n_pages[g] = r->n_pages[g];
        target_out->pages[g] = r->pages[g];
    }
    *out = r;
    return TD_OK;
}

void *td_rx_owner(const struct td_rx_reservation *r) { return r->owner; }
uint64_t td_rx_generation(const struct td_rx_reservation *r) { return r->generation; }

void td_rx_end(struct td_rx *rx, struct td_rx_reservation *r)
{
    TD_CHECK(r->rx == rx);
    if (r->is_wanted) td_metric_add(TD_M_handoffs_failed, 1);
    step(r, EV_END, &(struct happening){.status = TD_E_CANCELED, .why = "ended by its owner"});
}

void td_rx_disown(struct td_rx_reservation *r)
{
    r->owner = NULL;
    r->is_disowned = true;
    td_rx_end(r->rx, r);
}

uint64_t td_rx_lowest_live_generation(const struct td_rx *rx)
{
    if (td_list_is_empty(&rx->live)) return rx->next_generation;
    return TD_LIST_ENTRY(rx->live.next, struct td_rx_reservation, link)->generation;
}

/* ---- the sender ------------------------------------------------------------------------------------------------- */

static bool is_as_promised(const struct td_rx *rx, const struct td_rx_reservation *r, const struct td_wire *m)
{
    if (m->n_ranks != rx->o.n_ranks) return false;
    for (uint32_t i = 0; i < m->n_ranks; i++)
        if (m->kv_bytes[i] != r->bytes_per_rank) return false;
    return rx->o.n_vocab == 0 || m->first_token < rx->o.n_vocab;
}

static struct td_rx_reservation *find(const struct td_rx *rx, uint64_t generation)
{
    TD_LIST_FOREACH (it, &rx->live) {
        struct td_rx_reservation *r = TD_LIST_ENTRY(it, struct td_rx_reservation, link);
        if (r->generation == generation) return r;
    }
    return NULL;
}

void td_rx_on_message(struct td_rx *rx, uint64_t from, uint8_t id, const void *data, size_t n)
{
    struct td_wire m;
    struct td_err err;
    if (td_wire_decode(id, data, n, &m, &err) != TD_OK) {
        TD_WARN("handoff_bad_message", "from=%016" PRIx64 " %s", from, err.text);
        count_stale(rx, from, 0, "not understood");
        return;
    }
    struct td_rx_reservation *r = m.to == rx->o.incarnation ? find(rx, m.generation) : NULL;
    if (r == NULL || r->prefill != from) {
        count_stale(rx, from, m.generation, td_wire_name(id));
        return;
    }
    switch (id) {
    case TD_WIRE_BEGUN: step(r, EV_BEGUN, NULL); break;
    case TD_WIRE_COMPLETE: {
        struct happening h = {
            .msg = &m, .status = TD_E_PROTOCOL, .why = "prefill worker's complete does not fit the reservation"};
        if (is_as_promised(rx, r, &m)) {
            step(r, EV_COMPLETE, &h);
            break;
        }
        TD_ERROR(
            "handoff_bad_complete",
            "req=%s generation=%" PRIu64 " prefill=%016" PRIx64 " ranks=%u/%u bytes=%" PRIu64 "/%" PRIu64 " token=%u",
            r->holder, r->generation, from, m.n_ranks, rx->o.n_ranks, m.kv_bytes[0], r->bytes_per_rank, m.first_token);
        step(r, EV_BAD_COMPLETE, &h);
        break;
    }
    case TD_WIRE_ABORTED: {
        bool finished = m.status == TD_OK;
        /* CANCELED means to our owner that no KV is needed. A run whose caller was lost from sight is another matter:
         * the owner still waits. */
        enum td_status why = m.status == TD_E_CANCELED ? TD_E_STALE : m.status;
        struct happening h = {.status = finished ? TD_E_CANCELED : why,
                              .why = finished ? "finished by its first token" : "prefill worker aborted"};
        step(r, EV_ABORTED, &h);
        break;
    }
    case TD_WIRE_STOPPED: step(r, EV_STOPPED, &(struct happening){.status = TD_E_STALE, .why = "stopped"}); break;
    default: count_stale(rx, from, m.generation, td_wire_name(id)); break;
    }
}

/* Every reservation of that sender gets the event. Reservations made by callbacks meanwhile come later in the list. */
static void step_all(struct td_rx *rx, uint64_t prefill, enum rx_event ev)
{
    struct happening h = {.status = TD_E_PEER_LOST, .why = "prefill worker lost"};
    TD_LIST_FOREACH_SAFE (it, &rx->live) {
        struct td_rx_reservation *r = TD_LIST_ENTRY(it, struct td_rx_reservation, link);
        if (r->prefill == prefill && (ev != EV_REACHABLE || r->state == RX_STOPPING)) step(r, ev, &h);
    }
}

void td_rx_on_peer_lost(struct td_rx *rx, uint64_t prefill)
{
    if (!is_known_dead(rx, prefill)) rx->dead[rx->n_dead++ % N_REMEMBERED_DEAD] = prefill;
    step_all(rx, prefill, EV_SENDER_DEAD);
}

void td_rx_on_peer_reachable(struct td_rx *rx, uint64_t prefill) { step_all(rx, prefill, EV_REACHABLE); }

void td_rx_describe(const struct td_rx *rx, struct td_buf *out)
{
    td_buf_printf(out,
                  "{\"next_generation\":%" PRIu64 ",\"lowest_live_generation\":%" PRIu64
                  ",\"quarantined_pages\":%u,\"reservations\":[",
                  rx->next_generation, td_rx_lowest_live_generation(rx), td_rx_n_quarantined_pages(rx));
    const char *comma = "";
    TD_LIST_FOREACH (it, &rx->live) {
        const struct td_rx_reservation *r = TD_LIST_ENTRY(it, struct td_rx_reservation, link);
        td_buf_printf(out,
                      "%s{\"generation\":%" PRIu64 ",\"request\":\"%s\",\"state\":\"%s\",\"age_ms\":%" PRIu64
                      ",\"state_age_ms\":%" PRIu64 ",\"prefill\":\"%016" PRIx64
                      "\",\"sliding_pages\":%u,\"full_pages\":%u,\"bytes_per_rank\":%" PRIu64
                      ",\"stops_sent\":%u,\"is_wanted\":%s}",
                      comma, r->generation, r->holder, state_names[r->state], age_ms(rx, r->reserved_ns),
                      age_ms(rx, r->entered_ns), r->prefill, r->n_pages[TD_KV_SLIDING], r->n_pages[TD_KV_FULL],
                      r->bytes_per_rank, r->n_stops, r->is_wanted ? "true" : "false");
        comma = ",";
    }
    td_buf_str(out, "]}");
}
