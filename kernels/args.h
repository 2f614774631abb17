/* Arguments of the ops in ops.def: plain C, raw pointers and shapes, shared by host and device code. Level 1: nothing
 * here knows a model or an engine. Legend: T rows (tokens of a batch), H residual width, Nq/Nkv heads of this rank, D
 * head size, E experts, k experts a token, I expert width of this rank, V vocabulary rows.
 *
 * Activations: what is marked "act" below (normalised rows, queries, attention's output) has the backend's own type:
 * f32 on the CPU, bf16 on CUDA (struct td_backend, act_bytes), packed, in buffers that would hold f32. All other floats
 * are f32 everywhere, the residual and what collectives add among them.
 *
 * Row invariance. An output row depends on its own inputs and pages only, bit for bit: a dot product is one chain of
 * fused multiply-adds in rising index, and sums that tensor parallelism splits are cut into fixed pieces (struct
 * td_pieces), each such a chain from zero, added as a fixed binary tree. A rank whose pieces are a subtree computes
 * that subtree's sum; a collective adds the ranks' sums as the rest of the tree, so 1, 2, 4 and 8 ranks give the same
 * bits. */
#ifndef TD_KERNELS_ARGS_H
#define TD_KERNELS_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kv_layout.h"

#define TD_MAX_PIECES        64u
#define TD_EXPERT_PIECES     8u /* slices of an expert's width: TP up to 8 */
#define TD_MAX_TOKEN_EXPERTS 16u

/* Pieces of a sum over k. Piece i ends before end[i]; after it, the two topmost sums on the stack are added merges[i]
 * times: the post-order of a tree that halves [0, n) again and again. */
struct td_pieces {
    uint32_t n;
    uint32_t end[TD_MAX_PIECES];
    uint8_t merges[TD_MAX_PIECES];
};

/* Nodes of the halving tree over [0, n) whose last leaf is i. */
static inline uint32_t td_pieces_merges(uint32_t n, uint32_t i)
{
    uint32_t lo = 0, hi = n, merges = 0;
    while (hi - lo > 1) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (i == hi - 1) merges++;
        if (i >= mid)
            lo = mid;
        else
            hi = mid;
    }
    return merges;
}

/* Cuts k into n_total even pieces, of which this rank holds n_local from first on; boundaries are relative to its own
 * start. */
static inline void td_pieces_init(struct td_pieces *p, uint32_t k, uint32_t n_total, uint32_t first, uint32_t n_local)
{
    uint32_t base = (uint32_t)((uint64_t)first * k / n_total);
    p->n = n_local;
    for (uint32_t i = 0; i < n_local; i++) {
        p->end[i] = (uint32_t)((uint64_t)(first + i + 1) * k / n_total) - base;
        p->merges[i] = (uint8_t)td_pieces_merges(n_local, i);
    }
}

/* A matrix [n_out, n_in] in the backend's packed form, bias (may be NULL) in the matching order. */
struct td_weight {
    const void *data;
    const float *bias;
    uint32_t n_out, n_in;
};

enum td_weight_source {
    TD_SRC_BF16_ROWS, /* [n_out, n_in], row-major: y = x W^T */
    TD_SRC_BF16_COLS, /* [n_in, n_out]: unquantised experts */
    TD_SRC_MXFP4      /* blocks [n_out, n_in / 32, 16] and scales [n_out, n_in / 32] */
};

enum td_row_order {
    TD_ROWS_PLAIN,
    TD_ROWS_GATE_UP, /* an expert's first matrix: rows 2i and 2i + 1 are gate and up of unit i; the backend may reorder
                      * them and hold them in fewer bits (struct td_device_options, experts) */
    TD_ROWS_DOWN,    /* an expert's second: plain order, perhaps in fewer bits */
    TD_ROWS_DENSE    /* of QKV, O and the LM head: plain order, perhaps in fewer bits (is_dense_fp8 there) */
};
static inline bool td_is_expert_order(enum td_row_order order)
{
    return order == TD_ROWS_GATE_UP || order == TD_ROWS_DOWN;
}

/* Host sources; reads a window of the stored matrix: rows row_begin.. and columns col_begin.., out and bias_out sized
 * by td_device_packed_bytes. INVALID if an MXFP4 element is not finite in bf16 or a scale is 255. */
