/* tandem-bench steps: what lies between decode steps. A decode worker and an engine as in the daemon, with their
 * threads and mail, and requests that never end; only routers are missing. The device's clock says how long it computed
 * and how long it waited for the next step to begin: "gap" is all that is not computing, copies of plans and tokens
 * included. */
#include <getopt.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "decode/worker.h"
#include "tests/bench/bench.h"
#include "tests/bench/rig.h"

#define MAX_BATCH 256u
#define SETTLE    20u /* steps of the full batch before any counts */
#define MAX_STEPS 2000u
#define PROMPT    1u /* a row like any other: all run at once */

struct steps {
    struct td_bench_rig_options o;
    struct td_bench_rig r;
    struct td_loop *loop;
    struct td_engine *engine;
    struct td_kv_pages *kv;
    struct td_decode_worker *worker;
    uint32_t batch, n_wanted;
    /* the rank's thread */
    double busy_us[MAX_STEPS], gap_us[MAX_STEPS], begun_s, ended_s;
    uint32_t n_settled;
    _Atomic uint32_t n_timed;
    bool has_stopped;
};

/* --- the rank's thread ------------------------------------------------------------------------------------- */

static void on_timed(void *user, const struct td_batch *b, double busy_us, double gap_us)
{
    struct steps *s = user;
    uint32_t n = atomic_load(&s->n_timed);
    bool is_decode = b->n_segments == s->batch && gap_us > 0;
    for (uint32_t i = 0; i < b->n_segments; i++) is_decode &= b->segments[i].n_tokens == 1;
    if (!is_decode || n == s->n_wanted || s->n_settled++ < SETTLE) return;
    if (n == 0) s->begun_s = td_bench_now() - busy_us / 1e6 - gap_us / 1e6;
    s->busy_us[n] = busy_us;
    s->gap_us[n] = gap_us;
    s->ended_s = td_bench_now();
    atomic_store(&s->n_timed, n + 1);
}

/* --- the worker's world ------------------------------------------------------------------------------------ */

static enum td_status submit(void *self, struct td_batch *b)
{
    return td_engine_submit(((struct steps *)self)->engine, b);
}

static enum td_status send_events(void *self, void *call, const Tandem__V1__DecodeEvents *ev)
{
    struct steps *s = self;
    (void)call;
    for (size_t i = 0; i < ev->n_finished && !s->has_stopped; i++) {
        fprintf(stderr, "tandem-bench steps: a request ended: %s %s\n", ev->finished[i]->status_name,
                ev->finished[i]->message);
        exit(1);
    }
    if (atomic_load(&s->n_timed) == s->n_wanted && !s->has_stopped) {
        s->has_stopped = true;
        td_loop_stop(s->loop);
    }
    return TD_OK;
}

static void close_call(void *self, void *call, enum td_status st, const char *text)
{
    (void)self;
    (void)call;
    (void)st;
    (void)text;
}

static void introduce(void *self, const Tandem__V1__PeerDescriptor *peer)
{
    (void)self;
    (void)peer;
}

static enum td_status check_peer(void *self, uint64_t prefill, struct td_err *err)
{
    (void)self;
    (void)prefill;
    return td_err_set(err, TD_E_UNKNOWN_PEER, "there is no prefill worker here");
}

static enum td_status send_peer(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n)
{
    (void)self;
    (void)prefill;
    (void)id;
    (void)data;
    (void)n;
    return TD_E_UNKNOWN_PEER;
}

static const char *transport(void *self, uint64_t prefill)
{
    (void)self;
    (void)prefill;
    return "?";
}

static void on_drained(void *self) { td_loop_stop(((struct steps *)self)->loop); }

static void on_broken(void *self, enum td_status st, const char *why)
{
    (void)self;
    fprintf(stderr, "tandem-bench steps: %s: %s\n", td_status_name(st), why);
    exit(1);
}

