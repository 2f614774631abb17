/* /tokenize and /detokenize. The work is done while the body is read, which for a long one means on a pool thread.
 *   /tokenize    {"prompt": text} or {"messages": [...], "tools": ...}   ->  {"count", "max_model_len", "tokens"}
 *   /detokenize  {"tokens": [ids]}                                       ->  {"prompt": text} */
#include <inttypes.h>

#include "common/text/detok.h"
#include "router/api_int.h"
#include "router/router_int.h"

#define MAX_TEXT_BYTES (16u << 20) /* a short list of ids can mean a very long text */

struct tokens {
    struct td_token_list ids;
    struct td_buf text;
    bool wants_strings;
};

static void drop(struct td_api_call *call)
{
    struct tokens *t = call->state;
    td_token_list_free(&t->ids);
    td_buf_free(&t->text);
}

/* The model named must be the one served; false: it is not, and the client knows. */
static bool has_model(struct td_api_call *call)
{
    struct td_err err = {{0}};
    struct td_params_facts facts = td_front_facts(call->router);
    enum td_status st = td_params_check_model(&facts, call->order.model, &err);
    if (st != TD_OK) td_api_fail(call, st, err.text);
    return st == TD_OK;
}

/* --- /tokenize ---------------------------------------------------------------------------------------------------- */

static void render_chat(struct td_api_call *call, struct td_fields *f, struct td_token_list *out)
{
    struct td_order *o = &call->order;
    const struct td_router *ro = call->router;
    char date[16];
    td_chat_json_messages(f, &o->arena, &o->chat);
    td_api_read_tools(o, f, false);
    td_chat_json_effort(f, "reasoning_effort", &o->chat.effort);
    if (f->st != TD_OK) return;
    td_front_today(ro, "", date);
    o->chat.current_date = date;
    f->st = ro->format->render(ro->format, &o->chat, out, f->err);
    o->chat.current_date = NULL;
}

static void read_tokenize(struct td_api_call *call, struct td_fields *f)
{
    struct tokens *t = call->state;
    struct td_text text;
    bool parses_special = true;
    td_fields_str(f, "model", &call->order.model);
    td_fields_bool(f, "return_token_strs", &t->wants_strings);
    td_fields_bool(f, "parse_special", &parses_special);
    if (td_fields_get(f, "messages") != NULL) {
        render_chat(call, f, &t->ids);
    } else if (td_fields_text(f, "prompt", &text)) {
        f->st = td_tokenizer_encode(call->router->tokenizer, text.p, text.n,
                                    parses_special ? TD_TEXT_SPECIAL : TD_TEXT_ORDINARY, &t->ids, f->err);
        if (f->st != TD_OK) td_err_prefix(f->err, f->st, "prompt");
    } else {
        td_fields_fail(f, TD_E_INVALID, "prompt", "must be given, or messages");
    }
    if (t->ids.failed) td_fields_no_memory(f);
}

static void answer_tokenize(struct td_api_call *call)
{
    const struct tokens *t = call->state;
    struct td_buf *b = &call->out;
    if (!has_model(call)) return;
    td_buf_printf(b, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", t->ids.n,
                  td_front_facts(call->router).served_context);
    for (size_t i = 0; i < t->ids.n; i++) td_buf_printf(b, i > 0 ? ",%u" : "%u", t->ids.ids[i]);
    td_buf_str(b, "]");
    for (size_t i = 0; t->wants_strings && i < t->ids.n; i++) {
        size_t n;
        const uint8_t *p = td_tokenizer_bytes(call->router->tokenizer, t->ids.ids[i], &n);
        td_buf_str(b, i > 0 ? "," : ",\"token_strs\":[");
        td_json_quote(b, p != NULL ? (const char *)p : "", n);
    }
    td_buf_str(b, t->wants_strings && t->ids.n > 0 ? "]}" : "}");
    td_api_respond(call);
}

/* --- /detokenize -------------------------------------------------------------------------------------------------- */

static void read_detokenize(struct td_api_call *call, struct td_fields *f)
{
    struct tokens *t = call->state;
    const struct td_tokenizer *tokenizer = call->router->tokenizer;
    const json_t *list = NULL;
    bool keeps_special = true;
    td_fields_str(f, "model", &call->order.model);
    td_fields_bool(f, "keep_special", &keeps_special);
    if (!td_fields_array(f, "tokens", &list)) td_fields_fail(f, TD_E_INVALID, "tokens", "must be given");
    struct td_detok detok;
    td_detok_init(&detok, tokenizer, keeps_special);
    for (size_t i = 0; f->st == TD_OK && i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id >= (json_int_t)td_tokenizer_n_ids(tokenizer))
            td_fields_fail(f, TD_E_INVALID, "tokens", "the entry at index %zu is not a token id", i);
        else
            td_detok_feed(&detok, (uint32_t)id, &t->text);
        if (t->text.n > MAX_TEXT_BYTES)
            td_fields_fail(f, TD_E_TOO_LARGE, "tokens", "their text is longer than %u bytes", MAX_TEXT_BYTES);
    }
    td_detok_end(&detok, &t->text);
    if (t->text.failed) td_fields_no_memory(f);
}

static void answer_detokenize(struct td_api_call *call)
{
    struct tokens *t = call->state;
    if (!has_model(call)) return;
    td_buf_str(&call->out, "{\"prompt\":");
    td_json_quote(&call->out, td_buf_cstr(&t->text), t->text.n);
    td_buf_str(&call->out, "}");
    td_api_respond(call);
}

const struct td_api_endpoint td_api_tokenize = {.path = "/tokenize",
                                                .state_bytes = sizeof(struct tokens),
                                                .read = read_tokenize,
                                                .answer = answer_tokenize,
                                                .drop = drop};
const struct td_api_endpoint td_api_detokenize = {.path = "/detokenize",
                                                  .state_bytes = sizeof(struct tokens),
                                                  .read = read_detokenize,
                                                  .answer = answer_detokenize,
                                                  .drop = drop};
