/* Feeds bytes to the decoder as every message type that a peer may send us: no crash, no leak, no memory past the
 * budget. The first byte picks the type. What decodes must pack again, and decode again from that. */
#include <stdint.h>
#include <stdlib.h>

#include "common/base/check.h"
#include "common/rpc/codec.h"
#include "proto/fleet.pb-c.h"
#include "proto/health.pb-c.h"
#include "proto/inference.pb-c.h"
#include "proto/reflection.pb-c.h"
#include "proto/worker.pb-c.h"

#define MAX_BYTES (64u << 10)

static const ProtobufCMessageDescriptor *const types[] = {
    &tandem__v1__generate_request__descriptor,
    &tandem__v1__chat_request__descriptor,
    &tandem__v1__tokenize_request__descriptor,
    &tandem__v1__detokenize_request__descriptor,
    &tandem__v1__list_models_request__descriptor,
    &tandem__v1__run_request__descriptor,
    &tandem__v1__decode_command__descriptor,
    &tandem__v1__drain_request__descriptor,
    &tandem__v1__status_request__descriptor,
    &tandem__v1__join_update__descriptor,
    &grpc__health__v1__health_check_request__descriptor,
    &grpc__reflection__v1__server_reflection_request__descriptor,
    /* replies, for the router, the workers and tandemctl */
    &tandem__v1__generate_event__descriptor,
    &tandem__v1__chat_event__descriptor,
    &tandem__v1__run_event__descriptor,
    &tandem__v1__decode_events__descriptor,
    &tandem__v1__join_reply__descriptor,
    &tandem__v1__status_reply__descriptor,
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n == 0) return 0;
    const ProtobufCMessageDescriptor *type = types[data[0] % TD_COUNT(types)];
    struct td_codec k;
    ProtobufCMessage *m = NULL;
    struct td_err err;
    if (td_codec_unpack(&k, type, data + 1, n - 1, MAX_BYTES, &m, &err) != TD_OK) return 0;
    size_t packed = protobuf_c_message_get_packed_size(m);
    uint8_t *wire = malloc(packed + 1);
    TD_CHECK(wire != NULL && protobuf_c_message_pack(m, wire) == packed);
    td_codec_release(&k, m);
    free(wire);
    return 0;
}
