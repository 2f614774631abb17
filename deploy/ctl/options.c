#include "deploy/ctl/options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum td_status td_options_read_ids(const char *text, size_t n, struct td_token_list *out, struct td_err *err)
{
    for (size_t i = 0; i < n;) {
        if (strchr(", \t\r\n[]", text[i]) != NULL && text[i] != '\0') {
            i++;
            continue;
        }
        uint64_t id = 0;
        size_t begin = i;
        while (i < n && text[i] >= '0' && text[i] <= '9' && id <= UINT32_MAX)
            id = id * 10 + (uint64_t)(text[i++] - '0');
        bool ends = i == n || (text[i] != '\0' && strchr(", \t\r\n[]", text[i]) != NULL);
        if (i == begin || !ends || id >= TD_NO_TOKEN) {
            size_t len = n - begin < 20 ? n - begin : 20;
            return td_err_set(err, TD_E_INVALID, "\"%.*s\" is not a token id", (int)len, text + begin);
        }
        td_token_list_push(out, (uint32_t)id);
    }
    return out->failed ? td_err_set(err, TD_E_NO_MEMORY, "out of memory") : TD_OK;
}

static struct td_option *find(struct td_option *options, const char *name, size_t n)
{
    for (struct td_option *o = options; o->name != NULL; o++) {
        if (strlen(o->name) == n && memcmp(o->name, name, n) == 0) return o;
    }
    return NULL;
}

static enum td_status out_of_bounds(const struct td_option *o, struct td_err *err)
{
    return td_err_set(err, TD_E_INVALID, "--%s must be between %.10g and %.10g", o->name, o->min, o->max);
}

static enum td_status read_number(const struct td_option *o, const char *text, struct td_err *err)
{
    char *end = NULL;
    bool has_bounds = o->min != 0 || o->max != 0;
    errno = 0;
    if (o->kind == TD_OPTION_F32) {
        double v = strtod(text, &end);
        if (end == text || *end != '\0' || !isfinite(v))
            return td_err_set(err, TD_E_INVALID, "--%s: \"%s\" is not a number", o->name, text);
        if (has_bounds && (v < o->min || v > o->max)) return out_of_bounds(o, err);
        *(float *)o->value = (float)v;
        return TD_OK;
    }
    unsigned long long v = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || errno == ERANGE)
        return td_err_set(err, TD_E_INVALID, "--%s: \"%s\" is not a whole number", o->name, text);
    if (has_bounds && ((double)v < o->min || (double)v > o->max)) return out_of_bounds(o, err);
    if (o->kind == TD_OPTION_U64)
        *(uint64_t *)o->value = v;
    else if (v > UINT32_MAX)
        return td_err_set(err, TD_E_INVALID, "--%s: %s is too large", o->name, text);
    else
        *(uint32_t *)o->value = (uint32_t)v;
    return TD_OK;
}

static enum td_status read_value(struct td_option *o, const char *text, struct td_err *err)
{
    switch (o->kind) {
    case TD_OPTION_FLAG: break;
    case TD_OPTION_STR: *(const char **)o->value = text; return TD_OK;
    case TD_OPTION_U32:
    case TD_OPTION_U64:
    case TD_OPTION_F32: return read_number(o, text, err);
    case TD_OPTION_LIST: {
        struct td_option_list *l = o->value;
        if (l->n == sizeof l->items / sizeof l->items[0])
            return td_err_set(err, TD_E_INVALID, "--%s is given more than %u times", o->name, l->n);
        l->items[l->n++] = text;
        return TD_OK;
    }
    case TD_OPTION_IDS: {
        enum td_status st = td_options_read_ids(text, strlen(text), o->value, err);
        return st == TD_OK ? TD_OK : td_err_prefix(err, st, "--%s", o->name);
    }
    }
    return td_err_set(err, TD_E_INVALID, "--%s takes no value", o->name);
}

enum td_status td_options_read(struct td_option *options, int argc, char **argv, const char **words, unsigned max_words,
                               unsigned *n_words_out, struct td_err *err)
{
    bool only_words = false;
    *n_words_out = 0;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (only_words || strncmp(arg, "--", 2) != 0) {
            if (*n_words_out == max_words) return td_err_set(err, TD_E_INVALID, "unexpected argument \"%s\"", arg);
            words[(*n_words_out)++] = arg;
            continue;
        }
        if (arg[2] == '\0') {
            only_words = true;
            continue;
        }
        const char *equals = strchr(arg, '=');
        size_t n = equals != NULL ? (size_t)(equals - arg) - 2 : strlen(arg) - 2;
        struct td_option *o = find(options, arg + 2, n);
        if (o == NULL) return td_err_set(err, TD_E_INVALID, "unknown option --%.*s", (int)n, arg + 2);
        if (o->is_given != NULL) *o->is_given = true;
        if (o->kind == TD_OPTION_FLAG && equals == NULL) {
            *(bool *)o->value = true;
            continue;
        }
        const char *value = equals != NULL ? equals + 1 : i + 1 < argc ? argv[++i] : NULL;
        if (value == NULL) return td_err_set(err, TD_E_INVALID, "--%s needs a value", o->name);
        enum td_status st = read_value(o, value, err);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

static void print_default(const struct td_option *o)
{
    switch (o->kind) {
    case TD_OPTION_STR:
        if (*(const char **)o->value != NULL) printf(" [%s]", *(const char **)o->value);
        break;
    case TD_OPTION_U32: printf(" [%u]", *(uint32_t *)o->value); break;
    case TD_OPTION_F32: printf(" [%g]", (double)*(float *)o->value); break;
    case TD_OPTION_FLAG:
    case TD_OPTION_U64:
    case TD_OPTION_LIST:
    case TD_OPTION_IDS: break;
    }
}

static void print_help(const struct td_command *c, const struct td_option *options)
{
    printf("usage: tandemctl %s [options]%s%s\n\n%s\n\n", c->name, *c->arguments != '\0' ? " " : "", c->arguments,
           c->help);
    for (const struct td_option *o = options; o->name != NULL; o++) {
        char left[64];
        snprintf(left, sizeof left, "--%s%s%s", o->name, o->placeholder != NULL ? " " : "",
                 o->placeholder != NULL ? o->placeholder : "");
        printf("  %-26s %s", left, o->help);
        print_default(o);
        printf("\n");
    }
}

enum td_parse_result td_options_parse(const struct td_command *c, struct td_option *options, int argc, char **argv,
                                      const char **words, unsigned max_words, unsigned *n_words_out)
{
    struct td_err err = {{0}};
    /* Help shows defaults, so it comes before any value is changed. */
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") != 0 && strcmp(argv[i], "-h") != 0) continue;
        print_help(c, options);
        return TD_PARSE_EXIT_OK;
    }
    if (td_options_read(options, argc, argv, words, max_words, n_words_out, &err) == TD_OK) return TD_PARSE_RUN;
    fprintf(stderr, "tandemctl %s: %s (see tandemctl %s --help)\n", c->name, err.text, c->name);
    return TD_PARSE_EXIT_BAD;
}
