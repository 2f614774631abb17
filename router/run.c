#include "router/run.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/metrics/metrics.h"
#include "router/encode.h"
#include "router/router_int.h"

#define CHOICE_MAGIC 0x63686f69u /* "choi" */

struct served {
    uint32_t magic;
    struct td_run *run;
    struct td_request request;
    struct td_choice choice;
    uint64_t t_sent;         /* last tokens given to the sink; 0: none yet */
    struct td_buf arguments; /* of the call being made */
};

struct td_run {
    struct td_router *router;
    struct td_order order;
    const struct td_run_sink *sink; /* NULL: nobody listens any more */
    void *user;
    struct td_list link; /* router's runs */
    struct served *served;
    uint32_t n_served, n_open;
    struct td_timer step; /* to encode, or to tell the end: nothing is done inside the caller's call */
    bool is_told;         /* what step is for: the end */

    /* the prompts: made on a pool thread or at once */
    struct td_work work;
    bool is_encoding;
    char date[16];
    struct td_token_list *prompts;
    size_t n_prompts, n_bytes;
    uint32_t n_forced; /* tokens at the prompt's end that the answer begins with */
    enum td_status encode_st;
    struct td_err encode_err;

    bool is_too_long;
    enum td_status fail_st;
    struct td_err fail;
};

static void begin_requests(struct td_run *run);

/* --- the prompts: any thread -------------------------------------------------------------------------------------- */

static void encode(struct td_run *run)
{
    const struct td_order *o = &run->order;
    const struct td_router *ro = run->router;
    enum td_status st = TD_OK;
    for (size_t i = 0; i < run->n_prompts && st == TD_OK; i++) {
        struct td_token_list *ids = &run->prompts[i];
        if (o->is_chat) {
            struct td_chat_conversation chat = o->chat;
            if (chat.current_date == NULL) chat.current_date = run->date;
            st = td_chat_prompt(ro->format, &chat, o->tool_choice, o->tool_name, ids, &run->n_forced, &run->encode_err);
        } else if (o->prompts[i].ids != NULL) {
            td_token_list_append(ids, o->prompts[i].ids, o->prompts[i].n_ids);
        } else {
            enum td_text_mode mode = o->parse_special ? TD_TEXT_SPECIAL : TD_TEXT_ORDINARY;
            st = td_tokenizer_encode(ro->tokenizer, o->prompts[i].text.p, o->prompts[i].text.n, mode, ids,
                                     &run->encode_err);
            if (st != TD_OK) td_err_prefix(&run->encode_err, st, run->n_prompts > 1 ? "prompt[%zu]" : "prompt", i);
        }
        if (st == TD_OK && ids->failed) st = td_err_set(&run->encode_err, TD_E_NO_MEMORY, "no memory for the prompt");
    }
    run->encode_st = st;
}

static void on_pool(struct td_work *w) { encode(TD_CONTAINER_OF(w, struct td_run, work)); }

/* --- life --------------------------------------------------------------------------------------------------------- */

static void free_run(struct td_run *run)
{
    for (uint32_t i = 0; i < run->n_served; i++) {
        td_request_deinit(&run->served[i].request);
        td_choice_deinit(&run->served[i].choice);
        td_buf_free(&run->served[i].arguments);
        run->served[i].magic = 0;
    }
    for (size_t i = 0; i < run->n_prompts; i++) td_token_list_free(&run->prompts[i]);
    free(run->served);
    free(run->prompts);
    td_order_deinit(&run->order);
    free(run);
}

static void leave_if_over(struct td_run *run)
{
    if (run->n_open > 0 || run->is_encoding || run->sink != NULL) return;
    struct td_router *ro = run->router;
    ro->env->timer_stop(ro->env, &run->step);
    td_list_remove(&run->link);
    ro->n_clients--;
    free_run(run);
    td_router_client_left(ro);
}

static void on_encoded(struct td_work *w)
{
    struct td_run *run = TD_CONTAINER_OF(w, struct td_run, work);
    run->is_encoding = false;
    run->router->admit.n_tokenizing--;
    if (run->n_open > 0) begin_requests(run);
    leave_if_over(run);
}

static void on_step(struct td_timer *t)
{
    struct td_run *run = TD_CONTAINER_OF(t, struct td_run, step);
    struct td_router *ro = run->router;
    if (run->is_told) {
        const struct td_run_sink *sink = run->sink;
        if (sink != NULL) sink->on_done(run->user, run->fail_st, run->fail.text);
        run->sink = NULL;
        leave_if_over(run);
        return;
    }
    ro->admit.n_tokenizing++;
    run->is_encoding = true;
    if (run->n_bytes > TD_ENCODE_INLINE_BYTES) {
        run->work.work = on_pool;
        run->work.done = on_encoded;
        td_loop_work(ro->loop, &run->work);
    } else {
        encode(run);
        on_encoded(&run->work);
    }
}

