/* The decode stream.
 *   we  ->  hello; peer (a prefill worker's descriptor, before the first start that names it), start, cancel, first
 *   D   ->  one message per engine step: reservations, tokens of all streams, ends
 * A stream id is a serial number over a slot of the table, so that looking one up is one array access and an id is
 * never used twice. An id that has ended is not known here any more: late news of it is dropped.
 *
 * When the stream breaks, every request on it hears that the worker is lost. While the worker is live, the stream is
 * opened again after 100 ms to 2 s, and nothing is placed there until then. */
#include "router/link.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#define SLOT_BITS        20u
#define MAX_SLOTS        (1u << SLOT_BITS)
#define MAX_UNSENT_BYTES (8u << 20) /* of commands at one worker: a dozen starts of the longest prompts */
#define MIN_REOPEN_MS    100u
#define MAX_REOPEN_MS    2000u

/* The calls have lives of their own: they end after the link that began them. */
struct stream {
    struct td_link *link; /* NULL: nobody listens any more */
    struct td_rpc_call *call;
};
struct run {
    struct td_request *request; /* NULL: nobody listens any more */
    struct td_rpc_call *call;
    struct td_list link; /* of the prefill worker's runs */
};
struct slot {
    struct td_request *request; /* NULL: free */
    uint64_t id;
    uint32_t next_free;
};
struct td_link {
    const struct td_link_options *o;
    struct td_worker *worker;
    struct td_rpc_channel *channel;
    struct td_list runs;
    struct stream *stream; /* NULL: down */
    struct slot *slots;
    uint32_t n_slots, first_free;
    uint64_t serial;
    uint64_t *introduced; /* prefill incarnations that this stream has named */
    uint32_t n_introduced, cap_introduced;
    struct td_timer reopen;
    uint32_t reopen_ms;
};

/* --- slots ----------------------------------------------------------------------------------------------- */

static struct slot *slot_of(struct td_link *l, uint64_t id)
{
    uint64_t i = id & (MAX_SLOTS - 1);
    if (i >= l->n_slots || l->slots[i].id != id || l->slots[i].request == NULL) return NULL;
    return &l->slots[i];
}

static struct td_request *request_of(struct td_link *l, uint64_t id)
{
    struct slot *s = slot_of(l, id);
    return s != NULL ? s->request : NULL;
}

static bool take_slot(struct td_link *l, struct td_request *r)
{
    if (l->first_free == l->n_slots) {
        uint32_t n = l->n_slots == 0 ? 64 : l->n_slots * 2;
        struct slot *p = n <= MAX_SLOTS ? td_realloc(l->slots, n, sizeof *p) : NULL;
        if (p == NULL) return false;
        for (uint32_t i = l->n_slots; i < n; i++) p[i] = (struct slot){.next_free = i + 1};
        l->slots = p;
        l->n_slots = n;
    }
    struct slot *s = &l->slots[l->first_free];
    uint64_t index = l->first_free;
    l->first_free = s->next_free;
    s->request = r;
    s->id = ++l->serial << SLOT_BITS | index;
    r->stream_id = s->id;
    return true;
}

static void free_slot(struct td_link *l, uint64_t id)
{
    struct slot *s = slot_of(l, id);
    if (s == NULL) return;
    s->request = NULL;
    s->next_free = l->first_free;
    l->first_free = (uint32_t)(s - l->slots);
}

/* --- the decode stream ----------------------------------------------------------------------------------- */

static void open_stream(struct td_link *l);

static void tell_lost(struct td_link *l, const char *why)
{
    for (uint32_t i = 0; i < l->n_slots; i++) {
        struct td_request *r = l->slots[i].request;
        if (r == NULL) continue;
        free_slot(l, l->slots[i].id);
        td_request_on_worker_lost(r, l->worker, why);
    }
}

static void reopen_later(struct td_link *l)
{
    td_fleet_wired(l->o->fleet, l->worker, false);
    if (!l->worker->is_live) return;
    l->o->env->timer_start(l->o->env, &l->reopen, l->reopen_ms * TD_NS_PER_MS);
    l->reopen_ms = l->reopen_ms * 2 < MAX_REOPEN_MS ? l->reopen_ms * 2 : MAX_REOPEN_MS;
}

static void on_reopen(struct td_timer *t)
{
    struct td_link *l = TD_CONTAINER_OF(t, struct td_link, reopen);
    if (l->stream == NULL && l->worker->is_live) open_stream(l);
}

/* Forgets the stream and everything on it. */
static void drop_stream(struct td_link *l, const char *why)
{
    struct stream *s = l->stream;
    if (s == NULL) return;
    s->link = NULL;
    l->stream = NULL;
    l->n_introduced = 0;
    td_rpc_cancel(s->call);
    tell_lost(l, why);
}

