#include "decode/stream.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/engine/request.h"

struct td_decode_pending_token {
    uint64_t stream_id;
    uint32_t token;
    bool has_logprobs;
    struct td_logprob chosen;
    uint32_t n_top;
    struct td_logprob top[TD_MAX_LOGPROBS];
};

struct td_decode_pending_reserved {
    uint64_t stream_id, incarnation, generation, lowest_live_generation;
    uint32_t cached_tokens;
    uint32_t first_block[TD_KV_N_GROUPS], n_pages[TD_KV_N_GROUPS];
    uint32_t *pages; /* of both groups, one after the other: the reservation may be gone before this is sent */
};

/* Storage of the message on its way out. */
struct reserved_msg {
    Tandem__V1__DecodeReserved msg;
    Tandem__V1__KvTarget target;
    Tandem__V1__PageList lists[TD_KV_N_GROUPS];
};
struct td_decode_message {
    size_t cap_tokens, cap_logprobs, cap_reserved, cap_finished;
    uint64_t *stream_ids;
    uint32_t *token_ids;
    struct td_logprobs_msg *logprobs;
    Tandem__V1__PositionLogprobs **logprob_ptrs;
    struct reserved_msg *reserved;
    Tandem__V1__DecodeReserved **reserved_ptrs;
    Tandem__V1__DecodeFinished *finished;
    Tandem__V1__DecodeFinished **finished_ptrs;
};

/* The array that `array` points to holds at least n elements afterwards; *cap counts them. */
static bool grow(void *array, size_t *cap, size_t n, size_t size)
{
    void *p;
    memcpy(&p, array, sizeof p); /* array is a pointer to some other type of pointer */
    if (n <= *cap && p != NULL) return true;
    size_t want = *cap == 0 ? 16 : *cap;
    while (want < n) want *= 2;
    p = td_realloc(p, want, size);
    if (p == NULL) return false;
    memcpy(array, &p, sizeof p);
    *cap = want;
    return true;
}

struct td_decode_stream *td_decode_stream_create(void *call)
{
    struct td_decode_stream *s = td_calloc(1, sizeof *s);
    if (s == NULL) return NULL;
    s->message = td_calloc(1, sizeof *s->message);
    if (s->message == NULL) {
        free(s);
        return NULL;
    }
    s->call = call;
    td_list_init(&s->link);
    for (unsigned i = 0; i < TD_DECODE_STREAM_BUCKETS; i++) td_list_init(&s->requests[i]);
    return s;
}

static void forget(struct td_decode_stream *s)
{
    for (size_t i = 0; i < s->n_reserved; i++) free(s->reserved[i].pages);
    s->n_tokens = s->n_reserved = s->n_finished = s->n_pending_bytes = 0;
    s->has_logprobs = false;
}

void td_decode_stream_destroy(struct td_decode_stream *s)
{
    if (s == NULL) return;
    forget(s);
    free(s->tokens);
    free(s->reserved);
    free(s->finished);
    struct td_decode_message *m = s->message;
    free(m->stream_ids);
    free(m->token_ids);
    free(m->logprobs);
    free(m->logprob_ptrs);
    free(m->reserved);
    free(m->reserved_ptrs);
    free(m->finished);
    free(m->finished_ptrs);
    free(m);
    free(s);
}

/* Room for one more of something that takes about n bytes in the message. */
static bool admit(struct td_decode_stream *s, size_t n_bytes, void *array, size_t *cap, size_t n, size_t size)
{
    if (s->has_failed) return false;
    if (s->n_pending_bytes + n_bytes > TD_DECODE_MAX_PENDING_BYTES || !grow(array, cap, n + 1, size)) {
        s->has_failed = true;
        return false;
    }
    s->n_pending_bytes += n_bytes;
    return true;
}

