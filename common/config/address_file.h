/* Where a daemon listens, as a file: with port 0 nobody knows before it runs. Scripts and tests wait for this file. */
#ifndef TD_CONFIG_ADDRESS_FILE_H
#define TD_CONFIG_ADDRESS_FILE_H

#include "common/base/status.h"

/* Writes {"role":...,"name":...,"pid":...,"rpc":"host:port","http":"host:port"} to path. Appears at once and whole (a
 * rename). An address that is NULL or "" becomes "". err names the file. */
enum td_status td_address_file_write(const char *path, const char *role, const char *name, int pid,
                                     const char *rpc_addr, const char *http_addr, struct td_err *err);

#endif
