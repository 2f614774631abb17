/* tandem-bench xfer: puts between two processes of this machine, bandwidth by size and latency, over shared memory and
 * TCP, beside a loop of memcpy over the same bytes in the same run (on shared memory a put is a memcpy, so that is its
 * floor). put: one request with 8 segments in flight after another, 4 requests at a time. latency: one put of that
 * size, done, flush, done; each with a round through the loop. */
#include <getopt.h>

#define PAIR_WITHOUT_CMOCKA 1
#include "tests/bench/bench.h"
#include "tests/unit/common/transfer/xfer_pair.h"

#define N_SEGS  8u
#define N_DEPTH 4u

struct run {
    struct pair *p;
    struct td_xfer_peer *peer;
    size_t n_bytes;
    uint64_t until_ns, n_done;
    unsigned n_out;
    struct run_slot {
        struct td_xfer_req req;
        struct run *r;
    } slot[N_DEPTH];
};

static void post(struct run_slot *s)
{
    struct run *r = s->r;
    struct td_xfer_seg seg[N_SEGS];
    size_t span = PAIR_POOL_BYTES / N_SEGS;
    for (unsigned i = 0; i < N_SEGS; i++)
        seg[i] = (struct td_xfer_seg){r->p->mem[POOL_SHARED] + i * span, i * span, r->n_bytes};
    TD_CHECK(r->p->ops->put(r->peer, POOL_SHARED, seg, N_SEGS, &s->req) == TD_OK);
    r->n_out++;
}
static void done(struct td_xfer_req *req, enum td_status st)
{
    struct run_slot *s = TD_CONTAINER_OF(req, struct run_slot, req);
    TD_CHECK(st == TD_OK);
    s->r->n_out--;
    s->r->n_done++;
    if (td_clock_ns() < s->r->until_ns) post(s);
}
static bool is_over(void *arg) { return ((struct run *)arg)->n_out == 0; }

static double put_gbs(struct pair *p, struct td_xfer_peer *peer, size_t n_bytes, uint64_t ms)
{
    struct run r = {.p = p, .peer = peer, .n_bytes = n_bytes};
    uint64_t from_ns = td_clock_ns();
    r.until_ns = from_ns + ms * TD_NS_PER_MS;
    for (unsigned i = 0; i < N_DEPTH; i++) {
        r.slot[i] = (struct run_slot){.req.done = done, .r = &r};
        post(&r.slot[i]);
    }
    TD_CHECK(pair_run(p, is_over, &r, ms + 60000));
    TD_CHECK(pair_flush(p, peer, 60000) == TD_OK);
    return (double)(r.n_done * N_SEGS * n_bytes) / (double)(td_clock_ns() - from_ns);
}

/* One put and its flush at a time, started by each other's done: what a hand-off's tail costs. */
struct chain {
    struct td_xfer_req req;
    struct pair *p;
    struct td_xfer_peer *peer;
    size_t n_bytes;
    uint64_t until_ns, n;
    bool is_flush, is_over;
};
static void chain_next(struct td_xfer_req *req, enum td_status st)
{
    struct chain *c = TD_CONTAINER_OF(req, struct chain, req);
    TD_CHECK(st == TD_OK);
    if (!c->is_flush) {
        c->is_flush = true;
        TD_CHECK(c->p->ops->flush(c->peer, req) == TD_OK);
        return;
    }
    c->n++;
    if (td_clock_ns() >= c->until_ns) {
        c->is_over = true;
        return;
    }
    c->is_flush = false;
    struct td_xfer_seg seg = {c->p->mem[POOL_SHARED], 0, c->n_bytes};
    TD_CHECK(c->p->ops->put(c->peer, POOL_SHARED, &seg, 1, req) == TD_OK);
}
static bool chain_is_over(void *arg) { return ((struct chain *)arg)->is_over; }
static double put_flush_us(struct pair *p, struct td_xfer_peer *peer, size_t n_bytes, uint64_t ms)
{
    struct chain c = {.req.done = chain_next, .p = p, .peer = peer, .n_bytes = n_bytes, .is_flush = true};
    uint64_t from_ns = td_clock_ns();
    c.until_ns = from_ns + ms * TD_NS_PER_MS;
    chain_next(&c.req, TD_OK);
    TD_CHECK(pair_run(p, chain_is_over, &c, ms + 60000));
    return (double)(td_clock_ns() - from_ns) / 1e3 / (double)c.n;
}

static double memcpy_gbs(struct pair *p, size_t n_bytes, uint64_t ms)
{
    size_t span = PAIR_POOL_BYTES / N_SEGS;
    uint64_t from_ns = td_clock_ns(), n = 0, now_ns;
    do {
        for (unsigned i = 0; i < N_SEGS; i++)
            memcpy(p->mem[POOL_PLAIN] + i * span, p->mem[POOL_SHARED] + i * span, n_bytes);
        __asm__ volatile("" ::: "memory");
        n++;
        now_ns = td_clock_ns();
    } while (now_ns < from_ns + ms * TD_NS_PER_MS);
    return (double)(n * N_SEGS * n_bytes) / (double)(now_ns - from_ns);
}

static void table(const char *tls, uint64_t ms)
{
    static const size_t sizes[] = {4096, 16384, 65536, 262144, 1048576};
    struct pair p;
    struct child c;
    struct td_err err = {{0}};
    if (pair_open(&p, tls, &err) != TD_OK) {
        printf("%s: %s\n", tls, err.text);
        return;
    }
    child_start(&c, tls);
    child_connect(&c, &p);
    TD_CHECK(pair_flush(&p, c.peer, 20000) == TD_OK);
    pair_fill(p.mem[POOL_SHARED], PAIR_POOL_BYTES, 1);
    printf("%s: puts over %s, into an allocated pool\n%10s %12s %12s %8s %16s\n", tls, p.ops->peer_transport(c.peer),
           "bytes", "put GB/s", "memcpy GB/s", "share", "put+flush us");
    for (size_t i = 0; i < TD_COUNT(sizes); i++) {
        double put = put_gbs(&p, c.peer, sizes[i], ms), copy = memcpy_gbs(&p, sizes[i], ms);
        printf("%10zu %12.2f %12.2f %7.0f%% %16.1f\n", sizes[i], put, copy, 100 * put / copy,
               put_flush_us(&p, c.peer, sizes[i], ms));
        fflush(stdout);
    }
    child_quit(&c);
    pair_close(&p);
}

int td_bench_xfer(int argc, char **argv)
{
    child_main(argc, argv); /* does not return in the other process */
    const char *tls = "both";
    uint64_t ms = 300; /* of each row */
    static const struct option options[] = {
        {"tls", required_argument, NULL, 't'}, {"ms", required_argument, NULL, 'm'}, {NULL, 0, NULL, 0}};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (o) {
        case 't': tls = optarg; break;
        case 'm': ms = td_bench_number("ms", optarg, 1); break;
        default: return 2;
        }
    bool is_both = strcmp(tls, "both") == 0, is_shm = is_both || strcmp(tls, "shm") == 0;
    bool is_tcp = is_both || strcmp(tls, "tcp") == 0;
    if (optind < argc || !(is_shm || is_tcp)) {
        fprintf(stderr, "tandem-bench xfer: --tls shm, tcp or both, and --ms\n");
        return 2;
    }
    if (is_shm) table("shm", ms);
    if (is_tcp) table("tcp", ms);
    return 0;
}
