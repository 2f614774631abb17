/* Many generate calls to a router at once, each token with the time it came. */
#ifndef TESTS_BENCH_CLIENT_H
#define TESTS_BENCH_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_bench_call {
    const uint32_t *ids; /* the prompt */
    uint32_t n_ids, max_tokens;
    float temperature;
    uint64_t seed;
    bool ignore_eos;
    /* out; tokens and times (td_bench_now) have room for max_tokens */
    uint32_t *tokens, n_tokens;
    double *times, begun, ended;
    uint32_t n_cached, n_migrations;
    uint64_t queue_us, prefill_us, handoff_us;
    bool was_prefilled_locally;
    char transport[32];
    enum td_status st;
    char text[160]; /* of a failure */
};

/* Calls are started in order, n_at_once open at a time, until all are over. A call's failure is its own; the function
 * fails if the router's address is not one. */
enum td_status td_bench_client_run(const char *router, struct td_bench_call *calls, uint32_t n, uint32_t n_at_once,
                                   struct td_err *err);

#endif
