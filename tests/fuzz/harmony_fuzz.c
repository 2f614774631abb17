/* Any tokens as what a model wrote: the parser's events must come in order, its text must be whole characters, and
 * special tokens must not show. Two bytes of the input are one id; the first byte says how the turn ends. Runs in the
 * repository's root. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/text/chat.h"
#include "common/text/utf8.h"

struct seen {
    bool is_open, is_over;
    uint32_t n_messages;
    enum td_chat_kind kind;
};

static void on_event(void *user, const struct td_chat_event *e)
{
    struct seen *s = user;
    TD_CHECK(!s->is_over);
    switch (e->type) {
    case TD_CHAT_MESSAGE_START:
        TD_CHECK(!s->is_open && e->message == s->n_messages);
        TD_CHECK((e->function != NULL) == (e->kind == TD_CHAT_CALL));
        s->n_messages++;
        s->is_open = true;
        s->kind = e->kind;
        break;
    case TD_CHAT_TEXT:
        TD_CHECK(s->is_open && e->kind == s->kind && e->text.n > 0);
        TD_CHECK(td_utf8_is_valid(e->text.p, e->text.n));
        break;
    case TD_CHAT_MESSAGE_END:
        TD_CHECK(s->is_open && e->kind == s->kind);
        s->is_open = false;
        break;
    case TD_CHAT_TURN_END:
        TD_CHECK(!s->is_open);
        s->is_over = true;
        break;
    }
}

static struct td_chat_format *open_format(void)
{
    struct td_tokenizer *t = NULL;
    struct td_chat_format *f = NULL;
    struct td_err err = {{0}};
    if (td_tokenizer_load("tests/tiny/tiny-model", &t, &err) != TD_OK ||
        td_chat_format_open("harmony", t, &f, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    return f;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static struct td_chat_format *f;
    if (f == NULL) f = open_format();
    struct td_text functions[] = {{"f", 1}, {"get_weather", 11}};
    struct seen s = {0};
    struct td_chat_parser_options o = {.on_event = on_event, .user = &s, .functions = functions, .n_functions = 2};
    struct td_chat_parser *p = NULL;
    if (f->parser_create(f, &o, &p) != TD_OK) return 0;
    for (size_t i = 1; i + 1 < n; i += 2) {
        /* Every eighth pair or so is one of the special tokens, which begin at 2016 in this vocabulary. */
        uint32_t id = data[i] | (uint32_t)data[i + 1] << 8;
        td_chat_parser_feed(p, id >= 0xE000 ? 2016 + id % 40 : id % 2060);
    }
    td_chat_parser_end(p, n > 0 && (data[0] & 1) != 0);
    TD_CHECK(s.is_over || p->failed);
    td_chat_parser_destroy(p);
    return 0;
}
