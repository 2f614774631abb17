/* Text to tokens and back, on the loop when it is short, on a pool thread when it would hold the loop up. A job owns
 * copies of all it works on, so the client may leave meanwhile. */
#ifndef TD_ROUTER_ENCODE_H
#define TD_ROUTER_ENCODE_H

#include "common/loop/loop.h"
#include "common/text/tokenizer.h"
#include "proto/inference.pb-c.h"

#define TD_ENCODE_INLINE_BYTES 16384u /* about 1 ms at the tokenizer's slowest */

struct td_encode {
    struct td_work work;
    void (*done)(struct td_encode *e); /* loop thread, exactly once; maybe before start returns */
    const struct td_tokenizer *tokenizer;
    /* One of them is set: ours. */
    char *text;
    size_t n_text;
    enum td_text_mode mode;
    Tandem__V1__DetokenizeRequest *detokenize;
    /* Results */
    enum td_status st;
    struct td_err err; /* names the field */
    struct td_token_list ids;
    struct td_buf lossy, raw;
};

/* Lives in the caller's object until done; deinit frees inputs and results. Each returns without having started if
 * there is no memory (NO_MEMORY, done does not run). */
enum td_status td_encode_text(struct td_encode *e, struct td_loop *loop, const struct td_tokenizer *t, const void *text,
                              size_t n, enum td_text_mode mode, void (*done)(struct td_encode *e));
enum td_status td_encode_detokenize(struct td_encode *e, struct td_loop *loop, const struct td_tokenizer *t,
                                    const Tandem__V1__DetokenizeRequest *m, void (*done)(struct td_encode *e));
void td_encode_deinit(struct td_encode *e);

#endif
