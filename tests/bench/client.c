#include "tests/bench/client.h"

#include <stdio.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/loop/loop.h"
#include "common/rpc/rpc.h"
#include "proto/inference.pb-c.h"
#include "tests/bench/bench.h"

#define TIMEOUT_NS (600 * TD_NS_PER_S)

struct client {
    struct td_rpc_channel *channel;
    struct td_bench_call *calls;
    uint32_t n, n_started;
};

static void on_message(struct td_rpc_call *rpc, const ProtobufCMessage *msg)
{
    struct td_bench_call *c = td_rpc_call_user(rpc);
    const Tandem__V1__GenerateEvent *e = (const Tandem__V1__GenerateEvent *)msg;
    double now = td_bench_now();
    for (size_t i = 0; i < e->n_token_ids && c->n_tokens < c->max_tokens; i++) {
        c->tokens[c->n_tokens] = e->token_ids[i];
        c->times[c->n_tokens++] = now;
    }
    if (e->usage != NULL) c->n_cached = e->usage->cached_tokens;
    if (e->timing == NULL) return;
    c->n_migrations = e->timing->migrations;
    c->queue_us = e->timing->queue_us;
    c->prefill_us = e->timing->prefill_us;
    c->handoff_us = e->timing->handoff_us;
    c->was_prefilled_locally = e->timing->prefill_worker[0] == '\0';
    snprintf(c->transport, sizeof c->transport, "%s", e->timing->transport);
}

static void on_closed(struct td_rpc_call *rpc, enum td_status st, const char *text)
{
    struct td_bench_call *c = td_rpc_call_user(rpc);
    c->st = st;
    c->ended = td_bench_now();
    snprintf(c->text, sizeof c->text, "%s", st == TD_OK ? "" : *text != '\0' ? text : td_status_text(st));
}

static void start(struct client *client, struct td_bench_call *c)
{
    static const struct td_rpc_handlers handlers = {.on_message = on_message, .on_closed = on_closed};
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__TokenIds ids = TANDEM__V1__TOKEN_IDS__INIT;
    Tandem__V1__Sampling sampling = TANDEM__V1__SAMPLING__INIT;
    Tandem__V1__Stop stop = TANDEM__V1__STOP__INIT;
    struct td_rpc_call *rpc;
    ids.ids = (uint32_t *)(uintptr_t)c->ids;
    ids.n_ids = c->n_ids;
    m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKEN_IDS;
    m.token_ids = &ids;
    sampling.temperature_opt_case = TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE;
    sampling.temperature = c->temperature;
    sampling.seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
    sampling.seed = c->seed;
    stop.max_tokens = c->max_tokens;
    stop.ignore_eos = c->ignore_eos;
    m.sampling = &sampling;
    m.stop = &stop;
    c->n_tokens = 0;
    c->st = TD_E_IN_PROGRESS;
    c->begun = td_bench_now();
    enum td_status st =
        td_rpc_call_start(client->channel, "/tandem.v1.Inference/Generate", &tandem__v1__generate_event__descriptor,
                          td_clock_ns() + TIMEOUT_NS, false, NULL, &handlers, c, &rpc);
    if (st != TD_OK) {
        c->st = st;
        snprintf(c->text, sizeof c->text, "%s", td_status_text(st));
        return;
    }
    if (td_rpc_send(rpc, &m.base) == TD_OK)
        td_rpc_half_close(rpc);
    else
        td_rpc_cancel(rpc);
}

static uint32_t count_open(const struct client *c)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n_started; i++) n += c->calls[i].st == TD_E_IN_PROGRESS;
    return n;
}

enum td_status td_bench_client_run(const char *router, struct td_bench_call *calls, uint32_t n, uint32_t n_at_once,
                                   struct td_err *err)
{
    enum td_status st;
    struct td_loop *loop = NULL;
    struct td_rpc *rpc = NULL;
    struct client c = {.calls = calls, .n = n};
    TD_TRY(td_loop_create(&loop));
    TD_TRY(td_rpc_create(loop, NULL, &rpc));
    TD_TRY(td_rpc_channel_open(rpc, router, &c.channel));
    for (;;) {
        uint32_t n_open = count_open(&c);
        for (; n_open < n_at_once && c.n_started < n; n_open++) start(&c, &calls[c.n_started++]);
        if (n_open == 0 && c.n_started == n) break;
        td_loop_run_once(loop, true);
    }
out:
    td_rpc_channel_close(c.channel);
    td_rpc_destroy(rpc);
    td_loop_destroy(loop);
    return st == TD_OK ? TD_OK : td_err_set(err, st, "--router: %s: %s", router, td_status_text(st));
}