void td_decode_stream_token(struct td_decode_stream *s, uint64_t stream_id, const struct td_segment *seg)
{
    size_t n_bytes = 16 + (seg->want_logprobs ? 16 + 12 * (size_t)seg->n_top_logprobs : 0);
    if (!admit(s, n_bytes, &s->tokens, &s->cap_tokens, s->n_tokens, sizeof *s->tokens)) return;
    struct td_decode_pending_token *t = &s->tokens[s->n_tokens++];
    t->stream_id = stream_id;
    t->token = seg->token;
    t->has_logprobs = seg->want_logprobs;
    t->n_top = 0;
    if (!seg->want_logprobs) return;
    s->has_logprobs = true;
    t->chosen = seg->chosen;
    t->n_top = seg->n_top_logprobs;
    memcpy(t->top, seg->top, t->n_top * sizeof t->top[0]);
}

void td_decode_stream_reserved(struct td_decode_stream *s, uint64_t stream_id, uint64_t incarnation,
                               const struct td_rx_target *target)
{
    size_t n_pages = (size_t)target->n_pages[TD_KV_SLIDING] + target->n_pages[TD_KV_FULL];
    uint32_t *pages = td_calloc(n_pages, sizeof *pages);
    if (pages == NULL) s->has_failed = true;
    if (!admit(s, 64 + 5 * n_pages, &s->reserved, &s->cap_reserved, s->n_reserved, sizeof *s->reserved)) {
        free(pages);
        return;
    }
    struct td_decode_pending_reserved *r = &s->reserved[s->n_reserved++];
    *r = (struct td_decode_pending_reserved){
        .stream_id = stream_id,
        .incarnation = incarnation,
        .generation = target->generation,
        .lowest_live_generation = target->lowest_live_generation,
        .cached_tokens = target->cached_tokens,
        .pages = pages,
    };
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        r->first_block[g] = target->first_block[g];
        r->n_pages[g] = target->n_pages[g];
        memcpy(pages, target->pages[g], target->n_pages[g] * sizeof *pages);
        pages += target->n_pages[g];
    }
}

void td_decode_stream_finished(struct td_decode_stream *s, const struct td_decode_finish *f)
{
    if (!admit(s, 96 + strlen(f->message), &s->finished, &s->cap_finished, s->n_finished, sizeof *s->finished)) return;
    s->finished[s->n_finished++] = *f;
}

bool td_decode_stream_has_news(const struct td_decode_stream *s)
{
    return s->n_tokens > 0 || s->n_reserved > 0 || s->n_finished > 0;
}

/* --- the message ------------------------------------------------------------------------------------------- */

static bool put_tokens(struct td_decode_stream *s, Tandem__V1__DecodeEvents *ev)
{
    struct td_decode_message *m = s->message;
    size_t cap = m->cap_tokens;
    if (!grow(&m->stream_ids, &cap, s->n_tokens, sizeof *m->stream_ids) ||
        !grow(&m->token_ids, &m->cap_tokens, s->n_tokens, sizeof *m->token_ids))
        return false;
    for (size_t i = 0; i < s->n_tokens; i++) {
        m->stream_ids[i] = s->tokens[i].stream_id;
        m->token_ids[i] = s->tokens[i].token;
    }
    ev->n_stream_ids = ev->n_token_ids = s->n_tokens;
    ev->stream_ids = m->stream_ids;
    ev->token_ids = m->token_ids;
    if (!s->has_logprobs) return true;
    cap = m->cap_logprobs;
    if (!grow(&m->logprobs, &cap, s->n_tokens, sizeof *m->logprobs) ||
        !grow(&m->logprob_ptrs, &m->cap_logprobs, s->n_tokens, sizeof *m->logprob_ptrs))
        return false;
    for (size_t i = 0; i < s->n_tokens; i++) {
        const struct td_decode_pending_token *t = &s->tokens[i];
        td_logprobs_msg_init(&m->logprobs[i], t->chosen, t->top, t->n_top);
        if (!t->has_logprobs) m->logprobs[i].msg.chosen = NULL;
        m->logprob_ptrs[i] = &m->logprobs[i].msg;
    }
    ev->n_logprobs = s->n_tokens;
    ev->logprobs = m->logprob_ptrs;
    return true;
}

