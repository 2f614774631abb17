/* tandem-bench offline: what one GPU reaches on a model of gpt-oss's shape, without a cluster: prefill latency a prompt
 * length, decode step time a batch and context, each beside its floor (floors.h), and where the time of a decode step
 * and of a prefill goes, op by op. Weights are made up unless --model names a checkpoint. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "tests/bench/bench.h"
#include "tests/bench/rig.h"

#define MAX_LIST  16
#define MAX_TIMES 64

struct list {
    uint32_t v[MAX_LIST];
    uint32_t n;
};

static struct list read_list(const char *option, char *text)
{
    struct list l = {.n = 0};
    for (char *save = NULL, *word = strtok_r(text, ",", &save); word != NULL; word = strtok_r(NULL, ",", &save)) {
        if (l.n == MAX_LIST) {
            fprintf(stderr, "tandem-bench: --%s: more than %d numbers\n", option, MAX_LIST);
            exit(2);
        }
        l.v[l.n++] = td_bench_number(option, word, 1);
    }
    return l;
}

static uint32_t most(const struct list *l)
{
    uint32_t m = 0;
    for (uint32_t i = 0; i < l->n; i++)
        if (l->v[i] > m) m = l->v[i];
    return m;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *t, uint32_t n)
{
    qsort(t, n, sizeof *t, by_value);
    return t[n / 2];
}

struct offline {
    struct td_bench_rig_options o;
    struct td_bench_rig r;
    uint32_t steps;
    struct list prompts, batches, contexts;
};

/* ---- prefill ---- */

static double prefill(struct offline *b, uint32_t n, double us[TD_BENCH_N_OPS], uint32_t calls[TD_BENCH_N_OPS])
{
    double sum = 0;
    for (uint32_t at = 0; at < n; at += b->o.chunk) {
        uint32_t part = n - at < b->o.chunk ? n - at : b->o.chunk;
        sum += td_bench_rig_prefill(&b->r, at, part, at + part == n);
        if (us != NULL) td_bench_rig_add_ops(&b->r, us, calls);
    }
    return sum;
}

static void bench_prefill(struct offline *b)
{
    printf("\nprefill, %u tokens a pass at most\n%8s %10s %10s %7s %12s\n", b->o.chunk, "tokens", "ms", "floor",
           "ratio", "tokens/s");
    for (uint32_t i = 0; i < b->prompts.n; i++) {
        uint32_t n = b->prompts.v[i], times = n > 16384 ? 3 : 7;
        double t[MAX_TIMES];
        if (!td_bench_rig_fits(&b->r, 1, n)) {
            printf("%8u  does not fit\n", n);
            continue;
        }
        prefill(b, n, NULL, NULL);
        for (uint32_t k = 0; k < times; k++) t[k] = prefill(b, n, NULL, NULL);
        struct td_bench_floors f;
        td_bench_prefill_floors(b->r.c, b->o.form, n, &f);
        double s = median(t, times);
        printf("%8u %10.2f %10.2f %7.2f %12.0f\n", n, s * 1e3, f.total * 1e3, s / f.total, n / s);
        fflush(stdout);
    }
}

/* ---- decode ---- */

/* Median wall seconds of a step; *gap_out: of the time the device had nothing to do before one. */
static double decode(struct offline *b, uint32_t batch, uint32_t context, uint32_t steps, double *gap_out)
{
    double t[MAX_TIMES], g[MAX_TIMES];
    td_bench_rig_decode(&b->r, batch, context, steps, t, g);
    *gap_out = median(g, steps);
    return median(t, steps);
}

static void bench_decode(struct offline *b)
{
    printf("\ndecode, a step\n%8s %6s %10s %10s %7s %12s %12s\n", "context", "batch", "ms", "floor", "ratio",
           "tokens/s", "gap us");
    for (uint32_t i = 0; i < b->contexts.n; i++)
        for (uint32_t k = 0; k < b->batches.n; k++) {
            uint32_t context = b->contexts.v[i], batch = b->batches.v[k];
            if (!td_bench_rig_fits(&b->r, batch, context)) {
                printf("%8u %6u  does not fit\n", context, batch);
                continue;
            }
            struct td_bench_floors f;
            td_bench_decode_floors(b->r.c, b->o.form, b->o.kv, batch, context, &f);
            double gap, s = decode(b, batch, context, b->steps, &gap);
            printf("%8u %6u %10.3f %10.3f %7.2f %12.0f %12.0f\n", context, batch, s * 1e3, f.total * 1e3, s / f.total,
                   batch / s, gap * 1e6);
            fflush(stdout);
        }
}

