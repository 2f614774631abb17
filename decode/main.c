/* tandem-decode: owns the KV pages of running sequences and writes their tokens. */
#include "common/base/log.h"
#include "common/engine/kv_split.h"
#include "decode/daemon.h"

/* Some seconds of undisturbed decoding. */
#define RETURN_MARGIN_TOKENS 256u

/* On the CPU nothing is to be gained: the step that runs and the planning of the next want the same processors. */
static uint32_t step_depth(const struct td_worker *w)
{
    if (w->cfg.step_depth != 0) return w->cfg.step_depth;
    return w->device != NULL ? 2 : 1;
}

/* Sliding pages of running sequences, of as many again whose KV is on its way, and of the chunk of a prompt computed
 * here. */
static uint32_t sliding_pages(const struct td_worker *w)
{
    uint32_t window = td_model_config_of(w->model)->window, page = w->cfg.kv_page_tokens;
    /* A step in flight still sees a position that the one planned behind it does not. */
    uint64_t n = 2ull * w->cfg.max_batch * td_kv_span_pages(window + step_depth(w) - 1, page) +
                 td_kv_span_pages(window - 1 + w->cfg.local_prefill_tokens, page);
    return n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
}

/* As many as the flag asks for, or as the sliding pages allow beside the window. */
static uint32_t local_tokens(const struct td_worker *w)
{
    uint32_t window = td_model_config_of(w->model)->window, page = w->cfg.kv_page_tokens;
    uint32_t n = w->cfg.local_prefill_tokens, n_pages = w->kv_layout[TD_KV_SLIDING].n_pages;
    while (n > 1 && td_kv_span_pages(window - 1 + n, page) + 1 > n_pages) n /= 2;
    if (n < w->cfg.local_prefill_tokens)
        TD_WARN("local_prefill_cut", "--local-prefill-tokens=%u allowed=%u: --kv-bytes holds no more sliding pages",
                w->cfg.local_prefill_tokens, n);
    return n;
}

static enum td_status create_worker(struct td_decode_daemon *d, struct td_err *err)
{
    struct td_worker *w = &d->host;
    const struct td_model_config *c = td_model_config_of(w->model);
    struct td_decode_worker_options o = {
        .incarnation = w->incarnation,
        .window_tokens = c->window,
        .n_ranks = w->cfg.tp,
        .n_vocab = c->vocab,
        .max_context_tokens = w->max_context_tokens,
        .max_batch = w->cfg.max_batch,
        .chunk_tokens = local_tokens(w),
        .step_depth = step_depth(w),
        .has_prefix_cache = w->cfg.prefix_cache != 0,
        .return_margin_tokens = RETURN_MARGIN_TOKENS,
        .quarantine_ms = w->cfg.quarantine,
    };
    o.xfer_address = w->xfer_ops->address(w->xfer, &o.n_xfer_address);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) o.kv[g] = w->kv_layout[g];
    struct td_decode_ports ports = td_decode_daemon_ports(d);
    enum td_status st = td_decode_worker_create(&o, w->kv, &ports, &d->worker);
    if (st != TD_OK) return td_err_set(err, st, "%s", td_status_text(st));
    td_decode_recv_start(d->recv, w->xfer, d->worker);
    return TD_OK;
}

int main(int argc, char **argv)
{
    static struct td_decode_daemon d;
    struct td_worker *w = &d.host;
    struct td_err err = {0};
    enum td_status st;
    switch (td_worker_configure(w, &td_decode_role, &d, argc, argv)) {
    case TD_CONFIG_RUN: break;
    case TD_CONFIG_EXIT_OK: return 0;
    case TD_CONFIG_EXIT_BAD: return 2;
    }
    struct td_xfer_handlers xfer = td_decode_recv_handlers();
    struct td_engine_handlers engine = {.on_done = td_decode_daemon_on_step};
    TD_TRY(td_worker_load_model(w, &err));
    TD_TRY(td_worker_lay_out_kv(w, sliding_pages(w), &err));
    TD_TRY(td_decode_recv_create(&td_xfer_ucx, &w->descriptor.layout, &d.recv));
    TD_TRY(td_worker_open_transfer(w, &xfer, d.recv, &err)); /* and the KV pools */
    TD_TRY(td_worker_create_engine(w, w->cfg.max_batch + w->cfg.local_prefill_tokens, w->cfg.max_batch, &engine, &d,
                                   &err));
    TD_TRY(create_worker(&d, &err));
    TD_TRY(td_worker_listen(w, &err));
    TD_TRY(td_worker_join(w, &err)); /* from here on the router sends work */
    st = td_worker_run(w);           /* returns when drained */
out:
    td_worker_close_ports(w); /* the last callbacks of calls run in here: the worker goes later */
    td_decode_recv_destroy(d.recv);
    td_decode_worker_destroy(d.worker);
    td_worker_close_transfer(w);
    td_worker_free(w);
    return td_worker_exit_status(w, st, &err);
}
