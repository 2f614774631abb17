/* From the tail rows' final norm to tokens: logits, draws on the device where it can, else on the host. */
#include <string.h>

#include "common/engine/forward_int.h"

/* One row's logits on the host, and what its segment wants of them. */
static enum td_status finish_row(struct td_forward *f, struct td_segment *s, const float *logits)
{
    struct td_workspace *ws = &f->ws;
    uint32_t vocab = f->c->vocab;
    float *row = ws->host_logits.host;
    enum td_status st = td_stream_copy_out(f->stream, row, logits, vocab * sizeof *row);
    if (st == TD_OK) st = td_stream_sync(f->stream);
    if (st != TD_OK) return st;
    if (s->logits_out != NULL) memcpy(s->logits_out, row, vocab * sizeof *row);
    /* Rows past n_token_ids name no token and cannot be drawn. */
    if (s->want_token) td_sample(row, f->c->n_token_ids, s, ws->sample_scratch.host);
    return TD_OK;
}

void td_draws_ask(struct td_forward *f, const struct td_batch *b, uint32_t first, uint32_t n, struct td_asked *out)
{
    struct td_workspace *ws = &f->ws;
    struct td_sample_asked asked = {.rows = ws->sample_rows.host,
                                    .filtered = ws->sample_filtered.host,
                                    .edits = ws->sample_edits.host,
                                    .masks = ws->sample_masks.host,
                                    .max_edits = (uint32_t)ws->sample_edits.n,
                                    .max_masks = (uint32_t)ws->sample_rows.n,
                                    .mask_words = (f->c->vocab + 31) / 32,
                                    .n_ids = f->c->n_token_ids};
    *out = (struct td_asked){.first = first, .n = n};
    for (uint32_t i = 0; i < n; i++) {
        const struct td_segment *s = &b->segments[ws->tail_segments.host[first + i]];
        bool is_asked = s->want_token && td_sample_ask(&asked, s, (uint32_t *)(void *)ws->sample_scratch.host);
        if (!s->want_token) td_sample_ask_nothing(&asked);
        out->is_asked[i] = is_asked;
        out->needs_host |= s->logits_out != NULL || (s->want_token && !is_asked);
        out->has_tops |= asked.rows[i].n_top != 0;
    }
    out->n_filtered = asked.n_filtered;
    out->n_edits = asked.n_edits;
    out->n_mask_words = (size_t)asked.n_masks * asked.mask_words;
}

#define COPY_IN(name, count)                                                                                           \
    if ((count) != 0) TD_TRY(td_stream_copy_in(f->stream, ws->name.dev, ws->name.host, (count) * sizeof *ws->name.host))

enum td_status td_draws_copy_lists(struct td_forward *f, const struct td_asked *asked)
{
    enum td_status st = TD_OK;
    struct td_workspace *ws = &f->ws;
    COPY_IN(sample_edits, asked->n_edits);
    COPY_IN(sample_masks, asked->n_mask_words);
out:
    return st;
}

/* What is the same for every pass of that many rows. */
static struct td_sample_args sample_args(const struct td_forward *f, uint32_t n)
{
    const struct td_workspace *ws = &f->ws;
    return (struct td_sample_args){.logits = ws->logits.dev,
                                   .rows = ws->sample_rows.dev,
                                   .filtered = ws->sample_filtered.dev,
                                   .edits = ws->sample_edits.dev,
                                   .masks = ws->sample_masks.dev,
                                   .out = ws->sampled.dev,
                                   .top = ws->sample_tops.dev,
                                   .parts = ws->sample_parts.dev,
                                   .n_rows = n,
                                   .vocab = f->c->vocab,
                                   .n_ids = f->c->n_token_ids};
}

enum td_status td_draws_compute(struct td_forward *f, const struct td_rows *tail, uint32_t first, uint32_t n)
{
    const char *t = (const char *)tail->t + (size_t)first * f->c->hidden * td_device_act_bytes(f->ws.device);
    struct td_lm_head_args a = {
        .x = (const float *)(const void *)t, .w = f->w->lm_head, .logits = f->ws.logits.dev, .n_rows = n};
    enum td_status st = f->ops->lm_head(f->stream, &a);
    if (st != TD_OK || !td_device_can_sample(f->ws.device)) return st;
    struct td_sample_args draw = sample_args(f, n); /* rows that are filtered are left out */
    return td_stream_sample(f->stream, &draw);
}

enum td_status td_draws_filtered(struct td_forward *f, const struct td_asked *asked)
{
    if (asked->n_filtered == 0) return TD_OK;
    struct td_sample_args a = sample_args(f, asked->n_filtered); /* all filtered: no plain draws again */
    a.n_filtered = asked->n_filtered;
    return td_stream_sample(f->stream, &a);
}

