/* A token's way: the parser says which message its text belongs to (on_parsed), the text goes through the stop strings
 * (show), what they let pass collects in c->text and leaves as one event per message and step (send_text), together
 * with the log-probabilities of all tokens whose text is thereby complete. */
#include "router/choice.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/base/rng.h"

const char *td_finish_name(enum td_finish f)
{
    static const char *const names[] = {"stop", "length", "tool_calls"};
    return names[f];
}

/* --- events out --------------------------------------------------------------------------------------------------- */

static void send(struct td_choice *c, enum td_choice_event_type type)
{
    if (c->st != TD_OK) return;
    c->open.type = type;
    c->st = c->on_event(c->user, &c->open);
}

static bool is_content(enum td_chat_kind k) { return k == TD_CHAT_CONTENT || k == TD_CHAT_PREAMBLE; }

static void start_message(struct td_choice *c)
{
    if (c->is_open) return;
    c->is_open = true;
    c->open.message = c->n_shown++;
    send(c, TD_CHOICE_MESSAGE_START);
}

/* How many of the tokens that wait have all their text among the first n_out bytes let pass. A token without text goes
 * with the one before it. is_last: all go, but not those that lie in a stop string or behind it. */
static size_t count_ready(const struct td_choice *c, uint64_t n_out, bool is_last)
{
    size_t n = 0;
    if (is_last && !c->is_stopped) return c->n_tokens;
    while (n < c->n_tokens && (is_last ? c->places[n].start < n_out : c->places[n].end <= n_out)) n++;
    return n;
}

/* What has been let pass leaves as one event. is_last: the message, or the choice, ends here. */
static void send_text(struct td_choice *c, bool is_last)
{
    if (c->text.failed && c->st == TD_OK) c->st = TD_E_NO_MEMORY;
    uint64_t n_out = c->n_sent + c->text.n;
    size_t n_ready = count_ready(c, n_out, is_last);
    if ((c->text.n == 0 && n_ready == 0) || c->st != TD_OK) return;
    start_message(c);
    bool *had = is_content(c->open.kind)            ? &c->had_content
                : c->open.kind == TD_CHAT_REASONING ? &c->had_reasoning
                                                    : NULL;
    if (c->text.n > 0) {
        c->open.starts_line = !c->has_shown_text && had != NULL && *had;
        c->has_shown_text = true;
        if (had != NULL) *had = true;
    }
    for (size_t i = 0; i < n_ready; i++)
        c->tokens[i].at = c->places[i].start > c->n_sent ? (uint32_t)(c->places[i].start - c->n_sent) : 0;
    c->open.text = (struct td_text){td_buf_cstr(&c->text), c->text.n};
    c->open.tokens = c->tokens;
    c->open.n_tokens = n_ready;
    send(c, TD_CHOICE_TEXT);
    c->open.text = (struct td_text){NULL, 0};
    c->open.tokens = NULL;
    c->open.n_tokens = 0;
    c->open.starts_line = false;
    c->n_tokens -= n_ready;
    if (c->n_tokens > 0) {
        memmove(c->tokens, c->tokens + n_ready, c->n_tokens * sizeof *c->tokens);
        memmove(c->places, c->places + n_ready, c->n_tokens * sizeof *c->places);
    }
    c->n_sent = n_out;
    td_buf_clear(&c->text);
}

/* --- the message that is open ------------------------------------------------------------------------------------- */

static void open_message(struct td_choice *c, enum td_chat_kind kind)
{
    c->open = (struct td_choice_event){.kind = kind};
    c->is_open = c->has_shown_text = false;
    c->is_hidden = !td_chat_kind_is_visible(kind) || (kind == TD_CHAT_REASONING && c->order->hides_reasoning);
    c->n_fed = c->n_sent = 0;
    c->n_tokens = 0;
    td_buf_clear(&c->text);
}

