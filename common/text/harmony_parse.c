/* Reads what the model writes. A normal turn:
 *   <|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 12.<|return|>
 * States: HEADER (from the start: the prompt ends inside an assistant's header), BODY, IDLE (between messages).
 *
 * Nothing a model writes is an error. harmony_malformed.def lists what goes wrong in real output and what each kind
 * yields; the rules behind it:
 *   no <|message|> before a terminator       the header's text is the message (recover)
 *   <|start|> or <|channel|> inside a body   the message ends there
 *   text where <|start|> belongs             a header begins, without a role
 *   another party's role in a header         the message is hidden
 *   an unknown channel, several recipients   see read_channel, read_words
 * Special tokens never reach a message's text; bytes that are no UTF-8 become U+FFFD; part of a character waits for the
 * rest.
 */
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "common/text/detok.h"
#include "common/text/harmony.h"
#include "common/text/utf8.h"

static const char channel_mark[] = "<|channel|>";
static const char constrain_mark[] = "<|constrain|>";
static const char *const channels[] = {"analysis", "commentary", "final"};

enum state { HEADER, BODY, IDLE };

struct parser {
    struct td_chat_parser base;
    const struct td_harmony *h;
    struct td_chat_parser_options o;
    enum state state;
    bool is_explicit;     /* HEADER: entered by <|start|>, so that it must name its author */
    struct td_buf header; /* HEADER: bytes of its tokens, <|channel|> and <|constrain|> by name */
    struct td_detok detok;
    struct td_buf text;  /* BODY: what the last token made certain */
    struct td_buf blank; /* BODY of a call: leading white space, held back because a blank call becomes "{}" */

    /* the message that is open, or was last */
    struct td_chat_event message;
    struct td_buf recipient, content_type;
    bool has_text;
    uint32_t n_messages, n_calls;
    bool had_reasoning, had_content; /* an earlier message of that kind had text */
};

/* --- words -------------------------------------------------------------------------------------------------------- */

