/* One client's call of Generate: the request message becomes an order, tokens become events, the request's end becomes
 * the call's. The request itself lives in request.c; here is what a client sees of it.
 *
 * A client that reads too slowly: what is unsent to it is looked at after each event; above --max-client-backlog its
 * request ends with SLOW_CLIENT, and nobody else notices. A client that leaves: the request is told at once, but the
 * object stays until the pool thread that may be tokenising for it is done. A client that does not take the end of its
 * answer: the call is dropped after a minute. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/metrics/metrics.h"
#include "router/answer.h"
#include "router/encode.h"
#include "router/router_int.h"

#define CLIENT_MAGIC 0x636c6e74u /* "clnt" */
#define LINGER_NS    (60 * TD_NS_PER_S)

struct client {
    uint32_t magic;
    struct td_router *router;
    struct td_rpc_call *call; /* NULL: closed */
    struct td_list link;
    struct td_request request;
    struct td_answer answer;
    bool has_order, has_begun, is_encoding;
    struct td_encode encode;
    uint64_t t_sent;        /* last event; 0: none yet */
    struct td_timer linger; /* from the end of the request to that of the call */
};

static void free_if_over(struct client *k)
{
    if (k->call != NULL || k->is_encoding || !td_request_is_done(&k->request)) return;
    struct td_router *ro = k->router;
    td_list_remove(&k->link);
    ro->n_clients--;
    td_request_deinit(&k->request);
    td_encode_deinit(&k->encode);
    td_answer_deinit(&k->answer);
    k->magic = 0;
    free(k);
    td_router_client_left(ro);
}

struct td_params_facts td_front_facts(const struct td_router *ro)
{
    struct td_params_facts f = {.model = ro->cfg.model_name, .default_max_tokens = ro->cfg.default_max_tokens};
    const Tandem__V1__Identity *id = td_fleet_facts(&ro->fleet);
    if (id == NULL) return f;
    f.n_vocab = id->vocab_size;
    f.max_context = td_fleet_most_context(&ro->fleet);
    f.served_context = td_fleet_least_context(&ro->fleet);
    f.eos_ids = id->eos_ids;
    f.n_eos_ids = id->n_eos_ids;
    return f;
}

/* --- events out --------------------------------------------------------------------------------------------------- */

/* The answer's events. Not OK ends the request. */
static enum td_status send_event(void *user, const ProtobufCMessage *event)
{
    struct client *k = user;
    if (k->call == NULL) return TD_E_CANCELED;
    enum td_status st = td_rpc_send(k->call, event);
    if (st == TD_E_BUSY) return TD_E_SLOW_CLIENT;
    if (st != TD_OK) return st;
    uint64_t now = k->router->env->now_ns(k->router->env);
    if (td_request_is_done(&k->request)) return TD_OK; /* the last event: no token came with it */
    if (k->t_sent != 0)
        td_metric_observe(TD_M_itl_seconds, (double)(now - k->t_sent) / 1e9);
    else
        td_metric_observe(TD_M_ttft_seconds, (double)(now - k->request.t_received) / 1e9);
    k->t_sent = now;
    return td_rpc_queued_bytes(k->call) > k->router->cfg.max_client_backlog ? TD_E_SLOW_CLIENT : TD_OK;
}

/* --- what the request wants of us ------------------------------------------------------------------------ */

static struct client *client_of(struct td_request *r)
{
    struct client *k = TD_CONTAINER_OF(r, struct client, request);
    TD_MAGIC_CHECK(k, CLIENT_MAGIC);
    return k;
}

static enum td_status port_place(void *self, struct td_request *r, struct td_err *err)
{
    struct td_router *ro = self;
    return td_admit_place(&ro->admit, r, err);
}

static void port_leave_queue(void *self, struct td_request *r)
{
    struct td_router *ro = self;
    td_admit_remove(&ro->admit, r);
}

static enum td_status port_decode_start(void *self, struct td_request *r, struct td_err *err)
{
    (void)self;
    return td_link_start(r, err);
}

static void port_decode_cancel(void *self, struct td_request *r)
{
    (void)self;
    td_link_cancel(r);
}

