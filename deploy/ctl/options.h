/* Command lines of tandemctl: a command is a row with a table of options; parser and --help come from it. */
#ifndef TD_CTL_OPTIONS_H
#define TD_CTL_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/token_list.h"

enum td_option_kind {
    TD_OPTION_FLAG, /* bool: given or not */
    TD_OPTION_STR,  /* const char * */
    TD_OPTION_U32,
    TD_OPTION_U64,
    TD_OPTION_F32,
    TD_OPTION_LIST, /* struct td_option_list: may be given several times */
    TD_OPTION_IDS,  /* struct td_token_list: 1,2,3 */
};

struct td_option_list {
    const char *items[32];
    unsigned n;
};

struct td_option {
    const char *name; /* without dashes */
    enum td_option_kind kind;
    void *value;             /* holds the default; borrowed strings point into argv */
    const char *placeholder; /* "DIR"; NULL for flags */
    const char *help;
    double min, max; /* of numbers; both 0: no bounds */
    bool *is_given;  /* may be NULL */
};

struct td_command {
    const char *name, *arguments, *help; /* arguments: "[PROMPT]" or "" */
    int (*run)(int argc, char **argv);   /* argv[0] is the command's name; returns the exit status */
};

enum td_parse_result { TD_PARSE_RUN, TD_PARSE_EXIT_OK /* --help */, TD_PARSE_EXIT_BAD };

/* Reads --name value, --name=value and up to max_words other words (into words, *n_words_out). "--" ends options.
 * Prints help or the error, which names the option, itself. options end with a row without name. */
enum td_parse_result td_options_parse(const struct td_command *c, struct td_option *options, int argc, char **argv,
                                      const char **words, unsigned max_words, unsigned *n_words_out);
/* The same without help and without printing: err names the option. */
enum td_status td_options_read(struct td_option *options, int argc, char **argv, const char **words, unsigned max_words,
                               unsigned *n_words_out, struct td_err *err);
/* Ids separated by commas or white space, brackets allowed. INVALID: err quotes what is no id. */
enum td_status td_options_read_ids(const char *text, size_t n, struct td_token_list *out, struct td_err *err);

#endif
