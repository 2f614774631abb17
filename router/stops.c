#include "router/stops.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

/* Where string i's fallback array begins. */
static size_t offset_of(const struct td_stops *s, size_t i)
{
    size_t at = 0;
    for (size_t k = 0; k < i; k++) at += s->strings[k].n;
    return at;
}

/* fallback[k]: the longest proper prefix of the string that its first k + 1 bytes end in. */
static void build(const struct td_text *t, uint32_t *fallback)
{
    uint32_t k = 0;
    for (size_t i = 1; i < t->n; i++) {
        while (k > 0 && t->p[i] != t->p[k]) k = fallback[k - 1];
        if (t->p[i] == t->p[k]) k++;
        fallback[i] = k;
    }
}

enum td_status td_stops_init(struct td_stops *s, const struct td_text *strings, size_t n)
{
    *s = (struct td_stops){.strings = strings, .n = n};
    if (n == 0) return TD_OK;
    s->fallback = td_calloc(offset_of(s, n) + 1, sizeof *s->fallback);
    s->matched = td_calloc(n, sizeof *s->matched);
    if (s->fallback == NULL || s->matched == NULL) return TD_E_NO_MEMORY;
    for (size_t i = 0, at = 0; i < n; at += strings[i++].n) build(&strings[i], s->fallback + at);
    return TD_OK;
}

void td_stops_deinit(struct td_stops *s)
{
    free(s->fallback);
    free(s->matched);
    td_buf_free(&s->held);
    *s = (struct td_stops){0};
}

static void reset(struct td_stops *s)
{
    memset(s->matched, 0, s->n * sizeof *s->matched);
    td_buf_clear(&s->held);
}

/* One byte more. Returns the length of the string that it completes, 0 if none; *longest: what must be held. */
static size_t step(struct td_stops *s, char c, size_t *longest)
{
    size_t complete = 0;
    *longest = 0;
    for (size_t i = 0, at = 0; i < s->n; at += s->strings[i++].n) {
        const struct td_text *t = &s->strings[i];
        const uint32_t *fallback = s->fallback + at;
        uint32_t k = s->matched[i];
        while (k > 0 && t->p[k] != c) k = fallback[k - 1];
        if (t->p[k] == c) k++;
        s->matched[i] = k;
        if (k > *longest) *longest = k;
        if (k == t->n && k > complete) complete = k;
    }
    return complete;
}

bool td_stops_feed(struct td_stops *s, const char *text, size_t n, struct td_buf *out)
{
    if (s->n == 0) {
        td_buf_put(out, text, n);
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        size_t longest, complete = step(s, text[i], &longest);
        td_buf_u8(&s->held, (uint8_t)text[i]);
        size_t keep = complete > 0 ? complete : longest;
        if (s->held.failed) out->failed = true;
        if (s->held.failed || s->held.n < keep) return false;
        if (s->held.n > keep) {
            td_buf_put(out, s->held.data, s->held.n - keep);
            memmove(s->held.data, s->held.data + s->held.n - keep, keep);
            s->held.n = keep;
        }
        if (complete == 0) continue;
        reset(s);
        return true;
    }
    return false;
}

void td_stops_flush(struct td_stops *s, struct td_buf *out)
{
    if (s->n == 0) return;
    td_buf_put(out, s->held.data, s->held.n);
    reset(s);
}
