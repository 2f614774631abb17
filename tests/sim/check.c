#include "tests/sim/check.h"

#include <stdlib.h>
#include <string.h>

#include "common/handoff/receiver.h"
#include "decode/worker_int.h"
#include "tests/sim/trouble.h"

/* STOP is said again after a second; a death is noticed within 600 ms, the quarantine after it is 250 ms. */
#define QUARANTINE_LIMIT_NS SIM_MS(3000)

static const char *const group_names[] = {"sliding", "full"};

/* --- pages ------------------------------------------------------------------------------------------------- */

static uint32_t n_refs(const struct td_kv_pages *kv)
{
    uint32_t n = 0;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t p = 0; p < td_kv_pages_n_total(kv, g); p++) n += td_kv_pages_refs(kv, g, p);
    return n;
}

static uint32_t n_held_by(const struct td_decode_request *r)
{
    uint32_t n = r->seq.hit.has_copy ? TD_KV_N_GROUPS : 0;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        n += (r->reservation != NULL ? r->target.n_pages[g] : 0) + r->seq.end[g] - r->seq.first[g];
    return n;
}

static void say_who_holds(const struct sim_process *p)
{
    struct td_buf json = {0};
    td_kv_pages_describe(p->worker->kv, &json);
    sim_trace(p->host.world, "* pages of %s: %s", p->host.name, td_buf_cstr(&json));
    td_buf_free(&json);
}

static void check_decode_pages(const struct sim_process *p)
{
    const struct td_decode_worker *w = p->decode->worker;
    uint32_t n = td_rx_n_quarantined_pages(w->rx), n_all = n_refs(w->kv);
    TD_LIST_FOREACH (it, &w->requests) n += n_held_by(TD_LIST_ENTRY(it, struct td_decode_request, in_worker));
    if (n == n_all) return;
    say_who_holds(p);
    sim_fail(p->host.world, "%s: %u references to pages, requests and quarantine account for %u", p->host.name, n_all,
             n);
}

/* Pages come back soon once their sender is there to answer, or known to be dead. */
static void check_quarantine(struct sim_process *p)
{
    const struct sim_cluster *c = p->cluster;
    uint64_t now = p->host.world->now_ns, last = c->last_silence_ns;
    if (td_rx_n_quarantined_pages(p->decode->worker->rx) == 0)
        p->quarantined_since_ns = 0;
    else if (p->quarantined_since_ns == 0)
        p->quarantined_since_ns = now;
    if (p->quarantined_since_ns == 0) return;
    if (last < p->quarantined_since_ns) last = p->quarantined_since_ns;
    if (now < last + QUARANTINE_LIMIT_NS) return;
    say_who_holds(p);
    sim_fail(p->host.world, "%s: pages stay in quarantine for %llu ms, and no worker is silent", p->host.name,
             (unsigned long long)((now - last) / TD_NS_PER_MS));
}

static void check_prefill_pages(const struct sim_process *p)
{
    if (td_prefill_worker_n_runs(p->prefill->worker) > 0) return;
    uint32_t n = n_refs(p->worker->kv);
    if (n == 0) return;
    say_who_holds(p);
    sim_fail(p->host.world, "%s: %u pages are held, and there is no request", p->host.name, n);
}

static uint64_t sum_of(const struct td_worker *w, enum td_kv_group g, uint32_t page)
{
    uint64_t sum = 0;
    for (uint32_t r = 0; r < w->cfg.tp; r++)
        sum = sum * 7 + sim_kv_sum(w->xfer_ops->pool_base(w->pools[r][g]), &w->kv_layout[g], page);
    return sum;
}

static bool is_untouched(const struct td_worker *w, enum td_kv_group g, uint32_t page, const struct sim_page_mark *m)
{
    if (m->was == SIM_PAGE_KEPT) return sum_of(w, g, page) == m->sum;
    for (uint32_t r = 0; r < w->cfg.tp; r++)
        if (!sim_kv_is_canary(w->xfer_ops->pool_base(w->pools[r][g]), &w->kv_layout[g], page)) return false;
    return true;
}

