/* A model on a device with KV pools full of noise: passes of any shape, without a cluster. Every op is surrounded by
 * marks if asked for, so that a pass says where its time went, also when it is replayed from a graph. */
#ifndef TESTS_BENCH_RIG_H
#define TESTS_BENCH_RIG_H

#include "common/engine/forward.h"
#include "tests/bench/floors.h"

enum td_bench_op {
#define X(op, meaning) TD_BENCH_OP_##op,
#include "kernels/ops.def"
#undef X
    TD_BENCH_N_OPS
};
extern const char *const td_bench_op_names[TD_BENCH_N_OPS];

struct td_bench_rig_options {
    const char *config, *model; /* one of them: "20b" or "120b" with made-up weights, or a checkpoint's directory */
    const char *device;         /* "cuda" or "cpu" */
    enum td_expert_form form;
    enum td_dtype kv;
    uint32_t chunk;         /* rows of a pass at most */
    uint32_t n_seqs, n_ctx; /* most sequences, longest context */
    uint64_t n_tokens;      /* most tokens in full layers' pages at a time; fewer if the device has no room */
};

struct td_bench_rig {
    struct td_device *device;
    struct td_model *model;
    const struct td_model_config *c;
    struct td_engine_options o;
    struct td_forward forward;
    uint32_t *pages[TD_KV_N_GROUPS], *tokens; /* page ids of each pool, in no order; tokens [n_ctx] */
    double load_s;
    uint64_t weight_bytes, pool_bytes;
    bool is_cpu;
};

/* Ends the program with a message if anything is missing. */
void td_bench_rig_open(const struct td_bench_rig_options *o, struct td_bench_rig *out);
void td_bench_rig_close(struct td_bench_rig *r);
/* Every op between marks from now on, or only the whole: drops what was recorded. */
void td_bench_rig_trace(struct td_bench_rig *r, bool each_op);

/* Do that many sequences of that length fit? */
bool td_bench_rig_fits(const struct td_bench_rig *r, uint32_t n_seqs, uint32_t n_ctx);
/* n_steps, each of n_seqs sequences whose new token is the n_ctx-th, drawn on the device, after some that do not count.
 * The next is begun while one runs, as the engine's thread does it. A step's wall seconds, and those in which the
 * device had nothing to do before it (0 where that is unknown). */
void td_bench_rig_decode(struct td_bench_rig *r, uint32_t n_seqs, uint32_t n_ctx, uint32_t n_steps, double *wall_out,
                         double *gap_out);
/* Tokens [start, start + n) of a prompt in one pass. */
double td_bench_rig_prefill(struct td_bench_rig *r, uint32_t start, uint32_t n, bool is_last);
/* Of the last pass, all others ended: what each op took (added to us). */
void td_bench_rig_add_ops(struct td_bench_rig *r, double us[TD_BENCH_N_OPS], uint32_t calls[TD_BENCH_N_OPS]);
/* Rows that each expert got in the layers of a pass of n rows: the fullest over the mean, the middle layer's and the
 * worst one's. */
void td_bench_rig_balance(struct td_bench_rig *r, uint32_t n, double *middle_out, double *worst_out);

#endif
