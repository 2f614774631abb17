/* tandemctl tokenize, detokenize: with a model's tokenizer alone, no cluster needed. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/text/detok.h"
#include "common/text/tokenizer.h"
#include "common/text/utf8.h"
#include "deploy/ctl/commands.h"
#include "deploy/ctl/report.h"

struct tokens {
    const char *model, *file, *text;
    struct td_token_list ids;
    bool special, has_ids;
};

static enum td_status read_all(const char *path, struct td_buf *out, struct td_err *err)
{
    bool is_stdin = strcmp(path, "-") == 0;
    FILE *f = is_stdin ? stdin : fopen(path, "re");
    if (f == NULL) return td_err_set(err, TD_E_IO, "%s", strerror(errno));
    size_t n;
    while (td_buf_reserve(out, 65536) && (n = fread(out->data + out->n, 1, out->cap - out->n, f)) > 0) out->n += n;
    bool failed = ferror(f) != 0;
    int why = errno;
    if (!is_stdin) fclose(f);
    if (out->failed) return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    return failed ? td_err_set(err, TD_E_IO, "%s", strerror(why)) : TD_OK;
}

static enum td_status tokenize(struct tokens *t, const struct td_tokenizer *k, struct td_buf *out, struct td_err *err)
{
    struct td_buf text = {0};
    enum td_status st = TD_OK;
    if (t->text != NULL)
        td_buf_str(&text, t->text);
    else if ((st = read_all(t->file, &text, err)) != TD_OK)
        td_err_prefix(err, st, "--file: %s", t->file);
    if (st == TD_OK)
        st = td_tokenizer_encode(k, td_buf_cstr(&text), text.n, t->special ? TD_TEXT_SPECIAL : TD_TEXT_ORDINARY,
                                 &t->ids, err);
    if (st == TD_OK) {
        td_buf_printf(out, "{\"n_tokens\":%zu,\"token_ids\":", t->ids.n);
        td_report_ids(t->ids.ids, t->ids.n, out);
        td_buf_str(out, "}\n");
    }
    td_buf_free(&text);
    return st;
}

/* Ids as a list, or the object that tokenize and generate print. */
static enum td_status read_ids(const char *file, struct td_token_list *out, struct td_err *err)
{
    struct td_buf text = {0};
    enum td_status st = read_all(file, &text, err);
    if (st == TD_OK) {
        const char *p = td_buf_cstr(&text), *list = strstr(p, "\"token_ids\"");
        if (p[strspn(p, " \t\r\n")] == '{' && list != NULL) {
            json_t *v = json_loadb(p, text.n, 0, NULL);
            td_buf_clear(&text);
            char *ids = json_dumps(json_object_get(v, "token_ids"), JSON_COMPACT);
            td_buf_str(&text, ids != NULL ? ids : "?");
            free(ids);
            json_decref(v);
        }
        st = td_options_read_ids(td_buf_cstr(&text), text.n, out, err);
    }
    if (st != TD_OK) td_err_prefix(err, st, "--file: %s", file);
    td_buf_free(&text);
    return st;
}

static enum td_status detokenize(struct tokens *t, const struct td_tokenizer *k, struct td_buf *out, struct td_err *err)
{
    struct td_buf text = {0}, raw = {0};
    enum td_status st = TD_OK;
    if (!t->has_ids) st = read_ids(t->file, &t->ids, err);
    if (st == TD_OK) {
        struct td_detok d;
        td_tokenizer_decode(k, t->ids.ids, t->ids.n, t->special, &raw);
        td_detok_init(&d, k, t->special);
        td_detok_feed_bytes(&d, raw.data, raw.n, &text);
        td_detok_end(&d, &text);
        td_buf_str(out, "{\"text\":");
        td_json_quote(out, td_buf_cstr(&text), text.n);
        td_buf_printf(out, ",\"is_utf8\":%s,\"bytes_hex\":\"", td_utf8_is_valid(raw.data, raw.n) ? "true" : "false");
        for (size_t i = 0; i < raw.n; i++) td_buf_printf(out, "%02x", raw.data[i]);
        td_buf_str(out, "\"}\n");
    }
    td_buf_free(&text);
    td_buf_free(&raw);
    return st;
}

