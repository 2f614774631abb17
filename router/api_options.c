/* Fields that all generating endpoints have in common. */
#include <math.h>
#include <stdlib.h>

#include "router/api.h"

#define MAX_STOP_IDS   128u /* as params.c has it */
#define MAX_BIASES     1024u
#define MAX_LOGIT_BIAS 100.0f

/* --- sampling ----------------------------------------------------------------------------------------------------- */

static bool read_token_id(const char *s, uint32_t *out)
{
    if (s[0] < '0' || s[0] > '9') return false;
    char *end;
    unsigned long n = strtoul(s, &end, 10);
    if (*end != '\0' || n >= UINT32_MAX) return false;
    *out = (uint32_t)n;
    return true;
}

/* {"1734": -100, ...} */
static void read_logit_bias(struct td_order *o, struct td_fields *f)
{
    typedef Tandem__V1__Sampling__LogitBiasEntry entry;
    const json_t *map;
    if (!td_fields_object(f, "logit_bias", &map)) return;
    size_t n = json_object_size(map);
    if (n > MAX_BIASES) {
        td_fields_fail(f, TD_E_INVALID, "logit_bias", "%zu entries are more than %u", n, MAX_BIASES);
        return;
    }
    entry *entries = td_order_alloc(o, n, sizeof *entries);
    entry **list = td_order_alloc(o, n, sizeof(void *));
    if (entries == NULL || list == NULL) {
        td_fields_no_memory(f);
        return;
    }
    const char *key;
    json_t *v;
    size_t i = 0;
    json_object_foreach ((json_t *)map, key, v) {
        tandem__v1__sampling__logit_bias_entry__init(&entries[i]);
        if (!read_token_id(key, &entries[i].key))
            td_fields_fail(f, TD_E_INVALID, "logit_bias", "\"%.40s\" is not a token id", key);
        double d = json_number_value(v);
        if (!json_is_number(v) || !(fabs(d) <= (double)MAX_LOGIT_BIAS))
            td_fields_fail(f, TD_E_INVALID, "logit_bias", "the value for \"%.40s\" must be a number from -100 to 100",
                           key);
        entries[i].value = (float)d;
        list[i] = &entries[i];
        i++;
    }
    o->sampling.logit_bias = list;
    o->sampling.n_logit_bias = n;
}

static void read_sampling(struct td_order *o, struct td_fields *f)
{
    Tandem__V1__Sampling *s = &o->sampling;
    if (td_fields_float(f, "temperature", 0, 2, &s->temperature))
        s->temperature_opt_case = TANDEM__V1__SAMPLING__TEMPERATURE_OPT_TEMPERATURE;
    if (td_fields_float(f, "top_p", 0, 1, &s->top_p)) {
        s->top_p_opt_case = TANDEM__V1__SAMPLING__TOP_P_OPT_TOP_P;
        if (s->top_p < 1e-6f) s->top_p = 1e-6f; /* 0 is allowed here and means the likeliest token alone */
    }
    td_fields_u32(f, "top_k", 0, 1u << 24, &s->top_k);
    td_fields_float(f, "min_p", 0, 1, &s->min_p);
    if (td_fields_float(f, "repetition_penalty", 0.01f, 100, &s->repetition_penalty))
        s->repetition_penalty_opt_case = TANDEM__V1__SAMPLING__REPETITION_PENALTY_OPT_REPETITION_PENALTY;
    td_fields_float(f, "presence_penalty", -2, 2, &s->presence_penalty);
    td_fields_float(f, "frequency_penalty", -2, 2, &s->frequency_penalty);
    int64_t seed;
    if (td_fields_i64(f, "seed", &seed)) {
        s->seed = (uint64_t)seed;
        s->seed_opt_case = TANDEM__V1__SAMPLING__SEED_OPT_SEED;
    }
    read_logit_bias(o, f);
}

/* --- stop --------------------------------------------------------------------------------------------------------- */

static void take_stop(struct td_fields *f, const json_t *v, struct td_text *out)
{
    if (!json_is_string(v))
        td_fields_fail(f, TD_E_INVALID, "stop", "must be a string or an array of strings");
    else if (json_string_length(v) == 0)
        td_fields_fail(f, TD_E_INVALID, "stop", "must not be empty");
    else if (json_string_length(v) > TD_ORDER_MAX_STOP_BYTES)
        td_fields_fail(f, TD_E_INVALID, "stop", "longer than %u bytes", TD_ORDER_MAX_STOP_BYTES);
    else
        *out = td_json_text(v);
}

