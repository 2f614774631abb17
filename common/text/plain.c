#include "common/text/plain.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "common/text/detok.h"

static const char *const titles[] = {"System", "Developer", "User", "Assistant", "Tool"};

static enum td_status render(const struct td_chat_format *f, const struct td_chat_conversation *c,
                             struct td_token_list *out, struct td_err *err)
{
    if (c->n_tools > 0) return td_err_set(err, TD_E_INVALID, "tools: the plain chat format has none");
    if (c->response_format.schema.p != NULL)
        return td_err_set(err, TD_E_INVALID, "response_format: the plain chat format has none");
    struct td_buf text = {0};
    for (size_t i = 0; i < c->n_messages; i++) {
        const struct td_chat_message *m = &c->messages[i];
        td_buf_printf(&text, "%s:%s", titles[m->role], m->n_parts > 0 ? " " : "");
        for (size_t k = 0; k < m->n_parts; k++) td_buf_put(&text, m->parts[k].p, m->parts[k].n);
        td_buf_str(&text, "\n\n");
    }
    td_buf_str(&text, "Assistant:");
    enum td_status st = text.failed
                            ? td_err_set(err, TD_E_NO_MEMORY, "out of memory")
                            : td_tokenizer_encode(f->tokenizer, (char *)text.data, text.n, TD_TEXT_ORDINARY, out, err);
    td_buf_free(&text);
    return st;
}

struct parser {
    struct td_chat_parser base;
    struct td_chat_parser_options o;
    struct td_detok detok;
    struct td_buf text;
    bool is_open,
        is_past_space; /* the prompt ends in "Assistant:", so the answer begins with a space that is not its own */
};

static void emit(struct parser *p, enum td_chat_event_type type, bool is_complete)
{
    struct td_chat_event e = {.type = type, .kind = TD_CHAT_CONTENT, .is_complete = is_complete};
    e.text = (struct td_text){(char *)p->text.data, p->text.n};
    if (type != TD_CHAT_TEXT) e.text = (struct td_text){NULL, 0};
    p->o.on_event(p->o.user, &e);
}

static void emit_text(struct parser *p)
{
    if (p->text.failed) p->base.failed = true;
    if (p->base.failed || p->text.n == 0) return;
    bool drops_space = !p->is_past_space && p->text.data[0] == ' ';
    p->is_past_space = true;
    if (drops_space) memmove(p->text.data, p->text.data + 1, --p->text.n);
    if (p->text.n == 0) return;
    if (!p->is_open) emit(p, TD_CHAT_MESSAGE_START, false);
    p->is_open = true;
    emit(p, TD_CHAT_TEXT, false);
    td_buf_clear(&p->text);
}

static void feed(struct td_chat_parser *base, uint32_t id)
{
    struct parser *p = TD_CONTAINER_OF(base, struct parser, base);
    td_buf_clear(&p->text);
    td_detok_feed(&p->detok, id, &p->text);
    emit_text(p);
}

static void end(struct td_chat_parser *base, bool hit_limit)
{
    struct parser *p = TD_CONTAINER_OF(base, struct parser, base);
    td_buf_clear(&p->text);
    td_detok_end(&p->detok, &p->text);
    emit_text(p);
    if (p->is_open) emit(p, TD_CHAT_MESSAGE_END, !hit_limit);
    emit(p, TD_CHAT_TURN_END, !hit_limit);
}

static void parser_destroy(struct td_chat_parser *base)
{
    struct parser *p = TD_CONTAINER_OF(base, struct parser, base);
    td_buf_free(&p->text);
    free(p);
}

static const struct td_chat_parser_ops parser_ops = {.feed = feed, .end = end, .destroy = parser_destroy};

static enum td_status parser_create(const struct td_chat_format *f, const struct td_chat_parser_options *o,
                                    struct td_chat_parser **out)
{
    struct parser *p = td_calloc(1, sizeof *p);
    if (p == NULL) return TD_E_NO_MEMORY;
    p->base.ops = &parser_ops;
    p->o = *o;
    td_detok_init(&p->detok, f->tokenizer, false);
    *out = &p->base;
    return TD_OK;
}

static void destroy(struct td_chat_format *f) { free(f); }

enum td_status td_plain_create(const struct td_tokenizer *t, struct td_chat_format **out, struct td_err *err)
{
    struct td_chat_format *f = td_calloc(1, sizeof *f);
    if (f == NULL) return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    *f = (struct td_chat_format){
        .name = "plain", .tokenizer = t, .render = render, .parser_create = parser_create, .destroy = destroy};
    *out = f;
    return TD_OK;
}