static void port_decode_first(void *self, struct td_request *r)
{
    (void)self;
    td_link_first(r);
}

static enum td_status port_run_start(void *self, struct td_request *r, bool introduce, struct td_err *err)
{
    (void)self;
    return td_link_run(r, introduce, err);
}

static void port_run_end(void *self, struct td_request *r, bool cancel)
{
    (void)self;
    td_link_run_end(r, cancel);
}

static bool port_decode_full(void *self, struct td_request *r)
{
    (void)self;
    r->decode->is_full = true;
    const Tandem__V1__Load *l = &r->decode->load;
    return r->decode->n_requests == 1 && l->n_running + l->n_waiting == 0 && l->quarantined_pages == 0;
}

static void port_prefilled(void *self, struct td_request *r)
{
    struct td_router *ro = self;
    td_fleet_prefilled(&ro->fleet, r->prefill != NULL ? r->prefill : r->decode, r->n_charged);
}

static void port_release(void *self, struct td_request *r, struct td_worker *w, bool made_room)
{
    struct td_router *ro = self;
    (void)r;
    td_fleet_release(&ro->fleet, w, made_room);
}

static enum td_status port_emit(void *self, struct td_request *r, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs)
{
    (void)self;
    struct client *k = client_of(r);
    td_metric_add(TD_M_generated_tokens, n);
    return td_answer_tokens(&k->answer, r, n, logprobs);
}

void td_front_note_done(struct td_router *ro, const struct td_request *r, bool has_begun, enum td_status st,
                        const char *text)
{
    if (has_begun) {
        td_metric_set(TD_M_requests_running, --ro->n_running);
        td_metric_observe(TD_M_request_seconds, (double)(r->t_last - r->t_received) / 1e9);
    }
    if (st != TD_OK) td_metric_add(TD_M_requests_failed, 1);
    td_metric_add(TD_M_requests_migrated, r->n_migrations);
    td_metric_add(TD_M_requests_preempted, r->n_preempted);
    if (r->t_first != 0 && r->prefill_name[0] == '\0') td_metric_add(TD_M_requests_local, 1);
    uint64_t extra_us = st == TD_OK ? td_request_handoff_extra_us(r) : UINT64_MAX;
    if (extra_us != UINT64_MAX) td_fleet_note_handoff(&ro->fleet, extra_us);
    double ttft_ms = r->t_first != 0 ? (double)(r->t_first - r->t_received) / 1e6 : 0;
    TD_INFO("request_done",
            "req=%s status=%s prompt_tokens=%u generated_tokens=%u ttft_ms=%.1f total_ms=%.1f migrations=%u deaths=%u "
            "preemptions=%u prefill=%s decode=%s text=\"%s\"",
            r->id, td_status_name(st), r->n_prompt, td_request_n_generated(r), ttft_ms,
            (double)(r->t_last - r->t_received) / 1e6, r->n_migrations, r->n_deaths, r->n_preempted, r->prefill_name,
            r->decode_name, st == TD_OK ? "" : text);
}

static void port_done(void *self, struct td_request *r, enum td_status st, const char *text)
{
    struct td_router *ro = self;
    struct client *k = client_of(r);
    if (st == TD_OK && k->call != NULL) {
        st = td_answer_end(&k->answer, r);
        text = td_status_text(st);
    }
    td_front_note_done(ro, r, k->has_begun, st, text);
    if (k->call == NULL) return; /* whoever closed it frees */
    if (st == TD_E_SLOW_CLIENT)
        td_rpc_abort(k->call, st, text); /* it would not read what is queued either */
    else
        td_rpc_finish(k->call, st, st == TD_OK ? NULL : text);
    ro->env->timer_start(ro->env, &k->linger, LINGER_NS);
}

static void on_linger(struct td_timer *t)
{
    struct client *k = TD_CONTAINER_OF(t, struct client, linger);
    TD_WARN("client_does_not_read", "req=%s unsent_bytes=%llu", k->request.id,
            (unsigned long long)td_rpc_queued_bytes(k->call));
    td_rpc_abort(k->call, TD_E_SLOW_CLIENT, td_status_text(TD_E_SLOW_CLIENT));
}

