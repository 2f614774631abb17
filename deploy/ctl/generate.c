/* tandemctl generate: tokens or text in, tokens and text out. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/base/mem.h"
#include "deploy/ctl/client.h"
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/commands.h"
#include "deploy/ctl/report.h"
#include "deploy/ctl/sampling.h"

struct generate {
    struct td_client_options client;
    struct td_sampling_options sampling;
    struct td_token_list prompt;
    const char *text, *model;
    uint32_t n_logprobs;
    bool has_ids, wants_logprobs, parse_special, wants_json, wants_stats;

    /* the reply */
    struct td_token_list ids;
    struct td_buf words, logprobs, usage, timing, summary;
    char *request_id;
    uint64_t seed;
    Tandem__V1__FinishReason finish_reason;
    bool has_finished;
};

static void on_event(void *user, const ProtobufCMessage *msg)
{
    struct generate *g = user;
    const Tandem__V1__GenerateEvent *e = (const Tandem__V1__GenerateEvent *)msg;
    td_token_list_append(&g->ids, e->token_ids, e->n_token_ids);
    td_buf_put(&g->words, e->text.data, e->text.len);
    if (!g->wants_json && e->text.len > 0) {
        fwrite(e->text.data, 1, e->text.len, stdout);
        fflush(stdout);
    }
    for (size_t i = 0; i < e->n_logprobs; i++) {
        if (g->logprobs.n > 0) td_buf_str(&g->logprobs, ",");
        td_report_logprobs(e->logprobs[i], &g->logprobs);
    }
    if (g->request_id == NULL && e->request_id[0] != '\0') {
        g->request_id = td_strdup(e->request_id);
        g->seed = e->seed;
    }
    if (e->finish_reason == TANDEM__V1__FINISH_REASON__FINISH_NONE) return;
    g->has_finished = true;
    g->finish_reason = e->finish_reason;
    td_report_usage(e->usage, &g->usage);
    td_report_timing(e->timing, &g->timing);
    td_report_summary(e->usage, e->timing, 0, e->finish_reason, &g->summary);
}

static void print_json(struct generate *g)
{
    struct td_buf out = {0};
    td_buf_str(&out, "{\"token_ids\":");
    td_report_ids(g->ids.ids, g->ids.n, &out);
    td_buf_str(&out, ",\"text\":");
    td_json_quote(&out, td_buf_cstr(&g->words), g->words.n);
    td_buf_printf(&out, ",\"finish_reason\":\"%s\",\"logprobs\":", td_report_finish(g->finish_reason));
    if (g->wants_logprobs)
        td_buf_printf(&out, "[%s]", td_buf_cstr(&g->logprobs));
    else
        td_buf_str(&out, "null");
    td_buf_printf(&out, ",\"usage\":%s,\"timing\":%s,\"request_id\":", td_buf_cstr(&g->usage), td_buf_cstr(&g->timing));
    td_json_quote_str(&out, g->request_id != NULL ? g->request_id : "");
    td_buf_printf(&out, ",\"seed\":%" PRIu64 "}\n", g->seed);
    fwrite(td_buf_cstr(&out), 1, out.n, stdout);
    td_buf_free(&out);
}

static enum td_status call(struct generate *g, struct td_client *c, struct td_err *err)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__TokenIds ids = TANDEM__V1__TOKEN_IDS__INIT;
    Tandem__V1__Sampling sampling;
    Tandem__V1__Stop stop;
    td_sampling_fill(&g->sampling, &sampling, &stop);
    m.sampling = &sampling;
    m.stop = &stop;
    if (g->model != NULL) m.model = (char *)g->model;
    if (g->has_ids) {
        ids.ids = g->prompt.ids;
        ids.n_ids = g->prompt.n;
        m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKEN_IDS;
        m.token_ids = &ids;
    } else {
        m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
        m.text = (ProtobufCBinaryData){.data = (uint8_t *)g->text, .len = strlen(g->text)};
        m.parse_special = g->parse_special;
    }
    m.want_logprobs = g->wants_logprobs;
    m.n_logprobs = g->n_logprobs;
    enum td_status st = td_client_call(c, "/tandem.v1.Inference/Generate", &m.base,
                                       &tandem__v1__generate_event__descriptor, on_event, g, err);
    if (st == TD_OK && !g->has_finished) st = td_err_set(err, TD_E_PROTOCOL, "the stream ended without a last event");
    return st;
}

static int run(struct generate *g)
{
    struct td_err err = {{0}};
    struct td_client *c = NULL;
    if (g->has_ids == (g->text != NULL)) {
        td_err_set(&err, TD_E_INVALID, "give either --token-ids or --text");
        td_ctl_fail(&td_ctl_generate, TD_E_INVALID, &err);
        return TD_CTL_USAGE;
    }
    enum td_status st = td_client_open(&g->client, &c, &err);
    if (st == TD_OK) st = call(g, c, &err);
    bool was_interrupted = c != NULL && td_client_was_interrupted(c);
    td_client_close(c);
    if (!g->wants_json && g->words.n > 0) printf("\n");
    if (st == TD_OK && g->wants_json) print_json(g);
    if (st == TD_OK && g->wants_stats) fprintf(stderr, "%s\n", td_buf_cstr(&g->summary));
    if (was_interrupted) return TD_CTL_INTERRUPTED;
    return st == TD_OK ? 0 : td_ctl_fail(&td_ctl_generate, st, &err);
}

static int generate_main(int argc, char **argv)
{
    struct generate g = {.client = {.run_dir = TD_DEFAULT_RUN_DIR}, .sampling = TD_SAMPLING_DEFAULTS};
    struct td_option options[] = {
        {"token-ids", TD_OPTION_IDS, &g.prompt, "A,B,...", "the prompt as token ids", 0, 0, &g.has_ids},
        {"text", TD_OPTION_STR, &g.text, "TEXT", "the prompt as text", 0, 0, NULL},
        {"special", TD_OPTION_FLAG, &g.parse_special, NULL, "names of special tokens in --text become them", 0, 0,
         NULL},
        TD_SAMPLING_OPTIONS(g.sampling),
        {"logprobs", TD_OPTION_U32, &g.n_logprobs, "K", "log-probabilities of the chosen and the K likeliest tokens", 0,
         20, &g.wants_logprobs},
        {"json", TD_OPTION_FLAG, &g.wants_json, NULL, "print one JSON object at the end instead of text as it comes", 0,
         0, NULL},
        {"stats", TD_OPTION_FLAG, &g.wants_stats, NULL, "a line about time and transfer, on stderr", 0, 0, NULL},
        {"model", TD_OPTION_STR, &g.model, "NAME", "default: the one that is served", 0, 0, NULL},
        TD_CLIENT_OPTIONS(g.client),
        {NULL, TD_OPTION_FLAG, NULL, NULL, NULL, 0, 0, NULL},
    };
    unsigned n_words;
    enum td_parse_result how = td_options_parse(&td_ctl_generate, options, argc, argv, NULL, 0, &n_words);
    int rc = how == TD_PARSE_RUN ? run(&g) : how == TD_PARSE_EXIT_OK ? 0 : TD_CTL_USAGE;
    td_token_list_free(&g.prompt);
    td_token_list_free(&g.ids);
    td_token_list_free(&g.sampling.stop_ids);
    td_buf_free(&g.words);
    td_buf_free(&g.logprobs);
    td_buf_free(&g.usage);
    td_buf_free(&g.timing);
    td_buf_free(&g.summary);
    free(g.request_id);
    return rc;
}

const struct td_command td_ctl_generate = {"generate", "", "Continues a prompt of token ids or text.", generate_main};
