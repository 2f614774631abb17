/* The daemons of a simulated cluster, each put together as its main.c does it, on the twins. A place (P1, D2, R) has
 * one process at most; it may die or leave and another be started in its stead. */
#ifndef TESTS_SIM_CLUSTER_H
#define TESTS_SIM_CLUSTER_H

#include "common/transfer/memory.h"
#include "decode/daemon.h"
#include "prefill/daemon.h"
#include "tests/sim/engine.h"
#include "tests/sim/model.h"
#include "tests/sim/router.h"
#include "tests/sim/world.h"

#define SIM_MAX_WORKERS 8u
#define SIM_MAX_PAGES   256u

enum sim_role { SIM_ROUTER, SIM_PREFILL, SIM_DECODE };

struct sim_shape { /* what a worker is started with, in all its lives */
    uint32_t tp;
    uint32_t n_pages[TD_KV_N_GROUPS];
    uint32_t max_batch, chunk_tokens;
    bool has_prefix_cache;
    uint32_t quarantine_ms, step_timeout_ms, drain_timeout_ms;
    uint64_t layer_ns, token_ns;
    uint32_t rpc_queue_bytes;         /* unsent, per call; 0: as usual */
    uint64_t window_bytes, put_bytes; /* of the sender; 0: as usual */
    struct td_xfer_memory_trouble trouble;
};

/* What a page was after the last event. */
struct sim_page_mark {
    enum { SIM_PAGE_HELD, SIM_PAGE_FREE, SIM_PAGE_KEPT } was;
    uint64_t sum; /* KEPT: of its content */
};

/* One life. It is kept until the end of the world when it dies: what it leaves behind is never touched again. */
struct sim_process {
    struct td_loop host; /* first */
    struct sim_cluster *cluster;
    struct sim_place *place;
    enum sim_role role;
    union {
        struct td_router *router;
        struct td_prefill_daemon *prefill;
        struct td_decode_daemon *decode;
    };
    struct td_worker *worker;                                  /* of the two workers */
    uint64_t quarantined_since_ns;                             /* 0: nothing is */
    struct sim_page_mark marks[TD_KV_N_GROUPS][SIM_MAX_PAGES]; /* check.c's */
    struct td_list link;
};

struct sim_place {
    uint32_t address;
    char name[8];
    enum sim_role role;
    struct sim_shape shape;
    uint32_t n_lives, n_troubles; /* n_troubles: that struck it so far */
    bool is_losing;               /* messages of its transfer */
    struct sim_process *now;      /* NULL: nobody there */
    struct td_list link;
};

/* Moments at which trouble does most harm: it may be aimed at them. */
enum sim_moment { SIM_AT_TIME, SIM_AT_PUT, SIM_AT_RESERVED, SIM_AT_RUN, SIM_AT_FIRST, SIM_AT_TOKENS, SIM_N_MOMENTS };

struct sim_cluster {
    struct sim_world *world;
    struct sim_place router, workers[SIM_MAX_WORKERS];
    uint32_t n_workers;
    struct td_list dead;
    struct td_config router_cfg;
    uint64_t n_incarnations;
    /* check.c: a put is about to be written into a worker's pool. */
    void (*on_land)(struct sim_process *p, uint64_t from, void *at, size_t n, const void *data);
    /* trouble.c: something happens between two places. */
    void (*on_moment)(struct sim_cluster *c, enum sim_moment m, uint32_t a, uint32_t b);
    void *plot;
    uint64_t last_silence_ns; /* when a worker stood still or lost messages last */
    uint32_t n_losses;        /* times that transfer messages began to be lost */
    uint32_t n_struck[16];    /* troubles by kind (trouble.h) */
};

void sim_cluster_init(struct sim_cluster *c, struct sim_world *w);
struct sim_place *sim_cluster_add_worker(struct sim_cluster *c, enum sim_role role, const struct sim_shape *shape);
void sim_start(struct sim_cluster *c, struct sim_place *p);
/* notice_ns: until others see its sockets close. */
void sim_kill(struct sim_place *p, uint64_t notice_ns);
void sim_terminate(struct sim_place *p); /* SIGTERM; sim_reap sees its end */
void sim_pause(struct sim_place *p, bool is_paused);
/* NULL: nobody of that incarnation is alive. */
struct sim_place *sim_place_of(struct sim_cluster *c, uint64_t incarnation);
/* Takes down processes whose loop was told to stop; after every event. */
void sim_reap(struct sim_cluster *c);

#endif