void td_front_bind(struct td_router *ro)
{
    ro->request_ports = (struct td_router_ports){
        .env = ro->env,
        .self = ro,
        .place = port_place,
        .leave_queue = port_leave_queue,
        .decode_start = port_decode_start,
        .decode_cancel = port_decode_cancel,
        .decode_first = port_decode_first,
        .run_start = port_run_start,
        .run_end = port_run_end,
        .decode_full = port_decode_full,
        .prefilled = port_prefilled,
        .release = port_release,
        .emit = port_emit,
        .done = port_done,
    };
    td_run_bind(ro);
}

/* --- the order ------------------------------------------------------------------------------------------- */

/* The prompt's tokens are there. Takes over ids. */
static void begin_with_prompt(struct client *k, const char *field, uint32_t *ids, size_t n)
{
    struct td_err err = {{0}};
    struct td_params_facts f = td_front_facts(k->router);
    enum td_status st = td_params_set_prompt_take(&k->request, &f, field, ids, n, &err);
    if (st != TD_OK) {
        td_request_on_bad(&k->request, st, err.text);
        return;
    }
    td_metric_add(TD_M_prompt_tokens, n);
    td_request_on_ready(&k->request);
}

static void on_encoded(struct td_encode *e)
{
    struct client *k = TD_CONTAINER_OF(e, struct client, encode);
    TD_MAGIC_CHECK(k, CLIENT_MAGIC);
    k->is_encoding = false;
    k->router->admit.n_tokenizing--;
    if (!td_request_is_done(&k->request)) {
        if (e->st != TD_OK) {
            td_request_on_bad(&k->request, e->st, e->err.text);
        } else {
            uint32_t *ids = e->ids.ids;
            size_t n = e->ids.n;
            e->ids = (struct td_token_list){0}; /* the request's now */
            begin_with_prompt(k, "text", ids, n);
        }
    }
    td_encode_deinit(e);
    free_if_over(k);
}

/* Everything that is checked before work is done for a request. */
static enum td_status accept_order(struct client *k, const char *model, const char *request_id,
                                   const Tandem__V1__Sampling *sampling, const Tandem__V1__Stop *stop,
                                   bool want_logprobs, uint32_t n_logprobs, struct td_err *err)
{
    struct td_router *ro = k->router;
    struct td_params_facts f = td_front_facts(ro);
    enum td_status st;
    const char *id = request_id[0] != '\0' ? request_id : td_rpc_call_metadata(k->call, "x-request-id");
    TD_TRY(td_params_set_id(&k->request, id, ro->env->random(ro->env), err));
    TD_TRY(td_params_check_model(&f, model, err));
    TD_TRY(td_params_set_options(&k->request, &f, sampling, stop, want_logprobs, n_logprobs, ro->env->random(ro->env),
                                 err));
out:
    return st;
}

static enum td_status begin(struct client *k, struct td_err *err)
{
    struct td_router *ro = k->router;
    if (ro->is_draining) return td_err_set(err, TD_E_DRAINING, "this router is draining");
    enum td_status st = td_admit_check(&ro->admit, err);
    if (st != TD_OK) return st;
    k->has_begun = true;
    td_metric_add(TD_M_requests, 1);
    td_metric_set(TD_M_requests_running, ++ro->n_running);
    td_request_begin(&k->request);
    return TD_OK;
}

/* Until the job is done the client object stays. done may run inside. */
static void encoding(struct client *k)
{
    k->is_encoding = true;
    k->router->admit.n_tokenizing++;
}

static enum td_status not_encoding(struct client *k, struct td_err *err)
{
    k->is_encoding = false;
    k->router->admit.n_tokenizing--;
    return td_err_set(err, TD_E_NO_MEMORY, "no memory for the prompt");
}

