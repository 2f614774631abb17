/* Allocation with a fault point: code that must survive a failed allocation uses these. */
#ifndef TD_BASE_MEM_H
#define TD_BASE_MEM_H
#include <stddef.h>
void *td_calloc(size_t n, size_t size);
void *td_realloc(void *p, size_t n, size_t size); /* array of n; NULL on overflow too, p then stays valid */
char *td_strdup(const char *s);
char *td_strndup(const char *s, size_t n);
#endif
