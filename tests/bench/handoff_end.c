#include "tests/bench/handoff_end.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/rng.h"
#include "common/engine/kv_pages.h"
#include "common/handoff/receiver.h"
#include "tests/bench/bench.h"

#define SOCKET    3
#define N_SLIDING 64u
#define SUM_BYTES (4u << 20)
#define HOLES_OF  2u /* every second page stays taken, so that no two that a prompt gets are neighbours */

/* --- both ends --------------------------------------------------------------------------------------------- */

static void make_pool(struct td_bench_end *e, size_t n_bytes, void **base, struct td_xfer_pool **pool)
{
    struct td_err err = {{0}};
    if (e->device == NULL) {
        td_bench_must(td_xfer_ucx.pool_create(e->x, n_bytes, pool, &err), &err);
        *base = td_xfer_ucx.pool_base(*pool);
        return;
    }
    size_t block = (size_t)2 << 20; /* as common/worker/device.c */
    enum td_status st = td_device_alloc(e->device, (n_bytes + block - 1) / block * block, base);
    if (st != TD_OK) td_err_set(&err, st, "%zu bytes of the device: %s", n_bytes, td_device_last_error(e->device));
    td_bench_must(st, &err);
    td_bench_must(td_xfer_ucx.pool_register_device(e->x, *base, n_bytes, pool, &err), &err);
}

void td_bench_end_open(struct td_bench_end *e, const struct td_bench_end_options *o, const struct td_xfer_handlers *h,
                       void *user)
{
    struct td_err err = {{0}};
    memset(e, 0, sizeof *e);
    e->incarnation = td_rng_system() | 1;
    td_bench_must(td_loop_create(&e->loop), &err);
    struct td_device_options d = {.backend = o->device, .index = o->gpu};
    if (strcmp(o->device, "cpu") != 0) td_bench_must(td_device_open(&d, &e->device, &err), &err);
    struct td_xfer_options x = {
        .transport = "ucx", .incarnation = e->incarnation, .device = e->device, .is_mapping_off = o->is_mapping_off};
    td_bench_must(td_xfer_ucx.open(e->loop, &x, h, user, &e->x, &err), &err);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        e->kv[g] = (struct td_kv_group_layout){.n_layers = 18,
                                               .n_pages = g == TD_KV_SLIDING ? N_SLIDING : o->n_pages,
                                               .n_heads = 8,
                                               .head_dim = 64,
                                               .page_tokens = 64,
                                               .dtype = TD_BF16};
        void *base;
        make_pool(e, td_kv_pool_bytes(&e->kv[g]), &base, &e->pools[g]);
        e->base[g] = base;
    }
}

void td_bench_end_close(struct td_bench_end *e)
{
    td_xfer_ucx.destroy(e->x);
    for (int g = 0; e->device != NULL && g < TD_KV_N_GROUPS; g++) td_device_free(e->device, e->base[g]);
    td_device_close(e->device);
    td_loop_destroy(e->loop);
}

void td_bench_end_describe(const struct td_bench_end *e, struct td_buf *out)
{
    size_t n;
    const void *address = td_xfer_ucx.address(e->x, &n);
    td_buf_u64(out, e->incarnation);
    td_buf_blob(out, address, (uint32_t)n);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        td_buf_u64(out, (uint64_t)(uintptr_t)e->base[g]);
        const void *key = td_xfer_ucx.pool_key(e->pools[g], &n);
        td_buf_blob(out, key, (uint32_t)n);
    }
}

struct td_xfer_peer *td_bench_end_connect(struct td_bench_end *e, const uint8_t *text, size_t n, bool with_pools,
                                          uint64_t *incarnation_out)
{
    struct td_err err = {{0}};
    struct td_reader r = {.p = text, .n = n};
    struct td_xfer_remote pools[TD_KV_N_GROUPS];
    struct td_xfer_peer *peer = NULL;
    uint32_t n_address, n_key;
    *incarnation_out = td_read_u64(&r);
    const uint8_t *address = td_read_blob(&r, &n_address);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        pools[g].base = td_read_u64(&r);
        pools[g].key = td_read_blob(&r, &n_key);
        pools[g].n_key = n_key;
    }
    TD_CHECK(!r.failed);
    td_bench_must(td_xfer_ucx.peer_open(e->x, *incarnation_out, address, n_address, pools,
                                        with_pools ? TD_KV_N_GROUPS : 0, &peer, &err),
                  &err);
    return peer;
}

