/* A call's life: body -> (pool thread, if large) JSON and order -> run -> answer. It may end at any point by the
 * client's leaving; the object stays until no thread works for it. */
#include "router/api.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/text/utf8.h"
#include "router/api_int.h"
#include "router/router_int.h"

#define CALL_MAGIC         0x6170692eu /* "api." */
#define INLINE_PARSE_BYTES 16384u      /* about 1 ms with tokenising, which some endpoints do at once */
#define MAX_DEPTH          100u        /* of a body's arrays and objects */
#define MAX_VALUES         1000000u    /* in a body: each costs up to 130 bytes of ours */
#define RETRY_AFTER_S      "1"         /* a queue of requests moves on within a second or not at all */

static const struct td_api_endpoint *const endpoints[] = {
    &td_api_chat, &td_api_responses, &td_api_completions, &td_api_tokenize, &td_api_detokenize,
};

struct call {
    struct td_api_call api; /* first */
    uint32_t magic;
    struct td_work work;
    bool is_reading; /* a pool thread works on it */
    struct td_buf body;
    char request_id[TD_ROUTER_ID_MAX + 1];
    bool is_too_long;
    enum td_status st;
    struct td_err err;
};

static struct call *call_of(struct td_api_call *api)
{
    struct call *c = TD_CONTAINER_OF(api, struct call, api);
    TD_MAGIC_CHECK(c, CALL_MAGIC);
    return c;
}

static void free_if_over(struct call *c)
{
    if (c->api.http != NULL || c->is_reading) return;
    if (c->api.run != NULL) td_run_cancel(c->api.run);
    if (c->api.endpoint->drop != NULL) c->api.endpoint->drop(&c->api);
    c->magic = 0;
    td_order_deinit(&c->api.order);
    td_buf_free(&c->api.out);
    td_buf_free(&c->body);
    free(c->api.state);
    free(c);
}

/* --- errors ------------------------------------------------------------------------------------------------------- */

/* Names of the gRPC API that this one spells differently. */
static const struct {
    const char *theirs, *ours;
} field_names[] = {
    {"stop.token_ids", "stop_token_ids"},
    {"stop.min_tokens", "min_tokens"},
    {"n_logprobs", "top_logprobs"},
};

/* The field's name that text begins with, in this API's words; *rest: what follows it. "": none. */
static void split_field(const char *text, char *field, size_t size, const char **rest)
{
    size_t n = strspn(text, "abcdefghijklmnopqrstuvwxyz_0123456789[].ABCDEFGHIJKLMNOPQRSTUVWXYZ");
    *rest = text;
    field[0] = '\0';
    if (n == 0 || n >= size || strncmp(text + n, ": ", 2) != 0) return;
    memcpy(field, text, n);
    field[n] = '\0';
    *rest = text + n + 2;
    if (strncmp(field, "sampling.", 9) == 0) memmove(field, field + 9, n - 8);
    for (size_t i = 0; i < TD_COUNT(field_names); i++)
        if (strcmp(field, field_names[i].theirs) == 0) strcpy(field, field_names[i].ours); /* ours are not longer */
}

static bool blames_field(enum td_status st)
{
    return st == TD_E_INVALID || st == TD_E_NOT_FOUND || st == TD_E_UNIMPLEMENTED || st == TD_E_TOO_LARGE;
}

unsigned td_api_put_error(struct td_buf *out, const struct td_api_call *api, enum td_status st, const char *text)
{
    const struct call *c = (const struct call *)api;
    bool is_too_long = c->is_too_long || (api->run != NULL && td_run_is_too_long(api->run));
    unsigned status = st == TD_E_UNIMPLEMENTED || is_too_long ? 400 : td_http_status_of(st);
    char field[160] = "";
    const char *rest = text;
    if (blames_field(st)) split_field(text, field, sizeof field, &rest);
    const char *code = is_too_long                ? "context_length_exceeded"
                       : st == TD_E_UNIMPLEMENTED ? "unsupported_parameter"
                       : status == 404            ? "model_not_found"
                       : status == 429            ? "rate_limit_exceeded"
                                                  : NULL;
    struct td_buf message = {0};
    td_buf_printf(&message, "%s%s%s", field, field[0] != '\0' ? ": " : "", rest);
    td_http_put_error(out, status, field[0] != '\0' ? field : NULL, code, td_buf_cstr(&message));
    td_buf_free(&message);
    return status;
}

/* --- answers ------------------------------------------------------------------------------------------------------ */

/* The answer is complete: http is not ours any more. */
static void end(struct call *c) { c->api.http = NULL; }

void td_api_respond(struct td_api_call *api)
{
    struct call *c = call_of(api);
    if (api->http == NULL) return;
    if (api->out.failed) {
        td_api_fail(api, TD_E_NO_MEMORY, "no memory for the answer");
        return;
    }
    struct td_http_req *r = api->http;
    end(c);
    td_http_respond(r, 200, "application/json", api->out.data, api->out.n);
    td_buf_clear(&api->out);
}

