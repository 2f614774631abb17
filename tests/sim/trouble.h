/* What a seed means: a cluster's shape, the clients' orders, and what goes wrong when. All of it is drawn before the
 * run begins; then trouble strikes by timers of the world. */
#ifndef TESTS_SIM_TROUBLE_H
#define TESTS_SIM_TROUBLE_H

#include "tests/sim/client.h"
#include "tests/sim/cluster.h"

#define SIM_MAX_TROUBLES 24u

/* clang-format off */
#define SIM_TROUBLES(X)                                                                \
    X(CRASH)  /* a process dies; another starts in its place */                        \
    X(LEAVE)  /* SIGTERM; another starts in its place */                               \
    X(STALL)  /* a process stands still for a while */                                 \
    X(JUMP)   /* the clock of a process jumps ahead */                                 \
    X(SLOW)   /* a link is slow for a while */                                         \
    X(BLOCK)  /* nothing gets through a link for a while */                            \
    X(BREAK)  /* the connections between two places break */                           \
    X(LOSE)   /* some transfer messages of a worker are lost, or arrive twice */       \
    X(FAIL)   /* an engine fails a step */                                             \
    X(HANG)   /* an engine hangs */
/* clang-format on */
enum sim_trouble_kind {
#define X(name) SIM_##name,
    SIM_TROUBLES(X)
#undef X
        SIM_N_TROUBLES
};

struct sim_trouble {
    enum sim_trouble_kind kind;
    enum sim_moment aim; /* not AT_TIME: once it is due, it waits for this to happen at its place */
    uint64_t aim_ns;     /* and then so long */
    bool is_waiting;
    struct sim_place *place, *other; /* other: of links */
    uint64_t for_ns;                 /* how long; CRASH, LEAVE: until the next life; CRASH: notice_ns apart */
    uint64_t notice_ns;
    uint32_t amount;
    struct sim_plot *plot;
    struct td_timer begin, end;
};

struct sim_plot {
    struct sim_cluster *cluster;
    struct sim_trouble troubles[SIM_MAX_TROUBLES];
    uint32_t n_troubles;
    bool is_calm; /* this seed has none */
    uint64_t last_start_ns;
};

void sim_plot_make(struct sim_plot *plot, struct sim_cluster *c, struct sim_clients *clients, bool is_calm);
void sim_plot_end(struct sim_plot *plot); /* everything that was stopped goes on, everybody is there again */

#endif
