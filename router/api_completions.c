/* /v1/completions: prompts as texts or token ids, each with n choices; no chat format. */
#include <inttypes.h>
#include <stdlib.h>

#include "common/base/mem.h"
#include "common/text/detok.h"
#include "common/text/utf8.h"
#include "router/api_int.h"
#include "router/router_int.h"

#define DEFAULT_MAX_TOKENS 16u /* what this endpoint is documented with */

struct answer {
    struct td_buf text;
    struct td_buf tokens, values, tops, offsets; /* the insides of logprobs' arrays */
    uint64_t n_chars;                            /* of all text so far, echoed prompt too */
    enum td_finish finish;
    bool has_logprobs;
};

struct completions {
    bool includes_usage, echoes;
    struct answer *answers; /* one per choice */
    uint32_t n_answers;
};

/* --- the request -------------------------------------------------------------------------------------------------- */

static void take_ids(struct td_order *o, struct td_fields *f, const json_t *list, size_t index,
                     struct td_order_prompt *out)
{
    size_t n = json_array_size(list);
    uint32_t *ids = td_order_alloc(o, n + 1, sizeof *ids);
    if (ids == NULL) td_fields_no_memory(f);
    if (n == 0) td_fields_fail(f, TD_E_INVALID, "prompt", "the prompt at index %zu is empty", index);
    for (size_t i = 0; i < n && f->st == TD_OK; i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id >= (json_int_t)UINT32_MAX)
            td_fields_fail(f, TD_E_INVALID, "prompt", "the entry at index %zu of a list of token ids is none", i);
        else
            ids[i] = (uint32_t)id;
    }
    out->ids = ids;
    out->n_ids = n;
}

static void take_prompt(struct td_order *o, struct td_fields *f, const json_t *v, size_t index,
                        struct td_order_prompt *out)
{
    if (json_is_array(v)) {
        take_ids(o, f, v, index, out);
    } else if (!json_is_string(v)) {
        td_fields_fail(f, TD_E_INVALID, "prompt",
                       "must be a string, an array of strings, or token ids; the entry at index %zu is none", index);
    } else if (json_string_length(v) == 0) {
        td_fields_fail(f, TD_E_INVALID, "prompt", "the prompt at index %zu is empty", index);
    } else {
        out->text = td_json_text(v);
    }
}

static void read_prompts(struct td_order *o, struct td_fields *f)
{
    const json_t *v = td_fields_get(f, "prompt");
    if (v == NULL) td_fields_fail(f, TD_E_INVALID, "prompt", "must be given");
    bool is_one = !json_is_array(v) || json_is_number(json_array_get(v, 0));
    size_t n = is_one ? 1 : json_array_size(v);
    if (n == 0) td_fields_fail(f, TD_E_INVALID, "prompt", "must not be empty");
    if (n > TD_ORDER_MAX_CHOICES)
        td_fields_fail(f, TD_E_INVALID, "prompt", "%zu prompts are more than %u", n, TD_ORDER_MAX_CHOICES);
    if (f->st != TD_OK) return;
    struct td_order_prompt *prompts = td_order_alloc(o, n, sizeof *prompts);
    if (prompts == NULL) td_fields_no_memory(f);
    for (size_t i = 0; i < n && f->st == TD_OK; i++)
        take_prompt(o, f, is_one ? v : json_array_get(v, i), i, &prompts[i]);
    o->prompts = prompts;
    o->n_prompts = n;
}

static const struct td_fields_refusal refusals[] = {
    {"suffix", TD_HARMLESS_EMPTY, "the model cannot fill in; this is not supported"},
    {"response_format", TD_HARMLESS_NONE, "constrained output is not supported yet"},
};

