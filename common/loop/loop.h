/* The daemon's event loop: timers, mail from other threads, signals, background work. libuv is seen only in this
 * folder; TCP for common/http is tcp.h here. One loop per process (tests may have several); every callback runs on the
 * loop thread, and every function but td_loop_post is called there. */
#ifndef TD_LOOP_LOOP_H
#define TD_LOOP_LOOP_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/env.h"
#include "common/base/status.h"

struct td_loop;

enum td_status td_loop_create(struct td_loop **out); /* NO_MEMORY, or IO when the kernel gives no descriptors */
/* NULL is fine. Closes what is still open and runs the close callbacks, waits for work in flight and runs its done.
 * Timers that are still armed never fire, mail that was not delivered never is: neither is touched, so their owners may
 * be gone already. Threads that post must have ended (joined), not merely have posted their last. */
void td_loop_destroy(struct td_loop *l);
enum td_status td_loop_run(struct td_loop *l); /* until td_loop_stop; at once if that was called before */
void td_loop_stop(struct td_loop *l);          /* from another thread: post a mail that calls it */
/* One round: waits until something happens if may_block, and handles it. For tests and for tear-down. */
void td_loop_run_once(struct td_loop *l, bool may_block);

/* The clock, timers and random numbers of the real world. Timers have a resolution of 1 ms, never fire early, and fire
 * in the order of their due times (of their starts, when equal). A timer started by fire waits for the next round. */
struct td_env *td_loop_env(struct td_loop *l);

/* Mail: intrusive, lock-free to post, from any thread; delivered on the loop thread in the order posted per thread.
 * The sender's object holds the struct; it may be posted again only after deliver was called. Posting after the loop
 * was destroyed is an error of the caller: stop your threads first. */
struct td_mail {
    struct td_mail *next;
    void (*deliver)(struct td_mail *m);
};
void td_loop_post(struct td_loop *l, struct td_mail *m);

/* SIGTERM and SIGINT become "drain": on_signal runs on the loop thread with the signal's number and how many came so
 * far (1, 2, ...). SIGPIPE is ignored. */
enum td_status td_loop_on_signal(struct td_loop *l, void (*on_signal)(int signum, unsigned nth, void *user),
                                 void *user);

/* Runs work on a pool thread, then done on the loop thread. The struct lives in the caller's object until done. */
struct td_work {
    void (*work)(struct td_work *w); /* pool thread */
    void (*done)(struct td_work *w); /* loop thread, exactly once */
    void *impl[16];                  /* the loop's own (a uv_work_t) */
};
void td_loop_work(struct td_loop *l, struct td_work *w);

/* Called once each time the loop is about to block: flush batched output here. A hook may remove itself or others. */
struct td_loop_idle {
    void (*before_block)(struct td_loop_idle *i);
    struct td_list link;
};
void td_loop_add_idle(struct td_loop *l, struct td_loop_idle *i);
void td_loop_remove_idle(struct td_loop *l, struct td_loop_idle *i);

#endif