static bool is_well_formed(const Tandem__V1__DecodeEvents *e)
{
    return e->n_stream_ids == e->n_token_ids && (e->n_logprobs == 0 || e->n_logprobs == e->n_token_ids);
}

static void forget_introduction(struct td_link *l, uint64_t prefill)
{
    for (uint32_t i = 0; i < l->n_introduced; i++)
        if (l->introduced[i] == prefill) l->introduced[i--] = l->introduced[--l->n_introduced];
}

static void on_decode_events(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct stream *s = td_rpc_call_user(c);
    struct td_link *l = s->link;
    const Tandem__V1__DecodeEvents *e = (const Tandem__V1__DecodeEvents *)msg;
    if (l == NULL) return;
    if (!is_well_formed(e)) {
        TD_ERROR("decode_stream_malformed", "worker=%s stream_ids=%zu token_ids=%zu logprobs=%zu",
                 l->worker->identity->name, e->n_stream_ids, e->n_token_ids, e->n_logprobs);
        drop_stream(l, "its stream makes no sense");
        reopen_later(l);
        return;
    }
    l->reopen_ms = MIN_REOPEN_MS;
    /* What a request does on hearing this may end the stream: look again each time. */
    for (size_t i = 0; i < e->n_reserved && s->link != NULL; i++) {
        struct td_request *r = request_of(l, e->reserved[i]->stream_id);
        if (r != NULL) td_request_on_reserved(r, e->reserved[i]->target);
    }
    for (size_t i = 0, n; i < e->n_stream_ids && s->link != NULL; i += n) {
        for (n = 1; i + n < e->n_stream_ids && e->stream_ids[i + n] == e->stream_ids[i];) n++;
        struct td_request *r = request_of(l, e->stream_ids[i]);
        if (r != NULL)
            td_request_on_tokens(r, e->token_ids + i, e->n_logprobs > 0 ? e->logprobs + i : NULL, (uint32_t)n);
    }
    for (size_t i = 0; i < e->n_finished && s->link != NULL; i++) {
        struct td_request *r = request_of(l, e->finished[i]->stream_id);
        if (r == NULL) continue;
        free_slot(l, e->finished[i]->stream_id);
        if (strcmp(e->finished[i]->status_name, td_status_name(TD_E_UNKNOWN_PEER)) == 0 && r->prefill != NULL)
            forget_introduction(l, r->prefill->incarnation);
        td_request_on_finished(r, e->finished[i]);
    }
}

static void on_stream_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct stream *s = td_rpc_call_user(c);
    struct td_link *l = s->link;
    free(s);
    if (l == NULL) return;
    l->stream = NULL;
    l->n_introduced = 0;
    TD_WARN("decode_stream_closed", "worker=%s status=%s text=\"%s\"", l->worker->identity->name, td_status_name(st),
            text);
    char why[256] = "its stream broke";
    if (text[0] != '\0') snprintf(why, sizeof why, "its stream broke: %.200s", text);
    td_fleet_wired(l->o->fleet, l->worker, false); /* before requests look for another place */
    tell_lost(l, why);
    reopen_later(l);
}

static void open_stream(struct td_link *l)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_decode_events, .on_closed = on_stream_closed};
    struct stream *s = td_calloc(1, sizeof *s);
    enum td_status st =
        s == NULL ? TD_E_NO_MEMORY
                  : td_rpc_call_start(l->channel, "/tandem.v1.Decode/Generate", &tandem__v1__decode_events__descriptor,
                                      TD_NEVER_NS, false, NULL, &handlers, s, &s->call);
    if (st != TD_OK) {
        TD_WARN("decode_stream_failed", "worker=%s status=%s", l->worker->identity->name, td_status_name(st));
        free(s);
        reopen_later(l);
        return;
    }
    s->link = l;
    l->stream = s;
    Tandem__V1__DecodeHello hello = TANDEM__V1__DECODE_HELLO__INIT;
    hello.router = l->o->router;
    Tandem__V1__DecodeCommand command = TANDEM__V1__DECODE_COMMAND__INIT;
    command.command_case = TANDEM__V1__DECODE_COMMAND__COMMAND_HELLO;
    command.hello = &hello;
    st = td_rpc_send(s->call, &command.base);
    if (st != TD_OK) { /* on_closed tells */
        td_rpc_cancel(s->call);
        return;
    }
    td_fleet_wired(l->o->fleet, l->worker, true);
}