/* ---- op by op ---- */

static double floor_of(const struct td_bench_floors *f, enum td_bench_op op)
{
    return op == TD_BENCH_OP_qkv         ? f->qkv
           : op == TD_BENCH_OP_attention ? f->attention
           : op == TD_BENCH_OP_o_proj    ? f->o_proj
           : op == TD_BENCH_OP_moe       ? f->moe
           : op == TD_BENCH_OP_lm_head   ? f->lm_head
                                         : 0;
}

static void print_ops(const char *what, const double us[TD_BENCH_N_OPS], const uint32_t calls[TD_BENCH_N_OPS],
                      const struct td_bench_floors *f, double n_passes, double whole_s)
{
    double sum = 0;
    printf("\n%s: %.3f ms, floor %.3f\n%14s %7s %12s %7s %12s %7s %12s\n", what, whole_s * 1e3, f->total * 1e3, "op",
           "calls", "us", "share", "floor us", "ratio", "above it us");
    for (enum td_bench_op op = 0; op < TD_BENCH_N_OPS; op++) {
        double t = us[op] / n_passes, least = floor_of(f, op) * 1e6;
        if (calls[op] == 0) continue;
        sum += t;
        printf("%14s %7.0f %12.1f %6.1f%%", td_bench_op_names[op], calls[op] / n_passes, t, t / whole_s / 1e4);
        if (least > 0)
            printf(" %12.1f %7.2f %12.1f\n", least, t / least, t - least);
        else
            printf(" %12s %7s %12.1f\n", "", "", t);
    }
    printf("%14s %7s %12.1f %6.1f%%   (marks around each op add a little to it and end overlaps)\n", "the rest", "",
           whole_s * 1e6 - sum, (whole_s * 1e6 - sum) / whole_s / 1e4);
}

static void bench_ops(struct offline *b)
{
    static const uint32_t steps[][2] = {{1, 1024}, {64, 1024}, {128, 1024}};
    char what[96];
    double whole[TD_COUNT(steps)] = {0}, whole_prefill = 0, unused;
    uint32_t n = 8192 < most(&b->prompts) ? 8192 : most(&b->prompts);
    struct td_bench_floors f;
    for (size_t i = 0; i < TD_COUNT(steps); i++)
        if (td_bench_rig_fits(&b->r, steps[i][0], steps[i][1]))
            whole[i] = decode(b, steps[i][0], steps[i][1], b->steps, &unused);
    prefill(b, n, NULL, NULL);
    whole_prefill = prefill(b, n, NULL, NULL);
    td_bench_rig_trace(&b->r, true);
    for (size_t i = 0; i < TD_COUNT(steps); i++) {
        double us[TD_BENCH_N_OPS] = {0};
        uint32_t calls[TD_BENCH_N_OPS] = {0};
        if (!td_bench_rig_fits(&b->r, steps[i][0], steps[i][1])) continue;
        for (int k = 0; k < 8; k++) {
            decode(b, steps[i][0], steps[i][1], 1, &unused);
            td_bench_rig_add_ops(&b->r, us, calls);
        }
        td_bench_decode_floors(b->r.c, b->o.form, b->o.kv, steps[i][0], steps[i][1], &f);
        snprintf(what, sizeof what, "a decode step, batch %u at %u tokens", steps[i][0], steps[i][1]);
        print_ops(what, us, calls, &f, 8, whole[i]);
    }
    double us[TD_BENCH_N_OPS] = {0};
    uint32_t calls[TD_BENCH_N_OPS] = {0};
    prefill(b, n, NULL, NULL);
    for (int k = 0; k < 2; k++) prefill(b, n, us, calls);
    td_bench_prefill_floors(b->r.c, b->o.form, n, &f);
    snprintf(what, sizeof what, "a prefill of %u tokens", n);
    print_ops(what, us, calls, &f, 2, whole_prefill);
}

/* ---- the command ---- */

static void bench_load(struct offline *b)
{
    uint64_t n_free = 0, total = 0;
    double middle, worst;
    uint32_t rows = b->o.chunk < 8192 ? b->o.chunk : 8192;
    if (rows > b->o.n_ctx) rows = b->o.n_ctx;
    printf("weights %.2f GB in %.1f s; KV pools %.2f GB", (double)b->r.weight_bytes / 1e9, b->r.load_s,
           (double)b->r.pool_bytes / 1e9);
    if (td_device_memory(b->r.device, &n_free, &total) == TD_OK)
        printf("; %.2f of %.2f GB of the device in use", (double)(total - n_free) / 1e9, (double)total / 1e9);
    td_bench_rig_balance(&b->r, rows, &middle, &worst);
    printf("\nexperts: the fullest has %.2f times the mean's rows in the middle layer, %.2f in the worst (%u rows)\n",
           middle, worst, rows);
}

