/* Feeds bytes to the decompressor of messages: no crash, no leak, never more than the limit, and what it takes within a
 * tight limit it takes within a wide one, with the same bytes. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/rpc/inflate.h"

#define WIDE (1u << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 2) return 0;
    size_t tight = (size_t)data[0] << 8 | data[1], n_tight = 0, n_wide = 0;
    uint8_t *a = NULL, *b = NULL;
    struct td_err err;
    enum td_status st = td_inflate(data + 2, n - 2, tight, &a, &n_tight, &err);
    TD_CHECK(st == TD_OK || a == NULL);
    TD_CHECK(st != TD_OK || n_tight <= tight);
    enum td_status wide = td_inflate(data + 2, n - 2, WIDE, &b, &n_wide, &err);
    TD_CHECK(wide != TD_OK || n_wide <= WIDE);
    if (st == TD_OK) TD_CHECK(wide == TD_OK && n_wide == n_tight && memcmp(a, b, n_tight) == 0);
    if (wide == TD_OK && n_wide <= tight) TD_CHECK(st == TD_OK);
    free(a);
    free(b);
    return 0;
}