static void tell_end(struct td_run *run)
{
    run->is_told = true;
    run->router->env->timer_start(run->router->env, &run->step, 0);
}

static void cancel_requests(struct td_run *run, enum td_status st)
{
    for (uint32_t i = 0; i < run->n_served; i++) td_request_on_client_gone(&run->served[i].request, st);
}

void td_run_cancel(struct td_run *run)
{
    run->sink = NULL;
    cancel_requests(run, TD_E_CANCELED);
    tell_end(run);
}

/* --- what the requests want of us --------------------------------------------------------------------------------- */

static struct served *served_of(struct td_request *r)
{
    struct served *s = TD_CONTAINER_OF(r, struct served, request);
    TD_MAGIC_CHECK(s, CHOICE_MAGIC);
    return s;
}

/* Counts calls, and those whose arguments no client will be able to read. */
static void watch_call(struct served *s, const struct td_choice_event *e)
{
    if (e->type == TD_CHOICE_MESSAGE_START) td_buf_clear(&s->arguments);
    if (e->type == TD_CHOICE_TEXT) td_buf_put(&s->arguments, e->text.p, e->text.n);
    if (e->type != TD_CHOICE_MESSAGE_END) return;
    td_metric_add(TD_M_tool_calls, 1);
    json_t *v = json_loadb(td_buf_cstr(&s->arguments), s->arguments.n, JSON_ALLOW_NUL, NULL);
    if (!json_is_object(v)) td_metric_add(TD_M_tool_calls_not_json, 1);
    json_decref(v);
}

static enum td_status on_choice_event(void *user, const struct td_choice_event *e)
{
    struct served *s = user;
    struct td_run *run = s->run;
    if (run->sink == NULL) return TD_E_CANCELED;
    if (e->kind == TD_CHAT_CALL) watch_call(s, e);
    return run->sink->on_event(run->user, (uint32_t)(s - run->served), e);
}

static enum td_status port_emit(void *self, struct td_request *r, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs)
{
    struct td_router *ro = self;
    struct served *s = served_of(r);
    td_metric_add(TD_M_generated_tokens, n);
    uint64_t now = ro->env->now_ns(ro->env);
    if (s->t_sent != 0)
        td_metric_observe(TD_M_itl_seconds, (double)(now - s->t_sent) / 1e9);
    else
        td_metric_observe(TD_M_ttft_seconds, (double)(now - r->t_received) / 1e9);
    s->t_sent = now;
    enum td_status st = td_choice_tokens(&s->choice, r->tokens + r->n_tokens - n, n, logprobs);
    r->is_stopped = s->choice.is_stopped;
    return st;
}

static void port_done(void *self, struct td_request *r, enum td_status st, const char *text)
{
    struct td_router *ro = self;
    struct served *s = served_of(r);
    struct td_run *run = s->run;
    if (st == TD_OK) {
        st = td_choice_end(&s->choice, r->finish_reason == TANDEM__V1__FINISH_REASON__FINISH_LENGTH);
        text = td_status_text(st);
    }
    td_front_note_done(ro, r, true, st, text);
    bool is_first_failure = st != TD_OK && run->fail_st == TD_OK;
    if (is_first_failure) run->fail_st = td_err_set(&run->fail, st, "%s", text);
    if (--run->n_open == 0)
        tell_end(run);
    else if (is_first_failure)
        cancel_requests(run, TD_E_CANCELED);
}

void td_run_bind(struct td_router *ro)
{
    td_list_init(&ro->runs);
    ro->run_ports = ro->request_ports;
    ro->run_ports.emit = port_emit;
    ro->run_ports.done = port_done;
}

/* --- from prompts to requests ------------------------------------------------------------------------------------- */

