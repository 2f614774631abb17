/* Harmony messages to token ids, and the texts of system and developer messages.
 *   <|start|> author [:name] [ to=recipient] [<|channel|> channel] [ content-type] <|message|> parts <|end|>
 * Each of these pieces is encoded on its own: no token spans two of them. */
#include <string.h>

#include "common/text/harmony.h"

static bool is_text(struct td_text t, const char *s)
{
    return t.p != NULL && t.n == strlen(s) && memcmp(t.p, s, t.n) == 0;
}

struct writer {
    const struct td_harmony *h;
    struct td_token_list *out;
    struct td_err *err;
    enum td_status st; /* of the first failure; nothing is written after it */
};

static void put_id(struct writer *w, enum td_harmony_token t)
{
    if (w->st == TD_OK) td_token_list_push(w->out, w->h->ids[t]);
}

static void put_text(struct writer *w, struct td_text t)
{
    if (w->st == TD_OK)
        w->st =
            td_tokenizer_encode(w->h->format.tokenizer, t.p == NULL ? "" : t.p, t.n, TD_TEXT_ORDINARY, w->out, w->err);
}

/* One encoding unit of a fixed prefix and a text. */
static void put_prefixed(struct writer *w, const char *prefix, struct td_text t)
{
    struct td_buf b = {0};
    td_buf_str(&b, prefix);
    td_buf_put(&b, t.p, t.n);
    if (b.failed && w->st == TD_OK) w->st = td_err_set(w->err, TD_E_NO_MEMORY, "out of memory");
    put_text(w, (struct td_text){(char *)b.data, b.n});
    td_buf_free(&b);
}

static void put_content_type(struct writer *w, struct td_text t)
{
    static const char constrain[] = "<|constrain|>";
    size_t n = sizeof constrain - 1;
    if (t.n < n || memcmp(t.p, constrain, n) != 0) {
        put_prefixed(w, " ", t);
        return;
    }
    put_text(w, (struct td_text){" ", 1});
    put_id(w, TD_HARMONY_CONSTRAIN);
    put_text(w, (struct td_text){t.p + n, t.n - n});
}

static void put_message(struct writer *w, const struct td_harmony_message *m, bool is_last_of_training)
{
    put_id(w, TD_HARMONY_START);
    put_text(w, m->author);
    if (m->name.n > 0) put_prefixed(w, ":", m->name);
    if (m->recipient.n > 0 && !is_text(m->recipient, "all")) put_prefixed(w, " to=", m->recipient);
    if (m->channel.n > 0) {
        put_id(w, TD_HARMONY_CHANNEL);
        put_text(w, m->channel);
    }
    if (m->content_type.n > 0) put_content_type(w, m->content_type);
    put_id(w, TD_HARMONY_MESSAGE);
    for (size_t i = 0; i < m->n_parts; i++) put_text(w, m->parts[i]);
    bool is_assistant = is_text(m->author, "assistant");
    if (is_assistant && m->recipient.n > 0)
        put_id(w, TD_HARMONY_CALL);
    else if (is_assistant && is_last_of_training && is_text(m->channel, "final"))
        put_id(w, TD_HARMONY_RETURN);
    else
        put_id(w, TD_HARMONY_END);
}

/* Number of messages at the beginning whose reasoning goes. */
static size_t count_old(const struct td_harmony_message *messages, size_t n, enum td_harmony_drop drop)
{
    size_t first = n, last = n, last_assistant = n; /* n: none */
    for (size_t i = 0; i < n; i++) {
        if (!is_text(messages[i].author, "assistant")) continue;
        last_assistant = i;
        if (!is_text(messages[i].channel, "final")) continue;
        if (first == n) first = i;
        last = i;
    }
    if (drop == TD_HARMONY_DROP_NONE || last == n) return 0;
    if (drop == TD_HARMONY_DROP_FINISHED) return last;
    return last == last_assistant ? first : 0;
}

enum td_status td_harmony_render(const struct td_harmony *h, const struct td_harmony_message *messages, size_t n,
                                 enum td_harmony_mode mode, enum td_harmony_drop drop, struct td_token_list *out,
                                 struct td_err *err)
{
    struct writer w = {.h = h, .out = out, .err = err};
    size_t n_before = out->n, n_old = count_old(messages, n, drop);
    for (size_t i = 0; i < n && w.st == TD_OK; i++) {
        if (i < n_old && is_text(messages[i].channel, "analysis")) continue;
        put_message(&w, &messages[i], mode == TD_HARMONY_TRAINING && i + 1 == n);
        if (w.st != TD_OK)
            td_err_prefix(err, w.st, "message %zu (%.*s)", i, (int)messages[i].author.n, messages[i].author.p);
    }
    if (mode == TD_HARMONY_COMPLETION) {
        put_id(&w, TD_HARMONY_START);
        put_text(&w, (struct td_text){"assistant", 9});
    }
    if (w.st == TD_OK && out->failed) w.st = td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    if (w.st != TD_OK) out->n = n_before;
    return w.st;
}

/* --- texts -------------------------------------------------------------------------------------------------------- */

static void put(struct td_buf *out, struct td_text t) { td_buf_put(out, t.p, t.n); }

/* Sections are joined by an empty line. */
static void begin_section(struct td_buf *out, size_t n_before)
{
    if (out->n > n_before) td_buf_str(out, "\n\n");
}

static void put_line(struct td_buf *out, size_t n_before, const char *label, struct td_text t)
{
    if (t.p == NULL) return;
    if (out->n > n_before) td_buf_str(out, "\n");
    td_buf_str(out, label);
    put(out, t);
}

void td_harmony_system_text(const struct td_harmony_system *s, struct td_buf *out)
{
    size_t start = out->n;
    put_line(out, start, "", s->identity);
    put_line(out, start, "Knowledge cutoff: ", s->cutoff);
    put_line(out, start, "Current date: ", s->date);
    if (s->effort.p != NULL) {
        begin_section(out, start);
        td_buf_str(out, "Reasoning: ");
        put(out, s->effort);
    }
    if (s->n_tools > 0) {
        begin_section(out, start);
        td_harmony_tools_text(s->tools, s->n_tools, out);
    }
    if (s->n_channels > 0) {
        begin_section(out, start);
        td_buf_str(out, "# Valid channels: ");
        for (size_t i = 0; i < s->n_channels; i++) {
            if (i > 0) td_buf_str(out, ", ");
            put(out, s->channels[i]);
        }
        td_buf_str(out, ".");
        if (s->channel_required) td_buf_str(out, " Channel must be included for every message.");
        if (s->has_functions) td_buf_str(out, "\nCalls to these tools must go to the commentary channel: 'functions'.");
    }
}

void td_harmony_developer_text(const struct td_harmony_developer *d, struct td_buf *out)
{
    size_t start = out->n;
    if (d->instructions.p != NULL) {
        td_buf_str(out, "# Instructions\n\n");
        put(out, d->instructions);
    }
    if (d->n_tools > 0) {
        begin_section(out, start);
        td_harmony_tools_text(d->tools, d->n_tools, out);
    }
    const struct td_chat_response_format *r = &d->response_format;
    if (r->schema.p != NULL) {
        begin_section(out, start);
        td_buf_str(out, "# Response Formats\n\n## ");
        put(out, r->name.n > 0 ? r->name : (struct td_text){"response", 8});
        td_buf_str(out, "\n\n");
        if (r->description.p != NULL) {
            td_buf_str(out, "// ");
            put(out, r->description);
            td_buf_str(out, "\n");
        }
        put(out, r->schema);
    }
}