static void read_stop_strings(struct td_order *o, struct td_fields *f)
{
    const json_t *v = td_fields_get(f, "stop");
    if (v == NULL) return;
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > TD_ORDER_MAX_STOP_STRINGS) {
        td_fields_fail(f, TD_E_INVALID, "stop", "%zu strings are more than %u", n, TD_ORDER_MAX_STOP_STRINGS);
        return;
    }
    struct td_text *list = td_order_alloc(o, n + 1, sizeof *list);
    if (list == NULL) {
        td_fields_no_memory(f);
        return;
    }
    for (size_t i = 0; i < n; i++) take_stop(f, json_is_array(v) ? json_array_get(v, i) : v, &list[i]);
    o->stop_strings = list;
    o->n_stop_strings = n;
}

static void read_stop_ids(struct td_order *o, struct td_fields *f)
{
    const json_t *list;
    if (!td_fields_array(f, "stop_token_ids", &list)) return;
    size_t n = json_array_size(list);
    uint32_t *ids = n <= MAX_STOP_IDS ? td_order_alloc(o, n + 1, sizeof *ids) : NULL;
    if (n > MAX_STOP_IDS)
        td_fields_fail(f, TD_E_INVALID, "stop_token_ids", "%zu are more than %u", n, MAX_STOP_IDS);
    else if (ids == NULL)
        td_fields_no_memory(f);
    for (size_t i = 0; i < n && f->st == TD_OK; i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= UINT32_MAX)
            td_fields_fail(f, TD_E_INVALID, "stop_token_ids", "the entry at index %zu is not a token id", i);
        else
            ids[i] = (uint32_t)json_integer_value(v);
    }
    o->stop.token_ids = ids;
    o->stop.n_token_ids = n;
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

/* What only asks for less, or about things that do not exist here, is ignored: user, metadata, store, service_tier,
 * prompt_cache_key, safety_identifier and all that nobody has heard of. */
static const struct td_fields_refusal refusals[] = {
    {"best_of", TD_HARMLESS_ONE, NULL},
    {"use_beam_search", TD_HARMLESS_FALSE, NULL},
    {"prompt_logprobs", TD_HARMLESS_NONE, NULL},
    {"length_penalty", TD_HARMLESS_ONE, NULL},
    {"logits_processors", TD_HARMLESS_EMPTY, NULL},
    {"guided_json", TD_HARMLESS_NONE, "constrained output is not supported yet"},
    {"guided_regex", TD_HARMLESS_NONE, "constrained output is not supported yet"},
    {"guided_choice", TD_HARMLESS_NONE, "constrained output is not supported yet"},
    {"guided_grammar", TD_HARMLESS_NONE, "constrained output is not supported yet"},
    {"structured_outputs", TD_HARMLESS_NONE, "constrained output is not supported yet"},
    {"include_stop_str_in_output", TD_HARMLESS_FALSE, NULL},
    {"skip_special_tokens", TD_HARMLESS_TRUE, NULL},
    {"allowed_token_ids", TD_HARMLESS_NONE, NULL},
    {"bad_words", TD_HARMLESS_EMPTY, NULL},
    {"truncate_prompt_tokens", TD_HARMLESS_NONE, NULL},
    {"return_token_ids", TD_HARMLESS_FALSE, NULL},
    {"return_tokens_as_token_ids", TD_HARMLESS_FALSE, NULL},
};

void td_api_read_options(struct td_order *o, struct td_fields *f)
{
    td_fields_str(f, "model", &o->model);
    read_sampling(o, f);
    read_stop_strings(o, f);
    read_stop_ids(o, f);
    td_fields_u32(f, "min_tokens", 0, 1u << 20, &o->stop.min_tokens);
    bool ignore_eos = false;
    td_fields_bool(f, "ignore_eos", &ignore_eos);
    o->stop.ignore_eos = ignore_eos;
    td_fields_refuse(f, refusals, sizeof refusals / sizeof refusals[0]);
}

void td_api_read_stream(struct td_api_call *call, struct td_fields *f, bool *includes_usage_out)
{
    const json_t *v;
    td_fields_bool(f, "stream", &call->is_stream);
    if (!td_fields_object(f, "stream_options", &v)) return;
    if (!call->is_stream) td_fields_fail(f, TD_E_INVALID, "stream_options", "needs stream to be true");
    if (f->st != TD_OK) return;
    struct td_fields s = td_fields_open(v, f->err, "stream_options");
    td_fields_bool(&s, "include_usage", includes_usage_out);
    f->st = s.st;
}

void td_api_read_tools(struct td_order *o, struct td_fields *f, bool is_flat)
{
    bool parallel = true;
    td_chat_json_tools(f, &o->arena, is_flat, &o->chat, &o->tool_choice, &o->tool_name);
    td_fields_bool(f, "parallel_tool_calls", &parallel);
    o->one_call = !parallel;
}
