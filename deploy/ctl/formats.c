/* tandemctl render, parse: the exact prompt that a conversation becomes, and what is made of what a model wrote. With a
 * model's tokenizer alone: for the day when a client reports a wrong answer. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/text/tokenizer.h"
#include "common/text/utf8.h"
#include "deploy/ctl/cases.h"
#include "deploy/ctl/commands.h"

struct formats {
    const char *model, *format, *name, *date, *path, *text, *tools, *stopped_by;
    struct td_token_list ids;
    bool has_ids, wants_check;
    struct td_tokenizer *tokenizer;
    struct td_chat_format *chat;
    bool differs; /* --check: some case did */
};

/* --- one case ----------------------------------------------------------------------------------------------------- */

static json_t *json_ids(const struct td_token_list *l)
{
    json_t *v = json_array();
    for (size_t i = 0; i < l->n; i++) json_array_append_new(v, json_integer(l->ids[i]));
    return v;
}

/* The text with special tokens by name; "" if it is no UTF-8, as in the cases. */
static json_t *json_text(const struct formats *t, const struct td_token_list *l)
{
    struct td_buf text = {0};
    td_tokenizer_decode(t->tokenizer, l->ids, l->n, true, &text);
    bool is_text = td_utf8_is_valid(text.data, text.n);
    json_t *v = json_stringn(is_text ? td_buf_cstr(&text) : "", is_text ? text.n : 0);
    td_buf_free(&text);
    return v;
}

static enum td_status read_json_ids(const json_t *v, struct td_token_list *out, struct td_err *err)
{
    if (!json_is_array(v)) return td_err_set(err, TD_E_INVALID, "ids: must be a list of token ids");
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *id = json_array_get(v, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= TD_NO_TOKEN)
            return td_err_set(err, TD_E_INVALID, "ids[%zu]: is no token id", i);
        td_token_list_push(out, (uint32_t)json_integer_value(id));
    }
    return out->failed ? td_err_set(err, TD_E_NO_MEMORY, "no memory for the ids") : TD_OK;
}

static enum td_status render(const struct formats *t, json_t *c, json_t *out, struct td_err *err)
{
    struct td_token_list ids = {0};
    enum td_status st = td_case_render(t->chat, c, t->date, &ids, err);
    if (st == TD_OK) {
        json_object_set_new(out, "text", json_text(t, &ids));
        json_object_set_new(out, "ids", json_ids(&ids));
    }
    td_token_list_free(&ids);
    return st;
}

static enum td_status parse(const struct formats *t, const json_t *c, json_t *out, struct td_err *err)
{
    struct td_token_list ids = {0};
    const json_t *stopped_by = json_object_get(c, "stopped_by"), *tools = json_object_get(c, "tools");
    const char *how = stopped_by == NULL ? "stop" : json_string_value(stopped_by);
    json_t *result = NULL;
    enum td_status st;
    TD_TRY(read_json_ids(json_object_get(c, "ids"), &ids, err));
    if (how == NULL || (strcmp(how, "stop") != 0 && strcmp(how, "length") != 0)) {
        st = td_err_set(err, TD_E_INVALID, "stopped_by: must be stop or length");
        goto out;
    }
    TD_TRY(td_case_parse(t->chat, ids.ids, ids.n, strcmp(how, "length") == 0, tools, &result, err));
    json_object_set_new(out, "text", json_text(t, &ids));
    json_object_set_new(out, "ids", json_ids(&ids));
    json_object_set_new(out, "stopped_by", json_string(how));
    json_object_set_new(out, "tools", tools != NULL ? json_deep_copy(tools) : json_array());
    json_object_update(out, result);
out:
    json_decref(result);
    td_token_list_free(&ids);
    return st;
}

/* Fields of the result that the case expects to be something else, by name. */
static json_t *differences(const json_t *c, const json_t *out)
{
    json_t *list = json_array(), *v;
    const char *key;
    json_object_foreach ((json_t *)out, key, v) {
        const json_t *expected = json_object_get(c, key);
        if (expected != NULL && !json_equal(v, expected)) json_array_append_new(list, json_string(key));
    }
    return list;
}