enum td_status td_api_send(struct td_api_call *api, const char *event)
{
    if (api->http == NULL) return TD_E_CANCELED;
    if (api->out.failed) return TD_E_NO_MEMORY;
    if (!api->has_begun) td_http_sse_begin(api->http);
    api->has_begun = true;
    enum td_status st = td_http_sse(api->http, event, (const char *)api->out.data, api->out.n);
    td_buf_clear(&api->out);
    return st;
}

void td_api_end_stream(struct td_api_call *api, bool with_done)
{
    struct call *c = call_of(api);
    if (api->http == NULL) return;
    if (!api->has_begun) td_http_sse_begin(api->http);
    api->has_begun = true;
    td_buf_clear(&api->out);
    if (with_done) {
        td_buf_str(&api->out, "[DONE]");
        td_api_send(api, NULL);
    }
    struct td_http_req *r = api->http;
    end(c);
    td_http_end(r);
}

static void fail_stream(struct td_api_call *api, enum td_status st, const char *text)
{
    td_buf_clear(&api->out);
    if (api->endpoint->on_failure != NULL) {
        api->endpoint->on_failure(api, st, text);
        td_api_end_stream(api, false);
        return;
    }
    td_buf_str(&api->out, "{\"error\":");
    td_api_put_error(&api->out, api, st, text);
    td_buf_str(&api->out, "}");
    td_api_send(api, NULL);
    td_api_end_stream(api, true);
}

void td_api_fail(struct td_api_call *api, enum td_status st, const char *text)
{
    struct call *c = call_of(api);
    if (api->http == NULL) return;
    if (api->has_begun) {
        fail_stream(api, st, text);
        return;
    }
    struct td_buf *b = &api->out;
    td_buf_clear(b);
    td_buf_str(b, "{\"error\":");
    unsigned status = td_api_put_error(b, api, st, text);
    td_buf_str(b, "}\n");
    struct td_http_req *r = api->http;
    if (status == 429 || status == 503) td_http_set_header(r, "Retry-After", RETRY_AFTER_S);
    end(c);
    td_http_respond(r, status, "application/json", b->data, b->failed ? 0 : b->n);
    td_buf_clear(b);
}

/* --- the run ------------------------------------------------------------------------------------------------------ */

static enum td_status on_run_event(void *user, uint32_t choice, const struct td_choice_event *e)
{
    struct call *c = user;
    return c->api.endpoint->on_event(&c->api, choice, e);
}

static void on_run_done(void *user, enum td_status st, const char *text)
{
    struct call *c = user;
    if (st == TD_OK)
        c->api.endpoint->on_end(&c->api);
    else
        td_api_fail(&c->api, st, text);
    TD_CHECK(c->api.http == NULL); /* answered */
    c->api.run = NULL;             /* frees itself */
    free_if_over(c);
}

static void begin_run(struct call *c)
{
    static const struct td_run_sink sink = {.on_event = on_run_event, .on_done = on_run_done};
    struct td_api_call *api = &c->api;
    struct td_err err = {{0}};
    if (c->request_id[0] != '\0') api->order.request_id = c->request_id;
    enum td_status st = td_run_start(api->router, &api->order, &sink, c, &api->run, &err);
    if (st == TD_OK)
        td_http_set_header(api->http, "X-Request-Id", td_run_id(api->run));
    else
        td_api_fail(api, st, err.text);
}

/* --- the body: any thread ----------------------------------------------------------------------------------------- */

/* Before anything is allocated for it: how deep it is nested, and how many values it may hold. */
static enum td_status measure(const struct td_buf *body, struct td_err *err)
{
    size_t depth = 0, n_values = 0;
    bool in_string = false;
    for (size_t i = 0; i < body->n; i++) {
        char ch = (char)body->data[i];
        if (in_string) {
            if (ch == '\\') i++;
            if (ch == '"') in_string = false;
            continue;
        }
        in_string = ch == '"';
        depth += ch == '[' || ch == '{';
        depth -= depth > 0 && (ch == ']' || ch == '}');
        n_values += ch == '[' || ch == '{' || ch == ',';
        if (depth > MAX_DEPTH)
            return td_err_set(err, TD_E_INVALID, "the body is nested deeper than %u levels", MAX_DEPTH);
    }
    if (n_values > MAX_VALUES) return td_err_set(err, TD_E_INVALID, "the body holds more than %u values", MAX_VALUES);
    return TD_OK;
}

