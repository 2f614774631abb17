#include "common/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *text, *grpc;
    enum td_scope scope;
    enum td_retry retry;
} rows[TD_N_STATUS] = {
#define X(name, scope, retry, grpc, text) {#name, text, #grpc, TD_SCOPE_##scope, TD_RETRY_##retry},
#include "common/base/status.def"
#undef X
};

static unsigned row_of(enum td_status st)
{
    return (unsigned)st < TD_N_STATUS ? (unsigned)st : (unsigned)TD_E_INTERNAL;
}

const char *td_status_name(enum td_status st) { return rows[row_of(st)].name; }
const char *td_status_text(enum td_status st) { return rows[row_of(st)].text; }
const char *td_status_grpc_name(enum td_status st) { return rows[row_of(st)].grpc; }
enum td_scope td_status_scope(enum td_status st) { return rows[row_of(st)].scope; }
enum td_retry td_status_retry(enum td_status st) { return rows[row_of(st)].retry; }

/* Cuts an incomplete UTF-8 sequence off the end: a message that was too long must stay valid text. */
static void trim_partial_utf8(char *s)
{
    size_t n = strlen(s), i = n;
    while (i > 0 && n - i < 3 && ((unsigned char)s[i - 1] & 0xC0) == 0x80) i--;
    if (i == 0) return;
    unsigned char lead = (unsigned char)s[i - 1];
    size_t want = lead < 0x80 ? 1 : lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (n - (i - 1) < want) s[i - 1] = 0;
}

enum td_status td_err_set(struct td_err *err, enum td_status st, const char *fmt, ...)
{
    if (err == NULL) return st;
    char text[sizeof err->text]; /* the arguments may point into err->text */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    memcpy(err->text, text, strlen(text) + 1);
    trim_partial_utf8(err->text);
    return st;
}

enum td_status td_err_prefix(struct td_err *err, enum td_status st, const char *fmt, ...)
{
    if (err == NULL) return st;
    char old[sizeof err->text], prefix[sizeof err->text];
    memcpy(old, err->text, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    size_t n = strlen(prefix);
    memcpy(err->text, prefix, n + 1);
    if (n + 2 < sizeof err->text) {
        memcpy(err->text + n, ": ", 2);
        size_t room = sizeof err->text - n - 3, m = strnlen(old, sizeof old - 1);
        if (m > room) m = room;
        memcpy(err->text + n + 2, old, m);
        err->text[n + 2 + m] = 0;
    }
    trim_partial_utf8(err->text);
    return st;
}
