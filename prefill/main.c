/* tandem-prefill: computes a prompt's KV and its first token, and writes the KV into a decode worker's memory. */
#include <inttypes.h>

#include "common/base/log.h"
#include "prefill/daemon.h"
#include "prefill/sched.h"

/* The router keeps at most one request waiting here; several routers may share us. */
#define MAX_WAITING 16u
/* Prompts that are still sent while the next is computed, for which sliding pages are set aside. */
#define SENDS_AT_ONCE 8u
#define MIN_CHUNK     16u

static uint32_t sliding_pages(const struct td_worker *w)
{
    uint32_t window = td_model_config_of(w->model)->window, page = w->cfg.kv_page_tokens;
    return td_prefill_sched_sliding_compute(window, w->cfg.prefill_chunk_tokens, page) +
           (SENDS_AT_ONCE + w->cfg.max_prefill_batch - 1) * td_prefill_sched_sliding_send(window, page);
}

/* As long as the flags ask for, or as the sliding pages allow. */
static enum td_status choose_chunk(struct td_prefill_daemon *d, struct td_err *err)
{
    const struct td_worker *w = &d->host;
    uint32_t window = td_model_config_of(w->model)->window, page = w->cfg.kv_page_tokens;
    uint32_t n_sliding = w->kv_layout[TD_KV_SLIDING].n_pages;
    d->chunk_tokens = w->cfg.prefill_chunk_tokens;
    while (d->chunk_tokens > MIN_CHUNK && td_prefill_sched_sliding_compute(window, d->chunk_tokens, page) > n_sliding)
        d->chunk_tokens = d->chunk_tokens / 2 > MIN_CHUNK ? d->chunk_tokens / 2 : MIN_CHUNK;
    uint32_t needed = td_prefill_sched_sliding_compute(window, d->chunk_tokens, page);
    if (needed > n_sliding)
        return td_err_set(err, TD_E_BAD_CONFIG, "--kv-bytes %" PRIu64 " holds %u sliding pages, the window needs %u",
                          w->cfg.kv_bytes, n_sliding, needed);
    if (d->chunk_tokens < w->cfg.prefill_chunk_tokens)
        TD_WARN("chunk_cut", "--prefill-chunk-tokens=%u allowed=%u: --kv-bytes holds no more sliding pages",
                w->cfg.prefill_chunk_tokens, d->chunk_tokens);
    return TD_OK;
}

static enum td_status start_sender(struct td_prefill_daemon *d, struct td_err *err)
{
    const struct td_worker *w = &d->host;
    struct td_prefill_send_options o = {
        .env = td_loop_env(w->loop),
        .xfer = w->xfer_ops,
        .incarnation = w->incarnation,
        .layout = w->descriptor.layout,
        .is_staged = w->staging != NULL,
        .self = d,
        .ended = td_prefill_daemon_on_send_ended,
    };
    o.source.n_ranks = w->cfg.tp;
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        o.source.kv[g] = w->kv_layout[g];
        for (uint32_t r = 0; r < w->cfg.tp; r++)
            o.source.base[r][g] = w->xfer_ops->pool_base(w->pools[r][g]); /* staged: a copy */
    }
    enum td_status st = td_prefill_send_start(d->send, w->xfer, &o);
    return st == TD_OK ? TD_OK : td_err_set(err, st, "%s", td_status_text(st));
}

static enum td_status create_worker(struct td_prefill_daemon *d, struct td_err *err)
{
    const struct td_worker *w = &d->host;
    struct td_prefill_worker_options o = {
        .model = td_model_config_of(w->model),
        .max_context_tokens = w->max_context_tokens,
        .has_prefix_cache = w->cfg.prefix_cache != 0,
        .chunk_tokens = d->chunk_tokens,
        .max_batch = w->cfg.max_prefill_batch,
        .max_waiting = MAX_WAITING,
    };
    for (int g = 0; g < TD_KV_N_GROUPS; g++) o.kv[g] = w->kv_layout[g];
    struct td_prefill_ports ports = td_prefill_daemon_ports(d);
    enum td_status st = td_prefill_worker_create(&o, w->kv, d->send, &ports, &d->worker);
    return st == TD_OK ? TD_OK : td_err_set(err, st, "%s", td_status_text(st));
}

int main(int argc, char **argv)
{
    static struct td_prefill_daemon d;
    struct td_worker *w = &d.host;
    struct td_err err = {0};
    enum td_status st;
    switch (td_worker_configure(w, &td_prefill_role, &d, argc, argv)) {
    case TD_CONFIG_RUN: break;
    case TD_CONFIG_EXIT_OK: return 0;
    case TD_CONFIG_EXIT_BAD: return 2;
    }
    struct td_xfer_handlers xfer = td_prefill_send_handlers();
    struct td_engine_handlers engine = {.on_layer = td_prefill_daemon_on_layer, .on_done = td_prefill_daemon_on_done};
    TD_TRY(td_worker_load_model(w, &err));
    TD_TRY(td_worker_lay_out_kv(w, sliding_pages(w), &err));
    TD_TRY(choose_chunk(&d, &err));
    TD_TRY(td_prefill_send_create(&d.send));
    TD_TRY(td_worker_open_transfer(w, &xfer, d.send, &err)); /* and the KV pools */
    TD_TRY(start_sender(&d, &err));
    TD_TRY(td_worker_create_engine(w, d.chunk_tokens, w->cfg.max_prefill_batch, &engine, &d, &err));
    TD_TRY(create_worker(&d, &err));
    TD_TRY(td_worker_listen(w, &err));
    TD_TRY(td_worker_join(w, &err)); /* from here on the router sends work */
    st = td_worker_run(w);           /* returns when drained */
out:
    td_worker_close_ports(w);
    td_prefill_send_detach(d.send);
    td_worker_close_transfer(w);
    td_prefill_send_destroy(d.send);
    td_prefill_worker_destroy(d.worker);
    td_worker_free(w);
    return td_worker_exit_status(w, st, &err);
}
