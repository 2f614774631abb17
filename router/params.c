#include "router/params.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

/* The same bounds as the workers' (common/engine/sample.h, request.h), which the router does not link. */
#define MAX_TEMPERATURE 100.0f
#define MAX_PENALTY     100.0f
#define MAX_LOGIT_BIAS  1000.0f
#define MAX_TOP_K       (1u << 24)
#define MAX_LOGPROBS    20u
#define MAX_STOP_IDS    128u /* of the client; the model's own come on top */

enum td_status td_params_check_model(const struct td_params_facts *f, const char *model, struct td_err *err)
{
    if (model[0] == '\0' || strcmp(model, f->model) == 0) return TD_OK;
    return td_err_set(err, TD_E_NOT_FOUND, "model: \"%.200s\" is not served here; \"%s\" is", model, f->model);
}

enum td_status td_params_set_id(struct td_request *r, const char *id, uint64_t random, struct td_err *err)
{
    size_t n = id != NULL ? strlen(id) : 0;
    snprintf(r->id, sizeof r->id, "req-%016" PRIx64, random); /* also for the log line of a refusal */
    if (n > TD_ROUTER_ID_MAX)
        return td_err_set(err, TD_E_INVALID, "request_id: %zu bytes are more than %u", n, TD_ROUTER_ID_MAX);
    for (size_t i = 0; i < n; i++)
        if (id[i] <= ' ' || id[i] > '~' || id[i] == '"' || id[i] == '\\')
            return td_err_set(err, TD_E_INVALID,
                              "request_id: only printable ASCII without spaces, quotes and backslashes");
    if (n > 0) memcpy(r->id, id, n + 1);
    return TD_OK;
}

/* --- sampling and stop ----------------------------------------------------------------------------------- */

