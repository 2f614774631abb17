/* The trailer grpc-status-details-bin: a google.rpc.Status with what a program can act upon. Always ErrorInfo with the
 * name of our status; BadRequest where the text names the field; RetryInfo where the same request may work later. */
#include <ctype.h>
#include <string.h>

#include "common/rpc/rpc_int.h"
#include "proto/status.pb-c.h"

#define TYPE_URL       "type.googleapis.com/google.rpc."
#define DOMAIN         "tandem"
#define RETRY_DELAY_S  1 /* pages and places in a queue come back within a few decode steps to a few seconds */
#define MAX_FIELD      128u
#define MAX_PACKED_ONE (RPC_MAX_STATUS_BYTES + MAX_FIELD + 64u)
#define MAX_DETAILS    3u

/* The length of the field path that text begins with ("sampling.top_p: ..."), 0 if it does not name one. */
static size_t field_length(const char *text)
{
    size_t n = 0;
    if (!islower((unsigned char)text[0])) return 0;
    while (islower((unsigned char)text[n]) || isdigit((unsigned char)text[n]) ||
           (text[n] != 0 && strchr("_.[]", text[n])))
        n++;
    return text[n] == ':' && text[n + 1] == ' ' && n < MAX_FIELD ? n : 0;
}

struct details {
    Google__Rpc__Any any[MAX_DETAILS], *list[MAX_DETAILS];
    uint8_t bytes[MAX_DETAILS][MAX_PACKED_ONE];
    size_t n;
};

static void add(struct details *d, const char *type_url, const ProtobufCMessage *m)
{
    size_t n = protobuf_c_message_get_packed_size(m);
    if (n > MAX_PACKED_ONE) return; /* the texts are bounded: cannot be */
    Google__Rpc__Any *a = &d->any[d->n];
    google__rpc__any__init(a);
    a->type_url = (char *)(uintptr_t)type_url;
    a->value = (ProtobufCBinaryData){protobuf_c_message_pack(m, d->bytes[d->n]), d->bytes[d->n]};
    d->list[d->n] = a;
    d->n++;
}

static void add_bad_request(struct details *d, const char *text)
{
    size_t n = field_length(text);
    if (n == 0) return;
    char field[MAX_FIELD];
    memcpy(field, text, n);
    field[n] = 0;
    Google__Rpc__FieldViolation v = GOOGLE__RPC__FIELD_VIOLATION__INIT, *list[] = {&v};
    v.field = field;
    v.description = (char *)(uintptr_t)(text + n + 2);
    Google__Rpc__BadRequest m = GOOGLE__RPC__BAD_REQUEST__INIT;
    m.n_field_violations = 1;
    m.field_violations = list;
    add(d, TYPE_URL "BadRequest", &m.base);
}

static void add_retry_info(struct details *d)
{
    Google__Rpc__Duration delay = GOOGLE__RPC__DURATION__INIT;
    delay.seconds = RETRY_DELAY_S;
    Google__Rpc__RetryInfo m = GOOGLE__RPC__RETRY_INFO__INIT;
    m.retry_delay = &delay;
    add(d, TYPE_URL "RetryInfo", &m.base);
}

grpc_slice rpc_status_details(enum td_status st, const char *text)
{
    struct details d = {.n = 0};
    Google__Rpc__ErrorInfo info = GOOGLE__RPC__ERROR_INFO__INIT;
    info.reason = (char *)(uintptr_t)td_status_name(st);
    info.domain = (char *)(uintptr_t)DOMAIN;
    add(&d, TYPE_URL "ErrorInfo", &info.base);
    if (st == TD_E_INVALID) add_bad_request(&d, text);
    if (td_status_retry(st) == TD_RETRY_LATER) add_retry_info(&d);
    Google__Rpc__Status m = GOOGLE__RPC__STATUS__INIT;
    m.code = (int32_t)rpc_status_to_grpc(st);
    m.message = (char *)(uintptr_t)text;
    m.n_details = d.n;
    m.details = d.list;
    grpc_slice s = grpc_slice_malloc(protobuf_c_message_get_packed_size(&m.base));
    protobuf_c_message_pack(&m.base, GRPC_SLICE_START_PTR(s));
    return s;
}