static void on_step(struct td_engine *e, struct td_batch *b, enum td_status st, void *user)
{
    (void)e;
    (void)b;
    td_decode_worker_on_step(((struct steps *)user)->worker, st);
}

/* --- a run ------------------------------------------------------------------------------------------------- */

static void command(struct steps *s, struct td_decode_stream *router, Tandem__V1__DecodeCommand__CommandCase which,
                    void *body)
{
    Tandem__V1__DecodeCommand c = TANDEM__V1__DECODE_COMMAND__INIT;
    c.command_case = which;
    c.hello = body; /* one of a union of pointers */
    td_decode_worker_on_command(s->worker, router, &c);
}

static void start_request(struct steps *s, struct td_decode_stream *router, uint32_t i, float top_p)
{
    uint32_t tokens[PROMPT];
    for (uint32_t k = 0; k < PROMPT; k++) tokens[k] = s->r.tokens[(i * 131u + k) % s->o.n_ctx];
    Tandem__V1__Sampling sampling = TANDEM__V1__SAMPLING__INIT;
    sampling.temperature_opt_case = TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE;
    sampling.temperature = 1;
    sampling.top_p_opt_case = TANDEM__V1__SAMPLING__TOP_P_OPT_TOP_P;
    sampling.top_p = top_p;
    sampling.seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
    sampling.seed = i;
    Tandem__V1__TokenRequest q = TANDEM__V1__TOKEN_REQUEST__INIT;
    q.request_id = "bench";
    q.token_ids = tokens;
    q.n_token_ids = PROMPT;
    q.n_prompt = PROMPT;
    q.sampling = &sampling;
    q.max_tokens = s->o.n_ctx - PROMPT;
    Tandem__V1__DecodeStart m = TANDEM__V1__DECODE_START__INIT;
    m.stream_id = i;
    m.request = &q;
    command(s, router, TANDEM__V1__DECODE_COMMAND__COMMAND_START, &m);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double at(double *v, uint32_t n, double share)
{
    qsort(v, n, sizeof *v, by_value);
    return v[(uint32_t)((n - 1) * share)];
}

static void run(struct steps *s, uint32_t batch, uint32_t depth, float top_p)
{
    struct td_err none = {{0}};
    struct td_decode_worker_options o = {.incarnation = 1,
                                         .window_tokens = s->r.c->window,
                                         .n_ranks = 1,
                                         .n_vocab = s->r.c->vocab,
                                         .max_context_tokens = s->o.n_ctx,
                                         .max_batch = batch,
                                         .chunk_tokens = s->o.chunk,
                                         .step_depth = depth};
    struct td_decode_ports ports = {.env = td_loop_env(s->loop),
                                    .self = s,
                                    .submit = submit,
                                    .send = send_events,
                                    .close = close_call,
                                    .introduce = introduce,
                                    .check_peer = check_peer,
                                    .send_peer = send_peer,
                                    .transport = transport,
                                    .drained = on_drained,
                                    .broken = on_broken};
    for (int g = 0; g < TD_KV_N_GROUPS; g++) o.kv[g] = s->r.o.kv[g];
    s->batch = batch;
    s->n_settled = 0;
    s->has_stopped = false;
    td_bench_must(td_decode_worker_create(&o, s->kv, &ports, &s->worker), &none);
    struct td_decode_stream *router = td_decode_worker_on_stream(s->worker, s);
    TD_CHECK(router != NULL);
    Tandem__V1__DecodeHello hello = TANDEM__V1__DECODE_HELLO__INIT;
    command(s, router, TANDEM__V1__DECODE_COMMAND__COMMAND_HELLO, &hello);
    atomic_store(&s->n_timed, 0);
    for (uint32_t i = 0; i < batch; i++) start_request(s, router, i, top_p);
    td_bench_must(td_loop_run(s->loop), &none);
    uint32_t n = s->n_wanted;
    double wall_us = (s->ended_s - s->begun_s) * 1e6 / n, busy = 0, gap = 0;
    for (uint32_t i = 0; i < n; i++) {
        busy += s->busy_us[i] / n;
        gap += s->gap_us[i] / n;
    }
    printf(
        "batch %3u, %u in flight, %s: step %8.1f us on the wall, device %8.1f; gap median %6.1f, mean %6.1f, p99 %6.1f "
        "(%4.1f %% of the step)\n",
        batch, depth, top_p < 1 ? "top-p" : "plain", wall_us, busy, at(s->gap_us, n, 0.5), gap, at(s->gap_us, n, 0.99),
        100 * gap / wall_us);
    td_decode_worker_on_stream_closed(s->worker, router);
    td_decode_worker_drain(s->worker);
    td_bench_must(td_loop_run(s->loop), &none);
    td_decode_worker_destroy(s->worker);
}

int td_bench_steps(int argc, char **argv)
{
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'},      {"model", required_argument, NULL, 'm'},
        {"moe-weights", required_argument, NULL, 'w'}, {"steps", required_argument, NULL, 's'},
        {"graphs", required_argument, NULL, 'g'},      {NULL, 0, NULL, 0}};
    static const uint32_t batches[] = {1, 8, 64, 128};
    const char *form = "mxfp4", *graphs = "lazy";
    static struct steps s;
    s.o = (struct td_bench_rig_options){
        .config = "20b", .device = "cuda", .kv = TD_BF16, .chunk = 2048, .n_seqs = 128, .n_ctx = 2048};
    s.n_wanted = 200;
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'c': s.o.config = optarg; break;
        case 'm': s.o.model = optarg; break;
        case 'w': form = optarg; break;
        case 's': s.n_wanted = td_bench_number("steps", optarg, 1); break;
        case 'g': graphs = optarg; break;
        default: return 2;
        }
    if (optind < argc || s.n_wanted > MAX_STEPS / 2) {
        fprintf(stderr, "tandem-bench steps: %s\n", optind < argc ? "no such argument" : "--steps: at most 1000");
        return 2;
    }
    s.o.form = td_bench_expert_form(form);
    s.o.n_tokens = (uint64_t)s.o.n_seqs * s.o.n_ctx;
    td_log_open("tandem-bench", strcmp(graphs, "start") == 0 ? TD_LOG_INFO : TD_LOG_WARN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct td_err err = {{0}};
    td_bench_rig_open(&s.o, &s.r);
    td_forward_free(&s.r.forward); /* the engine has its own */
    td_bench_must(td_loop_create(&s.loop), &err);
    struct td_engine_options e = s.r.o;
    e.max_batch_tokens = s.o.chunk + s.o.n_seqs;
    e.graphs = strcmp(graphs, "start") == 0 ? TD_GRAPHS_START
               : strcmp(graphs, "off") == 0 ? TD_GRAPHS_OFF
                                            : TD_GRAPHS_LAZY;
    e.timed = on_timed;
    e.timed_user = &s;
    struct td_engine_handlers h = {.on_done = on_step};
    td_bench_must(td_engine_create(s.r.model, &e, s.loop, &h, &s, &s.engine, &err), &err);
    uint32_t n_pages[TD_KV_N_GROUPS] = {s.r.o.kv[TD_KV_SLIDING].n_pages, s.r.o.kv[TD_KV_FULL].n_pages};
    td_bench_must(td_kv_pages_create(n_pages, &s.kv), &err);
    printf("%s, experts %s, graphs %s, %u steps each\n", s.o.model != NULL ? s.o.model : s.o.config, form, graphs,
           s.n_wanted);
    for (size_t i = 0; i < TD_COUNT(batches); i++)
        for (uint32_t depth = 1; depth <= 2; depth++) run(&s, batches[i], depth, 1);
    run(&s, 64, 2, 0.95f);
    td_engine_destroy(s.engine);
    td_kv_pages_destroy(s.kv);
    td_loop_destroy(s.loop);
    td_bench_rig_close(&s.r);
    return 0;
}
