#include "tests/sim/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/inference.pb-c.h"

static struct sim_world *world_of(const struct sim_client *k) { return k->all->cluster->world; }

/* What an undisturbed cluster answers. */
static void work_out_answer(struct sim_client *k)
{
    uint64_t state = 0;
    uint32_t max = k->max_tokens;
    if (max > SIM_MAX_CONTEXT - k->n_prompt) max = SIM_MAX_CONTEXT - k->n_prompt;
    for (uint32_t i = 0; i < k->n_prompt; i++) state = sim_state(state, k->prompt[i]);
    k->reason = TANDEM__V1__FINISH_REASON__FINISH_LENGTH;
    for (k->n_answer = 0; k->n_answer < max;) {
        bool is_early = k->n_answer < k->min_tokens;
        uint32_t token =
            sim_next_token(state, k->sampling_seed, k->n_answer, sim_model.eos_ids, is_early ? sim_model.n_eos : 0);
        k->answer[k->n_answer++] = token;
        state = sim_state(state, token);
        for (uint32_t e = 0; e < sim_model.n_eos; e++) {
            if (token != sim_model.eos_ids[e]) continue;
            k->reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
            return;
        }
    }
}

static void leave(struct sim_client *k)
{
    if (k->has_left || k->is_over || k->call == NULL) return;
    sim_trace(world_of(k), "* client %s leaves", k->id);
    k->has_left = true;
    td_rpc_cancel(k->call);
}

static void on_leave(struct td_timer *t) { leave(TD_CONTAINER_OF(t, struct sim_client, leave)); }

static void on_event(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct sim_client *k = td_rpc_call_user(c);
    const Tandem__V1__GenerateEvent *e = (const Tandem__V1__GenerateEvent *)msg;
    const struct sim_world *w = world_of(k);
    if (k->has_finish) sim_fail(w, "%s: an event after the last one", k->id);
    for (size_t i = 0; i < e->n_token_ids; i++) {
        if (k->n_got == k->n_answer)
            sim_fail(w, "%s: token %u came, the answer has only %u", k->id, e->token_ids[i], k->n_answer);
        if (e->token_ids[i] != k->answer[k->n_got])
            sim_fail(w, "%s: token %u of %u is %u, not %u%s", k->id, k->n_got, k->n_answer, e->token_ids[i],
                     k->answer[k->n_got],
                     k->n_got > 0 && e->token_ids[i] == k->answer[k->n_got - 1] ? " (the one before it)" : "");
        k->n_got++;
    }
    if (k->want_logprobs && e->n_logprobs != e->n_token_ids)
        sim_fail(w, "%s: %zu log-probabilities for %zu tokens", k->id, e->n_logprobs, e->n_token_ids);
    for (size_t i = 0; i < e->n_logprobs; i++)
        if (e->logprobs[i]->chosen == NULL || e->logprobs[i]->chosen->id != e->token_ids[i])
            sim_fail(w, "%s: log-probabilities of another token", k->id);
    if (e->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE) {
        k->has_finish = true;
        if (k->n_got != k->n_answer || e->finish_reason != k->reason)
            sim_fail(w, "%s: ended after %u of %u tokens, reason %d not %d", k->id, k->n_got, k->n_answer,
                     (int)e->finish_reason, (int)k->reason);
        if (e->usage == NULL || e->usage->prompt_tokens != k->n_prompt || e->usage->completion_tokens != k->n_answer)
            sim_fail(w, "%s: usage is not that of %u prompt and %u answer tokens", k->id, k->n_prompt, k->n_answer);
    }
    if (k->n_got >= k->leaves_after) leave(k);
    if (k->stalls_ns > 0) {
        sim_rpc_stall(c, w->now_ns + k->stalls_ns);
        k->is_slow = true;
    }
    k->stalls_ns = 0;
}