static enum td_dtype read_kv(const char *text)
{
    if (strcmp(text, "bf16") == 0) return TD_BF16;
    if (strcmp(text, "e4m3") == 0) return TD_E4M3;
    fprintf(stderr, "tandem-bench: --kv-dtype: \"%s\" is not bf16 or e4m3\n", text);
    exit(2);
}

int td_bench_offline(int argc, char **argv)
{
    static const char *const parts[] = {"load", "prefill", "decode", "ops"};
    char prompts[] = "512,2048,8192,32768", batches[] = "1,8,32,64,128", contexts[] = "1024,8192,32768";
    char *only = NULL;
    const char *form = "mxfp4", *kv = "bf16";
    struct offline b = {.o = {.config = "20b", .device = "cuda", .chunk = 8192},
                        .steps = 20,
                        .prompts = read_list("prompts", prompts),
                        .batches = read_list("batches", batches),
                        .contexts = read_list("contexts", contexts)};
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'},   {"model", required_argument, NULL, 'm'},
        {"device", required_argument, NULL, 'd'},   {"moe-weights", required_argument, NULL, 'w'},
        {"kv-dtype", required_argument, NULL, 'k'}, {"chunk", required_argument, NULL, 'n'},
        {"steps", required_argument, NULL, 's'},    {"prompts", required_argument, NULL, 'p'},
        {"batches", required_argument, NULL, 'b'},  {"contexts", required_argument, NULL, 'x'},
        {"only", required_argument, NULL, 'o'},     {NULL, 0, NULL, 0}};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'c': b.o.config = optarg; break;
        case 'm': b.o.model = optarg; break;
        case 'd': b.o.device = optarg; break;
        case 'w': form = optarg; break;
        case 'k': kv = optarg; break;
        case 'n': b.o.chunk = td_bench_number("chunk", optarg, 16); break;
        case 's': b.steps = td_bench_number("steps", optarg, 1); break;
        case 'p': b.prompts = read_list("prompts", optarg); break;
        case 'b': b.batches = read_list("batches", optarg); break;
        case 'x': b.contexts = read_list("contexts", optarg); break;
        case 'o': only = optarg; break;
        default: return 2;
        }
    bool runs[TD_COUNT(parts)], is_known = true;
    for (size_t i = 0; i < TD_COUNT(parts); i++) runs[i] = only == NULL;
    for (char *save = NULL, *word = only != NULL ? strtok_r(only, ",", &save) : NULL; word != NULL;
         word = strtok_r(NULL, ",", &save)) {
        size_t i = 0;
        while (i < TD_COUNT(parts) && strcmp(word, parts[i]) != 0) i++;
        if (i < TD_COUNT(parts)) runs[i] = true;
        is_known &= i < TD_COUNT(parts);
    }
    if (optind < argc || !is_known || b.steps > MAX_TIMES || most(&b.batches) > 1024) {
        fprintf(stderr, "tandem-bench offline: %s\n",
                optind < argc         ? "no such argument"
                : b.steps > MAX_TIMES ? "--steps: at most 64"
                : !is_known           ? "--only some of load,prefill,decode,ops"
                                      : "--batches: at most 1024");
        return 2;
    }
    b.o.form = td_bench_expert_form(form);
    b.o.kv = read_kv(kv);
    b.o.n_seqs = most(&b.batches);
    uint32_t context = most(&b.contexts), prompt = most(&b.prompts);
    b.o.n_ctx = context > prompt ? context : prompt;
    b.o.n_tokens = prompt;
    for (uint32_t i = 0; i < b.contexts.n && runs[2]; i++) {
        uint64_t n = (uint64_t)b.contexts.v[i] * b.o.n_seqs;
        if (n > b.o.n_tokens) b.o.n_tokens = n;
    }
    if (runs[3] && b.o.n_tokens < 128u * 1024u) b.o.n_tokens = 128u * 1024u;
    td_log_open("tandem-bench", TD_LOG_WARN);
    printf("gpt-oss %s, experts %s, KV %s, %s\n", b.o.model != NULL ? b.o.model : b.o.config, form, kv, b.o.device);
    td_bench_rig_open(&b.o, &b.r);
    if (runs[0]) bench_load(&b);
    if (runs[1]) bench_prefill(&b);
    if (runs[2]) bench_decode(&b);
    if (runs[3]) bench_ops(&b);
    td_bench_rig_close(&b.r);
    return 0;
}
