/* What a decision module sees of the world: clock, timers, random numbers. router/request.c, prefill/worker.c,
 * decode/worker.c and common/handoff call nothing else of the operating system; what they send and order leaves
 * through a struct of functions of their own (their "ports", declared in their header). The loop implements this
 * struct over libuv (td_loop_env), tests implement it over a virtual clock. One thread. */
#ifndef TD_BASE_ENV_H
#define TD_BASE_ENV_H
#include "common/base/list.h"
#include <stdbool.h>
#include <stdint.h>
/* Lives in the owner's object; zero-initialise, set fire, then start. fire runs once per start, never from within
 * start. The implementation keeps its own state in link, due_ns and impl. */
struct td_timer {
    void (*fire)(struct td_timer *t);
    uint64_t due_ns;
    struct td_list link;
    bool is_armed;
    void *impl[2];
};
struct td_env {
    uint64_t (*now_ns)(struct td_env *env);
    void (*timer_start)(struct td_env *env, struct td_timer *t, uint64_t delay_ns); /* restarts if armed */
    void (*timer_stop)(struct td_env *env, struct td_timer *t);                     /* also when not armed */
    uint64_t (*random)(struct td_env *env);
};
#endif