static bool put_reserved(struct td_decode_stream *s, Tandem__V1__DecodeEvents *ev)
{
    struct td_decode_message *m = s->message;
    size_t cap = m->cap_reserved;
    if (!grow(&m->reserved, &cap, s->n_reserved, sizeof *m->reserved) ||
        !grow(&m->reserved_ptrs, &m->cap_reserved, s->n_reserved, sizeof *m->reserved_ptrs))
        return false;
    for (size_t i = 0; i < s->n_reserved; i++) {
        const struct td_decode_pending_reserved *r = &s->reserved[i];
        struct reserved_msg *out = &m->reserved[i];
        uint32_t *pages = r->pages;
        for (int g = 0; g < TD_KV_N_GROUPS; g++) {
            out->lists[g] = (Tandem__V1__PageList)TANDEM__V1__PAGE_LIST__INIT;
            out->lists[g].first_block = r->first_block[g];
            out->lists[g].n_pages = r->n_pages[g];
            out->lists[g].pages = pages;
            pages += r->n_pages[g];
        }
        out->target = (Tandem__V1__KvTarget)TANDEM__V1__KV_TARGET__INIT;
        out->target.incarnation = r->incarnation;
        out->target.generation = r->generation;
        out->target.lowest_live_generation = r->lowest_live_generation;
        out->target.cached_tokens = r->cached_tokens;
        out->target.sliding = &out->lists[TD_KV_SLIDING];
        out->target.full = &out->lists[TD_KV_FULL];
        out->msg = (Tandem__V1__DecodeReserved)TANDEM__V1__DECODE_RESERVED__INIT;
        out->msg.stream_id = r->stream_id;
        out->msg.target = &out->target;
        m->reserved_ptrs[i] = &out->msg;
    }
    ev->n_reserved = s->n_reserved;
    ev->reserved = m->reserved_ptrs;
    return true;
}

static bool put_finished(struct td_decode_stream *s, Tandem__V1__DecodeEvents *ev)
{
    struct td_decode_message *m = s->message;
    size_t cap = m->cap_finished;
    if (!grow(&m->finished, &cap, s->n_finished, sizeof *m->finished) ||
        !grow(&m->finished_ptrs, &m->cap_finished, s->n_finished, sizeof *m->finished_ptrs))
        return false;
    for (size_t i = 0; i < s->n_finished; i++) {
        struct td_decode_finish *f = &s->finished[i];
        Tandem__V1__DecodeFinished *out = &m->finished[i];
        *out = (Tandem__V1__DecodeFinished)TANDEM__V1__DECODE_FINISHED__INIT;
        out->stream_id = f->stream_id;
        out->reason = f->reason;
        out->status = (uint32_t)f->status;
        out->status_name = (char *)(uintptr_t)td_status_name(f->status); /* only read */
        out->message = f->message;
        out->handoff_bytes = f->handoff_bytes;
        out->handoff_us = f->handoff_us;
        out->decode_us = f->decode_us;
        out->transport = f->transport;
        out->is_lost = f->is_lost;
        out->is_handoff = f->is_handoff;
        out->cached_tokens = f->cached_tokens;
        m->finished_ptrs[i] = out;
    }
    ev->n_finished = s->n_finished;
    ev->finished = m->finished_ptrs;
    return true;
}

enum td_status
td_decode_stream_flush(struct td_decode_stream *s,
                       enum td_status (*send)(void *user, void *call, const Tandem__V1__DecodeEvents *ev), void *user)
{
    Tandem__V1__DecodeEvents ev = TANDEM__V1__DECODE_EVENTS__INIT;
    if (!put_tokens(s, &ev) || !put_reserved(s, &ev) || !put_finished(s, &ev)) return TD_E_NO_MEMORY;
    enum td_status st = send(user, s->call, &ev);
    if (st == TD_OK) forget(s);
    return st;
}