static void mark(const struct td_worker *w, enum td_kv_group g, uint32_t page, struct sim_page_mark *m)
{
    if (m->was == SIM_PAGE_KEPT) m->sum = sum_of(w, g, page);
    for (uint32_t r = 0; m->was == SIM_PAGE_FREE && r < w->cfg.tp; r++)
        sim_kv_fill_canary(w->xfer_ops->pool_base(w->pools[r][g]), &w->kv_layout[g], page);
}

/* Puts and engines are watched as they write. This is for those who write past them, so it may come a little later. */
static void check_free_pages(struct sim_process *p, bool with_content)
{
    const struct td_kv_pages *kv = p->worker->kv;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t page = 0; page < td_kv_pages_n_total(kv, g); page++) {
            struct sim_page_mark *m = &p->marks[g][page];
            int is = td_kv_pages_refs(kv, g, page) > 0  ? SIM_PAGE_HELD
                     : td_kv_pages_is_kept(kv, g, page) ? SIM_PAGE_KEPT
                                                        : SIM_PAGE_FREE;
            if (is == SIM_PAGE_HELD && m->was == SIM_PAGE_HELD) continue;
            if ((with_content || m->was != (unsigned)is) && m->was != SIM_PAGE_HELD && is != SIM_PAGE_HELD &&
                !is_untouched(p->worker, g, page, m))
                sim_fail(p->host.world, "%s: %s page %u was written while it was %s", p->host.name, group_names[g],
                         page, m->was == SIM_PAGE_KEPT ? "in the prefix cache" : "free");
            if (m->was == (unsigned)is) continue;
            m->was = is;
            mark(p->worker, g, page, m);
        }
}

/* --- puts -------------------------------------------------------------------------------------------------- */

static bool is_in_target(const struct td_decode_request *r, enum td_kv_group g, uint32_t page, uint32_t *block_out)
{
    if (r->reservation == NULL) return false;
    for (uint32_t i = 0; i < r->target.n_pages[g]; i++) {
        if (r->target.pages[g][i] != page) continue;
        *block_out = r->target.first_block[g] + i;
        return true;
    }
    return false;
}

static bool is_in_sequence(const struct td_decode_request *r, enum td_kv_group g, uint32_t page)
{
    for (uint32_t b = r->seq.first[g]; b < r->seq.end[g]; b++)
        if (r->seq.pages[g][b] == page) return true;
    return false;
}

static void check_content(const struct sim_process *p, const struct td_decode_request *r, enum td_kv_group g,
                          uint32_t layer, uint32_t head, uint32_t block, const uint8_t *part)
{
    uint64_t state = 0;
    uint32_t n = r->req.n_tokens, from = 0;
    if (g == TD_KV_SLIDING && n > SIM_WINDOW - 1) from = n - (SIM_WINDOW - 1); /* nobody sees what is before */
    for (uint32_t i = 0; i < n && i < (block + 1) * SIM_PAGE_TOKENS; i++) {
        state = sim_state(state, r->req.tokens[i]);
        if (i < block * SIM_PAGE_TOKENS || i < from) continue;
        if (!sim_kv_part_is(part, &p->worker->kv_layout[g], layer, head, i % SIM_PAGE_TOKENS, state))
            sim_fail(p->host.world, "%s: a put for %s brings wrong KV of position %u, %s layer %u", p->host.name,
                     r->req.id, i, group_names[g], layer);
    }
}

