/* Clients: each submits one request by Inference.Generate and knows the right answer beforehand. What it sees is judged
 * as it arrives: no token lost, repeated or wrong, one end. */
#ifndef TESTS_SIM_CLIENT_H
#define TESTS_SIM_CLIENT_H

#include "tests/sim/cluster.h"

#define SIM_MAX_ANSWER 96u

struct sim_client {
    struct td_list link;
    struct sim_clients *all;
    uint32_t n;
    char id[16];
    /* the order */
    uint32_t prompt[SIM_MAX_CONTEXT], n_prompt;
    uint32_t max_tokens, min_tokens;
    uint64_t sampling_seed, deadline_ns; /* 0: none */
    uint32_t leaves_after;               /* tokens; UINT32_MAX: stays */
    uint64_t leaves_ns;                  /* after the start; 0: stays */
    uint64_t stalls_ns;                  /* reads nothing for so long after its first token */
    bool want_logprobs, is_slow;
    /* the right answer */
    uint32_t answer[SIM_MAX_ANSWER], n_answer;
    Tandem__V1__FinishReason reason;
    /* what came */
    struct td_rpc_call *call;
    uint32_t n_got;
    bool has_started, has_finish, is_over, has_left;
    enum td_status st;
    char text[200];
    uint64_t started_ns, ended_ns;
    struct td_timer start, leave;
};

struct sim_clients {
    struct sim_cluster *cluster;
    struct td_loop host;
    struct td_rpc_channel *channel;
    struct td_list list;
    uint32_t n, n_over, n_good;
};

void sim_clients_init(struct sim_clients *all, struct sim_cluster *c);
/* The order is filled by the caller, then the client is told when to begin. */
struct sim_client *sim_client_new(struct sim_clients *all);
void sim_client_begin(struct sim_client *k, uint64_t delay_ns);
struct sim_client *sim_client_find(const struct sim_clients *all, const char *id);
void sim_clients_deinit(struct sim_clients *all);

#endif