static enum td_status one_case(struct formats *t, json_t *c, bool is_parse, struct td_err *err)
{
    const json_t *name = json_object_get(c, "name");
    const char *label = json_is_string(name) ? json_string_value(name) : NULL;
    if (t->name != NULL && (label == NULL || strcmp(label, t->name) != 0)) return TD_E_NOT_FOUND;
    json_t *out = json_object();
    if (label != NULL) json_object_set_new(out, "name", json_string(label));
    enum td_status st = is_parse ? parse(t, c, out, err) : render(t, c, out, err);
    if (st != TD_OK && label != NULL) td_err_prefix(err, st, "case \"%.80s\"", label);
    if (st == TD_OK && t->wants_check) {
        json_t *list = differences(c, out);
        t->differs = t->differs || json_array_size(list) > 0;
        json_object_set_new(out, "differs", list);
    }
    char *text = st == TD_OK ? json_dumps(out, JSON_COMPACT) : NULL;
    if (text != NULL) printf("%s\n", text);
    if (st == TD_OK && text == NULL) st = td_err_set(err, TD_E_NO_MEMORY, "no memory for the result");
    free(text);
    json_decref(out);
    return st;
}

/* --- all of them -------------------------------------------------------------------------------------------------- */

static enum td_status each_case(struct formats *t, const json_t *list, bool is_parse, bool *is_found,
                                struct td_err *err)
{
    size_t i;
    json_t *c;
    json_array_foreach (list, i, c) {
        enum td_status st = one_case(t, c, is_parse, err);
        *is_found = *is_found || st != TD_E_NOT_FOUND;
        if (st != TD_OK && st != TD_E_NOT_FOUND) return st;
    }
    return TD_OK;
}

/* root is a case, a list of cases, or a file of cases by section. */
static enum td_status all_cases(struct formats *t, json_t *root, bool is_parse, struct td_err *err)
{
    bool is_found = false, is_file = json_is_array(json_object_get(root, is_parse ? "parse" : "render"));
    enum td_status st;
    if (is_file) {
        st = each_case(t, json_object_get(root, is_parse ? "parse" : "render"), is_parse, &is_found, err);
        if (st == TD_OK && !is_parse) st = each_case(t, json_object_get(root, "chat"), is_parse, &is_found, err);
    } else if (json_is_array(root)) {
        st = each_case(t, root, is_parse, &is_found, err);
    } else {
        st = one_case(t, root, is_parse, err);
        is_found = st != TD_E_NOT_FOUND;
        if (!is_found) st = TD_OK;
    }
    if (st != TD_OK || is_found) return st;
    if (t->name == NULL) return td_err_set(err, TD_E_NOT_FOUND, "there are no cases");
    return td_err_set(err, TD_E_NOT_FOUND, "no case is named \"%s\"", t->name);
}

static enum td_status load(const char *path, json_t **out, struct td_err *err)
{
    json_error_t why;
    errno = 0;
    *out =
        strcmp(path, "-") == 0 ? json_loadf(stdin, JSON_ALLOW_NUL, &why) : json_load_file(path, JSON_ALLOW_NUL, &why);
    if (*out != NULL) return TD_OK;
    return why.line > 0 ? td_err_set(err, TD_E_BAD_FILE, "%s: line %d: %s", path, why.line, why.text)
                        : td_err_set(err, TD_E_IO, "%s: %s", path, errno != 0 ? strerror(errno) : why.text);
}

/* A case of what the options say. */
static enum td_status case_of_options(struct formats *t, json_t **out, struct td_err *err)
{
    enum td_status st = TD_OK;
    if (t->text != NULL)
        st = td_tokenizer_encode(t->tokenizer, t->text, strlen(t->text), TD_TEXT_SPECIAL, &t->ids, err);
    if (st != TD_OK) return td_err_prefix(err, st, "--text");
    json_t *c = json_object(), *tools = json_array();
    for (const char *p = t->tools != NULL ? t->tools : ""; *p != '\0';) {
        size_t n = strcspn(p, ",");
        if (n > 0) json_array_append_new(tools, json_stringn(p, n));
        p += n + (p[n] == ',');
    }
    json_object_set_new(c, "ids", json_ids(&t->ids));
    json_object_set_new(c, "tools", tools);
    json_object_set_new(c, "stopped_by", json_string(t->stopped_by));
    *out = c;
    return TD_OK;
}

