/* tandem-bench model: a directory that workers and routers can be started on, without weights. */
#include <getopt.h>
#include <stdio.h>

#include "tests/bench/bench.h"
#include "tests/bench/shape.h"

int td_bench_model(int argc, char **argv)
{
    const char *name = "20b", *tokenizer = NULL;
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'}, {"tokenizer", required_argument, NULL, 't'}, {NULL, 0, NULL, 0}};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'c': name = optarg; break;
        case 't': tokenizer = optarg; break;
        default: return 2;
        }
    if (optind + 1 != argc) {
        fprintf(stderr, "tandem-bench model: one directory to make, not %d\n", argc - optind);
        return 2;
    }
    struct td_err err = {{0}};
    td_bench_must(td_bench_shape_write(name, 0, argv[optind], tokenizer, &err), &err);
    printf("%s: config.json of gpt-oss-%s%s; start workers on it with --load-format dummy\n", argv[optind], name,
           tokenizer != NULL ? " and a tokenizer" : "");
    return 0;
}
