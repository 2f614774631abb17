/* tandem-bench online: load on a running cluster, so many requests open at a time, each a prompt of random tokens and
 * an answer that no stop token ends: time to the first token, time between tokens, tokens a second. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "tests/bench/bench.h"
#include "tests/bench/client.h"
#include "tests/bench/spread.h"

struct online {
    const char *router;
    uint32_t n_requests, n_at_once, n_input, n_output, n_ids;
};

static void print_ms(const char *what, double *v, size_t n)
{
    struct td_bench_spread s;
    td_bench_spread_of(v, n, &s);
    printf("%-28s p50 %9.2f  p90 %9.2f  p99 %9.2f  max %9.2f  mean %9.2f ms\n", what, s.p50 * 1e3, s.p90 * 1e3,
           s.p99 * 1e3, s.max * 1e3, s.mean * 1e3);
}

static struct td_bench_call *make_calls(const struct online *o, uint64_t seed)
{
    struct td_bench_call *calls = calloc(o->n_requests, sizeof *calls);
    TD_CHECK(calls != NULL);
    for (uint32_t i = 0; i < o->n_requests; i++) {
        struct td_bench_call *c = &calls[i];
        uint32_t *ids = malloc(o->n_input * sizeof *ids), state = (uint32_t)(seed * 7919 + i);
        c->tokens = malloc(o->n_output * sizeof *c->tokens);
        c->times = malloc(o->n_output * sizeof *c->times);
        TD_CHECK(ids != NULL && c->tokens != NULL && c->times != NULL);
        for (uint32_t k = 0; k < o->n_input; k++) ids[k] = ((state = state * 1664525u + 1013904223u) >> 8) % o->n_ids;
        c->ids = ids;
        c->n_ids = o->n_input;
        c->max_tokens = o->n_output;
        c->temperature = 1;
        c->seed = seed * 100003 + i;
        c->ignore_eos = true;
    }
    return calls;
}

static void free_calls(struct td_bench_call *calls, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        free((void *)(uintptr_t)calls[i].ids);
        free(calls[i].tokens);
        free(calls[i].times);
    }
    free(calls);
}

/* False if a request failed. */
static bool report(const struct online *o, const struct td_bench_call *calls)
{
    size_t n_tokens = 0, n_ok = 0, n_gaps = 0, n_local = 0;
    double first = 1e300, last = 0;
    double *ttft = malloc(o->n_requests * sizeof *ttft), *tpot = malloc(o->n_requests * sizeof *tpot),
           *handoff = malloc(o->n_requests * sizeof *handoff), *prefill = malloc(o->n_requests * sizeof *prefill),
           *gaps = malloc((size_t)o->n_requests * o->n_output * sizeof *gaps);
    TD_CHECK(ttft != NULL && tpot != NULL && handoff != NULL && prefill != NULL && gaps != NULL);
    for (uint32_t i = 0; i < o->n_requests; i++) {
        const struct td_bench_call *c = &calls[i];
        if (c->st != TD_OK || c->n_tokens != o->n_output) {
            printf("request %u: %u of %u tokens: %s\n", i, c->n_tokens, o->n_output,
                   c->text[0] != '\0' ? c->text : td_status_name(c->st));
            continue;
        }
        ttft[n_ok] = c->times[0] - c->begun;
        tpot[n_ok] = o->n_output > 1 ? (c->times[o->n_output - 1] - c->times[0]) / (o->n_output - 1) : 0;
        handoff[n_ok] = (double)c->handoff_us / 1e6;
        prefill[n_ok++] = (double)c->prefill_us / 1e6;
        n_local += c->was_prefilled_locally;
        n_tokens += c->n_tokens;
        for (uint32_t k = 1; k < c->n_tokens; k++) gaps[n_gaps++] = c->times[k] - c->times[k - 1];
        if (c->begun < first) first = c->begun;
        if (c->ended > last) last = c->ended;
    }
    if (n_ok > 0) {
        printf("%zu of %u requests, %u tokens in, %u out, %u at a time, %.2f s: %.0f tokens/s out, %.0f in and out\n",
               n_ok, o->n_requests, o->n_input, o->n_output, o->n_at_once, last - first,
               (double)n_tokens / (last - first), (double)(n_tokens + n_ok * o->n_input) / (last - first));
        print_ms("time to first token", ttft, n_ok);
        print_ms("time between tokens", gaps, n_gaps);
        print_ms("mean time a token, requests", tpot, n_ok);
        print_ms("prefill", prefill, n_ok);
        print_ms("first token to KV complete", handoff, n_ok);
        printf("%zu prompts computed by the decode worker; transport %s\n", n_local,
               calls[0].transport[0] != '\0' ? calls[0].transport : "none");
    }
    free(ttft);
    free(tpot);
    free(handoff);
    free(prefill);
    free(gaps);
    return n_ok == o->n_requests;
}

int td_bench_online(int argc, char **argv)
{
    struct online o = {.n_requests = 192, .n_at_once = 64, .n_input = 1024, .n_output = 1024, .n_ids = 2000};
    uint32_t n_warm = 4;
    static const struct option options[] = {
        {"router", required_argument, NULL, 'r'},      {"requests", required_argument, NULL, 'n'},
        {"concurrency", required_argument, NULL, 'c'}, {"input", required_argument, NULL, 'i'},
        {"output", required_argument, NULL, 'o'},      {"ids", required_argument, NULL, 'v'},
        {"warm-up", required_argument, NULL, 'w'},     {NULL, 0, NULL, 0}};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (c) {
        case 'r': o.router = optarg; break;
        case 'n': o.n_requests = td_bench_number("requests", optarg, 1); break;
        case 'c': o.n_at_once = td_bench_number("concurrency", optarg, 1); break;
        case 'i': o.n_input = td_bench_number("input", optarg, 1); break;
        case 'o': o.n_output = td_bench_number("output", optarg, 1); break;
        case 'v': o.n_ids = td_bench_number("ids", optarg, 1); break;
        case 'w': n_warm = td_bench_number("warm-up", optarg, 0); break;
        default: return 2;
        }
    if (o.router == NULL || optind < argc) {
        fprintf(stderr, "tandem-bench online: %s\n", o.router == NULL ? "--router HOST:PORT is missing" : argv[optind]);
        return 2;
    }
    struct td_err err = {{0}};
    struct online warm = o;
    warm.n_requests = n_warm;
    warm.n_output = o.n_output < 64 ? o.n_output : 64;
    if (n_warm > 0) {
        struct td_bench_call *calls = make_calls(&warm, 2);
        td_bench_must(td_bench_client_run(o.router, calls, n_warm, n_warm, &err), &err);
        free_calls(calls, n_warm);
    }
    struct td_bench_call *calls = make_calls(&o, 1);
    td_bench_must(td_bench_client_run(o.router, calls, o.n_requests, o.n_at_once, &err), &err);
    bool is_ok = report(&o, calls);
    free_calls(calls, o.n_requests);
    return is_ok ? 0 : 1;
}
