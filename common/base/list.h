/* Doubly linked lists threaded through the elements; a head is a link that points to itself when empty. */
#ifndef TD_BASE_LIST_H
#define TD_BASE_LIST_H
#include <stdbool.h>
#include <stddef.h>
#include "common/base/check.h"
struct td_list {
    struct td_list *prev, *next;
};
static inline void td_list_init(struct td_list *l) { l->prev = l->next = l; }
static inline bool td_list_is_empty(const struct td_list *l) { return l->next == l; }
static inline void td_list_push_back(struct td_list *head, struct td_list *l)
{
    l->prev = head->prev;
    l->next = head;
    head->prev->next = l;
    head->prev = l;
}
static inline void td_list_push_front(struct td_list *head, struct td_list *l)
{
    l->prev = head;
    l->next = head->next;
    head->next->prev = l;
    head->next = l;
}
/* Leaves l as an empty list of its own, so that removing twice does no harm. */
static inline void td_list_remove(struct td_list *l)
{
    l->prev->next = l->next;
    l->next->prev = l->prev;
    td_list_init(l);
}
#define TD_LIST_ENTRY(link, type, member) TD_CONTAINER_OF(link, type, member)
#define TD_LIST_FOREACH(it, head) for (struct td_list *it = (head)->next; it != (head); it = it->next)
#define TD_LIST_FOREACH_SAFE(it, head) \
    for (struct td_list *it = (head)->next, *it##_next = it->next; it != (head); it = it##_next, it##_next = it->next)
#endif