static enum td_status begin_request(struct td_run *run, struct served *s, const struct td_token_list *prompt,
                                    const char *field, struct td_err *err)
{
    struct td_params_facts f = td_front_facts(run->router);
    uint32_t *ids = td_calloc(prompt->n + 1, sizeof *ids);
    if (ids == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the prompt");
    if (prompt->n > 0) memcpy(ids, prompt->ids, prompt->n * sizeof *ids);
    run->is_too_long |=
        (f.max_context > 0 && prompt->n >= f.max_context) || (f.served_context > 0 && prompt->n >= f.served_context);
    enum td_status st = td_params_set_prompt_take(&s->request, &f, field, ids, prompt->n, err);
    if (st != TD_OK) return st;
    td_choice_force(&s->choice, prompt->ids + prompt->n - run->n_forced, run->n_forced);
    td_metric_add(TD_M_prompt_tokens, prompt->n);
    td_request_on_ready(&s->request);
    return TD_OK;
}

/* A failure ends all, so some may be over while we go through them. */
static void begin_requests(struct td_run *run)
{
    for (uint32_t i = 0; i < run->n_served; i++) {
        struct served *s = &run->served[i];
        struct td_err err = run->encode_err;
        enum td_status st = run->encode_st;
        if (td_request_is_done(&s->request)) continue;
        if (st == TD_OK) {
            char field[32];
            size_t prompt = i / run->order.n_choices;
            if (run->order.is_chat)
                snprintf(field, sizeof field, "%s", run->order.chat_field);
            else
                snprintf(field, sizeof field, run->n_prompts > 1 ? "prompt[%zu]" : "prompt", prompt);
            st = begin_request(run, s, &run->prompts[prompt], field, &err);
        }
        if (st != TD_OK) td_request_on_bad(&s->request, st, err.text);
    }
}

/* --- start -------------------------------------------------------------------------------------------------------- */

static size_t count_bytes(const struct td_order *o)
{
    size_t n = 0;
    if (!o->is_chat) {
        for (size_t i = 0; i < o->n_prompts; i++) n += o->prompts[i].text.n + o->prompts[i].n_ids / 16;
        return n;
    }
    for (size_t i = 0; i < o->chat.n_messages; i++) {
        const struct td_chat_message *m = &o->chat.messages[i];
        for (size_t k = 0; k < m->n_parts; k++) n += m->parts[k].n;
        for (size_t k = 0; k < m->n_calls; k++) n += m->calls[k].arguments.n;
        n += m->reasoning.n + 16;
    }
    return n + o->chat.n_tools * 512;
}

/* The order's limit on new tokens under the server's default and ceiling. */
static Tandem__V1__Stop stop_of(const struct td_run *run)
{
    const struct td_config *cfg = &run->router->cfg;
    Tandem__V1__Stop stop = run->order.stop;
    if (stop.max_tokens == 0) stop.max_tokens = cfg->default_max_tokens;
    bool is_above = stop.max_tokens == 0 || stop.max_tokens > cfg->max_output_tokens;
    if (cfg->max_output_tokens > 0 && is_above) {
        stop.max_tokens = cfg->max_output_tokens;
        if (stop.min_tokens > stop.max_tokens) stop.min_tokens = stop.max_tokens;
    }
    return stop;
}

/* What the client calls its request; further choices have a number behind that, if there is room. NULL: make one up. */
static const char *name_of(const struct td_order *o, uint32_t index, char out[TD_ROUTER_ID_MAX + 1])
{
    if (o->request_id == NULL || index == 0) return o->request_id;
    int n = snprintf(out, TD_ROUTER_ID_MAX + 1, "%s-%u", o->request_id, index);
    return n > 0 && n <= (int)TD_ROUTER_ID_MAX ? out : NULL;
}

/* Every choice draws from a seed of its own, which follows from the order's. */
static enum td_status prepare(struct td_run *run, struct served *s, uint32_t index, struct td_err *err)
{
    struct td_router *ro = run->router;
    struct td_params_facts f = td_front_facts(ro);
    const struct td_order *o = &run->order;
    enum td_status st;
    s->magic = CHOICE_MAGIC;
    s->run = run;
    td_request_init(&s->request, &ro->run_ports);
    s->request.deadline_ns = o->deadline_ns;
    if (o->deadline_ns == TD_NEVER_NS)
        s->request.deadline_ns = ro->env->now_ns(ro->env) + ro->cfg.request_timeout * TD_NS_PER_MS;
    char id[TD_ROUTER_ID_MAX + 1];
    TD_TRY(td_params_set_id(&s->request, name_of(o, index, id), ro->env->random(ro->env), err));
    Tandem__V1__Sampling sampling = o->sampling;
    sampling.seed += index % o->n_choices;
    Tandem__V1__Stop stop = stop_of(run);
    TD_TRY(td_params_set_options(&s->request, &f, &sampling, &stop, o->want_logprobs, o->n_logprobs,
                                 ro->env->random(ro->env), err));
    st = td_choice_init(&s->choice, o, ro->format, ro->tokenizer, ro->env->random(ro->env), on_choice_event, s);
    if (st != TD_OK) td_err_set(err, st, "no memory for another request");
out:
    return st;
}

static enum td_status check(const struct td_run *run, struct td_err *err)
{
    const struct td_router *ro = run->router;
    const struct td_order *o = &run->order;
    struct td_params_facts f = td_front_facts(ro);
    enum td_status st;
    TD_TRY(td_params_check_model(&f, o->model, err));
    if (ro->is_draining) return td_err_set(err, TD_E_DRAINING, "this router is draining");
    if (run->n_prompts == 0) return td_err_set(err, TD_E_INVALID, "prompt: must not be empty");
    if (o->is_chat && o->chat.n_messages == 0) return td_err_set(err, TD_E_INVALID, "messages: must not be empty");
    if (o->n_choices == 0 || run->n_prompts > TD_ORDER_MAX_CHOICES / o->n_choices)
        return td_err_set(err, TD_E_INVALID, "n: %zu prompts with %u choices each are more than %u choices",
                          run->n_prompts, o->n_choices, TD_ORDER_MAX_CHOICES);
    TD_TRY(td_admit_check(&ro->admit, err));
out:
    return st;
}

static enum td_status build(struct td_run *run, struct td_err *err)
{
    enum td_status st = check(run, err);
    if (st != TD_OK) return st;
    uint32_t n = (uint32_t)run->n_prompts * run->order.n_choices;
    run->prompts = td_calloc(run->n_prompts, sizeof *run->prompts);
    run->served = td_calloc(n, sizeof *run->served);
    if (run->prompts == NULL || run->served == NULL)
        return td_err_set(err, TD_E_NO_MEMORY, "no memory for another request");
    for (uint32_t i = 0; i < n; i++) {
        run->n_served++;
        st = prepare(run, &run->served[i], i, err);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

enum td_status td_run_start(struct td_router *ro, struct td_order *order, const struct td_run_sink *sink, void *user,
                            struct td_run **out, struct td_err *err)
{
    struct td_run *run = td_calloc(1, sizeof *run);
    if (run == NULL) {
        td_order_deinit(order);
        return td_err_set(err, TD_E_NO_MEMORY, "no memory for another request");
    }
    run->router = ro;
    run->order = *order;
    td_order_init(order);
    run->n_prompts = run->order.is_chat ? 1 : run->order.n_prompts;
    enum td_status st = build(run, err);
    if (st != TD_OK) {
        if (run->prompts == NULL) run->n_prompts = 0; /* none to free */
        free_run(run);
        return st;
    }
    run->sink = sink;
    run->user = user;
    run->n_open = run->n_served;
    run->n_bytes = count_bytes(&run->order);
    run->step.fire = on_step;
    td_front_today(ro, "", run->date);
    td_list_push_back(&ro->runs, &run->link);
    ro->n_clients++;
    for (uint32_t i = 0; i < run->n_served; i++) {
        td_metric_add(TD_M_requests, 1);
        td_metric_set(TD_M_requests_running, ++ro->n_running);
        td_request_begin(&run->served[i].request);
    }
    ro->env->timer_start(ro->env, &run->step, 0);
    *out = run;
    return TD_OK;
}

/* --- questions ---------------------------------------------------------------------------------------------------- */

const char *td_run_id(const struct td_run *run) { return run->served[0].request.id; }
const struct td_order *td_run_order(const struct td_run *run) { return &run->order; }
uint32_t td_run_n_choices(const struct td_run *run) { return run->n_served; }
bool td_run_is_too_long(const struct td_run *run) { return run->is_too_long; }

const struct td_request *td_run_request(const struct td_run *run, uint32_t choice)
{
    return &run->served[choice].request;
}

struct td_run_usage td_run_usage_of(const struct td_run *run)
{
    struct td_run_usage u = {0};
    for (uint32_t i = 0; i < run->n_served; i++) {
        const struct served *s = &run->served[i];
        if (i % run->order.n_choices == 0) {
            u.prompt_tokens += s->request.n_prompt;
            u.cached_tokens += s->request.cached_tokens;
        }
        u.completion_tokens += td_request_n_generated(&s->request);
        u.reasoning_tokens += td_choice_reasoning_tokens(&s->choice);
    }
    return u;
}

void td_run_describe_all(const struct td_router *ro, bool *is_first, struct td_buf *out)
{
    TD_LIST_FOREACH (it, &ro->runs) {
        const struct td_run *run = TD_LIST_ENTRY(it, struct td_run, link);
        for (uint32_t i = 0; i < run->n_served; i++) {
            if (td_request_is_done(&run->served[i].request)) continue;
            if (!*is_first) td_buf_str(out, ",");
            *is_first = false;
            td_request_describe(&run->served[i].request, out);
        }
    }
}
