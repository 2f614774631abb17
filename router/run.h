/* Carries out an order: makes prompts of it (long ones on a pool thread), has one request served per choice, and gives
 * the events of all choices to a sink. Knows no HTTP and no gRPC.
 *
 * A run ends in one of two ways: the sink's on_done, once, or td_run_cancel by the owner of the sink; after either, the
 * run must not be used any more (it frees itself when its last thread and request are gone). The first choice that
 * fails ends the others. Loop thread only. */
#ifndef TD_ROUTER_RUN_H
#define TD_ROUTER_RUN_H

#include "router/choice.h"
#include "router/order.h"

struct td_router;
struct td_request;
struct td_run;

struct td_run_sink {
    /* Choices are numbered prompt by prompt. Not OK ends the run with that status (SLOW_CLIENT when the client does not
     * keep up). */
    enum td_status (*on_event)(void *user, uint32_t choice, const struct td_choice_event *e);
    /* st OK: every choice has had its TD_CHOICE_END. Else text says why, for the client; it begins with the name of a
     * field ("messages[1]: ...") where one is to blame. Never from within td_run_start or on_event. */
    void (*on_done)(void *user, enum td_status st, const char *text);
};

/* Takes over *order and leaves it empty, on failure too. On failure nothing has begun: INVALID, NOT_FOUND (model), BUSY
 * (the queue is full), UNAVAILABLE (no workers), DRAINING, NO_MEMORY; err names the field. */
enum td_status td_run_start(struct td_router *ro, struct td_order *order, const struct td_run_sink *sink, void *user,
                            struct td_run **out, struct td_err *err);
void td_run_cancel(struct td_run *run); /* the client has left; the workers stop within a step */

/* Until on_done has returned. */
const char *td_run_id(const struct td_run *run);
const struct td_order *td_run_order(const struct td_run *run);
uint32_t td_run_n_choices(const struct td_run *run);
const struct td_request *td_run_request(const struct td_run *run, uint32_t choice); /* timing, tokens */
bool td_run_is_too_long(const struct td_run *run); /* failed because the prompt does not fit the context */

struct td_run_usage {
    uint64_t prompt_tokens, cached_tokens; /* each prompt counted once, however many choices it has */
    uint64_t completion_tokens, reasoning_tokens;
};
struct td_run_usage td_run_usage_of(const struct td_run *run);

#endif