static void on_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct sim_client *k = td_rpc_call_user(c);
    const struct sim_world *w = world_of(k);
    if (k->is_over) sim_fail(w, "%s: ended twice", k->id);
    k->is_over = true;
    k->st = st;
    snprintf(k->text, sizeof k->text, "%s", text);
    k->ended_ns = w->now_ns;
    k->call = NULL;
    k->all->n_over++;
    k->all->n_good += st == TD_OK;
    k->all->host.env.timer_stop(&k->all->host.env, &k->leave);
    sim_trace(w, "* client %s is over: %s %s, %u of %u tokens", k->id, td_status_name(st), text, k->n_got, k->n_answer);
    if (st == TD_OK && !k->has_finish) sim_fail(w, "%s: ended well without a last event", k->id);
}

static void on_start(struct td_timer *t)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_event, .on_closed = on_closed};
    struct sim_client *k = TD_CONTAINER_OF(t, struct sim_client, start);
    struct td_env *env = &k->all->host.env;
    uint64_t now = env->now_ns(env);
    k->has_started = true;
    k->started_ns = now;
    sim_trace(world_of(k), "* client %s asks: %u tokens, %u at most to come (%u will)", k->id, k->n_prompt,
              k->max_tokens, k->n_answer);
    td_rpc_call_start(k->all->channel, "/tandem.v1.Inference/Generate", &tandem__v1__generate_event__descriptor,
                      k->deadline_ns > 0 ? now + k->deadline_ns : TD_NEVER_NS, false, NULL, &handlers, k, &k->call);
    Tandem__V1__TokenIds ids = TANDEM__V1__TOKEN_IDS__INIT;
    ids.ids = k->prompt;
    ids.n_ids = k->n_prompt;
    Tandem__V1__Stop stop = TANDEM__V1__STOP__INIT;
    stop.max_tokens = k->max_tokens;
    stop.min_tokens = k->min_tokens;
    Tandem__V1__Sampling sampling = TANDEM__V1__SAMPLING__INIT;
    sampling.seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
    sampling.seed = k->sampling_seed;
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKEN_IDS;
    m.token_ids = &ids;
    m.stop = &stop;
    m.sampling = &sampling;
    m.want_logprobs = k->want_logprobs;
    m.request_id = k->id;
    td_rpc_send(k->call, &m.base);
    td_rpc_half_close(k->call);
    if (k->leaves_ns > 0) env->timer_start(env, &k->leave, k->leaves_ns);
}

void sim_clients_init(struct sim_clients *all, struct sim_cluster *c)
{
    *all = (struct sim_clients){.cluster = c};
    td_list_init(&all->list);
    sim_host_init(&all->host, c->world, sim_add_place(c->world, "C"), 1);
    struct td_rpc *r;
    td_rpc_create(&all->host, &(struct td_rpc_options){0}, &r);
    td_rpc_channel_open(r, c->router.name, &all->channel);
}

struct sim_client *sim_client_new(struct sim_clients *all)
{
    struct sim_client *k = calloc(1, sizeof *k);
    TD_CHECK(k != NULL);
    k->all = all;
    k->n = all->n++;
    snprintf(k->id, sizeof k->id, "r%u", k->n);
    k->leaves_after = UINT32_MAX;
    k->start.fire = on_start;
    k->leave.fire = on_leave;
    td_list_push_back(&all->list, &k->link);
    return k;
}

void sim_client_begin(struct sim_client *k, uint64_t delay_ns)
{
    work_out_answer(k);
    k->all->host.env.timer_start(&k->all->host.env, &k->start, delay_ns);
}

struct sim_client *sim_client_find(const struct sim_clients *all, const char *id)
{
    TD_LIST_FOREACH (it, &all->list) {
        struct sim_client *k = TD_LIST_ENTRY(it, struct sim_client, link);
        if (strcmp(k->id, id) == 0) return k;
    }
    return NULL;
}

void sim_clients_deinit(struct sim_clients *all)
{
    td_rpc_destroy(all->host.rpc);
    TD_LIST_FOREACH_SAFE (it, &all->list) free(TD_LIST_ENTRY(it, struct sim_client, link));
}
