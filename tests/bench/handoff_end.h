/* One end of a hand-off in a process of its own: a loop, a device's pools in the shape of gpt-oss-120b's KV, a
 * transfer, and the real sender or receiver on top. handoff.c is the sending process, and starts handoff_end.c's
 * receiver. */
#ifndef TESTS_BENCH_HANDOFF_END_H
#define TESTS_BENCH_HANDOFF_END_H

#include "common/base/bytes.h"
#include "common/loop/loop.h"
#include "common/transfer/xfer.h"
#include "kernels/device.h"
#include "kernels/kv_layout.h"

#define TD_BENCH_WINDOW 128u

struct td_bench_end_options {
    char device[8]; /* "cuda" or "cpu" */
    uint32_t gpu;
    bool is_mapping_off;
    uint32_t n_pages; /* of full layers' pool */
};

struct td_bench_end {
    struct td_loop *loop;
    struct td_device *device; /* NULL: the CPU */
    struct td_xfer *x;
    struct td_xfer_pool *pools[TD_KV_N_GROUPS];
    struct td_kv_group_layout kv[TD_KV_N_GROUPS];
    uint8_t *base[TD_KV_N_GROUPS];
    uint64_t incarnation;
};

/* What the two ends say to each other over a socket, one after another. */
enum td_bench_ask { ASK_HELLO, ASK_PEER, ASK_RESERVE, ASK_SUM, ASK_FREE, ASK_USAGE, ASK_READY };
struct td_bench_note {
    uint32_t what, n_text;
    uint64_t a, b, c;
};

/* Ends the program with a message if anything is missing. */
void td_bench_end_open(struct td_bench_end *e, const struct td_bench_end_options *o, const struct td_xfer_handlers *h,
                       void *user);
void td_bench_end_close(struct td_bench_end *e);
void td_bench_end_describe(const struct td_bench_end *e, struct td_buf *out);
/* The way to the end so described. */
struct td_xfer_peer *td_bench_end_connect(struct td_bench_end *e, const uint8_t *text, size_t n, bool with_pools,
                                          uint64_t *incarnation_out);
/* Of these pages' bytes in every layer, in order. */
uint64_t td_bench_end_sum(const struct td_bench_end *e, const uint32_t *const pages[TD_KV_N_GROUPS],
                          const uint32_t n[TD_KV_N_GROUPS]);
uint64_t td_bench_cpu_us(void); /* that this process has used, all threads */

bool td_bench_tell(int fd, struct td_bench_note n, const void *text);
/* text_out may be NULL if none is expected. false: the other end is gone. */
bool td_bench_hear(int fd, struct td_bench_note *out, struct td_buf *text_out);

/* The receiving process, if argv says so; does not return then. Its socket is descriptor 3. */
void td_bench_receiver_main(int argc, char **argv);

#endif