enum td_status td_api_read_body(struct td_api_call *api, const struct td_buf *body, struct td_err *err)
{
    size_t n_valid = td_utf8_valid_prefix(body->data, body->n);
    if (n_valid < body->n) return td_err_set(err, TD_E_INVALID, "the body is not UTF-8 at byte %zu", n_valid);
    enum td_status st = measure(body, err);
    if (st != TD_OK) return st;
    json_error_t e;
    json_t *doc = json_loadb((const char *)body->data, body->n, JSON_ALLOW_NUL, &e);
    if (doc == NULL) {
        bool is_memory = json_error_code(&e) == json_error_out_of_memory;
        if (is_memory) return td_err_set(err, TD_E_NO_MEMORY, "no memory for the request");
        return td_err_set(err, TD_E_INVALID, "the body is not JSON: line %d column %d: %s", e.line, e.column, e.text);
    }
    api->order.doc = doc;
    struct td_fields f = td_fields_open(doc, err, "%s", "");
    if (f.st == TD_OK) api->endpoint->read(api, &f);
    return f.st;
}

static void read_body(struct td_work *w)
{
    struct call *c = TD_CONTAINER_OF(w, struct call, work);
    c->st = td_api_read_body(&c->api, &c->body, &c->err);
    td_buf_free(&c->body);
}

static void on_read(struct td_work *w)
{
    struct call *c = TD_CONTAINER_OF(w, struct call, work);
    c->is_reading = false;
    if (c->api.http == NULL)
        ; /* the client did not wait */
    else if (c->st != TD_OK)
        td_api_fail(&c->api, c->st, c->err.text);
    else if (c->api.endpoint->answer != NULL)
        c->api.endpoint->answer(&c->api);
    else
        begin_run(c);
    free_if_over(c);
}

/* --- requests ----------------------------------------------------------------------------------------------------- */

static void on_gone(struct td_http_req *r, enum td_status why)
{
    struct call *c = td_http_user(r);
    TD_MAGIC_CHECK(c, CALL_MAGIC);
    (void)why;
    c->api.http = NULL;
    if (c->api.run != NULL) td_run_cancel(c->api.run);
    c->api.run = NULL;
    free_if_over(c);
}

/* "application/json", "application/problem+json; charset=utf-8", or nothing said at all. */
static bool is_json_type(const char *type)
{
    if (type == NULL || type[0] == '\0') return true;
    size_t n = strcspn(type, "; \t");
    if (n == 16 && strncasecmp(type, "application/json", n) == 0) return true;
    return n > 17 && strncasecmp(type, "application/", 12) == 0 && strncasecmp(type + n - 5, "+json", 5) == 0;
}

/* A client's name for its request, if it is one that logs and workers can carry. */
static void take_request_id(struct call *c)
{
    const char *id = td_http_header(c->api.http, "x-request-id");
    size_t n = id != NULL ? strlen(id) : 0;
    if (n == 0 || n > TD_ROUTER_ID_MAX) return;
    for (size_t i = 0; i < n; i++)
        if (id[i] <= ' ' || id[i] > '~' || id[i] == '"' || id[i] == '\\') return;
    memcpy(c->request_id, id, n + 1);
}

struct route {
    struct td_router *router;
    const struct td_api_endpoint *endpoint;
};

static struct call *open_call(struct td_http_req *r, const struct route *route)
{
    struct call *c = td_calloc(1, sizeof *c);
    if (c == NULL) return NULL;
    c->magic = CALL_MAGIC;
    c->api = (struct td_api_call){.router = route->router, .endpoint = route->endpoint, .http = r};
    td_order_init(&c->api.order);
    if (route->endpoint->state_bytes > 0) {
        c->api.state = td_calloc(1, route->endpoint->state_bytes);
        if (c->api.state == NULL) {
            free(c);
            return NULL;
        }
    }
    c->api.created_s = td_clock_wall_ns() / TD_NS_PER_S;
    c->api.random = route->router->env->random(route->router->env);
    return c;
}

static void handle(struct td_http_req *r, void *user)
{
    static const struct td_http_handlers handlers = {.on_gone = on_gone};
    const char *type = td_http_header(r, "content-type");
    if (!is_json_type(type)) {
        td_http_error(r, 415, NULL, NULL, "Content-Type must be application/json, not %.100s", type);
        return;
    }
    struct call *c = open_call(r, user);
    if (c == NULL) {
        td_http_error(r, 503, NULL, NULL, "no memory for another request");
        return;
    }
    td_http_set_handlers(r, &handlers, c);
    take_request_id(c);
    td_http_take_body(r, &c->body);
    c->is_reading = true;
    c->work.work = read_body;
    c->work.done = on_read;
    if (c->body.n > INLINE_PARSE_BYTES) {
        td_loop_work(c->api.router->loop, &c->work);
    } else {
        read_body(&c->work);
        on_read(&c->work);
    }
}

enum td_status td_api_add_routes(struct td_router *ro, struct td_http *h)
{
    static struct route routes[TD_COUNT(endpoints)]; /* one router a process */
    for (size_t i = 0; i < TD_COUNT(endpoints); i++) {
        routes[i] = (struct route){ro, endpoints[i]};
        struct td_http_route row = {"POST", endpoints[i]->path, handle, &routes[i]};
        enum td_status st = td_http_add_public_routes(h, &row, 1);
        if (st != TD_OK) return st;
    }
    return td_api_add_models(ro, h);
}
