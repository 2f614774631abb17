/* grpc.reflection.v1 (and v1alpha, the same messages): which services this daemon has, and the .proto files behind
 * them, out of the descriptor set that the build embeds. One stream, one answer per question; a wrong question is
 * answered with an error message and the stream goes on. */
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/rpc/descriptors.h"
#include "common/rpc/rpc_int.h"
#include "proto/reflection.pb-c.h"

#define MAX_FILES 32u

static const uint8_t descriptor_set[] = {
#include "proto/descriptors.inc" /* made by the build from proto/ */
};
static const struct td_descriptor_view set = {descriptor_set, sizeof descriptor_set};

typedef Grpc__Reflection__V1__ServerReflectionResponse Response;
typedef Grpc__Reflection__V1__ServerReflectionRequest Request;

static Response response_to(const Request *q)
{
    Response m = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
    m.valid_host = q->host;
    m.original_request = (Request *)(uintptr_t)q;
    return m;
}

static enum td_status answer_error(struct td_rpc_call *c, const Request *q, grpc_status_code code, const char *text)
{
    Response m = response_to(q);
    Grpc__Reflection__V1__ErrorResponse e = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;
    e.error_code = (int32_t)code;
    e.error_message = (char *)(uintptr_t)text;
    m.message_response_case = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
    m.error_response = &e;
    return td_rpc_send(c, &m.base);
}

static enum td_status answer_file(struct td_rpc_call *c, const Request *q, struct td_descriptor_view file)
{
    Response m = response_to(q);
    struct td_descriptor_view files[MAX_FILES];
    ProtobufCBinaryData bytes[MAX_FILES];
    Grpc__Reflection__V1__FileDescriptorResponse r = GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
    r.n_file_descriptor_proto = td_descriptors_with_imports(set, file, files, MAX_FILES);
    r.file_descriptor_proto = bytes;
    for (size_t i = 0; i < r.n_file_descriptor_proto; i++)
        bytes[i] = (ProtobufCBinaryData){files[i].n, (uint8_t *)(uintptr_t)files[i].p};
    m.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
    m.file_descriptor_response = &r;
    return td_rpc_send(c, &m.base);
}

/* Appends the services of a table that are not there yet. Names are cut out of "/service/Method". */
static bool add_services(const struct td_rpc_method *m, char **names, size_t *n, size_t max)
{
    for (; m->path != NULL; m++) {
        size_t len = (size_t)(strrchr(m->path, '/') - m->path - 1);
        bool is_known = len == strlen(RPC_REFLECTION_ALPHA) && strncmp(m->path + 1, RPC_REFLECTION_ALPHA, len) == 0;
        for (size_t i = 0; i < *n; i++) is_known |= strlen(names[i]) == len && strncmp(names[i], m->path + 1, len) == 0;
        if (is_known || *n == max) continue;
        names[*n] = td_strndup(m->path + 1, len);
        if (names[*n] == NULL) return false;
        ++*n;
    }
    return true;
}

static enum td_status answer_services(struct td_rpc_call *c, const Request *q)
{
    Response m = response_to(q);
    char *names[MAX_FILES];
    Grpc__Reflection__V1__ServiceResponse items[MAX_FILES], *list[MAX_FILES];
    Grpc__Reflection__V1__ListServiceResponse r = GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    size_t n = 0;
    bool is_complete =
        add_services(c->rpc->methods, names, &n, MAX_FILES) && add_services(rpc_builtin_methods, names, &n, MAX_FILES);
    for (size_t i = 0; i < n; i++) {
        grpc__reflection__v1__service_response__init(&items[i]);
        items[i].name = names[i];
        list[i] = &items[i];
    }
    r.n_service = n;
    r.service = list;
    m.message_response_case = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    m.list_services_response = &r;
    enum td_status st = is_complete ? td_rpc_send(c, &m.base) : TD_E_NO_MEMORY;
    for (size_t i = 0; i < n; i++) free(names[i]);
    return st;
}

static void on_question(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    const Request *q = (const void *)msg;
    struct td_descriptor_view file;
    enum td_status st;
    switch (q->message_request_case) {
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        st = answer_services(c, q);
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        st = td_descriptors_file(set, q->file_by_filename, &file)
                 ? answer_file(c, q, file)
                 : answer_error(c, q, GRPC_STATUS_NOT_FOUND, "no such file");
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        st = td_descriptors_symbol(set, q->file_containing_symbol, &file)
                 ? answer_file(c, q, file)
                 : answer_error(c, q, GRPC_STATUS_NOT_FOUND, "no such symbol");
        break;
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_EXTENSION:
    case GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_ALL_EXTENSION_NUMBERS_OF_TYPE:
        st = answer_error(c, q, GRPC_STATUS_NOT_FOUND, "no message has extensions here");
        break;
    default: st = answer_error(c, q, GRPC_STATUS_INVALID_ARGUMENT, "no question, or one not known here"); break;
    }
    if (st != TD_OK) td_rpc_abort(c, st == TD_E_BUSY ? TD_E_SLOW_CLIENT : st, NULL);
}

static void on_half_close(struct td_rpc_call *c) { td_rpc_finish(c, TD_OK, NULL); }

static void on_closed(struct td_rpc_call *c, enum td_status st, const char *text) { (void)c, (void)st, (void)text; }

void rpc_reflection_open(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {
        .on_message = on_question, .on_half_close = on_half_close, .on_closed = on_closed};
    td_rpc_call_accept(c, &h, service);
}
