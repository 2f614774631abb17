/* Any bytes as a hand-off message: decoding gives a message or an error, and both ends survive it. */
#include <stdlib.h>

#include "common/base/check.h"
#include "common/handoff/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 1) return 0;
    struct td_wire m, again;
    struct td_err err;
    uint8_t id = data[0];
    if (td_wire_decode(id, data + 1, n - 1, &m, &err) != TD_OK) return 0;
    struct td_buf b = {0};
    td_wire_encode(id, &m, &b); /* what was understood can be said again */
    TD_CHECK(!b.failed && td_wire_decode(id, b.data, b.n, &again, &err) == TD_OK);
    TD_CHECK(again.to == m.to && again.generation == m.generation && again.first_token == m.first_token &&
             again.n_ranks == m.n_ranks && again.lowest_live == m.lowest_live && again.n_address == m.n_address &&
             again.status == m.status);
    td_buf_free(&b);
    return 0;
}