static enum td_status introduce_prefill(struct td_link *l, struct td_worker *prefill)
{
    for (uint32_t i = 0; i < l->n_introduced; i++)
        if (l->introduced[i] == prefill->incarnation) return TD_OK;
    if (l->n_introduced == l->cap_introduced) {
        uint32_t cap = l->cap_introduced < 8 ? 8 : l->cap_introduced * 2;
        uint64_t *p = td_realloc(l->introduced, cap, sizeof *p);
        if (p == NULL) return TD_E_NO_MEMORY;
        l->introduced = p;
        l->cap_introduced = cap;
    }
    Tandem__V1__DecodeCommand command = TANDEM__V1__DECODE_COMMAND__INIT;
    command.command_case = TANDEM__V1__DECODE_COMMAND__COMMAND_PEER;
    command.peer = prefill->identity->descriptor;
    enum td_status st = td_rpc_send(l->stream->call, &command.base);
    if (st == TD_OK) l->introduced[l->n_introduced++] = prefill->incarnation;
    return st;
}

/* Borrows everything from r. */
static void fill_request(const struct td_link *l, struct td_request *r, Tandem__V1__TokenRequest *m)
{
    tandem__v1__token_request__init(m);
    m->request_id = r->id;
    m->token_ids = r->tokens;
    m->n_token_ids = r->n_tokens;
    m->n_prompt = r->n_prompt;
    m->sampling = r->sampling;
    m->max_tokens = r->max_tokens;
    m->stop_ids = r->stop_ids;
    m->n_stop_ids = r->n_stop_ids;
    m->n_logprobs = r->n_logprobs;
    m->want_logprobs = r->want_logprobs;
    m->min_tokens = r->min_tokens;
    uint64_t now = l->o->env->now_ns(l->o->env);
    m->age_us = now > r->t_received ? (now - r->t_received) / 1000 : 0;
    if (r->deadline_ns != TD_NEVER_NS) {
        m->timeout_us = r->deadline_ns > now ? (r->deadline_ns - now) / 1000 : 0;
        if (m->timeout_us == 0) m->timeout_us = 1; /* 0 would mean none */
    }
}

enum td_status td_link_start(struct td_request *r, struct td_err *err)
{
    struct td_link *l = r->decode->wire;
    if (l == NULL || l->stream == NULL) return td_err_set(err, TD_E_PEER_LOST, "no stream to it");
    if (td_rpc_queued_bytes(l->stream->call) > MAX_UNSENT_BYTES) return TD_E_BUSY;
    enum td_status st = r->prefill != NULL ? introduce_prefill(l, r->prefill) : TD_OK;
    if (st == TD_OK && !take_slot(l, r)) return TD_E_NO_MEMORY;
    if (st == TD_OK) {
        Tandem__V1__TokenRequest request;
        fill_request(l, r, &request);
        Tandem__V1__DecodeStart start = TANDEM__V1__DECODE_START__INIT;
        start.stream_id = r->stream_id;
        start.request = &request;
        start.prefill = r->prefill != NULL ? r->prefill->incarnation : 0;
        Tandem__V1__DecodeCommand command = TANDEM__V1__DECODE_COMMAND__INIT;
        command.command_case = TANDEM__V1__DECODE_COMMAND__COMMAND_START;
        command.start = &start;
        st = td_rpc_send(l->stream->call, &command.base);
        if (st != TD_OK) free_slot(l, r->stream_id);
    }
    return st == TD_E_CANCELED ? td_err_set(err, TD_E_PEER_LOST, "its stream is ending") : st;
}

/* Small words that must get through: if the stream takes not even these, it is of no use to anybody. */
static void send_word(struct td_link *l, const Tandem__V1__DecodeCommand *command)
{
    if (td_rpc_send(l->stream->call, &command->base) != TD_E_BUSY) return;
    TD_ERROR("decode_stream_stuck", "worker=%s unsent_bytes=%" PRIu64, l->worker->identity->name,
             td_rpc_queued_bytes(l->stream->call));
    td_rpc_cancel(l->stream->call); /* on_closed tells everybody */
}

void td_link_cancel(struct td_request *r)
{
    struct td_link *l = r->decode->wire;
    if (l == NULL || l->stream == NULL || request_of(l, r->stream_id) != r) return;
    free_slot(l, r->stream_id);
    Tandem__V1__DecodeCancel cancel = TANDEM__V1__DECODE_CANCEL__INIT;
    cancel.stream_id = r->stream_id;
    Tandem__V1__DecodeCommand command = TANDEM__V1__DECODE_COMMAND__INIT;
    command.command_case = TANDEM__V1__DECODE_COMMAND__COMMAND_CANCEL;
    command.cancel = &cancel;
    send_word(l, &command);
}

