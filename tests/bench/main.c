/* tandem-bench COMMAND [options]; commands.def is the list. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "tests/bench/bench.h"

static const struct command {
    const char *name, *arguments, *meaning;
    int (*run)(int argc, char **argv);
} commands[] = {
#define X(name, arguments, meaning) {#name, arguments, meaning, td_bench_##name},
#include "tests/bench/commands.def"
#undef X
};
#define N_COMMANDS (sizeof commands / sizeof commands[0])

void td_bench_must(enum td_status st, const struct td_err *err)
{
    if (st == TD_OK) return;
    fflush(stdout);
    fprintf(stderr, "tandem-bench: %s: %s\n", td_status_name(st), err->text);
    exit(1);
}

uint32_t td_bench_number(const char *option, const char *text, uint32_t least)
{
    char *end;
    unsigned long v = strtoul(text, &end, 10);
    if (end != text && *end == '\0' && text[0] != '-' && v >= least && v <= 1u << 30) return (uint32_t)v;
    fprintf(stderr, "tandem-bench: --%s: \"%s\" is not a whole number of %u or more\n", option, text, least);
    exit(2);
}

enum td_expert_form td_bench_expert_form(const char *text)
{
    if (strcmp(text, "bf16") == 0) return TD_EXPERTS_BF16;
    if (strcmp(text, "fp8") == 0) return TD_EXPERTS_FP8;
    if (strcmp(text, "mxfp4") == 0) return TD_EXPERTS_MXFP4;
    fprintf(stderr, "tandem-bench: --moe-weights: \"%s\" is not bf16, fp8 or mxfp4\n", text);
    exit(2);
}

static int usage(FILE *to, int rc)
{
    fprintf(to, "usage: tandem-bench COMMAND [options]\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(to, "\n  %s %s\n      %s\n", commands[i].name, commands[i].arguments, commands[i].meaning);
    return rc;
}

int main(int argc, char **argv)
{
    td_log_open("tandem-bench", TD_LOG_WARN);
    if (argc > 1 && strcmp(argv[1], "--child") == 0) return td_bench_xfer(argc, argv); /* xfer's other process */
    if (argc < 2) return usage(stderr, 2);
    if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0) return usage(stdout, 0);
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "tandem-bench: no command \"%s\"\n", argv[1]);
    return usage(stderr, 2);
}