static void read(struct td_api_call *call, struct td_fields *f)
{
    struct td_order *o = &call->order;
    struct completions *c = call->state;
    td_api_read_options(o, f);
    read_prompts(o, f);
    o->parse_special = true; /* who writes a prompt himself writes its format too */
    td_fields_bool(f, "parse_special", &o->parse_special);
    td_fields_u32(f, "n", 1, TD_ORDER_MAX_CHOICES, &o->n_choices);
    o->stop.max_tokens = DEFAULT_MAX_TOKENS;
    td_fields_u32(f, "max_tokens", 1, INT32_MAX, &o->stop.max_tokens);
    o->want_logprobs = td_fields_u32(f, "logprobs", 0, TD_ORDER_MAX_LOGPROBS, &o->n_logprobs);
    td_fields_bool(f, "echo", &c->echoes);
    if (c->echoes && o->want_logprobs)
        td_fields_fail(f, TD_E_UNIMPLEMENTED, "echo", "is not supported together with logprobs");
    td_api_read_stream(call, f, &c->includes_usage);
    td_fields_refuse(f, refusals, sizeof refusals / sizeof refusals[0]);
    if (f->st == TD_OK && o->n_prompts > TD_ORDER_MAX_CHOICES / o->n_choices)
        td_fields_fail(f, TD_E_INVALID, "n", "%zu prompts with %u choices each are more than %u choices", o->n_prompts,
                       o->n_choices, TD_ORDER_MAX_CHOICES);
    if (f->st != TD_OK) return;
    c->answers = td_calloc(o->n_prompts * o->n_choices, sizeof *c->answers);
    if (c->answers == NULL)
        td_fields_no_memory(f);
    else
        c->n_answers = (uint32_t)o->n_prompts * o->n_choices;
}

static void drop(struct td_api_call *call)
{
    struct completions *c = call->state;
    for (uint32_t i = 0; i < c->n_answers; i++) {
        struct answer *a = &c->answers[i];
        struct td_buf *all[] = {&a->text, &a->tokens, &a->values, &a->tops, &a->offsets};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) td_buf_free(all[k]);
    }
    free(c->answers);
}

/* --- logprobs ----------------------------------------------------------------------------------------------------- */

/* A token that is no whole text of its own appears as its bytes, so that names stay apart. */
static void put_token(struct td_buf *b, const struct td_router *ro, uint32_t id)
{
    size_t n;
    const char *p = (const char *)td_tokenizer_bytes(ro->tokenizer, id, &n);
    if (p == NULL || td_utf8_is_valid(p, n)) {
        td_json_quote(b, p != NULL ? p : "", n);
        return;
    }
    td_buf_str(b, "\"bytes:");
    for (size_t i = 0; i < n; i++) td_buf_printf(b, "\\\\x%02x", (unsigned char)p[i]);
    td_buf_str(b, "\"");
}

static uint64_t count_chars(const char *p, size_t n)
{
    uint64_t chars = 0;
    for (size_t i = 0; i < n; i++) chars += ((unsigned char)p[i] & 0xC0) != 0x80;
    return chars;
}

static void add_logprobs(struct answer *a, const struct td_router *ro, const struct td_choice_event *e)
{
    for (size_t i = 0; i < e->n_tokens; i++) {
        const struct td_token_logprobs *t = &e->tokens[i];
        const char *comma = a->has_logprobs ? "," : "";
        a->has_logprobs = true;
        td_buf_str(&a->tokens, comma);
        put_token(&a->tokens, ro, t->id);
        td_buf_str(&a->values, comma);
        td_api_put_number(&a->values, (double)t->logprob);
        td_buf_printf(&a->tops, "%s{", comma);
        for (uint32_t k = 0; k < t->n_top; k++) {
            if (k > 0) td_buf_str(&a->tops, ",");
            put_token(&a->tops, ro, t->top[k].id);
            td_buf_str(&a->tops, ":");
            td_api_put_number(&a->tops, (double)t->top[k].logprob);
        }
        td_buf_str(&a->tops, "}");
        td_buf_printf(&a->offsets, "%s%" PRIu64, comma, a->n_chars + count_chars(e->text.p, t->at));
    }
}

static void put_logprobs(struct td_buf *b, struct answer *a, bool wanted)
{
    if (!wanted) {
        td_buf_str(b, "null");
        return;
    }
    td_buf_printf(b, "{\"tokens\":[%s],", td_buf_cstr(&a->tokens));
    td_buf_printf(b, "\"token_logprobs\":[%s],", td_buf_cstr(&a->values));
    td_buf_printf(b, "\"top_logprobs\":[%s],", td_buf_cstr(&a->tops));
    td_buf_printf(b, "\"text_offset\":[%s]}", td_buf_cstr(&a->offsets));
    td_buf_clear(&a->tokens);
    td_buf_clear(&a->values);
    td_buf_clear(&a->tops);
    td_buf_clear(&a->offsets);
    a->has_logprobs = false;
}

