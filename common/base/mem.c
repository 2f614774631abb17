#include "common/base/mem.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/fault.h"

void *td_calloc(size_t n, size_t size)
{
    if (td_fault_hit(TD_FAULT_ALLOC)) return NULL;
    if (size != 0 && n > SIZE_MAX / size) return NULL; /* calloc checks too, but the address sanitizer's aborts */
    return calloc(n == 0 ? 1 : n, size == 0 ? 1 : size);
}

void *td_realloc(void *p, size_t n, size_t size)
{
    if (td_fault_hit(TD_FAULT_ALLOC)) return NULL;
    if (size != 0 && n > SIZE_MAX / size) return NULL;
    size_t bytes = n * size;
    return realloc(p, bytes == 0 ? 1 : bytes);
}

char *td_strndup(const char *s, size_t n)
{
    size_t len = strnlen(s, n);
    char *p = td_calloc(len + 1, 1);
    if (p != NULL) memcpy(p, s, len);
    return p;
}

char *td_strdup(const char *s) { return td_strndup(s, strlen(s)); }