/* Unicode white space at p: its length, 0 if there is none. Text is valid UTF-8. */
static size_t space_at(const uint8_t *p, size_t n)
{
    if (n == 0) return 0;
    size_t len;
    uint32_t c = td_utf8_decode(p, &len);
    bool is_space = (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
                    (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
                    c == 0x3000;
    return is_space ? len : 0;
}

static struct td_text trim(struct td_text t)
{
    if (t.n == 0) return t;
    const uint8_t *p = (const uint8_t *)t.p;
    size_t n = t.n, k;
    while ((k = space_at(p, n)) > 0) {
        p += k;
        n -= k;
    }
    size_t end = 0; /* behind the last character that is no space */
    for (size_t i = 0; i < n;) {
        k = space_at(p + i, n - i);
        if (k == 0) {
            td_utf8_decode(p + i, &k);
            end = i + k;
        }
        i += k;
    }
    return (struct td_text){(const char *)p, end};
}

/* Takes the first word off rest; n 0: there is none. rest keeps the space behind the word. */
static struct td_text next_word(struct td_text *rest)
{
    if (rest->n == 0) return *rest;
    const uint8_t *p = (const uint8_t *)rest->p;
    size_t n = rest->n, k, len = 0;
    while ((k = space_at(p, n)) > 0) {
        p += k;
        n -= k;
    }
    while (len < n && space_at(p + len, n - len) == 0) {
        td_utf8_decode(p + len, &k);
        len += k;
    }
    *rest = (struct td_text){(const char *)p + len, n - len};
    return (struct td_text){(const char *)p, len};
}

static bool starts_with(struct td_text t, const char *s) { return t.n >= strlen(s) && memcmp(t.p, s, strlen(s)) == 0; }
static bool equals(struct td_text t, const char *s) { return t.n == strlen(s) && memcmp(t.p, s, t.n) == 0; }
static struct td_text skip(struct td_text t, size_t k) { return (struct td_text){t.p + k, t.n - k}; }
static bool has_char(struct td_text t, char c) { return t.n > 0 && memchr(t.p, c, t.n) != NULL; }

static struct td_text up_to(struct td_text t, char c)
{
    const char *end = t.n > 0 ? memchr(t.p, c, t.n) : NULL;
    return end == NULL ? t : (struct td_text){t.p, (size_t)(end - t.p)};
}

static bool is_declared(const struct parser *p, struct td_text name)
{
    for (size_t i = 0; i < p->o.n_functions; i++) {
        const struct td_text *f = &p->o.functions[i];
        if (f->n == name.n && memcmp(f->p, name.p, name.n) == 0) return true;
    }
    return false;
}

/* --- events ------------------------------------------------------------------------------------------------------- */

static void emit(struct parser *p, enum td_chat_event_type type)
{
    p->message.type = type;
    if (!p->base.failed) p->o.on_event(p->o.user, &p->message);
}

static void emit_text(struct parser *p, const void *text, size_t n)
{
    if (n == 0) return;
    bool *had_text = p->message.kind == TD_CHAT_REASONING                                        ? &p->had_reasoning
                     : p->message.kind == TD_CHAT_CONTENT || p->message.kind == TD_CHAT_PREAMBLE ? &p->had_content
                                                                                                 : NULL;
    p->message.starts_line = !p->has_text && had_text != NULL && *had_text;
    p->has_text = true;
    if (had_text != NULL) *had_text = true;
    p->message.text = (struct td_text){text, n};
    emit(p, TD_CHAT_TEXT);
    p->message.text = (struct td_text){NULL, 0};
    p->message.starts_line = false;
}

/* Body text on its way out. */
static void add_text(struct parser *p, const uint8_t *text, size_t n)
{
    if (p->message.kind == TD_CHAT_CALL && !p->has_text) {
        td_buf_put(&p->blank, text, n);
        if (p->blank.failed)
            p->base.failed = true;
        else if (trim((struct td_text){(const char *)text, n}).n > 0)
            emit_text(p, p->blank.data, p->blank.n);
    } else {
        emit_text(p, text, n);
    }
}

static void set(struct parser *p, struct td_buf *b, struct td_text t)
{
    td_buf_clear(b);
    td_buf_put(b, t.p, t.n);
    td_buf_u8(b, 0);
    if (b->failed) p->base.failed = true;
}

static const char *value_of(const struct td_buf *b) { return b->failed || b->n <= 1 ? NULL : (const char *)b->data; }

static void choose_kind(struct parser *p, bool is_hidden)
{
    struct td_chat_event *m = &p->message;
    const char *to = m->recipient;
    if (is_hidden) {
        m->kind = TD_CHAT_HIDDEN;
    } else if (to != NULL && strcmp(to, "assistant") != 0) {
        bool has_prefix = strncmp(to, "functions.", 10) == 0;
        bool is_call = has_prefix || is_declared(p, (struct td_text){to, strlen(to)});
        m->kind = is_call ? TD_CHAT_CALL : TD_CHAT_UNKNOWN_CALL;
        if (is_call) m->function = has_prefix ? to + 10 : to;
        if (is_call) m->call = p->n_calls++;
    } else if (m->channel != NULL && strcmp(m->channel, "analysis") == 0) {
        m->kind = TD_CHAT_REASONING;
    } else {
        m->kind = m->channel != NULL && strcmp(m->channel, "commentary") == 0 ? TD_CHAT_PREAMBLE : TD_CHAT_CONTENT;
    }
}

static void open_message(struct parser *p, const char *channel, bool is_hidden)
{
    p->message = (struct td_chat_event){.message = p->n_messages++,
                                        .channel = channel,
                                        .recipient = value_of(&p->recipient),
                                        .content_type = value_of(&p->content_type)};
    p->has_text = false;
    td_buf_clear(&p->blank);
    choose_kind(p, is_hidden);
    emit(p, TD_CHAT_MESSAGE_START);
}

static void close_message(struct parser *p, bool is_complete)
{
    td_buf_clear(&p->text);
    td_detok_end(&p->detok, &p->text);
    if (p->text.n > 0) add_text(p, p->text.data, p->text.n);
    if (p->message.kind == TD_CHAT_CALL && !p->has_text) {
        if (is_complete)
            emit_text(p, "{}", 2);
        else
            emit_text(p, p->blank.data, p->blank.n);
    }
    p->message.is_complete = is_complete;
    emit(p, TD_CHAT_MESSAGE_END);
}

/* --- headers ------------------------------------------------------------------------------------------------------ */

struct header {
    struct td_buf text;    /* the header without channel and author, a space before each <|constrain|> */
    struct td_text rest;   /* of text: what follows the author */
    struct td_buf channel; /* as the model wrote it; empty: none */
    bool is_hidden;
};

/* Cuts every "<|channel|>value" out; the last value that is not empty counts. */
static void cut_channels(struct td_text t, struct header *h)
{
    for (size_t i = 0; i < t.n;) {
        struct td_text at = skip(t, i);
        if (starts_with(at, channel_mark)) {
            i += sizeof channel_mark - 1;
            size_t begin = i;
            while (i < t.n && t.p[i] != '<' && space_at((const uint8_t *)t.p + i, t.n - i) == 0) {
                size_t len;
                td_utf8_decode((const uint8_t *)t.p + i, &len);
                i += len;
            }
            if (i > begin) {
                td_buf_clear(&h->channel);
                td_buf_put(&h->channel, t.p + begin, i - begin);
            }
            td_buf_u8(&h->text, ' ');
            continue;
        }
        if (starts_with(at, constrain_mark)) {
            td_buf_printf(&h->text, " %s", constrain_mark);
            i += sizeof constrain_mark - 1;
            continue;
        }
        td_buf_put(&h->text, t.p + i++, 1);
    }
}

/* Takes the author off. Any other than the assistant makes the message hidden: the model is inventing other parties. */
static void read_author(const struct parser *p, struct header *h, bool has_body)
{
    static const char *const others[] = {"user", "system", "developer", "tool"};
    h->rest = (struct td_text){(char *)h->text.data, h->text.n};
    struct td_text rest = h->rest, word = next_word(&rest), role = up_to(word, ':');
    if (word.n == 0 || starts_with(word, "to=")) return;
    bool is_author = equals(role, "assistant") && (p->is_explicit || has_body);
    if (p->is_explicit && !is_author) {
        for (size_t i = 0; i < TD_COUNT(others); i++) h->is_hidden = h->is_hidden || equals(role, others[i]);
        h->is_hidden = h->is_hidden || (has_body && has_char(word, '.'));
    }
    if (is_author || h->is_hidden) h->rest = rest;
}

static void read_header(struct parser *p, struct header *h, bool has_body)
{
    struct td_buf lossy = {0};
    struct td_detok d;
    td_detok_init(&d, p->h->format.tokenizer, false);
    td_detok_feed_bytes(&d, p->header.data, p->header.n, &lossy);
    td_detok_end(&d, &lossy);
    cut_channels((struct td_text){(char *)lossy.data, lossy.n}, h);
    if (lossy.failed || h->text.failed || h->channel.failed || p->header.failed) p->base.failed = true;
    td_buf_free(&lossy);
    if (!p->base.failed) read_author(p, h, has_body);
}

static void header_free(struct header *h)
{
    td_buf_free(&h->text);
    td_buf_free(&h->channel);
}

/* NULL: none. A value that is no channel counts as the channel that it begins with, else by what the message looks
 * like. */
static const char *read_channel(const struct header *h, bool has_recipient)
{
    struct td_text value = {(char *)h->channel.data, h->channel.n};
    if (value.n == 0) return NULL;
    for (size_t i = 0; i < TD_COUNT(channels); i++) {
        if (starts_with(value, channels[i])) return channels[i];
    }
    return has_recipient ? "commentary" : "final";
}

/* "all" is the default audience. */
static bool has_recipient(struct parser *p)
{
    const char *to = value_of(&p->recipient);
    if (to != NULL && strcmp(to, "all") == 0) td_buf_clear(&p->recipient);
    return value_of(&p->recipient) != NULL;
}

/* A word that ends in a dot is the end of a sentence that stands before a header. */
static bool names_a_tool(const struct parser *p, struct td_text word)
{
    bool has_dot = has_char((struct td_text){word.p, word.n - 1}, '.');
    return has_dot || is_declared(p, word) || equals(word, "python") || equals(word, "browser") ||
           equals(word, "container");
}

/* The words of a header that a body follows. */
static void read_words(struct parser *p, struct td_text rest)
{
    struct td_text first = {NULL, 0}, last = {NULL, 0}, to = {NULL, 0}, type = {NULL, 0};
    size_t n_left = 0;
    for (struct td_text w; (w = next_word(&rest)).n > 0;) {
        if (starts_with(w, "to=")) {
            if (w.n > 3) to = skip(w, 3);
        } else if (starts_with(w, constrain_mark)) {
            type = w;
        } else {
            if (n_left++ == 0) first = w;
            last = w;
        }
    }
    if (to.n == 0 && n_left > 0 && names_a_tool(p, first)) {
        to = first;
        n_left--;
    }
    if (type.n == 0 && n_left > 0) type = last;
    set(p, &p->recipient, to);
    set(p, &p->content_type, type);
}

static void begin_body(struct parser *p)
{
    struct header h = {0};
    read_header(p, &h, true);
    if (!p->base.failed) {
        read_words(p, h.rest);
        bool to = has_recipient(p);
        if (!p->base.failed) open_message(p, read_channel(&h, to), h.is_hidden);
    }
    header_free(&h);
    p->state = BODY;
}

/* Appends text without any <|constrain|>. */
static void put_without_marks(struct td_buf *out, struct td_text t)
{
    for (size_t i = 0; i < t.n;) {
        if (starts_with(skip(t, i), constrain_mark))
            i += sizeof constrain_mark - 1;
        else
            td_buf_put(out, t.p + i++, 1);
    }
}

/* Text that no <|message|> introduced: find recipient and content type in front, the rest is the body. */
static void recover_from(struct parser *p, struct header *h)
{
    struct td_text rest = h->rest, to = {NULL, 0}, type = {NULL, 0};
    bool had_to = false;
    for (;;) {
        struct td_text behind = rest, w = next_word(&behind);
        if (starts_with(w, "to=")) {
            had_to = true;
            if (w.n > 3) to = skip(w, 3);
        } else if (had_to && starts_with(w, constrain_mark) && has_char(w, '{')) { /* arguments are glued to it */
            type = up_to(w, '{');
            rest = skip(w, type.n);
            rest.n += behind.n;
            break;
        } else if (had_to && (starts_with(w, constrain_mark) || equals(w, "json"))) {
            type = w;
        } else {
            break;
        }
        rest = behind;
    }
    struct td_text body = trim(rest);
    if (to.n == 0 && starts_with(body, constrain_mark) && has_char(body, '{')) {
        type = trim(up_to(body, '{'));
        body = skip(body, up_to(body, '{').n);
    }
    set(p, &p->recipient, to);
    set(p, &p->content_type, type);
    struct td_buf clean = {0};
    put_without_marks(&clean, body);
    if (clean.failed) p->base.failed = true;
    bool is_addressed = has_recipient(p);
    struct td_text text = {(char *)clean.data, clean.n};
    if (!p->base.failed && (is_addressed || trim(text).n > 0)) {
        open_message(p, read_channel(h, is_addressed), h->is_hidden);
        if (text.n > 0) add_text(p, clean.data, clean.n);
        close_message(p, true);
    }
    td_buf_free(&clean);
}

static void recover(struct parser *p)
{
    struct header h = {0};
    read_header(p, &h, false);
    if (!p->base.failed) recover_from(p, &h);
    header_free(&h);
}

/* --- tokens ------------------------------------------------------------------------------------------------------- */

static void enter_header(struct parser *p, bool is_explicit)
{
    td_buf_clear(&p->header);
    p->is_explicit = is_explicit;
    p->state = HEADER;
}

static void feed_header(struct parser *p, uint32_t id)
{
    const uint32_t *ids = p->h->ids;
    if (id == ids[TD_HARMONY_CHANNEL]) {
        td_buf_str(&p->header, channel_mark);
    } else if (id == ids[TD_HARMONY_CONSTRAIN]) {
        td_buf_str(&p->header, constrain_mark);
    } else if (!td_tokenizer_is_special(p->h->format.tokenizer, id)) {
        size_t n;
        const uint8_t *bytes = td_tokenizer_bytes(p->h->format.tokenizer, id, &n);
        if (n > 0) td_buf_put(&p->header, bytes, n);
    }
    if (p->header.failed) p->base.failed = true;
}

static void feed_body(struct parser *p, uint32_t id)
{
    td_buf_clear(&p->text);
    if (p->message.kind == TD_CHAT_REASONING) p->base.n_reasoning_tokens++;
    td_detok_feed(&p->detok, id, &p->text);
    if (p->text.failed)
        p->base.failed = true;
    else if (p->text.n > 0)
        add_text(p, p->text.data, p->text.n);
}

static void on_start(struct parser *p)
{
    if (p->state == HEADER) recover(p);
    if (p->state == BODY) close_message(p, true);
    enter_header(p, true);
}

static void on_terminator(struct parser *p)
{
    if (p->state == HEADER) recover(p);
    if (p->state == BODY) close_message(p, true);
    p->state = IDLE;
}

static void on_message(struct parser *p)
{
    if (p->state == BODY) return;
    if (p->state == IDLE) enter_header(p, false);
    begin_body(p);
}

static void on_channel(struct parser *p)
{
    if (p->state == BODY) close_message(p, true);
    if (p->state != HEADER) enter_header(p, false);
    feed_header(p, p->h->ids[TD_HARMONY_CHANNEL]);
}

static void feed(struct td_chat_parser *base, uint32_t id)
{
    struct parser *p = TD_CONTAINER_OF(base, struct parser, base);
    const uint32_t *ids = p->h->ids;
    if (base->failed) return;
    if (id == ids[TD_HARMONY_START]) {
        on_start(p);
    } else if (id == ids[TD_HARMONY_END] || id == ids[TD_HARMONY_RETURN] || id == ids[TD_HARMONY_CALL]) {
        on_terminator(p);
    } else if (id == ids[TD_HARMONY_MESSAGE]) {
        on_message(p);
    } else if (id == ids[TD_HARMONY_CHANNEL]) {
        on_channel(p);
    } else if (p->state == BODY) {
        if (!td_tokenizer_is_special(p->h->format.tokenizer, id)) feed_body(p, id);
    } else {
        if (p->state == IDLE) enter_header(p, false);
        feed_header(p, id);
    }
}

static void end(struct td_chat_parser *base, bool hit_limit)
{
    struct parser *p = TD_CONTAINER_OF(base, struct parser, base);
    if (base->failed) return;
    if (p->state == BODY) close_message(p, false);
    if (p->state == HEADER && !hit_limit) recover(p);
    p->state = IDLE;
    p->message = (struct td_chat_event){.message = p->n_messages, .is_complete = !hit_limit};
    emit(p, TD_CHAT_TURN_END);
}

static void destroy(struct td_chat_parser *base)
{
    struct parser *p = TD_CONTAINER_OF(base, struct parser, base);
    td_buf_free(&p->header);
    td_buf_free(&p->text);
    td_buf_free(&p->blank);
    td_buf_free(&p->recipient);
    td_buf_free(&p->content_type);
    free(p);
}

static const struct td_chat_parser_ops ops = {.feed = feed, .end = end, .destroy = destroy};

enum td_status td_harmony_parser_create(const struct td_chat_format *f, const struct td_chat_parser_options *o,
                                        struct td_chat_parser **out)
{
    struct parser *p = td_calloc(1, sizeof *p);
    if (p == NULL) return TD_E_NO_MEMORY;
    p->base.ops = &ops;
    p->h = TD_CONTAINER_OF(f, struct td_harmony, format);
    p->o = *o;
    td_detok_init(&p->detok, f->tokenizer, false);
    *out = &p->base;
    return TD_OK;
}
