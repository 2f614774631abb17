/* One status type for every call in the project, and the message that start-up and clients get with it. */
#ifndef TD_BASE_STATUS_H
#define TD_BASE_STATUS_H

#include <stddef.h>
#include <stdint.h>

enum td_status {
#define X(name, scope, retry, grpc, text) TD_E_##name,
#include "common/base/status.def"
#undef X
    TD_N_STATUS,
    TD_OK = TD_E_OK,
    TD_IN_PROGRESS = TD_E_IN_PROGRESS
};

enum td_scope { TD_SCOPE_NOTHING, TD_SCOPE_REQUEST, TD_SCOPE_PEER, TD_SCOPE_PROCESS };
enum td_retry { TD_RETRY_NO, TD_RETRY_LATER, TD_RETRY_OTHER };

const char *td_status_name(enum td_status st);      /* "NO_PAGES" */
const char *td_status_text(enum td_status st);      /* "no free KV pages" */
enum td_scope td_status_scope(enum td_status st);
enum td_retry td_status_retry(enum td_status st);
const char *td_status_grpc_name(enum td_status st); /* "RESOURCE_EXHAUSTED" */

/* A message for a person, filled by the first to see the error; each layer above may add a prefix that names
 * the file, flag or field. Storage is the caller's; always NUL-terminated UTF-8. */
struct td_err {
    char text[512];
};
/* Sets the text and returns st, so that `return td_err_set(err, TD_E_INVALID, "...")` reads well. err may be NULL. */
enum td_status td_err_set(struct td_err *err, enum td_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Puts "prefix: " in front of the text and returns st. */
enum td_status td_err_prefix(struct td_err *err, enum td_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* For functions with a local `st` and an `out:` label: stop at the first failure. */
#define TD_TRY(expr)                    \
    do {                                \
        st = (expr);                    \
        if (st != TD_OK) goto out;      \
    } while (0)

#endif
