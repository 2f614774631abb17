/* From bytes to protobuf-c messages and back, safe against what a peer sends. protobuf-c alone lets a small message
 * grow sixtyfold in memory and takes any bytes for a string; here every message has a memory budget and its strings are
 * checked. No gRPC type: any thread, and the fuzzer's entry. */
#ifndef TD_RPC_CODEC_H
#define TD_RPC_CODEC_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* One decoded message and what it may still allocate. Lives in the caller's frame: the message points into it. */
struct td_codec {
    ProtobufCAllocator allocator;
    size_t budget_bytes; /* left */
    bool is_over_budget, is_out_of_memory;
};

/* What a message of a type limited to max_bytes on the wire may take in memory: room for every field of a real message,
 * none for one that consists of empty sub-messages. */
size_t td_codec_budget(size_t max_bytes);

/* TOO_LARGE: over max_bytes, or over the budget. INVALID: not decodable, or a string that is not UTF-8 (err names the
 * field). NO_MEMORY. On success the caller ends with td_codec_release. */
enum td_status td_codec_unpack(struct td_codec *k, const ProtobufCMessageDescriptor *type, const void *data, size_t n,
                               size_t max_bytes, ProtobufCMessage **out, struct td_err *err);
void td_codec_release(struct td_codec *k, ProtobufCMessage *msg); /* msg NULL is fine */

/* Copies text into out (always NUL-terminated, n > 0), each byte that is not part of valid UTF-8 replaced by '?', cut
 * at a character boundary. Returns the length. */
size_t td_codec_clean_text(const char *text, char *out, size_t n);

#endif
