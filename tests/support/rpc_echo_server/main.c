/* A small gRPC server over common/rpc for foreign clients to try: tests/cluster/test_rpc.py. Service tandem.test.Echo,
 * requests are tandem.v1.TokenizeRequest (model is the instruction, text the content), replies
 * tandem.v1.DetokenizeReply:
 *   Unary     echoes text; model NAME of a status: ends with it and text as its message
 *   Count     model = how many replies to stream
 *   Bidi      echoes each message, ends with the client's half-close
 *   Sleep     answers once ("asleep"), then stays open
 *   Last      how the last call of Sleep or Flood closed: "CANCELED", "DEADLINE", ...; empty while none did
 *   Metadata  value of the request's metadata key that text names
 *   Flood     sends 1 KiB messages without end; model "abort": when the client stops reading, ends as SLOW_CLIENT
 *   Serving   model "on" or "off": what health says
 * Prints "listening PORT"; SIGTERM shuts down with a grace of 2 s. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/rpc/rpc.h"
#include "proto/inference.pb-c.h"

#define GRACE_MS          2000u
#define STALL_MS          300u
#define MAX_REQUEST_BYTES 65536u
#define FLOOD_BYTES       1024u

struct server {
    struct td_loop *loop;
    struct td_rpc *rpc;
    char last_closed[32];
};

struct flood {
    struct server *server;
    struct td_rpc_call *call;
    struct td_timer stall;
    bool does_abort;
};

static enum td_status reply(struct td_rpc_call *c, const void *text, size_t n)
{
    Tandem__V1__DetokenizeReply m = TANDEM__V1__DETOKENIZE_REPLY__INIT;
    m.text = (ProtobufCBinaryData){n, (uint8_t *)(uintptr_t)text};
    return td_rpc_send(c, &m.base);
}

static void reply_and_finish(struct td_rpc_call *c, const char *text)
{
    td_rpc_finish(c, reply(c, text, strlen(text)), NULL);
}

static const Tandem__V1__TokenizeRequest *request_of(const ProtobufCMessage *msg) { return (const void *)msg; }

static void ignore_closed(struct td_rpc_call *c, enum td_status st, const char *text) { (void)c, (void)st, (void)text; }

static void remember_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    (void)text;
    struct server *s = td_rpc_call_user(c);
    snprintf(s->last_closed, sizeof s->last_closed, "%s", td_status_name(st));
}

static void unary_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    const Tandem__V1__TokenizeRequest *q = request_of(msg);
    char text[4096];
    snprintf(text, sizeof text, "%.*s", (int)(q->text.len & 0xFFFF), (const char *)q->text.data);
    for (unsigned st = 0; st < TD_N_STATUS; st++)
        if (strcmp(q->model, td_status_name((enum td_status)st)) == 0) {
            td_rpc_finish(c, (enum td_status)st, text);
            return;
        }
    td_rpc_finish(c, reply(c, q->text.data, q->text.len), NULL);
}

static void count_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    unsigned n = (unsigned)strtoul(request_of(msg)->model, NULL, 10);
    enum td_status st = TD_OK;
    for (unsigned i = 0; i < n && st == TD_OK; i++) {
        char text[16];
        st = reply(c, text, (size_t)snprintf(text, sizeof text, "%u", i));
    }
    td_rpc_finish(c, st, NULL);
}

static void bidi_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    const Tandem__V1__TokenizeRequest *q = request_of(msg);
    enum td_status st = reply(c, q->text.data, q->text.len);
    if (st != TD_OK) td_rpc_finish(c, st, NULL);
}

static void bidi_half_close(struct td_rpc_call *c) { td_rpc_finish(c, TD_OK, NULL); }

static void sleep_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    (void)msg;
    reply(c, "asleep", 6);
}

static void last_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    (void)msg;
    reply_and_finish(c, ((struct server *)td_rpc_call_user(c))->last_closed);
}

static void metadata_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    char key[128];
    const Tandem__V1__TokenizeRequest *q = request_of(msg);
    snprintf(key, sizeof key, "%.*s", (int)(q->text.len & 0x7F), (const char *)q->text.data);
    const char *value = td_rpc_call_metadata(c, key);
    if (value == NULL)
        td_rpc_finish(c, TD_E_NOT_FOUND, "no such metadata");
    else
        reply_and_finish(c, value);
}

static void serving_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    td_rpc_set_serving(((struct server *)td_rpc_call_user(c))->rpc, strcmp(request_of(msg)->model, "on") == 0);
    reply_and_finish(c, "");
}

/* --- Flood ------------------------------------------------------------------------------------------------- */
static void flood_more(struct td_rpc_call *c)
{
    struct flood *f = td_rpc_call_user(c);
    struct td_env *env = td_loop_env(f->server->loop);
    char block[FLOOD_BYTES];
    memset(block, 'x', sizeof block);
    while (reply(c, block, sizeof block) == TD_OK) {
    }
    if (f->does_abort) env->timer_start(env, &f->stall, STALL_MS * TD_NS_PER_MS);
}