static void make_call_id(struct td_choice *c)
{
    static const char letters[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    memcpy(c->call_id, "call_", 5);
    for (unsigned i = 0; i < 24; i += 4) {
        uint32_t words[4];
        td_rng_philox(c->random, c->n_calls, i, words);
        for (unsigned k = 0; k < 4; k++) c->call_id[5 + i + k] = letters[words[k] % 62];
    }
    c->call_id[29] = '\0';
}

static void open_call(struct td_choice *c, const char *function)
{
    make_call_id(c);
    td_buf_clear(&c->function);
    td_buf_str(&c->function, function != NULL ? function : "");
    c->open.call = c->n_calls++;
    c->open.call_id = c->call_id;
    c->open.function = td_buf_cstr(&c->function);
    if (c->function.failed && c->st == TD_OK) c->st = TD_E_NO_MEMORY;
    start_message(c);
}

static void show(struct td_choice *c, const char *text, size_t n)
{
    if (is_content(c->open.kind)) {
        c->n_fed += n;
        c->is_stopped = td_stop_feed(c->stop, text, n, &c->text);
    } else {
        td_buf_put(&c->text, text, n);
    }
}

static void close_message(struct td_choice *c, bool is_complete)
{
    if (!c->is_hidden) {
        if (is_content(c->open.kind) && !c->is_stopped) td_stop_end(c->stop, &c->text);
        send_text(c, true);
        c->open.is_complete = is_complete;
        if (c->is_open) send(c, TD_CHOICE_MESSAGE_END);
    }
    c->is_hidden = true; /* nothing is open */
    c->is_open = false;
    c->n_tokens = 0;
}

static void on_parsed(void *user, const struct td_chat_event *e)
{
    struct td_choice *c = user;
    if (c->is_stopped || c->st != TD_OK) return;
    switch (e->type) {
    case TD_CHAT_MESSAGE_START:
        if (c->order->one_call && c->n_calls > 0) {
            c->is_stopped = true; /* whatever comes now comes after the one call */
            return;
        }
        open_message(c, e->kind);
        if (e->kind == TD_CHAT_CALL) open_call(c, e->function);
        break;
    case TD_CHAT_TEXT:
        if (!c->is_hidden) show(c, e->text.p, e->text.n);
        break;
    case TD_CHAT_MESSAGE_END: close_message(c, e->is_complete); break;
    case TD_CHAT_TURN_END: break;
    }
}

/* --- tokens in ---------------------------------------------------------------------------------------------------- */

static bool has_room_for_token(struct td_choice *c)
{
    if (c->n_tokens < c->cap_tokens) return true;
    size_t cap = c->cap_tokens < 8 ? 8 : c->cap_tokens * 2;
    struct td_token_logprobs *tokens = td_realloc(c->tokens, cap, sizeof *tokens);
    if (tokens != NULL) c->tokens = tokens;
    struct token_place *places = td_realloc(c->places, cap, sizeof *places);
    if (places != NULL) c->places = places;
    if (tokens == NULL || places == NULL) return false;
    c->cap_tokens = cap;
    return true;
}

/* The token's text is the bytes [start, n_fed) of the open message. */
static void note_logprobs(struct td_choice *c, uint32_t id, uint64_t start, const Tandem__V1__PositionLogprobs *l)
{
    if (!has_room_for_token(c)) {
        if (c->st == TD_OK) c->st = TD_E_NO_MEMORY;
        return;
    }
    struct td_token_logprobs *t = &c->tokens[c->n_tokens];
    *t = (struct td_token_logprobs){.id = id, .logprob = l->chosen != NULL ? l->chosen->logprob : 0};
    for (size_t i = 0; i < l->n_top && i < TD_ORDER_MAX_LOGPROBS; i++) {
        t->top[i].id = l->top[i]->id;
        t->top[i].logprob = l->top[i]->logprob;
        t->n_top++;
    }
    c->places[c->n_tokens++] = (struct token_place){start, c->n_fed};
}

static void feed_parser(struct td_choice *c, uint32_t id, const Tandem__V1__PositionLogprobs *l)
{
    bool was_open = !c->is_hidden;
    uint64_t start = was_open ? c->n_fed : 0;
    td_chat_parser_feed(c->parser, id);
    if (c->parser->failed && c->st == TD_OK) c->st = TD_E_NO_MEMORY;
    bool is_body = !c->is_hidden && is_content(c->open.kind) && (was_open || c->n_fed > 0);
    if (l != NULL && is_body && !td_tokenizer_is_special(c->tokenizer, id)) note_logprobs(c, id, start, l);
}

static void feed_plain(struct td_choice *c, uint32_t id, const Tandem__V1__PositionLogprobs *l)
{
    struct td_buf text = {0};
    uint64_t start = c->n_fed;
    td_detok_feed(&c->detok, id, &text);
    if (text.failed && c->st == TD_OK) c->st = TD_E_NO_MEMORY;
    show(c, (const char *)text.data, text.n);
    td_buf_free(&text);
    if (l != NULL) note_logprobs(c, id, start, l);
}

enum td_status td_choice_tokens(struct td_choice *c, const uint32_t *ids, uint32_t n,
                                Tandem__V1__PositionLogprobs *const *logprobs)
{
    if (!c->has_begun) {
        struct td_choice_event begin = {.type = TD_CHOICE_BEGIN};
        c->has_begun = true;
        c->st = c->on_event(c->user, &begin);
        for (size_t i = 0; i < c->n_forced && c->parser != NULL; i++) td_chat_parser_feed(c->parser, c->forced[i]);
    }
    for (uint32_t i = 0; i < n && !c->is_stopped && c->st == TD_OK; i++) {
        const Tandem__V1__PositionLogprobs *l = c->order->want_logprobs && logprobs != NULL ? logprobs[i] : NULL;
        if (c->parser != NULL)
            feed_parser(c, ids[i], l);
        else
            feed_plain(c, ids[i], l);
    }
    if (!c->is_hidden && !c->is_stopped) send_text(c, false);
    return c->st;
}

void td_choice_force(struct td_choice *c, const uint32_t *ids, size_t n)
{
    c->forced = ids;
    c->n_forced = n;
}

static enum td_finish finish_of(const struct td_choice *c, bool hit_limit)
{
    if (hit_limit) return TD_FINISH_LENGTH;
    /* A client that names the function knows that it is called. */
    bool says_calls = c->n_calls > 0 && c->order->tool_choice != TD_TOOL_CHOICE_NAMED;
    return says_calls ? TD_FINISH_TOOL_CALLS : TD_FINISH_STOP;
}

enum td_status td_choice_end(struct td_choice *c, bool hit_limit)
{
    if (c->has_ended) return c->st;
    c->has_ended = true;
    bool by_us = c->is_stopped;
    if (by_us) {
        if (!c->is_hidden) close_message(c, true);
    } else if (c->parser != NULL) {
        td_chat_parser_end(c->parser, hit_limit);
        if (c->parser->failed && c->st == TD_OK) c->st = TD_E_NO_MEMORY;
    } else {
        struct td_buf text = {0};
        td_detok_end(&c->detok, &text);
        if (text.failed && c->st == TD_OK) c->st = TD_E_NO_MEMORY;
        show(c, (const char *)text.data, text.n);
        td_buf_free(&text);
        close_message(c, !hit_limit);
    }
    c->open = (struct td_choice_event){.finish = finish_of(c, hit_limit && !by_us)};
    send(c, TD_CHOICE_END);
    return c->st;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static enum td_status open_parser(struct td_choice *c, const struct td_chat_format *format)
{
    const struct td_chat_conversation *chat = &c->order->chat;
    c->functions = td_calloc(chat->n_tools + 1, sizeof *c->functions);
    if (c->functions == NULL) return TD_E_NO_MEMORY;
    for (size_t i = 0; i < chat->n_tools; i++) c->functions[i] = chat->tools[i].name;
    struct td_chat_parser_options o = {
        .on_event = on_parsed, .user = c, .functions = c->functions, .n_functions = chat->n_tools};
    return format->parser_create(format, &o, &c->parser);
}

enum td_status td_choice_init(struct td_choice *c, const struct td_order *order, const struct td_chat_format *format,
                              const struct td_tokenizer *tokenizer, uint64_t random,
                              enum td_status (*on_event)(void *user, const struct td_choice_event *e), void *user)
{
    c->order = order;
    c->tokenizer = tokenizer;
    c->random = random;
    c->on_event = on_event;
    c->user = user;
    td_detok_init(&c->detok, tokenizer, false);
    enum td_status st = td_stop_create(order->stop_strings, order->n_stop_strings, &c->stop);
    if (st != TD_OK) return st;
    open_message(c, TD_CHAT_CONTENT); /* a plain prompt's only message */
    if (!order->is_chat) return TD_OK;
    c->is_hidden = true; /* nothing is open yet */
    return open_parser(c, format);
}

void td_choice_deinit(struct td_choice *c)
{
    td_chat_parser_destroy(c->parser);
    td_stop_destroy(c->stop);
    td_buf_free(&c->function);
    td_buf_free(&c->text);
    free(c->functions);
    free(c->tokens);
    free(c->places);
    *c = (struct td_choice){0};
}

uint64_t td_choice_reasoning_tokens(const struct td_choice *c)
{
    return c->parser != NULL ? c->parser->n_reasoning_tokens : 0;
}