enum td_status td_draws_fetch(struct td_forward *f, const struct td_asked *asked)
{
    enum td_status st = TD_OK;
    struct td_workspace *ws = &f->ws;
    TD_TRY(td_stream_copy_out(f->stream, ws->sampled.host, ws->sampled.dev, asked->n * sizeof *ws->sampled.host));
    if (asked->has_tops)
        TD_TRY(td_stream_copy_out(f->stream, ws->sample_tops.host, ws->sample_tops.dev,
                                  (size_t)asked->n * TD_SAMPLE_TOPS * sizeof *ws->sample_tops.host));
out:
    return st;
}

bool td_draws_are_complete(const struct td_forward *f, const struct td_asked *asked)
{
    for (uint32_t i = 0; i < asked->n; i++)
        if (asked->is_asked[i] && f->ws.sampled.host[i].token == UINT32_MAX) return false;
    return true;
}

enum td_status td_draws_take(struct td_forward *f, struct td_batch *b, const struct td_asked *asked)
{
    struct td_workspace *ws = &f->ws;
    for (uint32_t i = 0; i < asked->n; i++) {
        struct td_segment *s = &b->segments[ws->tail_segments.host[asked->first + i]];
        bool is_drawn = asked->is_asked[i] && ws->sampled.host[i].token != UINT32_MAX;
        if (is_drawn)
            td_sample_take(s, f->c->n_token_ids, &ws->sampled.host[i],
                           ws->sample_tops.host + (size_t)i * TD_SAMPLE_TOPS);
        if (is_drawn && s->logits_out == NULL) continue;
        if (!s->want_token && s->logits_out == NULL) continue;
        enum td_status st = finish_row(f, s, ws->logits.dev + (size_t)i * f->c->vocab);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

enum td_status td_draws_finish(struct td_forward *f, struct td_batch *b, const struct td_rows *tail)
{
    enum td_status st = TD_OK;
    struct td_workspace *ws = &f->ws;
    uint32_t n_at_once = (uint32_t)(ws->logits.n / f->c->vocab);
    for (uint32_t first = 0; first < tail->n; first += n_at_once) {
        struct td_asked asked = {.first = first, .n = tail->n - first < n_at_once ? tail->n - first : n_at_once};
        if (td_device_can_sample(ws->device)) {
            td_draws_ask(f, b, first, asked.n, &asked);
            COPY_IN(sample_rows, asked.n);
            COPY_IN(sample_filtered, asked.n_filtered);
            TD_TRY(td_draws_copy_lists(f, &asked));
            TD_TRY(td_draws_compute(f, tail, first, asked.n));
            TD_TRY(td_draws_filtered(f, &asked));
            TD_TRY(td_draws_fetch(f, &asked));
        } else {
            TD_TRY(td_draws_compute(f, tail, first, asked.n));
        }
        TD_TRY(td_stream_sync(f->stream));
        TD_TRY(td_draws_take(f, b, &asked));
    }
out:
    return st;
}

/* This rank's columns of n rows of logits, into their place in the leader's host memory. */
static enum td_status compute_columns(struct td_forward *f, const struct td_rows *tail, uint32_t first, uint32_t n)
{
    enum td_status st;
    struct td_workspace *ws = &f->ws;
    const struct td_shard *shard = &f->w->shard;
    const char *t = (const char *)tail->t + (size_t)first * f->c->hidden * td_device_act_bytes(ws->device);
    struct td_lm_head_args a = {
        .x = (const float *)(const void *)t, .w = f->w->lm_head, .logits = ws->logits.dev, .n_rows = n};
    TD_TRY(f->ops->lm_head(f->stream, &a));
    float *to = f->group->leader->ws.group_logits.host + shard->first_vocab;
    for (uint32_t i = 0; i < n; i++)
        TD_TRY(td_stream_copy_out(f->stream, to + (size_t)i * f->c->vocab, ws->logits.dev + (size_t)i * shard->n_vocab,
                                  shard->n_vocab * sizeof *to));
    TD_TRY(td_stream_sync(f->stream));
out:
    return st;
}

enum td_status td_draws_finish_together(struct td_forward *f, struct td_batch *b, const struct td_rows *tail)
{
    enum td_status st = TD_OK;
    struct td_workspace *ws = &f->ws;
    uint32_t vocab = f->c->vocab, n_at_once = (uint32_t)(ws->logits.n / f->w->shard.n_vocab);
    for (uint32_t first = 0; first < tail->n; first += n_at_once) {
        uint32_t n = tail->n - first < n_at_once ? tail->n - first : n_at_once;
        if (first > 0) TD_TRY(td_forward_meet(f)); /* the leader is done with the rows before */
        TD_TRY(compute_columns(f, tail, first, n));
        TD_TRY(td_forward_meet(f));
        for (uint32_t i = 0; i < n && f->group->leader == f; i++) {
            struct td_segment *s = &b->segments[ws->tail_segments.host[first + i]];
            const float *row = ws->group_logits.host + (size_t)i * vocab;
            if (s->logits_out != NULL) memcpy(s->logits_out, row, vocab * sizeof *row);
            if (s->want_token) td_sample(row, f->c->n_token_ids, s, ws->group_scratch.host);
        }
    }
out:
    return st;
}
