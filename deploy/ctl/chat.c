/* tandemctl chat: one question, or a conversation. Reasoning is shown apart from the answer: dim on a terminal, behind
 * "thinking:" elsewhere. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/mem.h"
#include "deploy/ctl/client.h"
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/commands.h"
#include "deploy/ctl/report.h"
#include "deploy/ctl/sampling.h"

struct message {
    const char *role;
    struct td_buf content, reasoning;
};

struct chat {
    struct td_client_options client;
    struct td_sampling_options sampling;
    const char *system, *effort, *date, *model;
    bool wants_stats, is_tty;
    struct message *history;
    size_t n_history, cap_history;

    /* the answer that is coming in */
    struct td_buf content, reasoning, summary;
    Tandem__V1__ChatChannel shown; /* what was printed last */
    bool is_midline, has_finished;
};

/* --- history -------------------------------------------------------------------------------------------------------
 */

static bool remember(struct chat *c, const char *role, const void *content, size_t n)
{
    if (c->n_history == c->cap_history) {
        size_t cap = c->cap_history == 0 ? 16 : c->cap_history * 2;
        struct message *list = td_realloc(c->history, cap, sizeof *list);
        if (list == NULL) return false;
        c->history = list;
        c->cap_history = cap;
    }
    struct message *m = &c->history[c->n_history++];
    *m = (struct message){.role = role};
    td_buf_put(&m->content, content, n);
    return !m->content.failed;
}

static void forget(struct chat *c, size_t n_kept)
{
    while (c->n_history > n_kept) {
        struct message *m = &c->history[--c->n_history];
        td_buf_free(&m->content);
        td_buf_free(&m->reasoning);
    }
}

/* --- the answer ----------------------------------------------------------------------------------------------------
 */

static void end_section(struct chat *c)
{
    if (c->shown == TANDEM__V1__CHAT_CHANNEL__CHANNEL_NONE) return;
    if (c->is_tty && c->shown == TANDEM__V1__CHAT_CHANNEL__CHANNEL_REASONING) printf("\033[0m");
    if (c->is_midline) printf("\n");
    c->is_midline = false;
}

static void begin_section(struct chat *c, const Tandem__V1__ChatDelta *d)
{
    end_section(c);
    c->shown = d->channel;
    if (d->channel == TANDEM__V1__CHAT_CHANNEL__CHANNEL_REASONING) printf("%s", c->is_tty ? "\033[2m" : "thinking: ");
    if (d->channel == TANDEM__V1__CHAT_CHANNEL__CHANNEL_TOOL_CALL) printf("call %s ", d->recipient);
}

static void show(struct chat *c, const Tandem__V1__ChatDelta *d)
{
    if (d->channel == TANDEM__V1__CHAT_CHANNEL__CHANNEL_REASONING)
        td_buf_put(&c->reasoning, d->text.data, d->text.len);
    else if (d->channel != TANDEM__V1__CHAT_CHANNEL__CHANNEL_TOOL_CALL)
        td_buf_put(&c->content, d->text.data, d->text.len);
    bool is_new_call = d->channel == TANDEM__V1__CHAT_CHANNEL__CHANNEL_TOOL_CALL && d->recipient[0] != '\0';
    if (d->channel != c->shown || is_new_call) begin_section(c, d);
    if (d->text.len == 0) return;
    fwrite(d->text.data, 1, d->text.len, stdout);
    c->is_midline = d->text.data[d->text.len - 1] != '\n';
}

static void on_event(void *user, const ProtobufCMessage *msg)
{
    struct chat *c = user;
    const Tandem__V1__ChatEvent *e = (const Tandem__V1__ChatEvent *)msg;
    for (size_t i = 0; i < e->n_deltas; i++) show(c, e->deltas[i]);
    if (e->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE) {
        c->has_finished = true;
        td_report_summary(e->usage, e->timing, e->reasoning_tokens, e->finish_reason, &c->summary);
    }
    fflush(stdout);
}