static enum td_status order_generate(struct client *k, const Tandem__V1__GenerateRequest *m, struct td_err *err)
{
    struct td_router *ro = k->router;
    enum td_status st =
        accept_order(k, m->model, m->request_id, m->sampling, m->stop, m->want_logprobs, m->n_logprobs, err);
    if (st != TD_OK) return st;
    bool is_text = m->prompt_case == TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    size_t n = is_text                                                            ? m->text.len
               : m->prompt_case == TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKEN_IDS ? m->token_ids->n_ids
                                                                                  : 0;
    if (n == 0) return td_err_set(err, TD_E_INVALID, "prompt: token_ids or text must be given and not empty");
    st = begin(k, err);
    if (st != TD_OK) return st;
    if (is_text) {
        encoding(k);
        st = td_encode_text(&k->encode, ro->loop, ro->tokenizer, m->text.data, n,
                            m->parse_special ? TD_TEXT_SPECIAL : TD_TEXT_ORDINARY, on_encoded);
        return st == TD_OK ? TD_OK : not_encoding(k, err);
    }
    uint32_t *ids = td_calloc(n, sizeof *ids);
    if (ids == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the prompt");
    memcpy(ids, m->token_ids->ids, n * sizeof *ids);
    begin_with_prompt(k, "token_ids", ids, n);
    return TD_OK;
}

void td_front_today(const struct td_router *ro, const char *asked, char out[16])
{
    const char *given = asked[0] != '\0' ? asked : ro->cfg.current_date;
    if (given[0] != '\0') {
        snprintf(out, 16, "%.10s", given);
        return;
    }
    time_t now = (time_t)(td_clock_wall_ns() / TD_NS_PER_S);
    struct tm tm;
    if (localtime_r(&now, &tm) == NULL || strftime(out, 16, "%Y-%m-%d", &tm) == 0) out[0] = '\0';
}

/* --- the call -------------------------------------------------------------------------------------------- */

static struct client *client_of_call(struct td_rpc_call *c)
{
    struct client *k = td_rpc_call_user(c);
    TD_MAGIC_CHECK(k, CLIENT_MAGIC);
    return k;
}

static void on_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct client *k = client_of_call(c);
    if (k->has_order) return;
    k->has_order = true;
    struct td_err err = {{0}};
    enum td_status st = order_generate(k, (const Tandem__V1__GenerateRequest *)msg, &err);
    if (st != TD_OK) td_request_on_bad(&k->request, st, err.text);
}

static void on_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct client *k = client_of_call(c);
    (void)text;
    k->call = NULL;
    k->router->env->timer_stop(k->router->env, &k->linger);
    td_request_on_client_gone(&k->request, st == TD_E_DEADLINE ? st : TD_E_CANCELED);
    free_if_over(k);
}

void td_front_open_generate(struct td_rpc_call *c, void *service)
{
    struct td_router *ro = service;
    static const struct td_rpc_handlers handlers = {.on_message = on_message, .on_closed = on_closed};
    struct client *k = td_calloc(1, sizeof *k);
    if (k == NULL) {
        td_rpc_finish(c, TD_E_NO_MEMORY, NULL);
        return;
    }
    k->magic = CLIENT_MAGIC;
    k->router = ro;
    k->call = c;
    k->linger.fire = on_linger;
    td_request_init(&k->request, &ro->request_ports);
    td_answer_init(&k->answer, ro->tokenizer, send_event, k);
    uint64_t deadline = td_rpc_call_deadline_ns(c);
    k->request.deadline_ns =
        deadline != TD_NEVER_NS ? deadline : ro->env->now_ns(ro->env) + ro->cfg.request_timeout * TD_NS_PER_MS;
    td_list_push_back(&ro->clients, &k->link);
    ro->n_clients++;
    td_rpc_call_accept(c, &handlers, k);
}

void td_front_describe(const struct td_router *ro, struct td_buf *out)
{
    td_buf_str(out, "[");
    bool is_first = true;
    TD_LIST_FOREACH (it, &ro->clients) {
        const struct client *k = TD_LIST_ENTRY(it, struct client, link);
        if (td_request_is_done(&k->request)) continue;
        if (!is_first) td_buf_str(out, ",");
        is_first = false;
        td_request_describe(&k->request, out);
    }
    td_run_describe_all(ro, &is_first, out);
    td_buf_str(out, "]");
}
