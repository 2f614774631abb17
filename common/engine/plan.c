#include "common/engine/plan_int.h"

static uint32_t window_of(const struct td_forward *f, enum td_kv_group g)
{
    return g == TD_KV_SLIDING ? f->c->window : 0;
}

/* First block that a segment starting at `start` can see. */
static uint32_t first_visible_block(const struct td_forward *f, enum td_kv_group g, uint32_t start)
{
    uint32_t window = window_of(f, g), seen = window != 0 && start + 1 > window ? start + 1 - window : 0;
    return seen / f->o.kv[g].page_tokens;
}

static enum td_status check_segment(const struct td_forward *f, const struct td_segment *s)
{
    if (s->n_tokens == 0 || (s->is_fed && s->n_tokens != 1) || (!s->is_fed && s->tokens == NULL) ||
        s->start > f->o.max_context_tokens || s->n_tokens > f->o.max_context_tokens - s->start)
        return TD_E_INVALID;
    if (s->want_token && s->sampling == NULL) return TD_E_INVALID;
    if (s->is_fed && s->fed_by >= f->o.max_batch_segments) return TD_E_INVALID;
    for (uint32_t i = 0; i < s->n_tokens && !s->is_fed; i++)
        if (s->tokens[i] >= f->c->vocab) return TD_E_INVALID;
    for (enum td_kv_group g = 0; g < TD_KV_N_GROUPS; g++) {
        if (f->c->n_group_layers[g] == 0) continue;
        const struct td_kv_group_layout *l = &f->o.kv[g];
        const struct td_page_table *t = &s->table[g];
        uint32_t first = first_visible_block(f, g, s->start), end = (s->start + s->n_tokens - 1) / l->page_tokens + 1;
        if (t->pages == NULL || t->first_block > first || t->n_blocks > UINT32_MAX - t->first_block ||
            t->first_block + t->n_blocks < end)
            return TD_E_INVALID;
        for (uint32_t b = first; b < end; b++)
            if (t->pages[b - t->first_block] >= l->n_pages) return TD_E_INVALID; /* TD_NO_PAGE too */
    }
    return TD_OK;
}

enum td_status td_forward_check(const struct td_forward *f, const struct td_batch *b)
{
    if (b->n_segments == 0 || b->n_segments > f->o.max_batch_segments) return TD_E_INVALID;
    for (uint32_t i = 0; i < b->n_copies; i++) {
        const struct td_page_copy *c = &b->copies[i];
        if (c->group >= TD_KV_N_GROUPS || c->from >= f->o.kv[c->group].n_pages || c->to >= f->o.kv[c->group].n_pages ||
            c->from == c->to)
            return TD_E_INVALID;
    }
    uint64_t n_rows = 0;
    for (uint32_t i = 0; i < b->n_segments; i++) {
        enum td_status st = check_segment(f, &b->segments[i]);
        if (st != TD_OK) return st;
        n_rows += b->segments[i].n_tokens;
    }
    return n_rows > f->o.max_batch_tokens ? TD_E_INVALID : TD_OK;
}

struct group_plan {
    uint32_t *row_page;
    struct td_seq_rows *seqs, *tail;
};

static void plan_group(struct td_forward *f, enum td_kv_group g, const struct td_segment *s, uint32_t i, uint32_t row,
                       bool has_tail, struct group_plan *p)
{
    const struct td_kv_group_layout *l = &f->o.kv[g];
    const struct td_page_table *t = &s->table[g];
    uint32_t first = first_visible_block(f, g, s->start), end = (s->start + s->n_tokens - 1) / l->page_tokens + 1;
    struct td_seq_rows q = {.row = row,
                            .n_rows = s->n_tokens,
                            .start = s->start,
                            .pages = f->n_pages,
                            .first_block = first,
                            .fresh = s->start};
    uint32_t *pages = f->ws.pages.host;
    for (uint32_t b = first; b < end; b++) pages[f->n_pages++] = t->pages[b - t->first_block];
    for (uint32_t k = 0; k < s->n_tokens; k++)
        p->row_page[row + k] = pages[q.pages + (s->start + k) / l->page_tokens - first];
    p->seqs[i] = q;
    if (has_tail) {
        q.row = f->n_tail;
        q.start += q.n_rows - 1;
        q.n_rows = 1;
        p->tail[f->n_tail] = q;
    }
}

/* A row's token, or where the device finds it. */
static void plan_token(struct td_forward *f, const struct td_segment *s, uint32_t k, uint32_t row,
                       const struct td_pass *before)
{
    struct td_workspace *ws = &f->ws;
    ws->fed.host[row] = TD_NOT_FED;
    if (!s->is_fed) {
        ws->tokens.host[row] = s->tokens[k];
        return;
    }
    uint32_t other = before->turn;
    ws->tokens.host[row] = before->is_ended ? ws->drawn.turns[other][s->fed_by] : 0;
    if (!before->is_ended) ws->fed.host[row] = ws->segment_tails.turns[other][s->fed_by];
}

void td_plan_make(struct td_forward *f, const struct td_batch *b, const struct td_pass *before)
{
    struct td_workspace *ws = &f->ws;
    struct group_plan groups[TD_KV_N_GROUPS] = {
        [TD_KV_SLIDING] = {.row_page = ws->row_page_sliding.host,
                           .seqs = ws->seqs_sliding.host,
                           .tail = ws->tail_sliding.host},
        [TD_KV_FULL] = {.row_page = ws->row_page_full.host, .seqs = ws->seqs_full.host, .tail = ws->tail_full.host},
    };
    f->n_rows = f->n_tail = f->n_single = f->n_pages = 0;
    for (uint32_t i = 0; i < b->n_segments; i++) {
        const struct td_segment *s = &b->segments[i];
        bool has_tail = s->want_token || s->logits_out != NULL;
        for (enum td_kv_group g = 0; g < TD_KV_N_GROUPS; g++)
            if (f->c->n_group_layers[g] != 0) plan_group(f, g, s, i, f->n_rows, has_tail, &groups[g]);
        for (uint32_t k = 0; k < s->n_tokens; k++) {
            plan_token(f, s, k, f->n_rows + k, before);
            ws->positions.host[f->n_rows + k] = s->start + k;
        }
        f->n_rows += s->n_tokens;
        if (s->n_tokens == 1) f->n_single++;
        if (!has_tail) continue;
        ws->tail_rows.host[f->n_tail] = f->n_rows - 1;
        ws->tail_segments.host[f->n_tail] = i;
        ws->segment_tails.host[i] = f->n_tail;
        f->n_tail++;
    }
    f->n_segments = b->n_segments;
}

enum td_status td_plan_take(struct td_forward *f, const struct td_forward *from)
{
    if (f != from) { /* the leader's are being read by others */
        f->n_rows = from->n_rows;
        f->n_tail = from->n_tail;
        f->n_single = from->n_single;
        f->n_segments = from->n_segments;
    }
    return td_stream_copy_in(f->stream, f->ws.plan_dev, from->ws.plan_host[from->turn],
                             td_workspace_plan_bytes(&from->ws, from->n_pages));
}
