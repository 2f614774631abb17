/* tandem-bench tokenizer: how fast text becomes tokens, on one core. First ordinary text (the files given, else this
 * repository's own), then a megabyte of each hostile kind, whose cost a byte should stay within five times the ordinary
 * one; beside each, tiktoken with the same vocabulary in the same run, where Python has it. CPU time of one thread,
 * the best of some runs. */
#include <errno.h>
#include <getopt.h>
#include <glob.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/text/tokenizer.h"
#include "tests/bench/bench.h"

#define RUNS         5
#define MEGABYTE     (1u << 20)
#define MAX_TEXTS    64u
#define PEER_WAIT_MS 60000 /* tiktoken may be quadratic on a hostile text */

struct text {
    const char *name;
    struct td_buf bytes;
    bool is_hostile;
    double seconds;
    size_t n_tokens;
};

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* ---- texts ----------------------------------------------------------------------------------------------------- */

static bool append_file(struct td_buf *to, const char *path)
{
    FILE *f = fopen(path, "rb");
    size_t n;
    if (f == NULL) return false;
    while (td_buf_reserve(to, MEGABYTE) && (n = fread(to->data + to->n, 1, to->cap - to->n, f)) > 0) to->n += n;
    fclose(f);
    return !to->failed;
}

/* Prose first, then sources, up to a megabyte. */
static void own_text(struct td_buf *to)
{
    static const char *const patterns[] = {"README.md",    "*/*/README.md", "tests/tiny/transcripts.txt",
                                           "common/*/*.h", "router/*.[ch]", "common/*/*.c"};
    for (size_t i = 0; i < TD_COUNT(patterns); i++) {
        glob_t g;
        if (glob(patterns[i], 0, NULL, &g) != 0) continue;
        for (size_t k = 0; k < g.gl_pathc && to->n < MEGABYTE; k++) append_file(to, g.gl_pathv[k]);
        globfree(&g);
    }
    while (to->n > MEGABYTE) to->n--;
    while (to->n > 0 && (to->data[to->n - 1] & 0x80) != 0) to->n--; /* no letter cut in two */
}

/* A megabyte of a unit again and again, or of letters drawn from n_letters code points from `first` on. */
static const struct {
    const char *name, *unit;
    uint32_t first, n_letters;
} hostile[] = {{"one letter", "a", 0, 0},
               {"one capital", "A", 0, 0},
               {"spaces", " ", 0, 0},
               {"line ends", "\n", 0, 0},
               {"digits", "7", 0, 0},
               {"marks", "!?", 0, 0},
               {"emoji", "\xf0\x9f\x98\x80", 0, 0},
               {"families of emoji", "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7", 0, 0},
               {"one CJK letter", "\xe7\x9a\x84", 0, 0},
               {"CJK letters by chance", NULL, 0x4e00, 3000},
               {"letters by chance", NULL, 'a', 26}};

static void hostile_text(struct td_buf *to, size_t which)
{
    uint32_t r = 1;
    while (to->n < MEGABYTE) {
        if (hostile[which].unit != NULL) {
            td_buf_str(to, hostile[which].unit);
            continue;
        }
        uint32_t c = hostile[which].first + (r = r * 1664525u + 1013904223u) / 4096 % hostile[which].n_letters;
        if (c >= 0x80) {
            td_buf_u8(to, (uint8_t)(0xe0 | c >> 12));
            td_buf_u8(to, (uint8_t)(0x80 | (c >> 6 & 0x3f)));
        }
        td_buf_u8(to, (uint8_t)(c >= 0x80 ? 0x80 | (c & 0x3f) : c));
    }
}

/* ---- ours ------------------------------------------------------------------------------------------------------ */

static void measure(const struct td_tokenizer *t, struct text *x)
{
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    x->seconds = 1e9;
    for (int i = 0; i < RUNS; i++) {
        td_token_list_clear(&ids);
        double start = cpu_seconds();
        td_bench_must(td_tokenizer_encode(t, td_buf_cstr(&x->bytes), x->bytes.n, TD_TEXT_ORDINARY, &ids, &err), &err);
        double took = cpu_seconds() - start;
        if (took < x->seconds) x->seconds = took;
    }
    x->n_tokens = ids.n;
    td_token_list_free(&ids);
}

/* ---- tiktoken, in a process of its own --------------------------------------------------------------------------- */

struct peer {
    pid_t pid;
    int fd;
    char dir[32];
    struct td_buf line;
};

static void write_text(const char *dir, uint32_t i, const struct td_buf *bytes, char path[64])
{
    snprintf(path, 64, "%s/%u", dir, i);
    FILE *f = fopen(path, "wb");
    TD_CHECK(f != NULL);
    bool is_whole = fwrite(bytes->data, 1, bytes->n, f) == bytes->n;
    TD_CHECK(fclose(f) == 0 && is_whole);
}

static void peer_start(struct peer *p, const char *python, const char *model, struct text *texts, uint32_t n)
{
    static char paths[MAX_TEXTS][64];
    char *argv[MAX_TEXTS + 4] = {(char *)(uintptr_t)python, "tests/bench/tiktoken_peer.py", (char *)(uintptr_t)model};
    int fds[2];
    *p = (struct peer){.fd = -1};
    memcpy(p->dir, "/tmp/tandem-bench-XXXXXX", sizeof "/tmp/tandem-bench-XXXXXX");
    TD_CHECK(mkdtemp(p->dir) != NULL && pipe(fds) == 0);
    for (uint32_t i = 0; i < n; i++) {
        write_text(p->dir, i, &texts[i].bytes, paths[i]);
        argv[3 + i] = paths[i];
    }
    fflush(stdout);
    p->pid = fork();
    TD_CHECK(p->pid >= 0);
    if (p->pid == 0) {
        dup2(fds[1], STDOUT_FILENO);
        close(fds[0]);
        close(fds[1]);
        execvp(python, argv);
        fprintf(stderr, "tandem-bench: %s: %s\n", python, strerror(errno));
        _exit(3);
    }
    close(fds[1]);
    p->fd = fds[0];
}

