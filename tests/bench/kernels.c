/* tandem-bench kernels: the CUDA ops, each row a shape of gpt-oss, with the floor and the ratio; then the same shapes
 * by cuBLAS and PyTorch, in the same run (kernels_peer.py). kernels.h says how they are timed. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/kernels.h"

/* What --batch-invariant costs: rows to hold beside those without it. */
static void bench_invariant(void)
{
    struct pair p;
    if (!pair_open_as(&p, &(struct td_device_options){.backend = "cuda", .is_batch_invariant = true})) return;
    td_bench_mode.prefix = "invariant: ";
    td_bench_mode.is_short = 1;
    td_bench_attention(&p);
    td_bench_dense(&p);
    pair_close(&p);
    td_bench_experts(true);
    td_bench_mode.prefix = "";
    td_bench_mode.is_short = 0;
}

/* --dense-weights fp8. */
static void bench_fp8_weights(void)
{
    struct pair p;
    if (!pair_open_as(&p, &(struct td_device_options){.backend = "cuda", .is_dense_fp8 = true})) return;
    td_bench_mode.prefix = "FP8 weights: ";
    td_bench_mode.is_fp8_weights = 1;
    td_bench_dense(&p);
    td_bench_mode.is_fp8_weights = 0;
    td_bench_mode.prefix = "";
    pair_close(&p);
}

/* only: the part whose peers run; "": all. The program lies beside the sources, or at the top of `make dist`. */
static void beside_peers(const char *python, const char *only)
{
    static const char *const places[] = {"tests/bench/kernels_peer.py", "kernels_peer.py"};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        if (access(places[i], R_OK) != 0) continue;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            execlp(python, python, places[i], only, (char *)NULL);
            _exit(127);
        }
        int status = 1;
        if (pid > 0) waitpid(pid, &status, 0);
        if (status != 0)
            printf("peers: %s with PyTorch and Triton did not run (--python chooses the interpreter)\n", python);
        return;
    }
    printf("peers: kernels_peer.py is not in tests/bench of this directory, nor in it\n");
}

int td_bench_kernels(int argc, char **argv)
{
    static const struct option options[] = {{"only", required_argument, NULL, 'o'},
                                            {"python", required_argument, NULL, 'p'},
                                            {"row", required_argument, NULL, 'r'},
                                            {"bare", no_argument, NULL, 'b'},
                                            {NULL, 0, NULL, 0}};
    static const struct {
        const char *name;
        void (*run)(struct pair *p);
    } parts[] = {{"attention", td_bench_attention},
                 {"dense", td_bench_dense},
                 {"rows", td_bench_rows},
                 {"sample", td_bench_sample}};
    const char *only = "", *python = "python3";
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'o': only = optarg; break;
        case 'p': python = optarg; break;
        case 'r': td_bench_mode.row = optarg; break;
        case 'b': td_bench_mode.is_profile = 1; break;
        default: return 2;
        }
    struct pair p;
    if (!pair_open(&p)) return 1;
    int n_run = 0;
    if (strcmp(only, "profile") == 0) {
        td_bench_mode.is_profile = n_run = 1;
        td_bench_attn(&p, 128, 1000, 1, 128, 16, 32);
        td_bench_attn(&p, 1, 32768, 1, 0, 4, 4);
        td_bench_attn(&p, 1, 8192, 8192, 0, 2, 2);
        td_bench_mode.is_short = 1;
        td_bench_dense(&p);
        td_bench_rows(&p);
    }
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (only[0] == '\0' || strcmp(only, parts[i].name) == 0) {
            parts[i].run(&p);
            n_run++;
        }
    pair_close(&p);
    if (only[0] == '\0' || strcmp(only, "experts") == 0) {
        td_bench_experts(false);
        n_run++;
    }
    if (only[0] == '\0' || strcmp(only, "invariant") == 0) {
        bench_invariant();
        n_run++;
    }
    if (only[0] == '\0' || strcmp(only, "fp8_weights") == 0) {
        bench_fp8_weights();
        n_run++;
    }
    bool is_peers = strcmp(only, "peers") == 0;
    if (td_bench_mode.row == NULL && !td_bench_mode.is_profile &&
        (only[0] == '\0' || is_peers || strcmp(only, "experts") == 0)) {
        beside_peers(python, is_peers ? "" : only);
        n_run++;
    }
    if (n_run != 0) return 0;
    fprintf(stderr,
            "tandem-bench kernels: --only: \"%s\" is none of attention, dense, rows, sample, experts, invariant, "
            "fp8_weights, peers, profile\n",
            only);
    return 2;
}