static void fill_message(const struct message *m, Tandem__V1__ChatMessage *out)
{
    *out = (Tandem__V1__ChatMessage)TANDEM__V1__CHAT_MESSAGE__INIT;
    out->role = (char *)m->role;
    out->content = (ProtobufCBinaryData){.data = m->content.data, .len = m->content.n};
    out->reasoning = (ProtobufCBinaryData){.data = m->reasoning.data, .len = m->reasoning.n};
}

static enum td_status call(struct chat *c, struct td_client *client, struct td_err *err)
{
    Tandem__V1__ChatRequest m = TANDEM__V1__CHAT_REQUEST__INIT;
    Tandem__V1__Sampling sampling;
    Tandem__V1__Stop stop;
    td_sampling_fill(&c->sampling, &sampling, &stop);
    Tandem__V1__ChatMessage *messages = td_calloc(c->n_history, sizeof *messages);
    Tandem__V1__ChatMessage **list = td_calloc(c->n_history, sizeof *list);
    enum td_status st = TD_E_NO_MEMORY;
    if (messages == NULL || list == NULL) goto out;
    for (size_t i = 0; i < c->n_history; i++) {
        fill_message(&c->history[i], &messages[i]);
        list[i] = &messages[i];
    }
    m.messages = list;
    m.n_messages = c->n_history;
    m.sampling = &sampling;
    m.stop = &stop;
    m.reasoning_effort = (char *)c->effort;
    if (c->date != NULL) m.current_date = (char *)c->date;
    if (c->model != NULL) m.model = (char *)c->model;
    st = td_client_call(client, "/tandem.v1.Inference/Chat", &m.base, &tandem__v1__chat_event__descriptor, on_event, c,
                        err);
    if (st == TD_OK && !c->has_finished) st = td_err_set(err, TD_E_PROTOCOL, "the stream ended without a last event");
out:
    free(messages);
    free(list);
    return st;
}

/* Asks with the history as it is, and adds the answer to it. */
static enum td_status answer(struct chat *c, struct td_client *client, struct td_err *err)
{
    td_buf_clear(&c->content);
    td_buf_clear(&c->reasoning);
    td_buf_clear(&c->summary);
    c->shown = TANDEM__V1__CHAT_CHANNEL__CHANNEL_NONE;
    c->has_finished = false;
    enum td_status st = call(c, client, err);
    end_section(c);
    fflush(stdout);
    if (st != TD_OK) return st;
    if (c->wants_stats) fprintf(stderr, c->is_tty ? "\033[2m%s\033[0m\n" : "%s\n", td_buf_cstr(&c->summary));
    if (!remember(c, "assistant", c->content.data, c->content.n)) return TD_E_NO_MEMORY;
    td_buf_put(&c->history[c->n_history - 1].reasoning, c->reasoning.data, c->reasoning.n);
    return TD_OK;
}

/* --- one question, or many ------------------------------------------------------------------------------------------
 */

static int ask(struct chat *c, struct td_client *client, const char *prompt, size_t n)
{
    struct td_err err = {{0}};
    if (!remember(c, "user", prompt, n)) return td_ctl_fail(&td_ctl_chat, TD_E_NO_MEMORY, &err);
    enum td_status st = answer(c, client, &err);
    if (td_client_was_interrupted(client)) return TD_CTL_INTERRUPTED;
    return st == TD_OK ? 0 : td_ctl_fail(&td_ctl_chat, st, &err);
}

static int ask_stdin(struct chat *c, struct td_client *client)
{
    struct td_buf text = {0};
    size_t n;
    while (td_buf_reserve(&text, 65536) && (n = fread(text.data + text.n, 1, text.cap - text.n, stdin)) > 0)
        text.n += n;
    while (text.n > 0 && text.data[text.n - 1] == '\n') text.n--;
    int rc;
    if (text.n == 0) {
        fprintf(stderr, "tandemctl chat: no PROMPT, and nothing on standard input\n");
        rc = TD_CTL_USAGE;
    } else {
        rc = ask(c, client, (char *)text.data, text.n);
    }
    td_buf_free(&text);
    return rc;
}

