/* Passes in turn. The plan of a pass goes to the device in one copy, its steps follow as one recorded launch where
 * there is one, its draws come back in one copy; a mark behind them says when. A second pass can stand behind the first
 * in the stream: tokens that the first draws are read on the device, its plan lies in the other copy of the host's
 * buffers.
 *
 * Where the device finds no token for a row (no logit above -inf), the host decides, and what stands behind has gone on
 * from the wrong one. Then both passes are made again, the first with the host's draws: they write the same positions
 * of the same pages, which nobody has let go of, since neither has ended for those who wait. */
#include <stdlib.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/engine/forward_int.h"

/* Marks of a pass: it begins, its draws are made, they are on the host. Those of four passes, so that what a pass is
 * timed against is there still when the one behind it has been marked. */
enum { BEGIN, DRAWN, END, N_MARKS };
_Static_assert(TD_FORWARD_FIRST_MARK + 4 * N_MARKS <= TD_STREAM_MARKS, "four passes' marks");
static uint32_t mark_of(uint64_t nth, uint32_t which)
{
    return TD_FORWARD_FIRST_MARK + (uint32_t)(nth % 4) * N_MARKS + which;
}

struct td_pass *td_pass_open(struct td_forward *f, struct td_batch *b, uint32_t turn)
{
    struct td_pass *p = &f->passes[turn];
    f->turn = p->turn = turn;
    p->batch = b;
    p->is_ended = false;
    p->failed = TD_OK;
    td_workspace_turn(&f->ws, turn);
    td_plan_make(f, b, &f->passes[1 - turn]);
    return p;
}

void td_pass_close(struct td_forward *f, struct td_pass *p)
{
    const struct td_batch *b = p->batch;
    for (uint32_t i = 0; i < b->n_segments; i++)
        if (b->segments[i].want_token) f->ws.drawn.turns[p->turn][i] = b->segments[i].token;
    p->is_ended = true;
    p->batch = NULL;
}

/* --- a pass ------------------------------------------------------------------------------------------------ */

/* A step of nothing but decode is the same launches whatever the lengths: those are in memory. */
static bool is_recordable(const struct td_forward *f)
{
    return f->graphs != NULL && f->n_rows == f->n_segments && f->n_single == f->n_rows && f->n_tail == f->n_rows;
}

static enum td_status compute(struct td_forward *f, struct td_batch *b)
{
    struct td_rows tail;
    enum td_status st = td_forward_layers(f, b, NULL, NULL, &tail);
    return st == TD_OK && f->n_tail > 0 ? td_draws_compute(f, &tail, 0, f->n_tail) : st;
}

static enum td_status record(struct td_forward *f, struct td_batch *b)
{
    struct td_graph **g = &f->graphs[f->n_rows];
    enum td_status st = td_graph_begin(f->stream), recorded = st;
    if (st == TD_OK) recorded = compute(f, b);
    if (st == TD_OK) st = td_graph_end(f->stream, g);
    if (recorded == TD_OK) return st;
    td_graph_destroy(f->ws.device, *g);
    *g = NULL;
    return recorded;
}

static enum td_status enqueue(struct td_forward *f, struct td_batch *b)
{
    if (!is_recordable(f)) return compute(f, b);
    if (!f->has_run[f->n_rows]) {
        f->has_run[f->n_rows] = true;
        return compute(f, b);
    }
    if (f->graphs[f->n_rows] == NULL) {
        enum td_status st = record(f, b);
        if (st != TD_OK) return st;
    }
    return td_graph_launch(f->stream, f->graphs[f->n_rows]);
}

static enum td_status start(struct td_forward *f, struct td_batch *b, uint32_t turn)
{
    enum td_status st;
    struct td_pass *p = td_pass_open(f, b, turn);
    p->nth = ++f->n_started;
    td_draws_ask(f, b, 0, f->n_tail, &p->asked);
    TD_TRY(td_plan_take(f, f));
    TD_TRY(td_draws_copy_lists(f, &p->asked));
    if (f->takes_times) TD_TRY(td_stream_mark(f->stream, mark_of(p->nth, BEGIN)));
    TD_TRY(td_forward_copy_pages(f, b));
    TD_TRY(enqueue(f, b));
    TD_TRY(td_draws_filtered(f, &p->asked));
    if (f->takes_times) TD_TRY(td_stream_mark(f->stream, mark_of(p->nth, DRAWN)));
    if (f->n_tail > 0) TD_TRY(td_draws_fetch(f, &p->asked));
    TD_TRY(td_stream_mark(f->stream, mark_of(p->nth, END)));
out:
    if (st == TD_E_DEVICE) TD_ERROR("device_failed", "error=\"%s\"", td_device_last_error(f->ws.device));
    return st;
}

bool td_forward_may_begin(const struct td_forward *f, const struct td_batch *b)
{
    if (!f->can_begin || f->n_begun == 2 || b->want_layers || f->probe != NULL) return false;
    if (f->n_begun > 0 && f->passes[f->turn].asked.needs_host) return false; /* its logits would be gone */
    uint32_t n_tail = 0;
    for (uint32_t i = 0; i < b->n_segments; i++)
        n_tail += b->segments[i].want_token || b->segments[i].logits_out != NULL;
    return n_tail <= f->ws.sampled.n;
}