static void check_part(const struct sim_process *p, uint64_t from, enum td_kv_group g, uint32_t layer, uint32_t page,
                       uint32_t head, const uint8_t *part)
{
    const struct td_decode_worker *w = p->decode->worker;
    uint32_t block;
    if (td_kv_pages_refs(p->worker->kv, g, page) == 0)
        sim_fail(p->host.world, "%s: a put of %016llx lands in %s page %u, which is free", p->host.name,
                 (unsigned long long)from, group_names[g], page);
    TD_LIST_FOREACH (it, &w->requests) {
        const struct td_decode_request *r = TD_LIST_ENTRY(it, struct td_decode_request, in_worker);
        if (is_in_sequence(r, g, page))
            sim_fail(p->host.world, "%s: a put of %016llx lands in %s page %u of the running %s", p->host.name,
                     (unsigned long long)from, group_names[g], page, r->req.id);
        if (!is_in_target(r, g, page, &block)) continue;
        if (r->prefill != from)
            sim_fail(p->host.world, "%s: a put of %016llx lands in %s page %u, reserved for %s by %016llx",
                     p->host.name, (unsigned long long)from, group_names[g], page, r->req.id,
                     (unsigned long long)r->prefill);
        check_content(p, r, g, layer, head, block, part);
        return;
    }
    if (td_rx_n_quarantined_pages(w->rx) == 0)
        sim_fail(p->host.world, "%s: a put of %016llx lands in %s page %u, which waits for none", p->host.name,
                 (unsigned long long)from, group_names[g], page);
}

static void on_land(struct sim_process *p, uint64_t from, void *at, size_t n, const void *data)
{
    const struct td_worker *w = p->worker;
    const struct sim_place *sender = sim_place_of(p->cluster, from);
    if (sender != NULL) p->cluster->on_moment(p->cluster, SIM_AT_PUT, sender->address, p->place->address);
    if (p->role != SIM_DECODE) sim_fail(p->host.world, "%s: a put into a prefill worker", p->host.name);
    for (uint32_t r = 0; r < w->cfg.tp; r++)
        for (int g = 0; g < TD_KV_N_GROUPS; g++) {
            const struct td_kv_group_layout *l = &w->kv_layout[g];
            const uint8_t *base = w->xfer_ops->pool_base(w->pools[r][g]), *to = at;
            if (to < base || to >= base + td_kv_pool_bytes(l)) continue;
            for (size_t i = 0; i < n; i += td_kv_head_bytes(l)) {
                size_t off = (size_t)(to - base) + i, in_layer = off % td_kv_layer_bytes(l);
                uint32_t head = (uint32_t)(in_layer % td_kv_page_bytes(l) / td_kv_head_bytes(l));
                check_part(p, from, g, (uint32_t)(off / td_kv_layer_bytes(l)),
                           (uint32_t)(in_layer / td_kv_page_bytes(l)), r * l->n_heads + head,
                           (const uint8_t *)data + i);
            }
            return;
        }
    sim_fail(p->host.world, "%s: a put outside of its pools", p->host.name);
}

/* --- the rules of the wire --------------------------------------------------------------------------------- */

enum { STARTED = 1, RESERVED = 2, ENDED = 4, GIVEN_UP = 8, FIRST = 16, DONE = 32 };

struct dealing { /* a request on a decode stream, or (stream_id 0) a run */
    uint64_t call, stream_id;
    unsigned seen;
};
static struct dealing *dealings;
static uint32_t n_dealings, cap_dealings;

static struct dealing *dealing_of(uint64_t call, uint64_t stream_id)
{
    for (uint32_t i = n_dealings; i-- > 0;)
        if (dealings[i].call == call && dealings[i].stream_id == stream_id) return &dealings[i];
    if (n_dealings == cap_dealings) {
        cap_dealings = cap_dealings == 0 ? 64 : cap_dealings * 2;
        dealings = realloc(dealings, cap_dealings * sizeof *dealings);
        TD_CHECK(dealings != NULL);
    }
    dealings[n_dealings] = (struct dealing){.call = call, .stream_id = stream_id};
    return &dealings[n_dealings++];
}

static void see(const struct sim_world *w, struct dealing *d, unsigned needs, unsigned forbids, unsigned becomes,
                const char *what)
{
    if ((d->seen & needs) != needs || (d->seen & forbids) != 0)
        sim_fail(w, "stream %llu of call %llu: %s comes after%s%s%s%s%s", (unsigned long long)(d->stream_id >> 20),
                 (unsigned long long)d->call, what, d->seen & STARTED ? " start" : " nothing",
                 d->seen & RESERVED ? ", reserved" : "", d->seen & (FIRST | GIVEN_UP) ? ", first or cancel" : "",
                 d->seen & DONE ? ", done" : "", d->seen & ENDED ? ", finished" : "");
    d->seen |= becomes;
}