/* Written so that NaN fails: every comparison with it is false. */
static enum td_status check_sampling(const Tandem__V1__Sampling *s, uint32_t n_vocab, struct td_err *err)
{
    if (s->temperature_opt_case == TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE &&
        !(s->temperature >= 0 && s->temperature <= MAX_TEMPERATURE))
        return td_err_set(err, TD_E_INVALID, "sampling.temperature: %g is not between 0 and %g", (double)s->temperature,
                          (double)MAX_TEMPERATURE);
    if (s->top_k > MAX_TOP_K)
        return td_err_set(err, TD_E_INVALID, "sampling.top_k: %u is above %u", s->top_k, MAX_TOP_K);
    if (s->top_p_opt_case == TANDEM__V1__SAMPLING__TOP_P_OPT_TOP_P && !(s->top_p > 0 && s->top_p <= 1))
        return td_err_set(err, TD_E_INVALID, "sampling.top_p: %g is not above 0 and at most 1", (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return td_err_set(err, TD_E_INVALID, "sampling.min_p: %g is not between 0 and 1", (double)s->min_p);
    if (s->repetition_penalty_opt_case == TANDEM__V1__SAMPLING__REPETITION_PENALTY_OPT_REPETITION_PENALTY &&
        !(s->repetition_penalty > 0 && s->repetition_penalty <= MAX_PENALTY))
        return td_err_set(err, TD_E_INVALID, "sampling.repetition_penalty: %g is not above 0 and at most %g",
                          (double)s->repetition_penalty, (double)MAX_PENALTY);
    if (!(fabsf(s->presence_penalty) <= MAX_PENALTY))
        return td_err_set(err, TD_E_INVALID, "sampling.presence_penalty: %g is not between -%g and %g",
                          (double)s->presence_penalty, (double)MAX_PENALTY, (double)MAX_PENALTY);
    if (!(fabsf(s->frequency_penalty) <= MAX_PENALTY))
        return td_err_set(err, TD_E_INVALID, "sampling.frequency_penalty: %g is not between -%g and %g",
                          (double)s->frequency_penalty, (double)MAX_PENALTY, (double)MAX_PENALTY);
    if (n_vocab > 0 && s->n_logit_bias > n_vocab)
        return td_err_set(err, TD_E_INVALID, "sampling.logit_bias: more entries than tokens");
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        const Tandem__V1__Sampling__LogitBiasEntry *e = s->logit_bias[i];
        if (n_vocab > 0 && e->key >= n_vocab)
            return td_err_set(err, TD_E_INVALID, "sampling.logit_bias: %u is not a token id (there are %u)", e->key,
                              n_vocab);
        if (!(fabsf(e->value) <= MAX_LOGIT_BIAS))
            return td_err_set(err, TD_E_INVALID, "sampling.logit_bias: %g for token %u is not between -%g and %g",
                              (double)e->value, e->key, (double)MAX_LOGIT_BIAS, (double)MAX_LOGIT_BIAS);
    }
    return TD_OK;
}

static Tandem__V1__Sampling *copy_sampling(const Tandem__V1__Sampling *s, uint64_t seed)
{
    Tandem__V1__Sampling none = TANDEM__V1__SAMPLING__INIT;
    if (s == NULL) s = &none;
    size_t n = tandem__v1__sampling__get_packed_size(s);
    uint8_t *bytes = td_calloc(1, n + 1);
    if (bytes == NULL) return NULL;
    tandem__v1__sampling__pack(s, bytes);
    Tandem__V1__Sampling *copy = tandem__v1__sampling__unpack(NULL, n, bytes);
    free(bytes);
    if (copy != NULL && copy->seed_opt_case != TANDEM__V1__SAMPLING__SEED_OPT_SEED) {
        copy->seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
        copy->seed = seed;
    }
    return copy;
}

enum td_status td_params_set_options(struct td_request *r, const struct td_params_facts *f,
                                     const Tandem__V1__Sampling *sampling, const Tandem__V1__Stop *stop,
                                     bool want_logprobs, uint32_t n_logprobs, uint64_t seed, struct td_err *err)
{
    static const Tandem__V1__Stop no_stop = TANDEM__V1__STOP__INIT;
    if (stop == NULL) stop = &no_stop;
    enum td_status st = sampling != NULL ? check_sampling(sampling, f->n_vocab, err) : TD_OK;
    if (st != TD_OK) return st;
    if (n_logprobs > MAX_LOGPROBS)
        return td_err_set(err, TD_E_INVALID, "n_logprobs: %u is above %u", n_logprobs, MAX_LOGPROBS);
    uint32_t max_tokens = stop->max_tokens > 0 ? stop->max_tokens : f->default_max_tokens;
    if (max_tokens == 0) max_tokens = INT32_MAX; /* the prompt's length decides */
    if (stop->min_tokens > max_tokens)
        return td_err_set(err, TD_E_INVALID, "stop.min_tokens: %u is above max_tokens %u", stop->min_tokens,
                          max_tokens);
    if (stop->n_token_ids > MAX_STOP_IDS)
        return td_err_set(err, TD_E_INVALID, "stop.token_ids: %zu are more than %u", stop->n_token_ids, MAX_STOP_IDS);
    for (size_t i = 0; i < stop->n_token_ids; i++)
        if (f->n_vocab > 0 && stop->token_ids[i] >= f->n_vocab)
            return td_err_set(err, TD_E_INVALID, "stop.token_ids: %u at index %zu is not a token id (there are %u)",
                              stop->token_ids[i], i, f->n_vocab);

    size_t n_eos = stop->ignore_eos ? 0 : f->n_eos_ids;
    uint32_t *stop_ids = td_calloc(stop->n_token_ids + n_eos + 1, sizeof *stop_ids);
    Tandem__V1__Sampling *copy = copy_sampling(sampling, seed);
    if (stop_ids == NULL || copy == NULL) {
        free(stop_ids);
        if (copy != NULL) tandem__v1__sampling__free_unpacked(copy, NULL);
        return td_err_set(err, TD_E_NO_MEMORY, "no memory for another request");
    }
    uint32_t n = 0;
    for (size_t i = 0; i < n_eos; i++) stop_ids[n++] = f->eos_ids[i];
    for (size_t i = 0; i < stop->n_token_ids; i++) stop_ids[n++] = stop->token_ids[i];
    r->sampling = copy;
    r->stop_ids = stop_ids;
    r->n_stop_ids = n;
    r->max_tokens = max_tokens;
    r->min_tokens = stop->min_tokens;
    r->n_logprobs = n_logprobs;
    r->want_logprobs = want_logprobs || n_logprobs > 0;
    return TD_OK;
}

/* --- the prompt ------------------------------------------------------------------------------------------ */

static enum td_status check_prompt(const struct td_params_facts *f, const char *field, const uint32_t *ids, size_t n,
                                   struct td_err *err)
{
    if (n == 0) return td_err_set(err, TD_E_INVALID, "%s: the prompt is empty", field);
    if (n >= UINT32_MAX / 2) return td_err_set(err, TD_E_INVALID, "%s: %zu tokens are too many", field, n);
    if (f->max_context > 0 && n >= f->max_context)
        return td_err_set(err, TD_E_INVALID,
                          "%s: the prompt's %zu tokens leave no room for another; the context holds %u", field, n,
                          f->max_context);
    if (f->served_context > 0 && n >= f->served_context)
        return td_err_set(err, TD_E_TOO_LARGE,
                          "%s: the prompt's %zu tokens leave no room for another; the workers have memory for %u",
                          field, n, f->served_context);
    for (size_t i = 0; i < n; i++)
        if (f->n_vocab > 0 && ids[i] >= f->n_vocab)
            return td_err_set(err, TD_E_INVALID, "%s: %u at index %zu is not a token id (there are %u)", field, ids[i],
                              i, f->n_vocab);
    return TD_OK;
}

enum td_status td_params_set_prompt_take(struct td_request *r, const struct td_params_facts *f, const char *field,
                                         uint32_t *ids, size_t n, struct td_err *err)
{
    enum td_status st = check_prompt(f, field, ids, n, err);
    if (st != TD_OK) {
        free(ids);
        return st;
    }
    free(r->tokens);
    r->tokens = ids;
    r->n_tokens = r->n_prompt = r->cap_tokens = (uint32_t)n;
    if (f->served_context > 0 && r->max_tokens > f->served_context - r->n_prompt)
        r->max_tokens = f->served_context - r->n_prompt;
    if (r->min_tokens > r->max_tokens) r->min_tokens = r->max_tokens;
    return TD_OK;
}

bool td_params_is_date(const char *s)
{
    static const char form[] = "dddd-dd-dd";
    for (size_t i = 0; i < sizeof form; i++)
        if (form[i] == 'd' ? s[i] < '0' || s[i] > '9' : s[i] != form[i]) return false;
    int month = (s[5] - '0') * 10 + s[6] - '0', day = (s[8] - '0') * 10 + s[9] - '0';
    return month >= 1 && month <= 12 && day >= 1 && day <= 31;
}