struct td_pack_weight_args {
    enum td_weight_source source;
    enum td_row_order order;
    const void *data;                           /* host */
    const uint8_t *scales;                      /* host; MXFP4 only */
    uint32_t ld;                                /* elements from one stored row to the next */
    uint32_t row_begin, col_begin, n_out, n_in; /* in terms of y = x W^T */
    const float *bias;                          /* host, [n_out], file order; NULL: none */
    void *out;
    float *bias_out;     /* NULL exactly when bias is */
    uint64_t *n_inexact; /* host; elements that the packed form cannot hold exactly are added to it; may be NULL */
    /* The call may come back before the device has read the sources, which are td_device_alloc_host memory then (slow
     * otherwise) and stay untouched until the stream passes. What it would have said about the values, n_inexact too,
     * td_stream_packed says. */
    bool may_defer;
};

#define TD_NOT_FED UINT32_MAX
struct td_sampled;

struct td_embed_args {
    const uint32_t *tokens; /* [T], each < V */
    const uint16_t *table;  /* [V, H] bf16 */
    float *x;               /* [T, H] out */
    uint32_t n_rows, dim;
    /* [T], or NULL: none is. Not TD_NOT_FED: the row's token is that of drawn[fed] instead, 0 if no draw was made. */
    const uint32_t *fed;
    const struct td_sampled *drawn;
};

struct td_rope_args {
    const uint32_t *positions; /* [T] */
    const float *freqs;        /* [D / 2] */
    float factor;              /* multiplies cos and sin */
    float *cos, *sin;          /* [T, D / 2] out */
    uint32_t n_rows, half;
};

struct td_rmsnorm_args {
    const float *x; /* [T, H] */
    const float *w; /* [H] */
    float *y;       /* [T, H] act, out */
    uint32_t n_rows, dim;
    float eps;
};

/* One group's pool at one layer, and where each row of the batch goes in it. */
struct td_kv_view {
    struct td_kv_group_layout layout;
    void *pool;
    uint32_t layer; /* in group */
};

enum { TD_QKV_Q = 1, TD_QKV_KV = 2 };

struct td_qkv_args {
    const float *x;            /* [T, H] act, normalised */
    struct td_weight w;        /* rows: Nq heads of q, then Nkv of k, then Nkv of v */
    const float *cos, *sin;    /* [T, D / 2] */
    const uint32_t *positions; /* [T] */
    const uint32_t *row_page;  /* [T] page of this group that holds the row's position */
    struct td_kv_view kv;      /* K (rotated) and V out */
    float *q;                  /* [T, Nq, D] act, out, rotated */
    uint32_t n_rows, n_heads, n_kv_heads, head_dim;
    uint32_t parts; /* TD_QKV_Q | TD_QKV_KV: what to compute */
};

/* Consecutive rows of one sequence in the batch. */
struct td_seq_rows {
    uint32_t row, n_rows; /* rows row .. row + n_rows - 1 ... */
    uint32_t start;       /* ... are positions start .. */
    uint32_t pages;       /* pages[pages + i] holds block first_block + i */
    uint32_t first_block;
    uint32_t fresh; /* positions from here on get their K and V in this pass; earlier ones may be read at any time */
};

/* Softmax over visible keys and a sink: position p sees c <= p, with window w also p - c < w. Keys are walked in
 * absolute blocks of positions, so chunking changes nothing. */
struct td_attention_args {
    const float *q; /* [T, Nq, D] act */
    struct td_kv_view kv;
    const struct td_seq_rows *seqs; /* [n_seqs] */
    const uint32_t *pages;
    uint32_t n_seqs, n_rows;             /* n_rows: of all sequences together, rows 0 .. n_rows - 1 of q */
    uint32_t n_single;                   /* sequences of one row */
    const struct td_seq_rows *seqs_host; /* the same as seqs, on the host; read during the call only */
    void *scratch;                       /* td_device_scratch_bytes, shared with moe; FP8 pages need it */
    size_t scratch_bytes;
    const float *sinks; /* [Nq] raw logits; -inf: none */
    float *out;         /* [T, Nq, D] act, out, may not overlap q */
    uint32_t n_heads, n_kv_heads, head_dim;
    uint32_t window; /* 0: none */
    float scale;
};

struct td_o_proj_args {
    const float *x;          /* [T, Nq * D] act */
    struct td_weight w;      /* [H, Nq * D]; its bias is add_norm's */
    struct td_pieces pieces; /* of Nq * D, one a KV head */
    float *y;                /* [T, H] out: sum of this rank's pieces */
    uint32_t n_rows;
};

struct td_add_norm_args {
    float *x;          /* [T, H] in and out: x += y + bias */
    const float *y;    /* [T, H], summed over ranks */
    const float *bias; /* [H] */
    const float *w;    /* [H] of the norm */
    float *t;          /* [T, H] act, out: rmsnorm(x) */
    uint32_t n_rows, dim;
    float eps;
};

