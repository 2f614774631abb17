/* Looks things up in a serialized google.protobuf.FileDescriptorSet, for server reflection. Nothing is decoded ahead: a
 * set is some ten kilobytes, and a question is rare. The set is our own (made from proto/ by the build), yet damaged
 * bytes only end a search. No gRPC type; any thread. */
#ifndef TD_RPC_DESCRIPTORS_H
#define TD_RPC_DESCRIPTORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct td_descriptor_view {
    const uint8_t *p;
    size_t n;
};

/* The file (a serialized FileDescriptorProto) of that name, "proto/worker.proto"; false: none. */
bool td_descriptors_file(struct td_descriptor_view set, const char *name, struct td_descriptor_view *out);
/* The file that declares a fully qualified message, enum, enum value, field, oneof, service or method:
 * "tandem.v1.Decode.Generate". */
bool td_descriptors_symbol(struct td_descriptor_view set, const char *symbol, struct td_descriptor_view *out);
/* The file itself, then everything it imports, each once. Returns how many; at most n_out. */
size_t td_descriptors_with_imports(struct td_descriptor_view set, struct td_descriptor_view file,
                                   struct td_descriptor_view *out, size_t n_out);

#endif
