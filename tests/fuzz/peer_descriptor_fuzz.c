/* What a worker says of itself in Fleet.Join, as another worker takes it in: message, then fields, then the layout
 * compared with itself. What was understood can be said again and is understood the same. */
#include <stdint.h>
#include <stdlib.h>

#include "common/base/check.h"
#include "common/handoff/descriptor.h"
#include "common/rpc/codec.h"

#define MAX_BYTES (64u << 10)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct td_codec k;
    ProtobufCMessage *m = NULL;
    struct td_err err;
    if (td_codec_unpack(&k, &tandem__v1__peer_descriptor__descriptor, data, n, MAX_BYTES, &m, &err) != TD_OK) return 0;
    static struct td_descriptor d, again;
    static struct td_descriptor_msg msg;
    if (td_descriptor_from_msg((const Tandem__V1__PeerDescriptor *)(const void *)m, &d, &err) == TD_OK) {
        TD_CHECK(d.n_ranks >= 1 && d.n_ranks <= TD_MAX_RANKS);
        TD_CHECK(td_peer_layout_check(&d.layout, &d.layout, &err) == TD_OK);
        td_descriptor_to_msg(&d, &msg);
        TD_CHECK(td_descriptor_from_msg(&msg.peer, &again, &err) == TD_OK && again.incarnation == d.incarnation);
    }
    td_codec_release(&k, m);
    return 0;
}