static void watch_command(const struct sim_world *w, uint64_t call, const Tandem__V1__DecodeCommand *m)
{
    switch (m->command_case) {
    case TANDEM__V1__DECODE_COMMAND__COMMAND_START:
        see(w, dealing_of(call, m->start->stream_id), 0, STARTED, STARTED, "start");
        break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_CANCEL:
        see(w, dealing_of(call, m->cancel->stream_id), STARTED, GIVEN_UP, GIVEN_UP, "cancel");
        break;
    case TANDEM__V1__DECODE_COMMAND__COMMAND_FIRST:
        see(w, dealing_of(call, m->first->stream_id), STARTED, GIVEN_UP, GIVEN_UP, "first");
        break;
    default: break;
    }
}

static void watch_events(const struct sim_world *w, uint64_t call, const Tandem__V1__DecodeEvents *m)
{
    for (size_t i = 0; i < m->n_reserved; i++)
        see(w, dealing_of(call, m->reserved[i]->stream_id), STARTED, RESERVED | ENDED, RESERVED, "reserved");
    for (size_t i = 0; i < m->n_token_ids; i++)
        see(w, dealing_of(call, m->stream_ids[i]), STARTED, ENDED, 0, "a token");
    for (size_t i = 0; i < m->n_finished; i++)
        see(w, dealing_of(call, m->finished[i]->stream_id), STARTED, ENDED, ENDED, "finished");
}

static void tell_moment(struct sim_cluster *c, const struct td_rpc_call *call, const ProtobufCMessage *m)
{
    enum sim_moment moment = SIM_AT_TIME;
    if (m->descriptor == &tandem__v1__decode_events__descriptor)
        moment = ((const Tandem__V1__DecodeEvents *)m)->n_reserved > 0 ? SIM_AT_RESERVED : SIM_AT_TOKENS;
    else if (m->descriptor == &tandem__v1__run_request__descriptor)
        moment = SIM_AT_RUN;
    else if (m->descriptor == &tandem__v1__run_event__descriptor)
        moment = SIM_AT_FIRST;
    uint32_t a, b;
    sim_rpc_places(call, &a, &b);
    if (moment != SIM_AT_TIME) c->on_moment(c, moment, a, b);
}

static void watch(void *user, const struct td_rpc_call *c, const ProtobufCMessage *m)
{
    struct sim_cluster *cluster = user;
    const struct sim_world *w = cluster->world;
    uint64_t call = sim_rpc_call_id(c);
    tell_moment(cluster, c, m);
    if (m->descriptor == &tandem__v1__decode_command__descriptor) {
        watch_command(w, call, (const Tandem__V1__DecodeCommand *)m);
    } else if (m->descriptor == &tandem__v1__decode_events__descriptor) {
        watch_events(w, call, (const Tandem__V1__DecodeEvents *)m);
    } else if (m->descriptor == &tandem__v1__run_event__descriptor) {
        const Tandem__V1__RunEvent *e = (const Tandem__V1__RunEvent *)m;
        bool is_first = e->event_case == TANDEM__V1__RUN_EVENT__EVENT_FIRST;
        see(w, dealing_of(call, 0), is_first ? 0 : FIRST, is_first ? FIRST : DONE, is_first ? FIRST : DONE,
            is_first ? "a first token" : "done");
    }
}

/* --- after every event ------------------------------------------------------------------------------------- */

void sim_check_init(struct sim_cluster *c, struct sim_clients *clients)
{
    (void)clients;
    c->on_land = on_land;
    sim_rpc_watch(watch, c);
}

/* Somebody stands still, or his messages are lost: nothing can be expected of him. */
static void note_silence(struct sim_cluster *c)
{
    for (uint32_t i = 0; i < c->n_workers; i++)
        if (c->workers[i].now != NULL && (c->workers[i].now->host.is_paused || c->workers[i].is_losing))
            c->last_silence_ns = c->world->now_ns;
}