/* One line of the peer's, or false: it ended, or takes longer than is worth waiting for. */
static bool peer_answer(struct peer *p, double *seconds, size_t *n_tokens)
{
    td_buf_clear(&p->line);
    for (char c;;) {
        struct pollfd f = {.fd = p->fd, .events = POLLIN};
        if (poll(&f, 1, PEER_WAIT_MS) <= 0 || read(p->fd, &c, 1) != 1) return false;
        if (c == '\n') break;
        td_buf_u8(&p->line, (uint8_t)c);
    }
    return sscanf(td_buf_cstr(&p->line), "%lf %zu", seconds, n_tokens) == 2;
}

/* Its exit status; -1 if it had to be killed. */
static int peer_end(struct peer *p, uint32_t n)
{
    int status = 0;
    char path[64];
    kill(p->pid, SIGKILL);
    waitpid(p->pid, &status, 0);
    close(p->fd);
    for (uint32_t i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%s/%u", p->dir, i);
        unlink(path);
    }
    rmdir(p->dir);
    td_buf_free(&p->line);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

static void print_text(const struct text *x, double ordinary)
{
    printf("  %-24s %8zu bytes %8zu tokens %8.1f MB/s %6.1f ns/byte", x->name, x->bytes.n, x->n_tokens,
           (double)x->bytes.n / x->seconds / 1e6, x->seconds * 1e9 / (double)x->bytes.n);
    if (x->is_hostile)
        printf("   %.2f of ordinary text's cost", x->seconds / (double)x->bytes.n / ordinary);
    else
        printf(" %7.1f ns/token", x->seconds * 1e9 / (double)x->n_tokens);
    printf("\n");
}

static void beside_tiktoken(const char *python, const char *model, struct text *texts, uint32_t n)
{
    char json[4096];
    struct stat is;
    snprintf(json, sizeof json, "%s%s", model, stat(model, &is) == 0 && S_ISDIR(is.st_mode) ? "/tokenizer.json" : "");
    struct peer p;
    peer_start(&p, python, json, texts, n);
    uint32_t i = 0;
    for (double seconds; i < n; i++) {
        size_t n_tokens;
        if (!peer_answer(&p, &seconds, &n_tokens)) break;
        if (i == 0) printf("beside tiktoken, the same vocabulary and texts\n");
        if (n_tokens == 0)
            printf("  %-24s tiktoken gives up\n", texts[i].name);
        else
            printf("  %-24s tiktoken %8.1f MB/s   ratio %.1f%s\n", texts[i].name,
                   (double)texts[i].bytes.n / seconds / 1e6, seconds / texts[i].seconds,
                   n_tokens == texts[i].n_tokens ? "" : "   BUT ANOTHER NUMBER OF TOKENS");
        fflush(stdout);
    }
    int rc = i == n ? (peer_end(&p, n), 0) : peer_end(&p, n);
    if (i < n && i > 0) printf("  %-24s tiktoken ended or took more than %d s\n", texts[i].name, PEER_WAIT_MS / 1000);
    if (i == 0)
        printf("tiktoken: %s, so nothing beside it\n",
               rc == 3 ? "not installed (PyPI package tiktoken; --python chooses the interpreter)" : "gave no answer");
}

int td_bench_tokenizer(int argc, char **argv)
{
    const char *model = getenv("TANDEM_GPTOSS_TOKENIZER"), *python = "python3";
    static const struct option options[] = {
        {"model", required_argument, NULL, 'm'}, {"python", required_argument, NULL, 'p'}, {NULL, 0, NULL, 0}};
    if (model == NULL) model = "tests/tiny/tiny-model";
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'm': model = optarg; break;
        case 'p': python = optarg; break;
        default: return 2;
        }
    static struct text texts[MAX_TEXTS];
    uint32_t n = 0;
    for (; optind < argc && n < MAX_TEXTS - TD_COUNT(hostile); optind++, n++) {
        texts[n].name = argv[optind];
        if (append_file(&texts[n].bytes, argv[optind]) && texts[n].bytes.n > 0) continue;
        fprintf(stderr, "tandem-bench tokenizer: %s: cannot be read, or is empty\n", argv[optind]);
        return 1;
    }
    if (n == 0) {
        own_text(&texts[n].bytes);
        texts[n++].name = "Tandem's own text";
        if (texts[0].bytes.n == 0) {
            fprintf(stderr, "tandem-bench tokenizer: start it in the repository's root, or name a FILE\n");
            return 1;
        }
    }
    for (size_t i = 0; i < TD_COUNT(hostile); i++, n++) {
        texts[n] = (struct text){.name = hostile[i].name, .is_hostile = true};
        hostile_text(&texts[n].bytes, i);
    }
    struct td_tokenizer *t = NULL;
    struct td_err err = {{0}};
    double start = cpu_seconds();
    td_bench_must(td_tokenizer_load(model, &t, &err), &err);
    printf("%s: loaded in %.2f s; one core\n", model, cpu_seconds() - start);
    for (uint32_t i = 0; i < n; i++) {
        measure(t, &texts[i]);
        print_text(&texts[i], texts[0].seconds / (double)texts[0].bytes.n);
    }
    td_tokenizer_destroy(t);
    beside_tiktoken(python, model, texts, n);
    for (uint32_t i = 0; i < n; i++) td_buf_free(&texts[i].bytes);
    return 0;
}