void td_link_first(struct td_request *r)
{
    struct td_link *l = r->decode->wire;
    if (l == NULL || l->stream == NULL || request_of(l, r->stream_id) != r) return;
    free_slot(l, r->stream_id);
    Tandem__V1__DecodeFirst first = TANDEM__V1__DECODE_FIRST__INIT;
    first.stream_id = r->stream_id;
    Tandem__V1__DecodeCommand command = TANDEM__V1__DECODE_COMMAND__INIT;
    command.command_case = TANDEM__V1__DECODE_COMMAND__COMMAND_FIRST;
    command.first = &first;
    send_word(l, &command);
}

/* --- runs ------------------------------------------------------------------------------------------------ */

static void on_run_event(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct run *run = td_rpc_call_user(c);
    const Tandem__V1__RunEvent *e = (const Tandem__V1__RunEvent *)msg;
    if (run->request == NULL) return;
    if (e->event_case == TANDEM__V1__RUN_EVENT__EVENT_FIRST)
        td_request_on_first(run->request, e->first);
    else if (e->event_case == TANDEM__V1__RUN_EVENT__EVENT_DONE)
        td_request_on_run_done(run->request, e->done);
}

static void on_run_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct run *run = td_rpc_call_user(c);
    struct td_request *r = run->request;
    td_list_remove(&run->link);
    free(run);
    if (r != NULL) td_request_on_run_closed(r, st, text);
}

enum td_status td_link_run(struct td_request *r, bool introduce, struct td_err *err)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_run_event, .on_closed = on_run_closed};
    struct td_link *l = r->prefill->wire;
    if (l == NULL || l->channel == NULL || !r->prefill->is_live) return td_err_set(err, TD_E_PEER_LOST, "it has left");
    struct run *run = td_calloc(1, sizeof *run);
    if (run == NULL) return TD_E_NO_MEMORY;
    td_list_init(&run->link);
    enum td_status st = td_rpc_call_start(l->channel, "/tandem.v1.Prefill/Run", &tandem__v1__run_event__descriptor,
                                          r->deadline_ns, false, NULL, &handlers, run, &run->call);
    if (st != TD_OK) {
        free(run);
        return st == TD_E_CANCELED ? TD_E_PEER_LOST : st;
    }
    Tandem__V1__TokenRequest request;
    fill_request(l, r, &request);
    Tandem__V1__RunRequest m = TANDEM__V1__RUN_REQUEST__INIT;
    m.request = &request;
    m.target = r->target;
    m.descriptor = introduce ? r->decode->identity->descriptor : NULL;
    st = td_rpc_send(run->call, &m.base);
    if (st != TD_OK) { /* closes to nobody */
        td_rpc_cancel(run->call);
        return st == TD_E_CANCELED ? TD_E_PEER_LOST : st;
    }
    td_rpc_half_close(run->call);
    run->request = r;
    td_list_push_back(&l->runs, &run->link);
    r->run = run;
    return TD_OK;
}

void td_link_run_end(struct td_request *r, bool cancel)
{
    struct run *run = r->run;
    run->request = NULL;
    td_list_remove(&run->link);
    if (cancel) td_rpc_cancel(run->call);
}

/* --- life ------------------------------------------------------------------------------------------------ */

enum td_status td_link_open(const struct td_link_options *o, struct td_worker *w)
{
    struct td_link *l = w->wire;
    if (l != NULL) {
        if (w->role == TANDEM__V1__ROLE__ROLE_DECODE && l->stream == NULL && !l->reopen.is_armed) open_stream(l);
        return TD_OK;
    }
    l = td_calloc(1, sizeof *l);
    if (l == NULL) return TD_E_NO_MEMORY;
    enum td_status st = td_rpc_channel_open(o->rpc, w->identity->rpc_address, &l->channel);
    if (st != TD_OK) {
        free(l);
        return st;
    }
    l->o = o;
    l->worker = w;
    l->reopen.fire = on_reopen;
    l->reopen_ms = MIN_REOPEN_MS;
    td_list_init(&l->runs);
    w->wire = l;
    if (w->role == TANDEM__V1__ROLE__ROLE_DECODE) open_stream(l);
    return TD_OK;
}

void td_link_close(struct td_worker *w, const char *why)
{
    struct td_link *l = w->wire;
    if (l == NULL) return;
    w->wire = NULL; /* from here on nothing new starts */
    if (w->role == TANDEM__V1__ROLE__ROLE_DECODE) td_fleet_wired(l->o->fleet, w, false);
    drop_stream(l, why);
    while (!td_list_is_empty(&l->runs)) {
        struct run *run = TD_LIST_ENTRY(l->runs.next, struct run, link);
        struct td_request *r = run->request;
        td_list_remove(&run->link);
        if (r != NULL) td_request_on_worker_lost(r, w, why); /* ends the run */
    }
    l->o->env->timer_stop(l->o->env, &l->reopen);
    td_rpc_channel_close(l->channel);
    free(l->slots);
    free(l->introduced);
    free(l);
}
