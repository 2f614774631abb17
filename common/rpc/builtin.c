/* The methods that every server has beside the daemon's own. */
#include "common/rpc/rpc_int.h"
#include "proto/health.pb-c.h"
#include "proto/reflection.pb-c.h"

#define MAX_REQUEST_BYTES 1024u

#define HEALTH &grpc__health__v1__health_check_request__descriptor, &grpc__health__v1__health_check_response__descriptor
#define REFLECTION                                                                                                     \
    &grpc__reflection__v1__server_reflection_request__descriptor,                                                      \
        &grpc__reflection__v1__server_reflection_response__descriptor

const struct td_rpc_method rpc_builtin_methods[] = {
    {"/grpc.health.v1.Health/Check", HEALTH, MAX_REQUEST_BYTES, rpc_health_check_open, false},
    {"/grpc.health.v1.Health/Watch", HEALTH, MAX_REQUEST_BYTES, rpc_health_watch_open, false},
    {"/" RPC_REFLECTION "/ServerReflectionInfo", REFLECTION, MAX_REQUEST_BYTES, rpc_reflection_open, true},
    {"/" RPC_REFLECTION_ALPHA "/ServerReflectionInfo", REFLECTION, MAX_REQUEST_BYTES, rpc_reflection_open, true},
    {.path = NULL},
};
