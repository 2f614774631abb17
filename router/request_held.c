/* Tokens that came before their turn: the decode worker's may overtake the prefill worker's first one, since they
 * travel on different connections. */
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "router/request_int.h"

static Tandem__V1__PositionLogprobs *copy_logprobs(const Tandem__V1__PositionLogprobs *l)
{
    size_t n =
        l != NULL ? tandem__v1__position_logprobs__get_packed_size(l) : 0; /* missing: an empty one in its place */
    uint8_t *bytes = td_calloc(1, n + 1);
    if (bytes == NULL) return NULL;
    if (l != NULL) tandem__v1__position_logprobs__pack(l, bytes);
    Tandem__V1__PositionLogprobs *copy = tandem__v1__position_logprobs__unpack(NULL, n, bytes);
    free(bytes);
    return copy;
}

bool td_request_hold(struct td_request *r, uint32_t id, const Tandem__V1__PositionLogprobs *logprobs, bool front)
{
    if (r->n_held == r->cap_held) {
        uint32_t cap = r->cap_held < 8 ? 8 : r->cap_held * 2;
        uint32_t *ids = td_realloc(r->held_ids, cap, sizeof *ids);
        if (ids != NULL) r->held_ids = ids;
        Tandem__V1__PositionLogprobs **l = td_realloc(r->held_logprobs, cap, sizeof(void *));
        if (l != NULL) r->held_logprobs = l;
        if (ids == NULL || l == NULL) return false;
        r->cap_held = cap;
    }
    Tandem__V1__PositionLogprobs *copy = r->want_logprobs ? copy_logprobs(logprobs) : NULL;
    if (r->want_logprobs && copy == NULL) return false;
    uint32_t at = front ? 0 : r->n_held, n_after = r->n_held - at;
    memmove(r->held_ids + at + 1, r->held_ids + at, n_after * sizeof *r->held_ids);
    memmove(r->held_logprobs + at + 1, r->held_logprobs + at, n_after * sizeof(void *));
    r->held_ids[at] = id;
    r->held_logprobs[at] = copy;
    r->n_held++;
    return true;
}

void td_request_drop_held(struct td_request *r)
{
    for (uint32_t i = 0; i < r->n_held; i++)
        if (r->want_logprobs) tandem__v1__position_logprobs__free_unpacked(r->held_logprobs[i], NULL);
    r->n_held = 0;
}

void td_request_free_held(struct td_request *r)
{
    td_request_drop_held(r);
    free(r->held_ids);
    free(r->held_logprobs);
    r->held_logprobs = NULL;
    r->held_ids = NULL;
    r->cap_held = 0;
}

enum td_request_event td_request_emit_held(struct td_request *r)
{
    if (r->n_held == 0) return EV_NONE;
    enum td_request_event ev = td_request_emit(r, r->held_ids, r->want_logprobs ? r->held_logprobs : NULL, r->n_held);
    td_request_drop_held(r);
    return ev;
}