static int run(struct formats *t, const struct td_command *command, bool is_parse)
{
    struct td_err err = {{0}};
    json_t *root = NULL;
    enum td_status st;
    unsigned n_inputs = (t->path != NULL) + t->has_ids + (t->text != NULL);
    if (t->model == NULL)
        td_err_set(&err, TD_E_INVALID, "--model is missing");
    else if (n_inputs != 1)
        td_err_set(&err, TD_E_INVALID, "%s",
                   is_parse ? "give one of CASE.json, --token-ids and --text" : "CASE.json is missing");
    if (err.text[0] != '\0') {
        td_ctl_fail(command, TD_E_INVALID, &err);
        return TD_CTL_USAGE;
    }
    TD_TRY(td_tokenizer_load(t->model, &t->tokenizer, &err));
    TD_TRY(td_chat_format_open(t->format, t->tokenizer, &t->chat, &err));
    TD_TRY(t->path != NULL ? load(t->path, &root, &err) : case_of_options(t, &root, &err));
    TD_TRY(all_cases(t, root, is_parse, &err));
out:
    json_decref(root);
    td_chat_format_destroy(t->chat);
    td_tokenizer_destroy(t->tokenizer);
    if (st != TD_OK) return td_ctl_fail(command, st, &err);
    return t->differs ? TD_CTL_FAILED : 0;
}

/* --- options ------------------------------------------------------------------------------------------------------ */

#define COMMON_OPTIONS(t)                                                                                              \
    {"model", TD_OPTION_STR, &(t).model, "DIR", "checkpoint, or its tokenizer.json or .tiktoken file (required)", 0,   \
     0,       NULL},                                                                                                   \
        {"format", TD_OPTION_STR, &(t).format, "NAME", "auto, harmony or plain; default auto", 0, 0, NULL},            \
        {"name", TD_OPTION_STR, &(t).name, "NAME", "of several cases only this one", 0, 0, NULL},                      \
    {                                                                                                                  \
        "check", TD_OPTION_FLAG, &(t).wants_check, NULL,                                                               \
            "compare with what the case expects: \"differs\" names the fields; status 1 if there are any", 0, 0, NULL  \
    }
#define END_OF_OPTIONS                                                                                                 \
    {                                                                                                                  \
        NULL, TD_OPTION_FLAG, NULL, NULL, NULL, 0, 0, NULL                                                             \
    }

static int formats_main(struct formats *t, const struct td_command *command, struct td_option *options, int argc,
                        char **argv, bool is_parse)
{
    unsigned n_words;
    enum td_parse_result how = td_options_parse(command, options, argc, argv, &t->path, 1, &n_words);
    int rc = how == TD_PARSE_RUN ? run(t, command, is_parse) : how == TD_PARSE_EXIT_OK ? 0 : TD_CTL_USAGE;
    td_token_list_free(&t->ids);
    return rc;
}

static int render_main(int argc, char **argv)
{
    struct formats t = {.format = "auto"};
    struct td_option options[] = {
        COMMON_OPTIONS(t),
        {"date", TD_OPTION_STR, &t.date, "YYYY-MM-DD", "what the model takes for today, unless the case says", 0, 0,
         NULL},
        END_OF_OPTIONS,
    };
    return formats_main(&t, &td_ctl_render, options, argc, argv, false);
}

static int parse_main(int argc, char **argv)
{
    struct formats t = {.format = "auto", .stopped_by = "stop"};
    struct td_option options[] = {
        COMMON_OPTIONS(t),
        {"token-ids", TD_OPTION_IDS, &t.ids, "A,B,...", "what the model wrote", 0, 0, &t.has_ids},
        {"text", TD_OPTION_STR, &t.text, "TEXT", "the same as text, special tokens by name", 0, 0, NULL},
        {"tools", TD_OPTION_STR, &t.tools, "A,B,...", "names of the functions that were declared", 0, 0, NULL},
        {"stopped-by", TD_OPTION_STR, &t.stopped_by, "stop|length", "how it ended; default stop", 0, 0, NULL},
        END_OF_OPTIONS,
    };
    return formats_main(&t, &td_ctl_parse, options, argc, argv, true);
}

const struct td_command td_ctl_render = {
    "render", "CASE.json",
    "Prints the exact prompt of a conversation, text and token ids, as JSON; needs no cluster.\n"
    "CASE.json is a request of Chat Completions or Responses, or a case as tests/cases/harmony-cases.json has them, or\n"
    "several; - is standard input.",
    render_main};
const struct td_command td_ctl_parse = {
    "parse", "[CASE.json]",
    "Prints what is made of the tokens that a model wrote, as JSON: messages, visible stream, chat result, events.\n"
    "Needs no cluster. CASE.json holds ids, tools and stopped_by, as tests/cases/harmony-cases.json has them.",
    parse_main};
