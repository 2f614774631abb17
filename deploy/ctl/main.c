/* tandemctl: the operator's client. `tandemctl --help` lists the commands. */
#include <stdio.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/process.h"
#include "common/config/config.h"
#include "deploy/ctl/commands.h"

static const struct td_command *const commands[] = {
    &td_ctl_up,         &td_ctl_generate, &td_ctl_chat,  &td_ctl_status, &td_ctl_tokenize,
    &td_ctl_detokenize, &td_ctl_render,   &td_ctl_parse, &td_ctl_drain,
};

static void print_help(FILE *f)
{
    fprintf(f, "usage: tandemctl COMMAND [options]\n\n");
    for (size_t i = 0; i < TD_COUNT(commands); i++) {
        /* The first sentence says it all. */
        const char *help = commands[i]->help, *end = strchr(help, '\n');
        fprintf(f, "  %-12s %.*s\n", commands[i]->name, end == NULL ? (int)strlen(help) : (int)(end - help), help);
    }
    fprintf(f, "\n`tandemctl COMMAND --help` tells more.\n");
}

int main(int argc, char **argv)
{
    td_process_hold_std_fds();
    td_log_open("tandemctl", TD_LOG_ERROR);
    if (argc < 2) {
        print_help(stderr);
        return TD_CTL_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("tandemctl %s\n", TD_VERSION);
        return 0;
    }
    for (size_t i = 0; i < TD_COUNT(commands); i++) {
        if (strcmp(argv[1], commands[i]->name) == 0) return commands[i]->run(argc - 1, argv + 1);
    }
    fprintf(stderr, "tandemctl: unknown command \"%s\" (see tandemctl --help)\n", argv[1]);
    return TD_CTL_USAGE;
}
