/* tandem-bench handoff: the real sender and receiver between two processes, KV in the shape of gpt-oss-120b on a device
 * each, and a computation that is nothing but time: each layer becomes ready when it is due. So what is measured is the
 * hand-off alone, with the devices otherwise idle. The pages lie scattered at both ends.
 *
 *   all at once   every layer ready at the start: what the bytes take
 *   beside        a layer every --layer-us: from the first token to the receiver's "ready", what a client would wait
 *   one page      of every layer, all at once: what a request costs beside its bytes
 *
 * --kills N: N receivers killed while the sender's puts are in flight; then the sender's device must be well, and the
 * dead one's memory free for its successor. */
#include <getopt.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/handoff/sender.h"
#include "tests/bench/bench.h"
#include "tests/bench/handoff_end.h"

#define RECEIVER_FD 3
#define PATIENCE_NS (20 * TD_NS_PER_S)
#define N_PUTS      4u /* in flight while receivers are killed */
#define PUT_PAGES   128u

extern char **environ;

static struct sender {
    struct td_bench_end_options o;
    uint32_t receiver_gpu;
    uint64_t extra_bytes; /* of the receiver's pool: what a mapping that outlives it would not give back */
    struct td_bench_end end;
    struct td_tx *tx;
    pid_t pid;
    int fd;
    uint64_t receiver;
    struct td_xfer_peer *peer; /* the sender's, of tx; or ours, for kills */
    bool is_raw, is_lost;
    bool has_ended;
    enum td_status ended_st;
    uint64_t ended_ns, ended_bytes;
} sn;

static void on_message(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t n, void *user)
{
    (void)x, (void)user;
    td_tx_on_message(sn.tx, from, id, data, n);
}
static void on_lost(struct td_xfer *x, struct td_xfer_peer *peer, uint64_t incarnation, void *user)
{
    (void)x, (void)user;
    sn.is_lost = true;
    if (sn.is_raw)
        td_xfer_ucx.peer_close(peer);
    else
        td_tx_on_peer_lost(sn.tx, incarnation);
}
static void on_ended(void *self, struct td_tx_send *s, enum td_status st, uint64_t bytes)
{
    (void)self, (void)s;
    sn.has_ended = true;
    sn.ended_st = st;
    sn.ended_ns = td_clock_ns();
    sn.ended_bytes = bytes;
}

static struct td_bench_note ask(struct td_bench_note n, const void *text, struct td_buf *answer)
{
    struct td_bench_note a;
    TD_CHECK(td_bench_tell(sn.fd, n, text) && td_bench_hear(sn.fd, &a, answer));
    return a;
}

/* Twice what a prompt needs, since every second one stays taken; for kills as many more as were asked for. */
static uint32_t receiver_pages(void)
{
    const struct td_kv_group_layout *l = &sn.end.kv[TD_KV_FULL];
    return 2 * sn.o.n_pages + 2 + (uint32_t)(sn.extra_bytes / (l->n_layers * td_kv_page_bytes(l)));
}