/* --- answers ------------------------------------------------------------------------------------------------------ */

static void put_head(struct td_api_call *call)
{
    td_buf_printf(&call->out,
                  "{\"id\":\"cmpl-%016" PRIx64 "\",\"object\":\"text_completion\",\"created\":%" PRIu64 ",\"model\":",
                  call->random, call->created_s);
    td_json_quote_str(&call->out, call->router->cfg.model_name);
    td_buf_str(&call->out, ",\"choices\":[");
}

/* What a.text and the log-probabilities hold goes out, and is forgotten. */
static void put_choice(struct td_api_call *call, uint32_t index, const char *finish)
{
    const struct completions *c = call->state;
    struct answer *a = &c->answers[index];
    struct td_buf *b = &call->out;
    td_buf_printf(b, "{\"index\":%u,\"text\":", index);
    td_json_quote(b, td_buf_cstr(&a->text), a->text.n);
    td_buf_str(b, ",\"logprobs\":");
    put_logprobs(b, a, td_run_order(call->run)->want_logprobs && (!call->is_stream || a->has_logprobs));
    td_buf_printf(b, finish != NULL ? ",\"finish_reason\":\"%s\"}" : ",\"finish_reason\":null}", finish);
    td_buf_clear(&a->text);
}

static void echo(const struct td_api_call *call, uint32_t choice, struct td_buf *out)
{
    const struct td_order *o = td_run_order(call->run);
    const struct td_order_prompt *p = &o->prompts[choice / o->n_choices];
    if (p->ids == NULL) {
        td_buf_put(out, p->text.p, p->text.n);
        return;
    }
    struct td_detok detok;
    td_detok_init(&detok, call->router->tokenizer, true);
    for (size_t i = 0; i < p->n_ids; i++) td_detok_feed(&detok, p->ids[i], out);
    td_detok_end(&detok, out);
}

static enum td_status on_event(struct td_api_call *call, uint32_t choice, const struct td_choice_event *e)
{
    const struct completions *c = call->state;
    struct answer *a = &c->answers[choice];
    if (e->type == TD_CHOICE_BEGIN && c->echoes) {
        echo(call, choice, &a->text);
        a->n_chars = count_chars(td_buf_cstr(&a->text), a->text.n);
    } else if (e->type == TD_CHOICE_TEXT) {
        add_logprobs(a, call->router, e);
        td_buf_put(&a->text, e->text.p, e->text.n);
        a->n_chars += count_chars(e->text.p, e->text.n);
    } else if (e->type == TD_CHOICE_END) {
        a->finish = e->finish;
    }
    if (a->text.failed || a->tokens.failed || a->values.failed || a->tops.failed || a->offsets.failed)
        return TD_E_NO_MEMORY;
    bool is_end = e->type == TD_CHOICE_END;
    if (!call->is_stream || (a->text.n == 0 && !a->has_logprobs && !is_end)) return TD_OK;
    put_head(call);
    put_choice(call, choice, is_end ? td_finish_name(e->finish) : NULL);
    td_buf_str(&call->out, c->includes_usage ? "],\"usage\":null}" : "]}");
    return td_api_send(call, NULL);
}

static void on_end(struct td_api_call *call)
{
    const struct completions *c = call->state;
    if (call->is_stream && !c->includes_usage) {
        td_api_end_stream(call, true);
        return;
    }
    put_head(call);
    for (uint32_t i = 0; i < c->n_answers && !call->is_stream; i++) {
        if (i > 0) td_buf_str(&call->out, ",");
        put_choice(call, i, td_finish_name(c->answers[i].finish));
    }
    td_buf_str(&call->out, "],\"usage\":");
    td_api_put_usage(&call->out, call->run);
    td_buf_str(&call->out, "}");
    if (!call->is_stream) {
        td_api_respond(call);
        return;
    }
    td_api_send(call, NULL);
    td_api_end_stream(call, true);
}

const struct td_api_endpoint td_api_completions = {
    .path = "/v1/completions",
    .state_bytes = sizeof(struct completions),
    .read = read,
    .on_event = on_event,
    .on_end = on_end,
    .drop = drop,
};
