/* enum td_status to gRPC's codes and back. The way out is a column of status.def. The way back is exact between two of
 * us, through a trailer with the status's name; a foreign server leaves only the code. */
#include <string.h>

#include "common/rpc/rpc_int.h"

grpc_status_code rpc_status_to_grpc(enum td_status st)
{
    static const grpc_status_code codes[TD_N_STATUS] = {
#define X(name, scope, retry, grpc, text) GRPC_STATUS_##grpc,
#include "common/base/status.def"
#undef X
    };
    return (unsigned)st < TD_N_STATUS ? codes[st] : GRPC_STATUS_INTERNAL;
}

/* Without our trailer the code comes from gRPC itself or from a foreign server: UNAVAILABLE means that the connection
 * could not be made or broke, RESOURCE_EXHAUSTED that a message was over a limit. */
static enum td_status status_from_code(grpc_status_code code)
{
    switch (code) {
    case GRPC_STATUS_OK: return TD_OK;
    case GRPC_STATUS_CANCELLED: return TD_E_CANCELED;
    case GRPC_STATUS_DEADLINE_EXCEEDED: return TD_E_DEADLINE;
    case GRPC_STATUS_INVALID_ARGUMENT:
    case GRPC_STATUS_OUT_OF_RANGE:
    case GRPC_STATUS_ALREADY_EXISTS:
    case GRPC_STATUS_PERMISSION_DENIED:
    case GRPC_STATUS_UNAUTHENTICATED: return TD_E_INVALID;
    case GRPC_STATUS_NOT_FOUND: return TD_E_NOT_FOUND;
    case GRPC_STATUS_RESOURCE_EXHAUSTED: return TD_E_TOO_LARGE;
    case GRPC_STATUS_FAILED_PRECONDITION: return TD_E_MISMATCH;
    case GRPC_STATUS_ABORTED: return TD_E_STALE;
    case GRPC_STATUS_UNIMPLEMENTED: return TD_E_UNIMPLEMENTED;
    case GRPC_STATUS_UNAVAILABLE: return TD_E_PEER_LOST;
    default: return TD_E_INTERNAL;
    }
}

enum td_status rpc_status_from_grpc(grpc_status_code code, const char *name)
{
    if (name != NULL)
        for (unsigned st = 0; st < TD_N_STATUS; st++)
            if (strcmp(name, td_status_name((enum td_status)st)) == 0 && rpc_status_to_grpc((enum td_status)st) == code)
                return (enum td_status)st;
    return status_from_code(code);
}
