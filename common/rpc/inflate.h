/* Bounded decompression of what a peer sent, gzip or zlib. gRPC core would unpack a message whole before it looks at
 * its size, so a few kilobytes could take gigabytes; here nothing is written beyond max_bytes. No gRPC type; any
 * thread. */
#ifndef TD_RPC_INFLATE_H
#define TD_RPC_INFLATE_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* The whole of one gzip or zlib stream (told apart by itself). *out is malloc'ed, the caller's, never NULL on success.
 * TOO_LARGE: it would become larger than max_bytes. INVALID: damaged, cut short, or something behind it. NO_MEMORY. */
enum td_status td_inflate(const void *data, size_t n, size_t max_bytes, uint8_t **out, size_t *n_out,
                          struct td_err *err);

#endif