void sim_check_event(struct sim_cluster *c)
{
    note_silence(c);
    const struct td_loop *ran = c->world->ran;
    for (uint32_t i = 0; i < c->n_workers; i++) {
        struct sim_process *p = c->workers[i].now;
        if (p == NULL || (ran != &p->host && ran != &c->world->network)) continue; /* nothing can have changed */
        check_free_pages(p, c->world->n_events % 64 == 0);
        if (p->role == SIM_DECODE) {
            check_decode_pages(p);
            check_quarantine(p);
        } else {
            check_prefill_pages(p);
        }
    }
    if (c->router.now != NULL) sim_router_check(c->router.now->router, false);
}

/* --- the end ----------------------------------------------------------------------------------------------- */

static uint32_t n_requests(const struct sim_process *p)
{
    return p->role == SIM_DECODE ? td_decode_worker_n_requests(p->decode->worker)
                                 : td_prefill_worker_n_runs(p->prefill->worker);
}

bool sim_is_at_rest(const struct sim_cluster *c)
{
    if (c->router.now != NULL && sim_router_n_requests(c->router.now->router) > 0) return false;
    for (uint32_t i = 0; i < c->n_workers; i++) {
        const struct sim_process *p = c->workers[i].now;
        if (p != NULL && (n_requests(p) > 0 || n_refs(p->worker->kv) > 0)) return false;
    }
    return true;
}

/* Was there a decode worker that no trouble touched? Then nothing but a second death ends a request. */
static bool had_sound_decode(const struct sim_cluster *c)
{
    for (uint32_t i = 0; i < c->n_workers; i++)
        if (c->workers[i].role == SIM_DECODE && c->workers[i].n_troubles == 0) return true;
    return false;
}

/* May this request have failed? */
static bool is_excused(const struct sim_cluster *c, const struct sim_client *k)
{
    uint32_t n_troubles = 0;
    for (uint32_t i = 0; i < c->n_workers; i++) n_troubles += c->workers[i].n_troubles;
    switch (k->st) {
    case TD_OK: return true;
    case TD_E_CANCELED: return k->has_left;
    case TD_E_SLOW_CLIENT: return k->is_slow;
    case TD_E_DEADLINE:
        /* The clock of a process that it was at jumped past its deadline; or its COMPLETE was lost, which nobody but
         * its deadline tells. */
        return k->deadline_ns > 0 || c->n_struck[SIM_JUMP] > 0 || c->n_losses > 0;
    case TD_E_PEER_LOST:
    case TD_E_TARGET_LOST:
    case TD_E_UNAVAILABLE:
    case TD_E_DRAINING:
    case TD_E_STALE:
    case TD_E_DEVICE:
        if (c->router.n_troubles > 0) return true;
        if (n_troubles >= 2 && strstr(k->text, "the second worker that died") != NULL) return true;
        return n_troubles > 0 && !had_sound_decode(c);
    default: return false;
    }
}

void sim_check_end(struct sim_cluster *c, const struct sim_clients *clients)
{
    TD_LIST_FOREACH (it, &clients->list) {
        const struct sim_client *k = TD_LIST_ENTRY(it, struct sim_client, link);
        if (!k->is_over) sim_fail(c->world, "%s has had no end", k->id);
        if (!is_excused(c, k)) sim_fail(c->world, "%s ended with %s (%s)", k->id, td_status_name(k->st), k->text);
    }
    for (uint32_t i = 0; i < c->n_workers; i++) {
        const struct sim_process *p = c->workers[i].now;
        if (p == NULL) continue;
        if (n_requests(p) > 0) sim_fail(c->world, "in the end %s has %u requests", p->host.name, n_requests(p));
        uint32_t n = n_refs(p->worker->kv);
        if (n == 0) continue;
        say_who_holds(p);
        sim_fail(c->world, "in the end %s holds %u pages", p->host.name, n);
    }
    if (c->router.now != NULL) sim_router_check(c->router.now->router, true);
    free(dealings);
    dealings = NULL;
    n_dealings = cap_dealings = 0;
}
