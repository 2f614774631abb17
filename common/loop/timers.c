#include "common/loop/timers_int.h"

#include <stddef.h>

/* In a timer: impl[0] is its first child, link.next the next sibling, link.prev the previous sibling, or the parent for
 * a first child. impl[1] is the number of its start. All stored as void * or through the list's own pointer type. */
static struct td_timer *child_of(const struct td_timer *t) { return t->impl[0]; }
static struct td_timer *as_timer(struct td_list *l)
{
    return l == NULL ? NULL : TD_LIST_ENTRY(l, struct td_timer, link);
}
static struct td_list *as_link(struct td_timer *t) { return t == NULL ? NULL : &t->link; }

static bool is_before(const struct td_timer *a, const struct td_timer *b)
{
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : (uintptr_t)a->impl[1] < (uintptr_t)b->impl[1];
}

/* Two trees without siblings become one. Either may be NULL. */
static struct td_timer *meld(struct td_timer *a, struct td_timer *b)
{
    if (a == NULL) return b;
    if (b == NULL) return a;
    if (is_before(b, a)) {
        struct td_timer *t = a;
        a = b;
        b = t;
    }
    struct td_timer *first = child_of(a);
    b->link.next = as_link(first);
    b->link.prev = &a->link;
    if (first != NULL) first->link.prev = &b->link;
    a->impl[0] = b;
    return a;
}

/* Joins a list of siblings: in pairs from the left, then the pairs from the right. That order is what makes it O(log
 * n). */
static struct td_timer *meld_siblings(struct td_timer *first)
{
    struct td_timer *pairs = NULL; /* threaded through link.next, last pair first */
    while (first != NULL) {
        struct td_timer *a = first, *b = as_timer(a->link.next);
        first = b == NULL ? NULL : as_timer(b->link.next);
        a->link.next = a->link.prev = NULL;
        if (b != NULL) b->link.next = b->link.prev = NULL;
        struct td_timer *m = meld(a, b);
        m->link.next = as_link(pairs);
        pairs = m;
    }
    struct td_timer *root = NULL;
    while (pairs != NULL) {
        struct td_timer *m = pairs;
        pairs = as_timer(m->link.next);
        m->link.next = NULL;
        root = meld(root, m);
    }
    return root;
}

void td_timers_stop(struct td_timers *ts, struct td_timer *t)
{
    if (!t->is_armed) return;
    t->is_armed = false;
    struct td_timer *below = meld_siblings(child_of(t));
    if (t == ts->root) {
        ts->root = below;
    } else {
        struct td_timer *prev = as_timer(t->link.prev), *next = as_timer(t->link.next);
        if (child_of(prev) == t)
            prev->impl[0] = next;
        else
            prev->link.next = as_link(next);
        if (next != NULL) next->link.prev = &prev->link;
        ts->root = meld(ts->root, below);
    }
    t->link.next = t->link.prev = NULL;
    t->impl[0] = NULL;
}

void td_timers_start(struct td_timers *ts, struct td_timer *t, uint64_t due_ns)
{
    TD_CHECK(t->fire != NULL);
    td_timers_stop(ts, t);
    t->due_ns = due_ns;
    t->is_armed = true;
    t->link.next = t->link.prev = NULL;
    t->impl[0] = NULL;
    t->impl[1] = (void *)(uintptr_t)ts->n_started++;
    ts->root = meld(ts->root, t);
}

void td_timers_fire(struct td_timers *ts, uint64_t now_ns)
{
    uint64_t n_before = ts->n_started; /* else a timer that restarts itself with delay 0 would keep us here */
    while (ts->root != NULL && ts->root->due_ns <= now_ns && (uintptr_t)ts->root->impl[1] < n_before) {
        struct td_timer *t = ts->root;
        td_timers_stop(ts, t);
        t->fire(t);
    }
}
