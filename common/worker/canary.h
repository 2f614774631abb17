/* Whether free KV pages are written, by whomever: they are filled with a pattern when they become free and looked at
 * when somebody takes them. For tests (--page-canary 1): it costs a page's bytes twice for every use. Host memory only.
 * Loop thread only. */
#ifndef TD_WORKER_CANARY_H
#define TD_WORKER_CANARY_H

#include "common/worker/worker.h"

/* After the pools are there, before any page is taken. A page that was written while it was free is an error in the log
 * and counts in kv_pages_written_free. */
enum td_status td_worker_watch_pages(struct td_worker *w, struct td_err *err);

#endif