static int converse(struct chat *c, struct td_client *client)
{
    char *line = NULL;
    size_t cap = 0, n_start = c->n_history;
    printf("An empty line or Ctrl-D ends, /new forgets, Ctrl-C stops an answer.\n");
    for (;;) {
        printf("\033[1m> \033[0m");
        fflush(stdout);
        td_client_allow_interrupts(client, true);
        ssize_t n = getline(&line, &cap, stdin);
        td_client_allow_interrupts(client, false);
        if (n > 0 && line[n - 1] == '\n') n--;
        if (n <= 0) break;
        if (n == 4 && memcmp(line, "/new", 4) == 0) {
            forget(c, n_start);
            continue;
        }
        size_t n_before = c->n_history;
        if (ask(c, client, line, (size_t)n) != 0) forget(c, n_before); /* what got no answer was not said */
    }
    free(line);
    return 0;
}

static int run(struct chat *c, const char *prompt)
{
    struct td_err err = {{0}};
    struct td_client *client = NULL;
    enum td_status st = td_client_open(&c->client, &client, &err);
    if (st != TD_OK) return td_ctl_fail(&td_ctl_chat, st, &err);
    int rc;
    if (c->system != NULL && !remember(c, "system", c->system, strlen(c->system)))
        rc = td_ctl_fail(&td_ctl_chat, TD_E_NO_MEMORY, &err);
    else if (prompt != NULL)
        rc = ask(c, client, prompt, strlen(prompt));
    else if (isatty(STDIN_FILENO))
        rc = converse(c, client);
    else
        rc = ask_stdin(c, client);
    td_client_close(client);
    return rc;
}

static int chat_main(int argc, char **argv)
{
    struct chat c = {.client = {.run_dir = TD_DEFAULT_RUN_DIR}, .sampling = TD_SAMPLING_DEFAULTS, .effort = "medium"};
    struct td_option options[] = {
        {"system", TD_OPTION_STR, &c.system, "TEXT", "instructions", 0, 0, NULL},
        {"effort", TD_OPTION_STR, &c.effort, "low|medium|high", "how much to think", 0, 0, NULL},
        {"date", TD_OPTION_STR, &c.date, "YYYY-MM-DD", "what the model takes for today", 0, 0, NULL},
        TD_SAMPLING_OPTIONS(c.sampling),
        {"stats", TD_OPTION_FLAG, &c.wants_stats, NULL,
         "a line about time and transfer, on stderr (always on a terminal)", 0, 0, NULL},
        {"model", TD_OPTION_STR, &c.model, "NAME", "default: the one that is served", 0, 0, NULL},
        TD_CLIENT_OPTIONS(c.client),
        {NULL, TD_OPTION_FLAG, NULL, NULL, NULL, 0, 0, NULL},
    };
    const char *prompt = NULL;
    unsigned n_words;
    enum td_parse_result how = td_options_parse(&td_ctl_chat, options, argc, argv, &prompt, 1, &n_words);
    if (how != TD_PARSE_RUN) return how == TD_PARSE_EXIT_OK ? 0 : TD_CTL_USAGE;
    c.is_tty = isatty(STDOUT_FILENO);
    c.wants_stats = c.wants_stats || c.is_tty;
    int rc = run(&c, prompt);
    forget(&c, 0);
    free(c.history);
    td_buf_free(&c.content);
    td_buf_free(&c.reasoning);
    td_buf_free(&c.summary);
    td_token_list_free(&c.sampling.stop_ids);
    return rc;
}

const struct td_command td_ctl_chat = {"chat", "[PROMPT]",
                                       "Asks a question, or talks if there is none and a terminal to talk on.\n"
                                       "Without PROMPT and without a terminal, standard input is the question.",
                                       chat_main};
