#include "router/encode.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/base/mem.h"
#include "common/text/detok.h"

#define MAX_DETOKENIZED_BYTES (16u << 20) /* a short list of ids can mean a very long text */

/* --- the work: any thread -------------------------------------------------------------------------------- */

static void detokenize(struct td_encode *e)
{
    const Tandem__V1__DetokenizeRequest *m = e->detokenize;
    uint32_t n_ids = td_tokenizer_n_ids(e->tokenizer);
    struct td_detok detok;
    td_detok_init(&detok, e->tokenizer, m->keep_special);
    for (size_t i = 0; i < m->n_token_ids; i++) {
        if (m->token_ids[i] >= n_ids) {
            e->st = td_err_set(&e->err, TD_E_INVALID, "token_ids: %u at index %zu is not a token id (there are %u)",
                               m->token_ids[i], i, n_ids);
            return;
        }
        td_tokenizer_decode(e->tokenizer, &m->token_ids[i], 1, m->keep_special, &e->raw);
        td_detok_feed(&detok, m->token_ids[i], &e->lossy);
        if (e->raw.n > MAX_DETOKENIZED_BYTES) {
            e->st = td_err_set(&e->err, TD_E_TOO_LARGE, "token_ids: their text is longer than %u bytes",
                               MAX_DETOKENIZED_BYTES);
            return;
        }
    }
    td_detok_end(&detok, &e->lossy);
    e->st = e->raw.failed || e->lossy.failed ? td_err_set(&e->err, TD_E_NO_MEMORY, "no memory for the text") : TD_OK;
}

static void run(struct td_encode *e)
{
    if (e->detokenize != NULL) {
        detokenize(e);
    } else {
        e->st = td_tokenizer_encode(e->tokenizer, e->text, e->n_text, e->mode, &e->ids, &e->err);
    }
    if (e->st == TD_OK && e->ids.failed) e->st = td_err_set(&e->err, TD_E_NO_MEMORY, "no memory for the tokens");
}

static void on_pool(struct td_work *w) { run(TD_CONTAINER_OF(w, struct td_encode, work)); }
static void on_done(struct td_work *w)
{
    struct td_encode *e = TD_CONTAINER_OF(w, struct td_encode, work);
    e->done(e);
}

static void start(struct td_encode *e, struct td_loop *loop, size_t n_bytes)
{
    if (n_bytes <= TD_ENCODE_INLINE_BYTES) {
        run(e);
        e->done(e);
        return;
    }
    e->work.work = on_pool;
    e->work.done = on_done;
    td_loop_work(loop, &e->work);
}

/* --- the orders: loop thread ----------------------------------------------------------------------------- */

enum td_status td_encode_text(struct td_encode *e, struct td_loop *loop, const struct td_tokenizer *t, const void *text,
                              size_t n, enum td_text_mode mode, void (*done)(struct td_encode *e))
{
    *e = (struct td_encode){.done = done, .tokenizer = t, .n_text = n, .mode = mode};
    e->text = td_calloc(n + 1, 1);
    if (e->text == NULL) return TD_E_NO_MEMORY;
    if (n > 0) memcpy(e->text, text, n);
    start(e, loop, n);
    return TD_OK;
}

/* A message of ours on the heap, as unpacking makes it; NULL: no memory. */
static ProtobufCMessage *copy_message(const ProtobufCMessage *m, size_t *n_out)
{
    *n_out = protobuf_c_message_get_packed_size(m);
    uint8_t *bytes = td_calloc(1, *n_out + 1);
    if (bytes == NULL) return NULL;
    protobuf_c_message_pack(m, bytes);
    ProtobufCMessage *copy = protobuf_c_message_unpack(m->descriptor, NULL, *n_out, bytes);
    free(bytes);
    return copy;
}

enum td_status td_encode_detokenize(struct td_encode *e, struct td_loop *loop, const struct td_tokenizer *t,
                                    const Tandem__V1__DetokenizeRequest *m, void (*done)(struct td_encode *e))
{
    *e = (struct td_encode){.done = done, .tokenizer = t};
    size_t n;
    e->detokenize = (Tandem__V1__DetokenizeRequest *)copy_message(&m->base, &n);
    if (e->detokenize == NULL) return TD_E_NO_MEMORY;
    start(e, loop, n);
    return TD_OK;
}

void td_encode_deinit(struct td_encode *e)
{
    free(e->text);
    e->text = NULL;
    if (e->detokenize != NULL) tandem__v1__detokenize_request__free_unpacked(e->detokenize, NULL);
    e->detokenize = NULL;
    td_token_list_free(&e->ids);
    td_buf_free(&e->lossy);
    td_buf_free(&e->raw);
}
