#include "router/encode.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "common/text/detok.h"
#include "common/text/utf8.h"
#include "router/params.h"

#define MAX_DETOKENIZED_BYTES (16u << 20) /* a short list of ids can mean a very long text */

/* --- the work: any thread -------------------------------------------------------------------------------- */

static void render_chat(struct td_encode *e)
{
    const Tandem__V1__ChatRequest *m = e->chat;
    struct td_chat_message *messages = td_calloc(m->n_messages, sizeof *messages);
    struct td_text *parts = td_calloc(m->n_messages, sizeof *parts);
    if (messages == NULL || parts == NULL) {
        e->st = td_err_set(&e->err, TD_E_NO_MEMORY, "no memory for the conversation");
        goto out;
    }
    for (size_t i = 0; i < m->n_messages; i++) {
        const Tandem__V1__ChatMessage *from = m->messages[i];
        struct td_chat_message *to = &messages[i];
        td_chat_role_parse(from->role, &to->role);
        parts[i] = (struct td_text){from->content.len > 0 ? (const char *)from->content.data : "", from->content.len};
        to->parts = &parts[i];
        to->n_parts = 1;
        if (from->reasoning.len > 0)
            to->reasoning = (struct td_text){(const char *)from->reasoning.data, from->reasoning.len};
        if (from->name[0] != '\0') to->name = (struct td_text){from->name, strlen(from->name)};
    }
    struct td_chat_conversation c = {.messages = messages, .n_messages = m->n_messages, .current_date = e->date};
    td_chat_effort_parse(m->reasoning_effort, &c.effort);
    e->st = e->format->render(e->format, &c, &e->ids, &e->err);
out:
    free(messages);
    free(parts);
}

static void detokenize(struct td_encode *e)
{
    const Tandem__V1__DetokenizeRequest *m = e->detokenize;
    uint32_t n_ids = td_tokenizer_n_ids(e->tokenizer);
    struct td_detok detok;
    td_detok_init(&detok, e->tokenizer, m->keep_special);
    for (size_t i = 0; i < m->n_token_ids; i++) {
        if (m->token_ids[i] >= n_ids) {
            e->st = td_err_set(&e->err, TD_E_INVALID, "token_ids: %u at index %zu is not a token id (there are %u)",
                               m->token_ids[i], i, n_ids);
            return;
        }
        td_tokenizer_decode(e->tokenizer, &m->token_ids[i], 1, m->keep_special, &e->raw);
        td_detok_feed(&detok, m->token_ids[i], &e->lossy);
        if (e->raw.n > MAX_DETOKENIZED_BYTES) {
            e->st = td_err_set(&e->err, TD_E_TOO_LARGE, "token_ids: their text is longer than %u bytes",
                               MAX_DETOKENIZED_BYTES);
            return;
        }
    }
    td_detok_end(&detok, &e->lossy);
    e->st = e->raw.failed || e->lossy.failed ? td_err_set(&e->err, TD_E_NO_MEMORY, "no memory for the text") : TD_OK;
}

static void run(struct td_encode *e)
{
    if (e->chat != NULL) {
        render_chat(e);
    } else if (e->detokenize != NULL) {
        detokenize(e);
    } else {
        e->st = td_tokenizer_encode(e->tokenizer, e->text, e->n_text, e->mode, &e->ids, &e->err);
    }
    if (e->st == TD_OK && e->ids.failed) e->st = td_err_set(&e->err, TD_E_NO_MEMORY, "no memory for the tokens");
}

static void on_pool(struct td_work *w) { run(TD_CONTAINER_OF(w, struct td_encode, work)); }
static void on_done(struct td_work *w)
{
    struct td_encode *e = TD_CONTAINER_OF(w, struct td_encode, work);
    e->done(e);
}

static void start(struct td_encode *e, struct td_loop *loop, size_t n_bytes)
{
    if (n_bytes <= TD_ENCODE_INLINE_BYTES) {
        run(e);
        e->done(e);
        return;
    }
    e->work.work = on_pool;
    e->work.done = on_done;
    td_loop_work(loop, &e->work);
}

/* --- the orders: loop thread ----------------------------------------------------------------------------- */

