#include "common/engine/request.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "common/engine/sample.h"

/* Whatever a client put there must not break a log line or JSON. */
static void copy_id(char out[TD_REQUEST_ID_MAX + 1], const char *id)
{
    uint32_t n = 0;
    for (; id != NULL && id[n] != '\0' && n < TD_REQUEST_ID_MAX; n++) {
        char c = id[n];
        out[n] = c > ' ' && c <= '~' && c != '"' && c != '\\' ? c : '?';
    }
    if (n == 0) out[n++] = '-';
    out[n] = '\0';
}

static enum td_status copy_ids(const uint32_t *ids, size_t n, size_t room, uint32_t **out)
{
    uint32_t *p = td_calloc(room, sizeof *p);
    if (p == NULL) return TD_E_NO_MEMORY;
    if (n > 0) memcpy(p, ids, n * sizeof *p);
    *out = p;
    return TD_OK;
}

static int compare_u32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static int compare_bias(const void *a, const void *b)
{
    const Tandem__V1__Sampling__LogitBiasEntry *const *x = a, *const *y = b;
    return ((*x)->key > (*y)->key) - ((*x)->key < (*y)->key);
}

static enum td_status parse_tokens(const Tandem__V1__TokenRequest *msg, uint32_t n_vocab, uint32_t max_context,
                                   struct td_token_request *r, struct td_err *err)
{
    if (msg->n_token_ids == 0) return td_err_set(err, TD_E_INVALID, "token_ids: empty");
    if (msg->n_token_ids >= max_context)
        return td_err_set(err, TD_E_INVALID, "token_ids: %zu tokens leave no room for another (the context holds %u)",
                          msg->n_token_ids, max_context);
    for (size_t i = 0; i < msg->n_token_ids; i++)
        if (msg->token_ids[i] >= n_vocab)
            return td_err_set(err, TD_E_INVALID, "token_ids: %u at index %zu is not a token id (there are %u)",
                              msg->token_ids[i], i, n_vocab);
    if (msg->n_prompt == 0 || msg->n_prompt > msg->n_token_ids)
        return td_err_set(err, TD_E_INVALID, "n_prompt: %u is not between 1 and the %zu token_ids", msg->n_prompt,
                          msg->n_token_ids);
    uint32_t n_generated = (uint32_t)msg->n_token_ids - msg->n_prompt;
    if (msg->max_tokens == 0) return td_err_set(err, TD_E_INVALID, "max_tokens: must be at least 1");
    if (n_generated >= msg->max_tokens)
        return td_err_set(err, TD_E_INVALID, "max_tokens: %u, but %u are generated already", msg->max_tokens,
                          n_generated);
    if (msg->min_tokens > msg->max_tokens)
        return td_err_set(err, TD_E_INVALID, "min_tokens: %u is above max_tokens %u", msg->min_tokens, msg->max_tokens);
    r->n_tokens = (uint32_t)msg->n_token_ids;
    r->n_prompt = msg->n_prompt;
    r->max_tokens = msg->max_tokens;
    r->min_tokens = msg->min_tokens;
    r->n_tokens_max = msg->max_tokens < max_context - r->n_prompt ? r->n_prompt + msg->max_tokens : max_context;
    return copy_ids(msg->token_ids, r->n_tokens, r->n_tokens_max, &r->tokens);
}

static enum td_status parse_stop(const Tandem__V1__TokenRequest *msg, uint32_t n_vocab, struct td_token_request *r,
                                 struct td_err *err)
{
    if (msg->n_stop_ids > TD_MAX_STOP_IDS)
        return td_err_set(err, TD_E_INVALID, "stop_ids: %zu are more than %u", msg->n_stop_ids, TD_MAX_STOP_IDS);
    for (size_t i = 0; i < msg->n_stop_ids; i++)
        if (msg->stop_ids[i] >= n_vocab)
            return td_err_set(err, TD_E_INVALID, "stop_ids: %u is not a token id (there are %u)", msg->stop_ids[i],
                              n_vocab);
    enum td_status st = copy_ids(msg->stop_ids, msg->n_stop_ids, msg->n_stop_ids, &r->stop_ids);
    if (st != TD_OK) return st;
    qsort(r->stop_ids, msg->n_stop_ids, sizeof *r->stop_ids, compare_u32);
    for (size_t i = 0; i < msg->n_stop_ids; i++)
        if (r->n_stop_ids == 0 || r->stop_ids[r->n_stop_ids - 1] != r->stop_ids[i])
            r->stop_ids[r->n_stop_ids++] = r->stop_ids[i];
    return TD_OK;
}