static void start_receiver(void)
{
    int fds[2];
    char gpu[16], mapping[4], pages[16];
    TD_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    snprintf(gpu, sizeof gpu, "%u", sn.receiver_gpu);
    snprintf(mapping, sizeof mapping, "%d", sn.o.is_mapping_off ? 1 : 0);
    snprintf(pages, sizeof pages, "%u", receiver_pages());
    char *argv[] = {"handoff", "--receiver", sn.o.device, gpu, mapping, pages, NULL};
    char *const whole[] = {"tandem-bench", argv[0], argv[1], argv[2], argv[3], argv[4], argv[5], NULL};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    int theirs = fds[1] == RECEIVER_FD ? dup(fds[1]) : fds[1];
    posix_spawn_file_actions_adddup2(&actions, theirs, RECEIVER_FD);
    TD_CHECK(posix_spawn(&sn.pid, "/proc/self/exe", &actions, NULL, whole, environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(theirs);
    if (theirs != fds[1]) close(fds[1]);
    sn.fd = fds[0];
    sn.is_lost = false;
}

static void connect_receiver(void)
{
    struct td_buf theirs = {0};
    struct td_bench_note a;
    TD_CHECK(td_bench_tell(sn.fd, (struct td_bench_note){.what = ASK_HELLO}, NULL));
    if (!td_bench_hear(sn.fd, &a, &theirs)) {
        fprintf(stderr, "tandem-bench handoff: the receiver did not start\n");
        exit(1);
    }
    sn.peer = td_bench_end_connect(&sn.end, theirs.data, theirs.n, true, &sn.receiver);
    td_buf_free(&theirs);
    if (sn.is_raw) return;
    struct td_tx_remote_layout remote = {.n_ranks = 1};
    memcpy(remote.kv, sn.end.kv, sizeof remote.kv);
    remote.kv[TD_KV_FULL].n_pages = receiver_pages();
    TD_CHECK(td_tx_add_peer(sn.tx, sn.receiver, sn.peer, &remote) == TD_OK);
    struct td_buf ours = {0};
    td_bench_end_describe(&sn.end, &ours);
    ask((struct td_bench_note){.what = ASK_PEER, .n_text = (uint32_t)ours.n}, ours.data, NULL);
    td_buf_free(&ours);
}

static void fill(uint8_t *to, size_t n, uint64_t seed)
{
    static uint64_t noise[1 << 18];
    for (size_t at = 0; at < n; at += sizeof noise) {
        for (size_t i = 0; i < TD_COUNT(noise); i++)
            noise[i] = seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        size_t part = n - at < sizeof noise ? n - at : sizeof noise;
        if (sn.end.device == NULL)
            memcpy(to + at, noise, part);
        else
            TD_CHECK(td_device_upload(sn.end.device, to + at, noise, part) == TD_OK);
    }
}

/* --- one hand-off ------------------------------------------------------------------------------------------ */

struct figures {
    double whole_us, added_us,
        ended_us;  /* first layer ready -> ready there; first token -> ready there, -> told here */
    double cpu_us; /* of both processes */
    uint64_t bytes;
};

static struct figures hand_off(uint32_t n_tokens, uint32_t layer_us, bool check)
{
    struct td_tx_pages src[TD_KV_N_GROUPS], dst[TD_KV_N_GROUPS];
    struct td_buf text = {0};
    struct td_bench_note t =
        ask((struct td_bench_note){.what = ASK_RESERVE, .a = n_tokens, .b = sn.end.incarnation}, NULL, &text);
    struct td_reader r = {.p = text.data, .n = text.n};
    uint32_t *pages[TD_KV_N_GROUPS][2], n[TD_KV_N_GROUPS];
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        uint32_t first = td_read_u32(&r);
        n[g] = td_read_u32(&r);
        for (int end = 0; end < 2; end++) TD_CHECK((pages[g][end] = malloc((n[g] + 1) * sizeof(uint32_t))) != NULL);
        for (uint32_t i = 0; i < n[g]; i++) {
            pages[g][0][i] = sn.end.kv[g].n_pages - 1 - i; /* backwards: no two are neighbours */
            pages[g][1][i] = td_read_u32(&r);
        }
        src[g] = (struct td_tx_pages){first, n[g], pages[g][0]};
        dst[g] = (struct td_tx_pages){first, n[g], pages[g][1]};
    }
    struct td_tx_send *s;
    uint64_t cpu = td_bench_cpu_us() + ask((struct td_bench_note){.what = ASK_USAGE}, NULL, NULL).a;
    sn.has_ended = false;
    TD_CHECK(td_tx_begin(sn.tx, sn.receiver, t.a, t.b, src, dst, "bench", NULL, &s) == TD_OK);
    uint64_t begun_ns = td_clock_ns(), due_ns = begun_ns;
    for (uint32_t layer = 0; layer < 2 * sn.end.kv[0].n_layers; layer++, due_ns += layer_us * 1000ull) {
        while (td_clock_ns() < due_ns) td_loop_run_once(sn.end.loop, false);
        td_tx_layer_ready(sn.tx, s, layer / 2, layer % 2 == 0 ? TD_KV_SLIDING : TD_KV_FULL, UINT32_MAX);
    }
    uint64_t token_ns = td_clock_ns();
    td_tx_finish(sn.tx, s, 1);
    while (!sn.has_ended && td_clock_ns() < token_ns + PATIENCE_NS) td_loop_run_once(sn.end.loop, true);
    if (!sn.has_ended || sn.ended_st != TD_OK) {
        fprintf(stderr, "tandem-bench handoff: it did not end well: %s\n",
                sn.has_ended ? td_status_name(sn.ended_st) : "late");
        exit(1);
    }
    struct td_bench_note ready;
    TD_CHECK(td_bench_hear(sn.fd, &ready, NULL) && ready.what == ASK_READY && ready.a != 0);
    cpu = td_bench_cpu_us() + ask((struct td_bench_note){.what = ASK_USAGE}, NULL, NULL).a - cpu;
    if (check && td_bench_end_sum(&sn.end, (const uint32_t *const[]){pages[0][0], pages[1][0]}, n) !=
                     ask((struct td_bench_note){.what = ASK_SUM}, NULL, NULL).a) {
        fprintf(stderr, "tandem-bench handoff: other bytes arrived than were sent\n");
        exit(1);
    }
    ask((struct td_bench_note){.what = ASK_FREE}, NULL, NULL);
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (int end = 0; end < 2; end++) free(pages[g][end]);
    td_buf_free(&text);
    return (struct figures){.whole_us = (double)(ready.a - begun_ns) / 1e3,
                            .added_us = (double)(ready.a - token_ns) / 1e3,
                            .ended_us = (double)(sn.ended_ns - token_ns) / 1e3,
                            .cpu_us = (double)cpu,
                            .bytes = sn.ended_bytes};
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Medians; the most added in *worst. */
static struct figures repeat(uint32_t n_tokens, uint32_t layer_us, uint32_t times, double *worst)
{
    double *all[4];
    struct figures f = {0};
    for (int i = 0; i < 4; i++) TD_CHECK((all[i] = malloc(times * sizeof(double))) != NULL);
    for (uint32_t i = 0; i < times; i++) {
        f = hand_off(n_tokens, layer_us, false);
        all[0][i] = f.whole_us;
        all[1][i] = f.added_us;
        all[2][i] = f.ended_us;
        all[3][i] = f.cpu_us;
    }
    for (int i = 0; i < 4; i++) qsort(all[i], times, sizeof(double), by_size);
    f.whole_us = all[0][times / 2];
    f.added_us = all[1][times / 2];
    f.ended_us = all[2][times / 2];
    f.cpu_us = all[3][times / 2];
    if (worst != NULL) *worst = all[1][times - 1];
    for (int i = 0; i < 4; i++) free(all[i]);
    return f;
}

static void measure(uint32_t n_tokens, uint32_t layer_us, uint32_t times)
{
    struct td_tx_ports ports = {
        .env = td_loop_env(sn.end.loop), .xfer = &td_xfer_ucx, .x = sn.end.x, .ended = on_ended};
    struct td_tx_source source = {.n_ranks = 1, .base = {{sn.end.base[0], sn.end.base[1]}}};
    memcpy(source.kv, sn.end.kv, sizeof source.kv);
    TD_CHECK(td_tx_create(&ports, &source, sn.end.incarnation, &sn.tx) == TD_OK);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) fill(sn.end.base[g], td_kv_pool_bytes(&sn.end.kv[g]), 7 + (uint64_t)g);
    start_receiver();
    connect_receiver();
    printf("handoff: %s %u -> %s %u over %s, %u tokens\n", sn.o.device, sn.o.gpu, sn.o.device, sn.receiver_gpu,
           td_xfer_ucx.peer_transport(sn.peer), n_tokens);
    hand_off(n_tokens, 0, true); /* and warm */
    double worst;
    struct figures whole = repeat(n_tokens, 0, times, NULL);
    struct figures beside = repeat(n_tokens, layer_us, times, &worst);
    hand_off(n_tokens, layer_us, true);
    struct figures page = repeat(1, 0, 10 * times, NULL);
    printf("  all at once  %8.1f us  %.1f MB  %.1f GB/s\n", whole.whole_us, (double)whole.bytes / 1e6,
           (double)whole.bytes / 1e3 / whole.whole_us);
    printf("  beside       %8.1f us added to the second token (worst %.1f), a layer every %u us; told here after %.1f; "
           "%.2f %% of what all at once takes is hidden\n",
           beside.added_us, worst, layer_us, beside.ended_us, 100 * (1 - beside.added_us / whole.whole_us));
    printf("  one page     %8.1f us from its layers to ready there, %.0f us of processor at both ends; %.1f KB\n",
           page.whole_us, page.cpu_us, (double)page.bytes / 1e3);
    td_tx_detach(sn.tx);
    kill(sn.pid, SIGTERM);
    waitpid(sn.pid, NULL, 0);
}

/* --- kills ------------------------------------------------------------------------------------------------- */

static struct raw_put {
    struct td_xfer_req req;
    bool is_out;
} raw[N_PUTS];
static uint64_t n_raw;

static void raw_post(struct raw_put *p)
{
    static struct td_xfer_seg segs[PUT_PAGES];
    uint32_t n = PUT_PAGES < sn.o.n_pages ? PUT_PAGES : sn.o.n_pages;
    size_t page = td_kv_page_bytes(&sn.end.kv[TD_KV_FULL]);
    for (uint32_t i = 0; i < n; i++)
        segs[i] = (struct td_xfer_seg){sn.end.base[TD_KV_FULL] + (n - 1 - i) * page, (uint64_t)2 * i * page, page};
    p->is_out = td_xfer_ucx.put(sn.peer, TD_KV_FULL, segs, n, &p->req) == TD_OK;
}
static void raw_done(struct td_xfer_req *req, enum td_status st)
{
    struct raw_put *p = TD_CONTAINER_OF(req, struct raw_put, req);
    p->is_out = false;
    n_raw++;
    if (st == TD_OK) raw_post(p);
}
static bool is_any_out(void)
{
    for (unsigned i = 0; i < N_PUTS; i++)
        if (raw[i].is_out) return true;
    return false;
}

/* The sender's own device still copies and computes right. */
static bool is_well(void)
{
    size_t n = td_kv_page_bytes(&sn.end.kv[TD_KV_FULL]);
    uint32_t one[2] = {0, 1}, first = sn.o.n_pages > 1 ? 1 : 0, count[TD_KV_N_GROUPS] = {1, 1 + first};
    const uint32_t *pages[TD_KV_N_GROUPS] = {one, one};
    uint64_t was = td_bench_end_sum(&sn.end, pages, count);
    fill(sn.end.base[TD_KV_FULL], n, 99);
    uint64_t other = td_bench_end_sum(&sn.end, pages, count);
    fill(sn.end.base[TD_KV_FULL], n, 8);
    const char *error = sn.end.device == NULL ? "" : td_device_last_error(sn.end.device);
    if (error[0] != '\0') fprintf(stderr, "tandem-bench handoff: the device says \"%s\"\n", error);
    return was != other && was == td_bench_end_sum(&sn.end, pages, count) && error[0] == '\0';
}

static int kill_receivers(uint32_t n)
{
    uint64_t slowest = 0, n_puts_before;
    sn.is_raw = true;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) fill(sn.end.base[g], td_kv_pool_bytes(&sn.end.kv[g]), 7 + (uint64_t)g);
    for (uint32_t i = 0; i < n; i++) {
        start_receiver();
        connect_receiver();
        if (i == 0)
            printf("handoff: %s %u -> %s %u over %s, receivers with %.1f GB more killed under puts of %u pages\n",
                   sn.o.device, sn.o.gpu, sn.o.device, sn.receiver_gpu, td_xfer_ucx.peer_transport(sn.peer),
                   (double)sn.extra_bytes / 1e9, PUT_PAGES);
        n_puts_before = n_raw;
        for (unsigned k = 0; k < N_PUTS; k++) {
            raw[k].req.done = raw_done;
            raw_post(&raw[k]);
        }
        uint64_t until_ns = td_clock_ns() + (5 + i % 7) * TD_NS_PER_MS + i * 37000ull;
        while (td_clock_ns() < until_ns) td_loop_run_once(sn.end.loop, false);
        kill(sn.pid, SIGKILL);
        uint64_t killed_ns = td_clock_ns();
        waitpid(sn.pid, NULL, 0);
        while ((!sn.is_lost || is_any_out()) && td_clock_ns() < killed_ns + PATIENCE_NS)
            td_loop_run_once(sn.end.loop, true);
        uint64_t took = td_clock_ns() - killed_ns;
        if (took > slowest) slowest = took;
        close(sn.fd);
        if (!sn.is_lost || is_any_out() || !is_well()) {
            printf("  FAILED in round %u: lost=%d in_flight=%d after %.1f ms\n", i, sn.is_lost, is_any_out(),
                   (double)took / 1e6);
            return 1;
        }
        if (i == 0) printf("  %llu puts before the first kill\n", (unsigned long long)(n_raw - n_puts_before));
    }
    printf("  %u killed; each known at most %.1f ms later, the sender's device well after each\n", n,
           (double)slowest / 1e6);
    return 0;
}