enum td_status td_forward_begin(struct td_forward *f, struct td_batch *b)
{
    TD_CHECK(f->n_begun < 2);
    enum td_status st = start(f, b, 1 - f->turn);
    if (st == TD_OK) f->n_begun++;
    return st;
}

/* --- its end ----------------------------------------------------------------------------------------------- */

static struct td_pass *first_begun(struct td_forward *f)
{
    TD_CHECK(f->n_begun > 0);
    return &f->passes[f->n_begun == 2 ? 1 - f->turn : f->turn];
}

bool td_forward_has_ended(struct td_forward *f)
{
    bool has_passed = false;
    enum td_status st = td_stream_has_passed(f->stream, mark_of(first_begun(f)->nth, END), &has_passed);
    return st != TD_OK || has_passed;
}

static enum td_status wait_for(struct td_forward *f, const struct td_pass *p)
{
    bool has_passed = false;
    enum td_status st = p->failed;
    while (st == TD_OK && !has_passed) st = td_stream_has_passed(f->stream, mark_of(p->nth, END), &has_passed);
    return st;
}

/* The first pass again, with the host's draws, and the one behind it. */
static enum td_status again(struct td_forward *f, struct td_pass *p, struct td_pass *behind)
{
    enum td_status st;
    struct td_batch *b = p->batch, *next = behind->batch;
    TD_WARN("draw_on_host", "segments=%u: the device found no token; two steps are made again", b->n_segments);
    TD_TRY(td_stream_sync(f->stream));
    behind->is_ended = true; /* what it still holds are the tokens of the pass before p: they feed it */
    td_pass_open(f, b, p->turn);
    TD_TRY(td_forward_rank(f, b, NULL, NULL));
    td_pass_close(f, p);
    TD_TRY(start(f, next, behind->turn));
out:
    behind->failed = st;
    return st;
}

enum td_status td_forward_end(struct td_forward *f)
{
    enum td_status st;
    struct td_pass *p = first_begun(f), *behind = &f->passes[1 - p->turn];
    TD_TRY(wait_for(f, p));
    td_workspace_turn(&f->ws, p->turn);
    if (f->n_begun == 2 && !td_draws_are_complete(f, &p->asked)) {
        TD_TRY(again(f, p, behind));
    } else {
        TD_TRY(td_draws_take(f, p->batch, &p->asked));
        td_pass_close(f, p);
    }
out:
    td_workspace_turn(&f->ws, f->turn);
    f->n_begun--;
    if (st == TD_E_DEVICE) TD_ERROR("device_failed", "error=\"%s\"", td_device_last_error(f->ws.device));
    return st;
}

enum td_status td_forward_times(struct td_forward *f, double *busy_us, double *gap_us)
{
    uint64_t nth = f->passes[f->n_begun == 1 ? 1 - f->turn : f->turn].nth;
    *gap_us = 0;
    enum td_status st = td_stream_mark_us(f->stream, mark_of(nth, BEGIN), mark_of(nth, DRAWN), busy_us);
    if (st == TD_OK && nth > 1) st = td_stream_mark_us(f->stream, mark_of(nth - 1, DRAWN), mark_of(nth, BEGIN), gap_us);
    return st;
}

/* --- recording at the start -------------------------------------------------------------------------------- */

enum td_status td_forward_record_all(struct td_forward *f)
{
    static const struct td_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    enum td_status st = TD_OK;
    uint32_t n = f->o.max_batch_segments < f->ws.sampled.n ? f->o.max_batch_segments : (uint32_t)f->ws.sampled.n;
    uint64_t begin_ns = td_clock_ns(), free_before = 0, free_after = 0, total;
    (void)td_device_memory(f->ws.device, &free_before, &total); /* not known: 0 is said */
    uint32_t page = 0, token = 0;
    struct td_segment *s = td_calloc(n, sizeof *s);
    if (s == NULL) return TD_E_NO_MEMORY;
    for (uint32_t i = 0; i < n; i++) {
        s[i] = (struct td_segment){.tokens = &token, .n_tokens = 1, .want_token = true, .sampling = &greedy};
        for (int g = 0; g < TD_KV_N_GROUPS; g++) s[i].table[g] = (struct td_page_table){.pages = &page, .n_blocks = 1};
    }
    /* Largest first: what a smaller one needs of the device's memory is there then. */
    for (uint32_t k = n; k > 0; k--) {
        struct td_batch b = {.segments = s, .n_segments = k};
        for (int i = 0; i < 2; i++) { /* it runs, and is recorded */
            TD_TRY(td_forward_begin(f, &b));
            TD_TRY(td_forward_end(f));
        }
    }
    (void)td_device_memory(f->ws.device, &free_after, &total);
    TD_INFO("graphs_recorded", "sizes=%u ms=%llu device_bytes=%llu", n,
            (unsigned long long)((td_clock_ns() - begin_ns) / TD_NS_PER_MS),
            (unsigned long long)(free_before > free_after ? free_before - free_after : 0));
out:
    free(s);
    return st;
}
