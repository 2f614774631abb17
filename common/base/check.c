#include "common/base/check.h"

#include <stdio.h>
#include <stdlib.h>

void td_check_failed(const char *file, int line, const char *expr)
{
    fprintf(stderr, "%s:%d: check failed: %s\n", file, line, expr);
    fflush(stderr);
    abort();
}
