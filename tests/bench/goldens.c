/* tandem-bench goldens: asks a running cluster for the small checkpoint's recorded continuations and compares token by
 * token. Where the recorded margin between the two likeliest tokens is above --margin they must be equal; where it is
 * not, a difference ends that answer's comparison. --expect: what must have happened meanwhile, or the check fails. */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "tests/bench/bench.h"
#include "tests/bench/client.h"

#define MAX_PROMPTS 64u

struct golden {
    const char *name;
    uint32_t *ids, *greedy, n_ids, n_greedy;
    double *margins;
    bool stopped;
};

struct tally {
    uint32_t n_answers, n_equal, n_near, n_wrong, n_cached, n_migrations, n_local, n_remote;
};

static uint32_t *read_ids(const json_t *j, uint32_t *n_out)
{
    size_t i, n = json_array_size(j);
    json_t *v;
    uint32_t *ids = calloc(n + 1, sizeof *ids);
    TD_CHECK(ids != NULL);
    json_array_foreach (j, i, v) ids[i] = (uint32_t)json_integer_value(v);
    *n_out = (uint32_t)n;
    return ids;
}

static uint32_t read_goldens(const json_t *root, struct golden *g)
{
    size_t i, k;
    uint32_t n = 0;
    json_t *j, *m;
    json_array_foreach (json_object_get(root, "prompts"), i, j) {
        if (n == MAX_PROMPTS) break;
        struct golden *x = &g[n++];
        x->name = json_string_value(json_object_get(j, "name"));
        x->ids = read_ids(json_object_get(j, "ids"), &x->n_ids);
        x->greedy = read_ids(json_object_get(j, "greedy"), &x->n_greedy);
        x->margins = calloc(x->n_greedy + 1, sizeof *x->margins);
        TD_CHECK(x->margins != NULL);
        json_array_foreach (json_object_get(j, "greedy_margin"), k, m)
            if (k < x->n_greedy) x->margins[k] = json_number_value(m);
        x->stopped = json_is_true(json_object_get(j, "stopped"));
    }
    return n;
}

static void compare(const struct golden *g, const struct td_bench_call *c, double margin, struct tally *t)
{
    /* The recorded answers end with the stop token, which a cluster keeps to itself. */
    uint32_t n = g->stopped && g->n_greedy > 0 ? g->n_greedy - 1 : g->n_greedy;
    t->n_answers++;
    t->n_cached += c->n_cached;
    t->n_migrations += c->n_migrations;
    t->n_local += c->was_prefilled_locally;
    t->n_remote += !c->was_prefilled_locally;
    if (c->st != TD_OK) {
        printf("  %s: %s\n", g->name, c->text);
        t->n_wrong++;
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        bool is_there = i < c->n_tokens;
        if (is_there && c->tokens[i] == g->greedy[i]) continue;
        if (g->margins[i] <= margin) {
            t->n_near++;
            return;
        }
        printf("  %s: token %u is %d, not %u (margin %.3g)\n", g->name, i, is_there ? (int)c->tokens[i] : -1,
               g->greedy[i], g->margins[i]);
        t->n_wrong++;
        return;
    }
    bool goes_on = c->n_tokens > n && (!g->stopped || c->tokens[n] != g->greedy[n]);
    if (goes_on) printf("  %s: goes on after its end\n", g->name);
    t->n_wrong += goes_on;
    t->n_equal += !goes_on;
}

static bool did_happen(const char *expect, const struct tally *t)
{
    const struct {
        const char *name;
        bool is_so;
    } all[] = {{"cached", t->n_cached > 0},
               {"migrated", t->n_migrations > 0},
               {"local", t->n_local > 0 && t->n_remote == 0},
               {"remote", t->n_remote > 0 && t->n_local == 0}};
    for (size_t i = 0; i < TD_COUNT(all); i++)
        if (strcmp(expect, all[i].name) == 0) {
            if (!all[i].is_so) printf("  expected: %s; it did not happen\n", expect);
            return all[i].is_so;
        }
    fprintf(stderr, "tandem-bench goldens: --expect: \"%s\" is not cached, migrated, local or remote\n", expect);
    exit(2);
}

int td_bench_goldens(int argc, char **argv)
{
    const char *router = NULL, *path = "tests/tiny/goldens.json", *expect[8];
    uint32_t n_rounds = 1, n_at_once = 8, n_expect = 0;
    double margin = 0.2;
    static const struct option options[] = {{"router", required_argument, NULL, 'r'},
                                            {"goldens", required_argument, NULL, 'g'},
                                            {"rounds", required_argument, NULL, 'n'},
                                            {"concurrency", required_argument, NULL, 'c'},
                                            {"margin", required_argument, NULL, 'm'},
                                            {"expect", required_argument, NULL, 'e'},
                                            {NULL, 0, NULL, 0}};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'r': router = optarg; break;
        case 'g': path = optarg; break;
        case 'n': n_rounds = td_bench_number("rounds", optarg, 1); break;
        case 'c': n_at_once = td_bench_number("concurrency", optarg, 1); break;
        case 'm': margin = atof(optarg); break;
        case 'e':
            if (n_expect < TD_COUNT(expect)) expect[n_expect++] = optarg;
            break;
        default: return 2;
        }
    json_error_t e;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &e);
    if (root == NULL || router == NULL) {
        fprintf(stderr, "tandem-bench goldens: %s\n", router == NULL ? "--router HOST:PORT is missing" : e.text);
        return 2;
    }
    struct golden g[MAX_PROMPTS];
    struct tally t = {0};
    struct td_err err = {{0}};
    uint32_t n = read_goldens(root, g), n_calls = n * n_rounds;
    struct td_bench_call *calls = calloc(n_calls, sizeof *calls);
    TD_CHECK(calls != NULL && n > 0);
    for (uint32_t i = 0; i < n_calls; i++) {
        const struct golden *x = &g[i % n];
        calls[i] = (struct td_bench_call){.ids = x->ids, .n_ids = x->n_ids, .max_tokens = x->n_greedy, .seed = 1};
        calls[i].tokens = calloc(x->n_greedy, sizeof *calls[i].tokens);
        calls[i].times = calloc(x->n_greedy, sizeof *calls[i].times);
        TD_CHECK(calls[i].tokens != NULL && calls[i].times != NULL);
    }
    double begun = td_bench_now();
    td_bench_must(td_bench_client_run(router, calls, n_calls, n_at_once, &err), &err);
    for (uint32_t i = 0; i < n_calls; i++) compare(&g[i % n], &calls[i], margin, &t);
    bool is_ok = t.n_wrong == 0;
    for (uint32_t i = 0; i < n_expect; i++) is_ok &= did_happen(expect[i], &t);
    printf("goldens: %u answers: %u equal, %u differ where two tokens are near, %u wrong; %u prompt tokens cached, %u "
           "migrations, %u prompts computed by decode workers; %.1f s\n",
           t.n_answers, t.n_equal, t.n_near, t.n_wrong, t.n_cached, t.n_migrations, t.n_local, td_bench_now() - begun);
    for (uint32_t i = 0; i < n_calls; i++) {
        free(calls[i].tokens);
        free(calls[i].times);
    }
    for (uint32_t i = 0; i < n; i++) {
        free(g[i].ids);
        free(g[i].greedy);
        free(g[i].margins);
    }
    free(calls);
    json_decref(root);
    return is_ok ? 0 : 1;
}