uint64_t td_bench_end_sum(const struct td_bench_end *e, const uint32_t *const pages[TD_KV_N_GROUPS],
                          const uint32_t n[TD_KV_N_GROUPS])
{
    static uint64_t words[SUM_BYTES / 8];
    uint64_t h = 1;
    for (int g = 0; g < TD_KV_N_GROUPS; g++)
        for (uint32_t layer = 0; layer < e->kv[g].n_layers; layer++)
            for (uint32_t i = 0; i < n[g]; i++) {
                size_t bytes = td_kv_page_bytes(&e->kv[g]);
                const uint8_t *from = e->base[g] + td_kv_offset(&e->kv[g], layer, pages[g][i], 0, false, 0);
                TD_CHECK(bytes <= sizeof words);
                if (e->device == NULL)
                    memcpy(words, from, bytes);
                else
                    TD_CHECK(td_device_download(e->device, words, from, bytes) == TD_OK);
                for (size_t w = 0; w < bytes / 8; w++) h = (h ^ words[w]) * 0x9e3779b97f4a7c15ull + (h >> 29);
            }
    return h;
}

uint64_t td_bench_cpu_us(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (uint64_t)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000000u +
           (uint64_t)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static bool move_all(int fd, void *p, size_t n, bool is_out)
{
    for (size_t done = 0; done < n;) {
        ssize_t k =
            is_out ? send(fd, (uint8_t *)p + done, n - done, MSG_NOSIGNAL) : read(fd, (uint8_t *)p + done, n - done);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return false;
        done += (size_t)k;
    }
    return true;
}

bool td_bench_tell(int fd, struct td_bench_note n, const void *text)
{
    return move_all(fd, &n, sizeof n, true) && (n.n_text == 0 || move_all(fd, (void *)(uintptr_t)text, n.n_text, true));
}

bool td_bench_hear(int fd, struct td_bench_note *out, struct td_buf *text_out)
{
    if (!move_all(fd, out, sizeof *out, false)) return false;
    if (out->n_text == 0) return true;
    uint8_t *text = malloc(out->n_text);
    bool is_there = text != NULL && move_all(fd, text, out->n_text, false);
    if (is_there && text_out != NULL) td_buf_put(text_out, text, out->n_text);
    free(text);
    return is_there;
}

/* --- the receiving process --------------------------------------------------------------------------------- */

static struct receiver {
    struct td_bench_end end;
    struct td_kv_pages *kv;
    struct td_rx *rx;
    struct td_xfer_peer *to_sender;
    uint32_t n[TD_KV_N_GROUPS], *pages[TD_KV_N_GROUPS]; /* of the last reservation */
    struct td_mail mail;
    sem_t handled;
    struct td_bench_note note;
    struct td_buf text;
} rv;

static enum td_status rx_send(void *self, uint64_t prefill, uint8_t id, const void *data, size_t n)
{
    (void)self, (void)prefill;
    return rv.to_sender == NULL ? TD_E_UNKNOWN_PEER : td_xfer_ucx.send(rv.to_sender, id, data, n);
}
static void rx_ready(void *self, struct td_rx_reservation *r, const struct td_rx_complete *c)
{
    (void)self;
    td_bench_tell(SOCKET, (struct td_bench_note){ASK_READY, 0, td_clock_ns(), td_rx_generation(r), c->kv_bytes}, NULL);
}
static void rx_failed(void *self, struct td_rx_reservation *r, enum td_status st, const char *why)
{
    (void)self;
    td_bench_tell(SOCKET, (struct td_bench_note){ASK_READY, 0, 0, td_rx_generation(r), (uint64_t)st}, NULL);
    fprintf(stderr, "tandem-bench handoff: the receiver failed: %s %s\n", td_status_name(st), why);
}
static void rx_ended(void *self, struct td_rx_reservation *r) { (void)self, (void)r; }

static void on_message(struct td_xfer *x, uint64_t from, uint8_t id, const void *data, size_t n, void *user)
{
    (void)x, (void)user;
    td_rx_on_message(rv.rx, from, id, data, n);
}

static void free_pages(void)
{
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        for (uint32_t i = 0; i < rv.n[g]; i++) td_kv_pages_unref(rv.kv, (enum td_kv_group)g, rv.pages[g][i]);
        free(rv.pages[g]);
        rv.pages[g] = NULL;
        rv.n[g] = 0;
    }
}

