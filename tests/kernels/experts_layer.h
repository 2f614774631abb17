/* What the tests of the experts in FP8 and MXFP4 share: a random layer as a checkpoint stores it, the same on the GPU,
 * one run of the op, and the definition in float64. A program's tests stand in the files that use this. */
#ifndef TESTS_KERNELS_EXPERTS_LAYER_H
#define TESTS_KERNELS_EXPERTS_LAYER_H

#include "kernels/cuda/moe_scratch.h"
#include "tests/kernels/pair.h"

#define EXPERTS_K   4u
#define EXPERTS_MAX 128u

extern const char *const experts_form_names[];
extern struct td_device_options experts_options; /* of every device that experts_open opens, but for the form */

struct experts_tally {
    uint32_t n_checks, n_failed;
    bool is_quiet; /* failures are expected */
};
extern struct experts_tally experts_tally;
void experts_check(bool is_good, const char *what, const char *form, double have, double allowed);

float experts_random(void);
/* Ends the program where there is no memory. */
void *experts_grab(size_t bytes);

struct experts_layer {
    uint32_t hidden, intermediate, n_experts;
    uint32_t first, units; /* of the intermediate, this rank's: all of it to begin with */
    float limit;           /* of the activation */
    uint8_t *up_blocks, *up_scales, *down_blocks,
        *down_scales; /* as stored, all experts; NULL once only the GPU needs them */
    float *up_bias, *router_bias;
    uint16_t *router;
};
/* Groups' exponents span `spread`. Random routing needs no more than random weights. */
struct experts_layer experts_make(uint32_t hidden, uint32_t intermediate, uint32_t n_experts, int spread);
void experts_free(struct experts_layer *m);
/* Of one expert, what this rank packs. */
struct td_pack_weight_args experts_args(const struct experts_layer *m, bool is_up, uint32_t e);

struct experts_gpu {
    struct td_device *d;
    struct td_stream *s;
    const struct td_ops *ops;
    enum td_expert_form form;
};
/* 0: there is no GPU to use; the reason is printed. */
int experts_open(struct experts_gpu *g, enum td_expert_form form);
void experts_close(struct experts_gpu *g);
void experts_must(const struct experts_gpu *g, enum td_status st, const char *what);

struct experts_loaded {
    struct td_weight up[EXPERTS_MAX], down[EXPERTS_MAX];
    void *up_data, *up_bias, *down_data, *router, *router_bias;
    uint64_t n_inexact;
};
/* Experts absent .. n - 1; copies: expert e is stored expert e % copies. */
void experts_load(const struct experts_gpu *g, const struct experts_layer *m, uint32_t n, uint32_t absent,
                  uint32_t copies, struct experts_loaded *w);
void experts_unload(const struct experts_gpu *g, struct experts_loaded *w);

struct experts_result {
    uint32_t *ids;
    float *weights, *y;
    char *scratch;         /* all of it, on the host */
    struct moe_scratch at; /* in it */
    uint32_t *padded;      /* [slots] where a slot is in the sorted order */
};
struct experts_result experts_run(const struct experts_gpu *g, const struct experts_layer *m,
                                  const struct experts_loaded *w, const uint16_t *x, uint32_t n_rows);
void experts_free_result(struct experts_result *r);
/* What the kernels took for a row: its codes times their scales. */
void experts_codes(const struct experts_result *r, const uint8_t *codes, const float *scales, uint32_t p, uint32_t n,
                   float *to);

/* All of a stored expert in f32, rows as stored. */
float *experts_widened(const struct td_pack_weight_args *a);
/* x becomes what its E4M3 codes stand for. */
void experts_quantise(float *x, uint32_t n);
/* One row through one expert. given: the second product's input, if it is not to be what the first gives; then *u_off
 * tells how far that is, squared, and *u_size how large it is. */
void experts_reference(const struct experts_layer *m, const float *up, const float *down, const float *up_bias,
                       const uint16_t *x, bool is_quantised, const float *given, double *u_off, double *u_size,
                       double *y);

#endif