int td_bench_handoff(int argc, char **argv)
{
    td_bench_receiver_main(argc, argv); /* does not return in the other process */
    uint32_t n_tokens = 8192, layer_us = 4000, times = 20, n_kills = 0;
    snprintf(sn.o.device, sizeof sn.o.device, "cuda");
    static const struct option options[] = {{"device", required_argument, NULL, 'd'},
                                            {"gpu", required_argument, NULL, 'g'},
                                            {"peer-gpu", required_argument, NULL, 'p'},
                                            {"tokens", required_argument, NULL, 't'},
                                            {"layer-us", required_argument, NULL, 'l'},
                                            {"times", required_argument, NULL, 'n'},
                                            {"puts", no_argument, NULL, 'u'},
                                            {"kills", required_argument, NULL, 'k'},
                                            {"extra-gib", required_argument, NULL, 'x'},
                                            {NULL, 0, NULL, 0}};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 'd': snprintf(sn.o.device, sizeof sn.o.device, "%s", optarg); break;
        case 'g': sn.o.gpu = td_bench_number("gpu", optarg, 0); break;
        case 'p': sn.receiver_gpu = td_bench_number("peer-gpu", optarg, 0); break;
        case 't': n_tokens = td_bench_number("tokens", optarg, 1); break;
        case 'l': layer_us = td_bench_number("layer-us", optarg, 0); break;
        case 'n': times = td_bench_number("times", optarg, 1); break;
        case 'u': sn.o.is_mapping_off = true; break;
        case 'k': n_kills = td_bench_number("kills", optarg, 1); break;
        case 'x': sn.extra_bytes = (uint64_t)td_bench_number("extra-gib", optarg, 0) << 30; break;
        default: return 2;
        }
    if (optind < argc || n_tokens > 131072) {
        fprintf(stderr, "tandem-bench handoff: %s\n",
                optind < argc ? "no arguments but options" : "--tokens: 131072 at most");
        return 2;
    }
    td_log_open("sender", TD_LOG_WARN);
    sn.o.n_pages = (n_tokens + 63) / 64;
    struct td_xfer_handlers h = {on_message, on_lost};
    td_bench_end_open(&sn.end, &sn.o, &h, NULL);
    int rc = 0;
    if (n_kills != 0)
        rc = kill_receivers(n_kills);
    else
        measure(n_tokens, layer_us, times);
    td_bench_end_close(&sn.end);
    td_tx_destroy(sn.tx);
    return rc;
}
