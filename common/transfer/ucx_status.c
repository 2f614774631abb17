/* UCX's status codes in ours, in this one place. */
#include "common/transfer/ucx_int.h"

enum td_status td_ucx_status(ucs_status_t s)
{
    switch (s) {
    case UCS_OK: return TD_OK;
    case UCS_INPROGRESS: return TD_IN_PROGRESS;
    case UCS_ERR_CANCELED: return TD_E_CANCELED;
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_EXCEEDS_LIMIT: return TD_E_NO_MEMORY;
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_INVALID_ADDR: return TD_E_INVALID;
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NOT_IMPLEMENTED:
    case UCS_ERR_UNREACHABLE: return TD_E_UNSUPPORTED;
    case UCS_ERR_BUFFER_TOO_SMALL:
    case UCS_ERR_MESSAGE_TRUNCATED: return TD_E_TOO_LARGE;
    case UCS_ERR_SHMEM_SEGMENT:
    case UCS_ERR_IO_ERROR: return TD_E_IO;
    /* What the death of a peer looks like: it depends on the transport and on UCX's version. */
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_SOME_CONNECTS_FAILED: return TD_E_PEER_LOST;
    default: break;
    }
    if (s <= UCS_ERR_FIRST_ENDPOINT_FAILURE && s >= UCS_ERR_LAST_ENDPOINT_FAILURE) return TD_E_PEER_LOST;
    return TD_E_INTERNAL;
}

enum td_status td_ucx_err(struct td_err *err, ucs_status_t s, const char *what)
{
    return td_err_set(err, td_ucx_status(s), "%s: UCX says \"%s\"", what, ucs_status_string(s));
}