struct td_moe_args {
    const float *x;                  /* [T, H] act, normalised */
    struct td_weight router;         /* [E, H] with bias; all experts */
    const struct td_weight *gate_up; /* [E] each [2I, H], order GATE_UP; host array; data NULL: another rank's expert */
    const struct td_weight *down;    /* [E] each [H, I]; host array; its bias is moe_add_norm's */
    struct td_pieces pieces;         /* of I */
    uint32_t n_rows, hidden, intermediate, n_experts, top_k;
    float alpha, limit; /* of the activation */
    uint32_t *ids;      /* [T, k] out: falling logit, lower id first on equal ones */
    float *weights;     /* [T, k] out: softmax over the chosen */
    float *y; /* [T, k, H] out: this rank's pieces; -0.0 where another rank has the expert, so that adding is exact */
    void *scratch;        /* td_device_scratch_bytes */
    bool is_routing_only; /* benchmarks of a GPU: stop before the first product; y is left alone */
};

struct td_moe_add_norm_args {
    float *x;       /* [T, H] in and out: x += sum over slots, in slot order, of weight * (y + bias of the expert) */
    const float *y; /* [T, k, H], summed over ranks */
    const uint32_t *ids;    /* [T, k] */
    const float *weights;   /* [T, k] */
    const float *down_bias; /* [E, H] */
    const float *w;         /* [H] of the norm that follows */
    float *t;               /* [T, H] act, out */
    uint32_t n_rows, dim, top_k;
    float eps;
};

struct td_gather_args {   /* act rows count as rows of n * act_bytes / 4 floats */
    const float *x;       /* [*, dim] */
    const uint32_t *rows; /* [n_rows] */
    float *y;             /* [n_rows, dim] out, may not overlap x */
    uint32_t n_rows, dim;
};

/* One row's draw, over the first n_ids logits. common/engine/sample.h defines what each setting means; what touches
 * single ids (bans, bias, penalties) comes as a list of edits, each id once. */
#define TD_SAMPLE_NO_MASK UINT32_MAX
struct td_sample_row {
    double u; /* [0, 1) */
    float temperature, top_p, min_p;
    float repetition, presence, frequency; /* penalties of the edits that ask for them */
    uint32_t top_k;
    uint32_t first_edit, n_edits;
    uint32_t mask;        /* which of masks; TD_SAMPLE_NO_MASK: all ids */
    uint32_t n_top;       /* likeliest ids wanted, at most TD_SAMPLE_TOPS */
    uint32_t is_filtered; /* anything but temperature and the token's own log-probability: listed in filtered */
};
struct td_sample_edit {
    uint32_t id;
    float bias;
    uint32_t how; /* TD_EDIT_*, and how often the id was generated */
};
#define TD_EDIT_BANNED    0x80000000u
#define TD_EDIT_PENALISED 0x40000000u
#define TD_EDIT_COUNT     0x3fffffffu
struct td_sampled {
    double log_sum; /* ln of the sum of e^logit */
    float logit;    /* of the token */
    uint32_t token; /* UINT32_MAX: no logit is above -inf, or fewer than the row wants; the host decides */
};
struct td_sample_top {
    float logit;
    uint32_t id;
};
#define TD_SAMPLE_PARTS   256u   /* runs of ids a row is cut into */
#define TD_SAMPLE_SCRATCH 22528u /* bytes a row */
#define TD_SAMPLE_TOPS  20u

/* As common/engine/sample.h defines it, up to rounding of the sums. */
struct td_sample_args {
    const float *logits;                /* [n_rows, vocab] */
    const struct td_sample_row *rows;   /* [n_rows], and those in filtered */
    const uint32_t *filtered;           /* [n_filtered] rows that are filtered */
    const struct td_sample_edit *edits; /* of all rows */
    const uint32_t *masks;              /* [.., ceil(vocab / 32)]: bit set = allowed */
    struct td_sampled *out;             /* as rows */
    struct td_sample_top *top;          /* as rows, [TD_SAMPLE_TOPS] each, falling; n_top are written */
    void *parts;                        /* as rows, [TD_SAMPLE_SCRATCH] bytes each: scratch */
    /* Plain draws of rows 0 .. n_rows - 1, of which those that are filtered are left out, unless n_filtered is n_rows;
     * then draws of the rows in filtered. */
    uint32_t n_rows, n_filtered, vocab, n_ids;
};

struct td_lm_head_args {
    const float *x;     /* [n_rows, H] act */
    struct td_weight w; /* [V, H] */
    float *logits;      /* [n_rows, V] out */
    uint32_t n_rows;
};

#endif
