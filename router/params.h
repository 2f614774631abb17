/* What a client asks for, checked and completed into an order that workers take: every refusal names the field, so that
 * a client's mistake ends here and costs no worker anything. Workers check again, for they may be called by others.
 * Pure; no request is touched when something is refused. */
#ifndef TD_ROUTER_PARAMS_H
#define TD_ROUTER_PARAMS_H

#include "common/base/status.h"
#include "proto/inference.pb-c.h"
#include "router/request.h"

/* What the fleet and the settings say about the model served. n_vocab and the contexts are 0 while no worker is known:
 * what depends on them is not checked then. */
struct td_params_facts {
    const char *model;
    uint32_t n_vocab, default_max_tokens; /* 0: what the context leaves */
    uint32_t max_context;                 /* of the worker that takes most: a longer prompt makes no sense (INVALID) */
    uint32_t served_context; /* of the worker that takes least: a longer prompt finds no memory (TOO_LARGE) */
    const uint32_t *eos_ids;
    size_t n_eos_ids;
};

/* NOT_FOUND: another name. Empty: the one served. */
enum td_status td_params_check_model(const struct td_params_facts *f, const char *model, struct td_err *err);
/* Copies id, or makes one ("req-" and 16 hex digits of random) if it is NULL or empty. INVALID: not printable or too
 * long. */
enum td_status td_params_set_id(struct td_request *r, const char *id, uint64_t random, struct td_err *err);
/* sampling and stop may be NULL: all defaults. seed: for a client that gives none. */
enum td_status td_params_set_options(struct td_request *r, const struct td_params_facts *f,
                                     const Tandem__V1__Sampling *sampling, const Tandem__V1__Stop *stop,
                                     bool want_logprobs, uint32_t n_logprobs, uint64_t seed, struct td_err *err);
/* Takes over ids (malloc), also on failure. field names where they came from. Limits max_tokens to what the context
 * leaves. */
enum td_status td_params_set_prompt_take(struct td_request *r, const struct td_params_facts *f, const char *field,
                                         uint32_t *ids, size_t n, struct td_err *err);
/* "YYYY-MM-DD"? */
bool td_params_is_date(const char *s);

#endif