enum td_status td_encode_text(struct td_encode *e, struct td_loop *loop, const struct td_tokenizer *t, const void *text,
                              size_t n, enum td_text_mode mode, void (*done)(struct td_encode *e))
{
    *e = (struct td_encode){.done = done, .tokenizer = t, .n_text = n, .mode = mode};
    e->text = td_calloc(n + 1, 1);
    if (e->text == NULL) return TD_E_NO_MEMORY;
    if (n > 0) memcpy(e->text, text, n);
    start(e, loop, n);
    return TD_OK;
}

/* A message of ours on the heap, as unpacking makes it; NULL: no memory. */
static ProtobufCMessage *copy_message(const ProtobufCMessage *m, size_t *n_out)
{
    *n_out = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes = td_calloc(1, *n_out + 1);
    if (bytes == NULL) return NULL;
    protobuf_c_message_pack(m, bytes);
    ProtobufCMessage *copy = protobuf_c_message_unpack(m->descriptor, NULL, *n_out, bytes);
    free(bytes);
    return copy;
}

enum td_status td_encode_chat(struct td_encode *e, struct td_loop *loop, const struct td_chat_format *f,
                              const Tandem__V1__ChatRequest *chat, const char *date, void (*done)(struct td_encode *e))
{
    *e = (struct td_encode){.done = done, .tokenizer = f->tokenizer, .format = f};
    strncpy(e->date, date, sizeof e->date - 1);
    size_t n;
    e->chat = (Tandem__V1__ChatRequest *)copy_message(&chat->base, &n);
    if (e->chat == NULL) return TD_E_NO_MEMORY;
    start(e, loop, n);
    return TD_OK;
}

enum td_status td_encode_detokenize(struct td_encode *e, struct td_loop *loop, const struct td_tokenizer *t,
                                    const Tandem__V1__DetokenizeRequest *m, void (*done)(struct td_encode *e))
{
    *e = (struct td_encode){.done = done, .tokenizer = t};
    size_t n;
    e->detokenize = (Tandem__V1__DetokenizeRequest *)copy_message(&m->base, &n);
    if (e->detokenize == NULL) return TD_E_NO_MEMORY;
    start(e, loop, n);
    return TD_OK;
}

enum td_status td_encode_check_chat(const Tandem__V1__ChatRequest *chat, struct td_err *err)
{
    if (chat->n_messages == 0) return td_err_set(err, TD_E_INVALID, "messages: must not be empty");
    enum td_chat_effort effort;
    if (!td_chat_effort_parse(chat->reasoning_effort, &effort))
        return td_err_set(err, TD_E_INVALID, "reasoning_effort: \"%.40s\" is none of low, medium, high",
                          chat->reasoning_effort);
    if (chat->current_date[0] != '\0' && !td_params_is_date(chat->current_date))
        return td_err_set(err, TD_E_INVALID, "current_date: \"%.40s\" is not of the form YYYY-MM-DD",
                          chat->current_date);
    for (size_t i = 0; i < chat->n_messages; i++) {
        const Tandem__V1__ChatMessage *m = chat->messages[i];
        enum td_chat_role role;
        if (!td_chat_role_parse(m->role, &role))
            return td_err_set(err, TD_E_INVALID,
                              "messages[%zu].role: \"%.40s\" is none of system, developer, user, assistant, tool", i,
                              m->role);
        size_t n = td_utf8_valid_prefix(m->content.data, m->content.len);
        if (n < m->content.len)
            return td_err_set(err, TD_E_INVALID, "messages[%zu].content: not UTF-8 at byte %zu", i, n);
        n = td_utf8_valid_prefix(m->reasoning.data, m->reasoning.len);
        if (n < m->reasoning.len)
            return td_err_set(err, TD_E_INVALID, "messages[%zu].reasoning: not UTF-8 at byte %zu", i, n);
        if (role == TD_CHAT_TOOL && m->name[0] == '\0')
            return td_err_set(err, TD_E_INVALID, "messages[%zu].name: a tool message names its function", i);
    }
    return TD_OK;
}

void td_encode_deinit(struct td_encode *e)
{
    free(e->text);
    e->text = NULL;
    if (e->chat != NULL) tandem__v1__chat_request__free_unpacked(e->chat, NULL);
    e->chat = NULL;
    if (e->detokenize != NULL) tandem__v1__detokenize_request__free_unpacked(e->detokenize, NULL);
    e->detokenize = NULL;
    td_token_list_free(&e->ids);
    td_buf_free(&e->lossy);
    td_buf_free(&e->raw);
}
