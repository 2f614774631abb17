/* What tcp.c needs of the loop. */
#ifndef TD_LOOP_LOOP_INT_H
#define TD_LOOP_LOOP_INT_H

#include <uv.h>

#include "common/loop/loop.h"

/* First member of what a handle's data points to, for every handle that is not the loop's own: td_loop_destroy closes
 * the handles that are left by it. */
struct td_uv_owner {
    void (*close)(uv_handle_t *h);
};

#define TD_LOOP_READ_BYTES 65536u
char *td_loop_read_buf(struct td_loop *l); /* scratch for the read that is going on */

uv_loop_t *td_loop_uv(struct td_loop *l);
enum td_status td_status_from_uv(int uv_error); /* the one place where libuv's codes are translated */

#endif