static void flood_stalled(struct td_timer *t)
{
    td_rpc_abort(TD_CONTAINER_OF(t, struct flood, stall)->call, TD_E_SLOW_CLIENT, "read faster, bitte schön");
}

static void flood_message(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    ((struct flood *)td_rpc_call_user(c))->does_abort = strcmp(request_of(msg)->model, "abort") == 0;
    flood_more(c);
}

static void flood_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    (void)text;
    struct flood *f = td_rpc_call_user(c);
    struct td_env *env = td_loop_env(f->server->loop);
    env->timer_stop(env, &f->stall);
    snprintf(f->server->last_closed, sizeof f->server->last_closed, "%s", td_status_name(st));
    free(f);
}

static void flood_open(struct td_rpc_call *c, void *service)
{
    static const struct td_rpc_handlers h = {
        .on_message = flood_message, .on_writable = flood_more, .on_closed = flood_closed};
    struct flood *f = td_calloc(1, sizeof *f);
    if (f == NULL) {
        td_rpc_finish(c, TD_E_NO_MEMORY, NULL);
        return;
    }
    f->server = service;
    f->call = c;
    f->stall.fire = flood_stalled;
    td_rpc_call_accept(c, &h, f);
}

/* --- the table --------------------------------------------------------------------------------------------- */
#define OPEN(name, closed, ...)                                                                                        \
    static void name##_open(struct td_rpc_call *c, void *service)                                                      \
    {                                                                                                                  \
        static const struct td_rpc_handlers h = {.on_message = name##_message, .on_closed = closed, ##__VA_ARGS__};    \
        td_rpc_call_accept(c, &h, service);                                                                            \
    }
OPEN(unary, ignore_closed)
OPEN(count, ignore_closed)
OPEN(bidi, ignore_closed, .on_half_close = bidi_half_close)
OPEN(sleep, remember_closed)
OPEN(last, ignore_closed)
OPEN(metadata, ignore_closed)
OPEN(serving, ignore_closed)

#define METHOD(path, open, takes_stream)                                                                               \
    {                                                                                                                  \
        "/tandem.test.Echo/" path, &tandem__v1__tokenize_request__descriptor,                                          \
            &tandem__v1__detokenize_reply__descriptor, MAX_REQUEST_BYTES, open, takes_stream                           \
    }
static const struct td_rpc_method methods[] = {
    METHOD("Unary", unary_open, false),
    METHOD("Count", count_open, false),
    METHOD("Bidi", bidi_open, true),
    METHOD("Sleep", sleep_open, false),
    METHOD("Last", last_open, false),
    METHOD("Metadata", metadata_open, false),
    METHOD("Flood", flood_open, false),
    METHOD("Serving", serving_open, false),
    {.path = NULL},
};

/* --- life -------------------------------------------------------------------------------------------------- */
static void on_shut(void *user) { td_loop_stop(((struct server *)user)->loop); }

static void on_signal(int signum, unsigned nth, void *user)
{
    (void)signum;
    td_rpc_shutdown(((struct server *)user)->rpc, nth > 1 ? 0 : GRACE_MS, on_shut, user);
}

int main(int argc, char **argv)
{
    struct server s = {.loop = NULL};
    struct td_err err = {.text = ""};
    enum td_status st = TD_E_INVALID;
    td_log_open("echo", TD_LOG_INFO);
    struct td_rpc_options options = {0};
    if (argc < 2 || argc > 5) {
        td_err_set(&err, st,
                   "usage: rpc_echo_server host:port [keepalive_ms [keepalive_timeout_ms [first_message_ms]]]");
        goto out;
    }
    uint32_t *const numbers[] = {&options.keepalive_ms, &options.keepalive_timeout_ms, &options.first_message_ms};
    for (int i = 2; i < argc; i++) *numbers[i - 2] = (uint32_t)strtoul(argv[i], NULL, 10);
    TD_TRY(td_loop_create(&s.loop));
    TD_TRY(td_loop_on_signal(s.loop, on_signal, &s));
    TD_TRY(td_rpc_create(s.loop, &options, &s.rpc));
    TD_TRY(td_rpc_serve(s.rpc, argv[1], methods, &s, &err));
    td_rpc_set_serving(s.rpc, true);
    printf("listening %u\n", td_rpc_port(s.rpc));
    fflush(stdout);
    st = td_loop_run(s.loop);
out:
    if (st != TD_OK) fprintf(stderr, "rpc_echo_server: %s\n", err.text[0] != 0 ? err.text : td_status_text(st));
    td_rpc_destroy(s.rpc);
    td_loop_destroy(s.loop);
    return st == TD_OK ? 0 : 1;
}
