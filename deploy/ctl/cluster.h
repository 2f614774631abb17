/* Who listens where: the address files that daemons write, and cluster.json, which `up` writes and other commands read.
 */
#ifndef TD_CTL_CLUSTER_H
#define TD_CTL_CLUSTER_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/base/status.h"

#define TD_DEFAULT_RUN_DIR "build/run"

struct td_address {
    char name[128], rpc[320], http[320];
    int pid; /* 0: unknown */
};

/* False: not there yet, or not whole, or of another process than pid. */
bool td_address_file_read(const char *path, int pid, struct td_address *out);

struct td_cluster {
    const char *model;
    const struct td_address *router, *prefill, *decode;
    unsigned n_prefill, n_decode;
};
/* Appears at once and whole. */
enum td_status td_cluster_write(const char *path, const struct td_cluster *c, struct td_err *err);
/* The router of the cluster in run_dir. NOT_FOUND: no cluster.json there. */
enum td_status td_cluster_read_router(const char *run_dir, struct td_address *out, struct td_err *err);

/* GET http://address/path. Appends the body to out if not NULL; *status_out 0 while nobody answers. Blocks for at most
 * timeout_ms in each of connecting, sending, receiving. */

enum td_status td_http_get(const char *address, const char *path, uint32_t timeout_ms, unsigned *status_out,
                           struct td_buf *out, struct td_err *err);

#endif
