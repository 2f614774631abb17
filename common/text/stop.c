/* Knuth-Morris-Pratt per string: n_matched is how many of its first bytes the text ends in, so the longest of these is
 * all that has to wait. The bytes that wait are the beginning of that string: they need no copy. */
#include "common/text/stop.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

struct pattern {
    char *bytes;
    size_t *border; /* [i]: of the first i + 1 bytes, the longest proper prefix that they also end in */
    size_t n, n_matched;
};

struct td_stop {
    struct pattern *patterns;
    size_t n_patterns;
    size_t widest; /* the pattern that holds the most; any while n_held is 0 */
    size_t n_held;
    int found;
};

static enum td_status pattern_init(struct pattern *p, struct td_text t)
{
    p->n = t.n;
    p->bytes = td_calloc(t.n, 1);
    p->border = td_calloc(t.n, sizeof *p->border);
    if (p->bytes == NULL || p->border == NULL) return TD_E_NO_MEMORY;
    memcpy(p->bytes, t.p, t.n);
    for (size_t i = 1, k = 0; i < t.n; i++) {
        while (k > 0 && p->bytes[i] != p->bytes[k]) k = p->border[k - 1];
        if (p->bytes[i] == p->bytes[k]) k++;
        p->border[i] = k;
    }
    return TD_OK;
}

enum td_status td_stop_create(const struct td_text *strings, size_t n, struct td_stop **out)
{
    enum td_status st = TD_E_NO_MEMORY;
    struct td_stop *s = td_calloc(1, sizeof *s);
    if (s == NULL) goto out;
    s->found = -1;
    s->patterns = td_calloc(n + 1, sizeof *s->patterns);
    if (s->patterns == NULL) goto out;
    for (size_t i = 0; i < n; i++) {
        st = TD_E_INVALID;
        if (strings[i].n == 0) goto out;
        s->n_patterns = i + 1;
        st = pattern_init(&s->patterns[i], strings[i]);
        if (st != TD_OK) goto out;
    }
    st = TD_OK;
    *out = s;
    s = NULL;
out:
    td_stop_destroy(s);
    return st;
}

void td_stop_destroy(struct td_stop *s)
{
    if (s == NULL) return;
    for (size_t i = 0; i < s->n_patterns; i++) {
        free(s->patterns[i].bytes);
        free(s->patterns[i].border);
    }
    free(s->patterns);
    free(s);
}

/* One byte of text. true: the pattern is complete. */
static bool step(struct pattern *p, char c)
{
    while (p->n_matched > 0 && p->bytes[p->n_matched] != c) p->n_matched = p->border[p->n_matched - 1];
    if (p->bytes[p->n_matched] == c) p->n_matched++;
    return p->n_matched == p->n;
}

/* Moves the first n of what is held, and then of the piece, to the text. */
static void release(const struct td_stop *s, size_t n_held, const char *piece, size_t n, struct td_buf *out)
{
    size_t n_old = n < n_held ? n : n_held;
    if (n_old > 0) td_buf_put(out, s->patterns[s->widest].bytes, n_old);
    if (n > n_old) td_buf_put(out, piece, n - n_old);
}

bool td_stop_feed(struct td_stop *s, const char *text, size_t n, struct td_buf *out)
{
    if (s->found >= 0) return true;
    size_t n_before = s->n_held, widest = s->widest, n_held = n_before;
    for (size_t i = 0; i < n && s->found < 0; i++) {
        n_held = 0;
        for (size_t k = 0; k < s->n_patterns; k++) {
            struct pattern *p = &s->patterns[k];
            bool is_whole = step(p, text[i]);
            if (p->n_matched > n_held) {
                n_held = p->n_matched;
                widest = k;
            }
            /* Of several that end here the longest is not a part of another one's beginning that was shown. */
            if (is_whole && (s->found < 0 || p->n > s->patterns[s->found].n)) s->found = (int)k;
        }
        if (s->found >= 0) release(s, n_before, text, n_before + i + 1 - s->patterns[s->found].n, out);
    }
    if (s->found < 0) release(s, n_before, text, n_before + n - n_held, out);
    s->widest = widest;
    s->n_held = s->found < 0 ? n_held : 0;
    return s->found >= 0;
}

void td_stop_end(struct td_stop *s, struct td_buf *out)
{
    release(s, s->n_held, NULL, s->n_held, out);
    s->n_held = 0;
    for (size_t i = 0; i < s->n_patterns; i++) s->patterns[i].n_matched = 0;
}

int td_stop_found(const struct td_stop *s) { return s->found; }
size_t td_stop_held(const struct td_stop *s) { return s->n_held; }