static enum td_status parse_sampling(const Tandem__V1__Sampling *m, uint32_t n_vocab, struct td_sampling *s,
                                     struct td_err *err)
{
    if (m == NULL) return td_err_set(err, TD_E_INVALID, "sampling: must be set");
    if (m->seed_opt_case != TANDEM__V1__SAMPLING__SEED_OPT_SEED)
        return td_err_set(err, TD_E_INVALID, "sampling.seed: must be set");
    *s = (struct td_sampling){
        .temperature =
            m->temperature_opt_case == TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE ? m->temperature : 1,
        .top_k = m->top_k,
        .top_p = m->top_p_opt_case == TANDEM__V1__SAMPLING__TOP_P_OPT_TOP_P ? m->top_p : 1,
        .min_p = m->min_p,
        .seed = m->seed,
        .repetition_penalty =
            m->repetition_penalty_opt_case == TANDEM__V1__SAMPLING__REPETITION_PENALTY_OPT_REPETITION_PENALTY
                ? m->repetition_penalty
                : 1,
        .presence_penalty = m->presence_penalty,
        .frequency_penalty = m->frequency_penalty,
    };
    if (m->n_logit_bias > n_vocab)
        return td_err_set(err, TD_E_INVALID, "sampling.logit_bias: more entries than tokens");
    if (m->n_logit_bias > 0) {
        uint32_t n = (uint32_t)m->n_logit_bias;
        uint32_t *ids = td_calloc(n, sizeof *ids);
        float *values = td_calloc(n, sizeof *values);
        const Tandem__V1__Sampling__LogitBiasEntry **sorted = td_calloc(n, sizeof(void *));
        if (ids == NULL || values == NULL || sorted == NULL) {
            free(ids);
            free(values);
            free(sorted);
            return TD_E_NO_MEMORY;
        }
        for (uint32_t i = 0; i < n; i++) sorted[i] = m->logit_bias[i];
        qsort(sorted, n, sizeof *sorted, compare_bias);
        for (uint32_t i = 0; i < n; i++) {
            ids[i] = sorted[i]->key;
            values[i] = sorted[i]->value;
        }
        free(sorted);
        s->n_logit_bias = n;
        s->bias_ids = ids;
        s->bias_values = values;
    }
    struct td_err field;
    enum td_status st = td_sampling_check(s, n_vocab, &field);
    return st == TD_OK ? TD_OK : td_err_set(err, st, "sampling.%s", field.text);
}

enum td_status td_token_request_parse(const Tandem__V1__TokenRequest *msg, uint32_t n_vocab,
                                      uint32_t max_context_tokens, struct td_token_request *out, struct td_err *err)
{
    struct td_token_request r = {0};
    enum td_status st = TD_E_INVALID;
    if (msg == NULL) {
        td_err_set(err, st, "request: must be set");
        goto out;
    }
    copy_id(r.id, msg->request_id);
    TD_TRY(parse_tokens(msg, n_vocab, max_context_tokens, &r, err));
    TD_TRY(parse_stop(msg, n_vocab, &r, err));
    TD_TRY(parse_sampling(msg->sampling, n_vocab, &r.sampling, err));
    if (msg->n_logprobs > TD_MAX_LOGPROBS) {
        st = td_err_set(err, TD_E_INVALID, "n_logprobs: %u is above %u", msg->n_logprobs, TD_MAX_LOGPROBS);
        goto out;
    }
    r.want_logprobs = msg->want_logprobs || msg->n_logprobs > 0;
    r.n_logprobs = msg->n_logprobs;
    r.timeout_us = msg->timeout_us;
    r.age_us = msg->age_us;
out:
    if (st == TD_OK) {
        *out = r;
        return TD_OK;
    }
    if (st == TD_E_NO_MEMORY) td_err_set(err, st, "out of memory for a request of %zu tokens", msg->n_token_ids);
    td_token_request_deinit(&r);
    *out = (struct td_token_request){0};
    return st;
}

void td_token_request_deinit(struct td_token_request *r)
{
    free(r->tokens);
    free(r->stop_ids);
    free((void *)(uintptr_t)r->sampling.bias_ids); /* ours, const for everybody else */
    free((void *)(uintptr_t)r->sampling.bias_values);
    *r = (struct td_token_request){0};
}

Tandem__V1__FinishReason td_token_request_append(struct td_token_request *r, uint32_t token)
{
    TD_CHECK(r->n_tokens < r->n_tokens_max);
    r->tokens[r->n_tokens++] = token;
    for (uint32_t i = 0; i < r->n_stop_ids; i++)
        if (r->stop_ids[i] == token) return TANDEM__V1__FINISH_REASON__FINISH_STOP;
    return r->n_tokens == r->n_tokens_max ? TANDEM__V1__FINISH_REASON__FINISH_LENGTH
                                          : TANDEM__V1__FINISH_REASON__FINISH_NONE;
}

void td_token_request_want_token(const struct td_token_request *r, uint32_t n_coming, struct td_segment *seg)
{
    uint32_t n_generated = td_token_request_n_generated(r) + n_coming;
    bool is_too_early = n_generated < r->min_tokens;
    seg->want_token = true;
    seg->want_logprobs = r->want_logprobs;
    seg->n_top_logprobs = r->n_logprobs;
    seg->sampling = &r->sampling;
    seg->draw_index = n_generated;
    seg->history = r->tokens;
    seg->n_history = r->n_tokens;
    seg->n_prompt = r->n_prompt;
    seg->banned_ids = is_too_early ? r->stop_ids : NULL;
    seg->n_banned = is_too_early ? r->n_stop_ids : 0;
    seg->mask = NULL;
}

void td_logprobs_msg_init(struct td_logprobs_msg *m, struct td_logprob chosen, const struct td_logprob *top,
                          uint32_t n_top)
{
    TD_CHECK(n_top <= TD_MAX_LOGPROBS);
    m->msg = (Tandem__V1__PositionLogprobs)TANDEM__V1__POSITION_LOGPROBS__INIT;
    m->chosen = (Tandem__V1__TokenLogprob)TANDEM__V1__TOKEN_LOGPROB__INIT;
    m->chosen.id = chosen.id;
    m->chosen.logprob = chosen.logprob;
    m->msg.chosen = &m->chosen;
    for (uint32_t i = 0; i < n_top; i++) {
        m->top[i] = (Tandem__V1__TokenLogprob)TANDEM__V1__TOKEN_LOGPROB__INIT;
        m->top[i].id = top[i].id;
        m->top[i].logprob = top[i].logprob;
        m->top_ptrs[i] = &m->top[i];
    }
    m->msg.n_top = n_top;
    m->msg.top = m->top_ptrs;
}