static struct td_bench_note reserve(uint32_t n_tokens, struct td_buf *text)
{
    struct td_rx_reservation *r;
    struct td_rx_target t;
    static unsigned n_made;
    TD_CHECK(td_rx_reserve(rv.rx, rv.note.b, n_tokens, 0, "bench", NULL, &r, &t) == TD_OK);
    n_made++;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        td_buf_u32(text, t.first_block[g]);
        td_buf_u32(text, t.n_pages[g]);
        rv.n[g] = t.n_pages[g];
        rv.pages[g] = malloc((t.n_pages[g] + 1) * sizeof *rv.pages[g]);
        for (uint32_t i = 0; i < t.n_pages[g]; i++) td_buf_u32(text, rv.pages[g][i] = t.pages[g][i]);
    }
    return (struct td_bench_note){ASK_RESERVE, (uint32_t)text->n, t.generation, t.lowest_live_generation, n_made};
}

static void handle(struct td_mail *m)
{
    (void)m;
    struct td_bench_note a = {.what = rv.note.what};
    struct td_buf text = {0};
    uint64_t whom;
    switch (rv.note.what) {
    case ASK_HELLO:
        td_bench_end_describe(&rv.end, &text);
        a.n_text = (uint32_t)text.n;
        break;
    case ASK_PEER:
        rv.to_sender = td_bench_end_connect(&rv.end, rv.text.data, rv.text.n, false, &whom);
        td_rx_on_peer_reachable(rv.rx, whom);
        break;
    case ASK_RESERVE: a = reserve((uint32_t)rv.note.a, &text); break;
    case ASK_SUM: a.a = td_bench_end_sum(&rv.end, (const uint32_t *const *)rv.pages, rv.n); break;
    case ASK_FREE: free_pages(); break;
    case ASK_USAGE: a.a = td_bench_cpu_us(); break;
    default: break;
    }
    td_bench_tell(SOCKET, a, text.data);
    td_buf_free(&text);
    sem_post(&rv.handled);
}

static void *listen_main(void *arg)
{
    (void)arg;
    for (;;) {
        td_buf_clear(&rv.text);
        if (!td_bench_hear(SOCKET, &rv.note, &rv.text)) _exit(0); /* the sender has ended */
        td_loop_post(rv.end.loop, &rv.mail);
        while (sem_wait(&rv.handled) != 0 && errno == EINTR) continue;
    }
}

void td_bench_receiver_main(int argc, char **argv)
{
    if (argc != 6 || strcmp(argv[1], "--receiver") != 0) return;
    struct td_bench_end_options o = {
        .gpu = (uint32_t)atoi(argv[3]), .is_mapping_off = atoi(argv[4]) != 0, .n_pages = (uint32_t)atoi(argv[5])};
    snprintf(o.device, sizeof o.device, "%s", argv[2]);
    td_log_open("receiver", TD_LOG_WARN);
    struct td_xfer_handlers h = {.on_message = on_message};
    td_bench_end_open(&rv.end, &o, &h, NULL);
    struct td_err err = {{0}};
    uint32_t n_pages[TD_KV_N_GROUPS] = {rv.end.kv[0].n_pages, rv.end.kv[1].n_pages};
    td_bench_must(td_kv_pages_create(n_pages, &rv.kv), &err);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        uint32_t *all = calloc(n_pages[g], sizeof *all);
        td_bench_must(td_kv_pages_alloc(rv.kv, (enum td_kv_group)g, n_pages[g], "holes", all), &err);
        for (uint32_t i = 0; i < n_pages[g]; i += HOLES_OF) td_kv_pages_unref(rv.kv, (enum td_kv_group)g, all[i]);
        free(all);
    }
    struct td_rx_options ro = {.incarnation = rv.end.incarnation, .window_tokens = TD_BENCH_WINDOW, .n_ranks = 1};
    ro.address = td_xfer_ucx.address(rv.end.x, &ro.n_address);
    memcpy(ro.kv, rv.end.kv, sizeof ro.kv);
    struct td_rx_ports ports = {
        .env = td_loop_env(rv.end.loop), .send = rx_send, .ready = rx_ready, .failed = rx_failed, .ended = rx_ended};
    td_bench_must(td_rx_create(&ro, rv.kv, &ports, &rv.rx), &err);
    rv.mail.deliver = handle;
    sem_init(&rv.handled, 0, 0);
    pthread_t listener;
    TD_CHECK(pthread_create(&listener, NULL, listen_main, NULL) == 0);
    td_loop_run(rv.end.loop);
    _exit(0);
}