static int run(struct tokens *t, const struct td_command *c)
{
    struct td_err err = {{0}};
    struct td_tokenizer *k = NULL;
    struct td_buf out = {0};
    bool is_tokenize = c == &td_ctl_tokenize;
    bool has_input = is_tokenize ? t->text != NULL : t->has_ids;
    if (t->model == NULL)
        td_err_set(&err, TD_E_INVALID, "--model is missing");
    else if (has_input == (t->file != NULL))
        td_err_set(&err, TD_E_INVALID, "give either --file or %s", is_tokenize ? "--text" : "--token-ids");
    if (err.text[0] != '\0') {
        td_ctl_fail(c, TD_E_INVALID, &err);
        return TD_CTL_USAGE;
    }
    enum td_status st = td_tokenizer_load(t->model, &k, &err);
    if (st == TD_OK) st = is_tokenize ? tokenize(t, k, &out, &err) : detokenize(t, k, &out, &err);
    if (st == TD_OK && out.failed) st = td_err_set(&err, TD_E_NO_MEMORY, "out of memory");
    if (st == TD_OK) fwrite(out.data, 1, out.n, stdout);
    td_tokenizer_destroy(k);
    td_buf_free(&out);
    return st == TD_OK ? 0 : td_ctl_fail(c, st, &err);
}

static int tokens_main(const struct td_command *c, struct tokens *t, struct td_option *options, int argc, char **argv)
{
    unsigned n_words;
    enum td_parse_result how = td_options_parse(c, options, argc, argv, NULL, 0, &n_words);
    int rc = how == TD_PARSE_RUN ? run(t, c) : how == TD_PARSE_EXIT_OK ? 0 : TD_CTL_USAGE;
    td_token_list_free(&t->ids);
    return rc;
}

static int tokenize_main(int argc, char **argv)
{
    struct tokens t = {0};
    struct td_option options[] = {
        {"model", TD_OPTION_STR, &t.model, "DIR", "checkpoint, or its tokenizer.json or .tiktoken file (required)", 0,
         0, NULL},
        {"file", TD_OPTION_STR, &t.file, "FILE", "text; - is standard input", 0, 0, NULL},
        {"text", TD_OPTION_STR, &t.text, "TEXT", "text", 0, 0, NULL},
        {"special", TD_OPTION_FLAG, &t.special, NULL, "names of special tokens become them", 0, 0, NULL},
        {NULL, TD_OPTION_FLAG, NULL, NULL, NULL, 0, 0, NULL},
    };
    return tokens_main(&td_ctl_tokenize, &t, options, argc, argv);
}

static int detokenize_main(int argc, char **argv)
{
    struct tokens t = {0};
    struct td_option options[] = {
        {"model", TD_OPTION_STR, &t.model, "DIR", "checkpoint, or its tokenizer.json or .tiktoken file (required)", 0,
         0, NULL},
        {"token-ids", TD_OPTION_IDS, &t.ids, "A,B,...", "ids", 0, 0, &t.has_ids},
        {"file", TD_OPTION_STR, &t.file, "FILE",
         "ids, or what tokenize or generate --json printed; - is standard input", 0, 0, NULL},
        {"special", TD_OPTION_FLAG, &t.special, NULL, "special tokens appear by name", 0, 0, NULL},
        {NULL, TD_OPTION_FLAG, NULL, NULL, NULL, 0, 0, NULL},
    };
    return tokens_main(&td_ctl_detokenize, &t, options, argc, argv);
}

const struct td_command td_ctl_tokenize = {"tokenize", "", "Prints the token ids of a text as JSON; needs no cluster.",
                                           tokenize_main};
const struct td_command td_ctl_detokenize = {
    "detokenize", "", "Prints the text of token ids as JSON; needs no cluster.", detokenize_main};
