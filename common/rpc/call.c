/* One call, at either end: what is read, what waits to be sent, how it ends.
 *
 * Server:  [RECV_CLOSE] from the start, alone: it comes back when the call is over, whatever the reason, also while
 * idle. [RECV_MESSAGE] again after each delivery. [INITIAL_METADATA+MESSAGE] ... [MESSAGE] ... [MESSAGE+STATUS], one at
 * a time: what is asked for while one is in flight waits in `out`, and core's flow control holds the next. Closed once
 * RECV_CLOSE says cancelled, or STATUS was taken. Client:  [INITIAL_METADATA+MESSAGE+CLOSE...], [RECV_STATUS],
 * [RECV_INITIAL_METADATA+RECV_MESSAGE] ... Closed once the status and every other operation came back: two pollers may
 * swap their order. Sends start when the loop is about to block, so that a message and the end behind it leave as one
 * batch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/metrics/metrics.h"
#include "common/rpc/codec.h"
#include "common/rpc/inflate.h"
#include "common/rpc/rpc_int.h"

#define CALL_MAGIC 0x63616c6cu /* "call" */
/* A client's own deadline reaches us as a reset that may come a little before ours, which the wire has rounded up. */
#define DEADLINE_SLACK_NS (20 * TD_NS_PER_MS)

static void settle(struct td_rpc_call *c);

/* --- life -------------------------------------------------------------------------------------------------- */
static void on_read(struct rpc_tag *t, bool ok);
static void on_sent(struct rpc_tag *t, bool ok);
static void on_end(struct rpc_tag *t, bool ok);

struct td_rpc_call *rpc_call_create(struct td_rpc *r, grpc_call *call)
{
    struct td_rpc_call *c = td_calloc(1, sizeof *c);
    if (c == NULL) {
        grpc_call_cancel_with_status(call, GRPC_STATUS_RESOURCE_EXHAUSTED, "out of memory", NULL);
        grpc_call_unref(call);
        return NULL;
    }
    c->magic = CALL_MAGIC;
    c->rpc = r;
    c->call = call;
    td_list_init(&c->dirty_link);
    td_list_init(&c->out);
    td_list_push_back(&r->calls, &c->link);
    c->read = (struct rpc_tag){.done = on_read, .rpc = r};
    c->send = (struct rpc_tag){.done = on_sent, .rpc = r};
    c->end = (struct rpc_tag){.done = on_end, .rpc = r};
    grpc_metadata_array_init(&c->metadata);
    grpc_metadata_array_init(&c->trailing);
    c->details = grpc_empty_slice();
    c->end_slice = grpc_empty_slice();
    return c;
}

static void out_free(struct rpc_out *o)
{
    if (o == NULL) return;
    grpc_byte_buffer_destroy(o->bytes);
    free(o);
}

static void drop_queue(struct td_rpc_call *c)
{
    while (!td_list_is_empty(&c->out)) {
        struct rpc_out *o = TD_LIST_ENTRY(c->out.next, struct rpc_out, link);
        td_list_remove(&o->link);
        c->queued_bytes -= o->n;
        out_free(o);
    }
}

void rpc_call_free(struct td_rpc_call *c)
{
    TD_CHECK(c->n_in_flight == 0);
    drop_queue(c);
    td_list_remove(&c->link);
    td_list_remove(&c->dirty_link);
    if (c->metadata_text != NULL)
        for (size_t i = 0; i < c->metadata.count; i++) free(c->metadata_text[i]);
    free(c->metadata_text);
    grpc_metadata_array_destroy(&c->metadata);
    grpc_metadata_array_destroy(&c->trailing);
    for (size_t i = 0; i < c->n_md; i++) {
        grpc_slice_unref(c->md[i].key);
        grpc_slice_unref(c->md[i].value);
    }
    free(c->md);
    grpc_slice_unref(c->details);
    grpc_slice_unref(c->end_slice);
    free(c->end_text);
    gpr_free(c->peer);
    grpc_call_unref(c->call);
    if (c->is_server) rpc_server_call_gone(c->rpc);
    if (c->channel != NULL) {
        c->channel->n_calls--;
        rpc_channel_release(c->channel);
    }
    c->magic = 0;
    free(c);
}

/* --- the end ----------------------------------------------------------------------------------------------- */
static bool has_deadline_passed(const struct td_rpc_call *c)
{
    return c->deadline_ns != TD_NEVER_NS && td_clock_ns() + DEADLINE_SLACK_NS + c->timeout_ns / 64 >= c->deadline_ns;
}

static void set_end(struct td_rpc_call *c, enum td_status st, const char *text)
{
    char clean[RPC_MAX_STATUS_BYTES];
    td_codec_clean_text(text != NULL ? text : st == TD_OK ? "" : td_status_text(st), clean, sizeof clean);
    free(c->end_text);
    c->end_text = td_strdup(clean); /* without memory the status goes alone */
    c->end_status = st;
}

static char *text_of_slice(grpc_slice s)
{
    char *raw = td_strndup((const char *)GRPC_SLICE_START_PTR(s), GRPC_SLICE_LENGTH(s));
    if (raw == NULL) return NULL;
    size_t n = strlen(raw) + 1;
    char *clean = td_calloc(n, 1);
    if (clean != NULL) td_codec_clean_text(raw, clean, n);
    free(raw);
    return clean;
}

static bool slice_is(grpc_slice s, const char *text)
{
    size_t n = strlen(text);
    return GRPC_SLICE_LENGTH(s) == n && memcmp(GRPC_SLICE_START_PTR(s), text, n) == 0;
}

static enum td_status client_status(const struct td_rpc_call *c)
{
    char name[64] = "";
    for (size_t i = 0; i < c->trailing.count; i++) {
        const grpc_metadata *m = &c->trailing.metadata[i];
        if (!slice_is(m->key, RPC_STATUS_KEY) || GRPC_SLICE_LENGTH(m->value) >= sizeof name) continue;
        memcpy(name, GRPC_SLICE_START_PTR(m->value), GRPC_SLICE_LENGTH(m->value));
    }
    return rpc_status_from_grpc(c->code, name[0] != 0 ? name : NULL);
}

static void close_server(struct td_rpc_call *c)
{
    enum td_status st = TD_OK;
    if (c->is_cut)
        st = c->end_status;
    else if (!c->is_end_done)
        st = has_deadline_passed(c) ? TD_E_DEADLINE : TD_E_CANCELED;
    if (st != TD_OK || c->end_status != TD_OK) td_metric_add(TD_M_rpc_errors, 1);
    if (c->h.on_closed != NULL) c->h.on_closed(c, st, c->is_cut && c->end_text != NULL ? c->end_text : "");
}

static void close_client(struct td_rpc_call *c)
{
    enum td_status st = c->end_status;
    if (!c->is_cut) {
        st = client_status(c);
        free(c->end_text);
        c->end_text = text_of_slice(c->details);
    }
    c->h.on_closed(c, st, c->end_text != NULL ? c->end_text : "");
}

static void stop_first_wait(struct td_rpc_call *c)
{
    struct td_env *env = td_loop_env(c->rpc->loop);
    env->timer_stop(env, &c->first_wait);
}

/* Runs on_closed when its time has come, and frees the call when nothing of it is left with core. */
static void settle(struct td_rpc_call *c)
{
    bool is_over = c->is_server ? c->is_end_received && (c->was_cancelled || c->is_end_done || c->is_send_broken)
                                : c->is_end_received && c->n_in_flight == 0;
    if (is_over && !c->is_closed) {
        c->is_closed = true;
        stop_first_wait(c);
        drop_queue(c);
        td_list_remove(&c->dirty_link);
        if (c->is_server)
            close_server(c);
        else
            close_client(c);
    }
    if (c->is_closed && c->n_in_flight == 0) rpc_call_free(c);
}

static void on_end(struct rpc_tag *t, bool ok)
{
    (void)ok; /* these operations always succeed */
    struct td_rpc_call *c = TD_CONTAINER_OF(t, struct td_rpc_call, end);
    c->n_in_flight--;
    c->is_end_received = true;
    settle(c);
}

static void start_end(struct td_rpc_call *c)
{
    grpc_op op = {.op = c->is_server ? GRPC_OP_RECV_CLOSE_ON_SERVER : GRPC_OP_RECV_STATUS_ON_CLIENT};
    if (c->is_server) {
        op.data.recv_close_on_server.cancelled = &c->was_cancelled;
    } else {
        op.data.recv_status_on_client.trailing_metadata = &c->trailing;
        op.data.recv_status_on_client.status = &c->code;
        op.data.recv_status_on_client.status_details = &c->details;
    }
    TD_CHECK(rpc_start_batch(c, &op, 1, &c->end));
}

/* --- reading ----------------------------------------------------------------------------------------------- */
static void start_read(struct td_rpc_call *c)
{
    grpc_op ops[2] = {{.op = GRPC_OP_RECV_MESSAGE}, {.op = GRPC_OP_RECV_INITIAL_METADATA}};
    ops[0].data.recv_message.recv_message = &c->arrived;
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &c->metadata;
    size_t n = c->is_server || c->is_read_started ? 1 : 2;
    c->is_read_started = true;
    TD_CHECK(rpc_start_batch(c, ops, n, &c->read));
}

/* The peer sent what we do not take. */
static void refuse(struct td_rpc_call *c, enum td_status st, const char *text)
{
    td_metric_add(TD_M_rpc_bad_messages, 1);
    TD_WARN("rpc_bad_message", "peer=%s status=%s text=\"%s\"", td_rpc_call_peer(c), td_status_name(st), text);
    td_rpc_abort(c, c->is_server ? st : TD_E_PROTOCOL, text);
}

static enum td_status decode_compressed(const struct td_rpc_call *c, grpc_slice bytes, struct td_codec *k,
                                        ProtobufCMessage **out, struct td_err *err)
{
    uint8_t *plain;
    size_t n;
    enum td_status st =
        td_inflate(GRPC_SLICE_START_PTR(bytes), GRPC_SLICE_LENGTH(bytes), c->max_incoming_bytes, &plain, &n, err);
    if (st != TD_OK) return td_err_prefix(err, st, "%s", c->incoming->name);
    st = td_codec_unpack(k, c->incoming, plain, n, c->max_incoming_bytes, out, err);
    free(plain);
    return st;
}

static enum td_status decode(const struct td_rpc_call *c, grpc_byte_buffer *arrived, struct td_codec *k,
                             ProtobufCMessage **out, struct td_err *err)
{
    size_t n = grpc_byte_buffer_length(arrived);
    if (c->is_server && !c->method->takes_stream && c->n_messages > 0)
        return td_err_set(err, TD_E_INVALID, "%s takes one message, got another", c->method->path);
    if (n > c->max_incoming_bytes) /* before it is copied */
        return td_err_set(err, TD_E_TOO_LARGE, "%s has %zu bytes, the limit is %u", c->incoming->name, n,
                          c->max_incoming_bytes);
    grpc_byte_buffer_reader reader;
    if (!grpc_byte_buffer_reader_init(&reader, arrived))
        return td_err_set(err, TD_E_INVALID, "%s cannot be read", c->incoming->name);
    grpc_slice bytes = grpc_byte_buffer_reader_readall(&reader);
    grpc_byte_buffer_reader_destroy(&reader);
    enum td_status st = arrived->data.raw.compression != GRPC_COMPRESS_NONE
                            ? decode_compressed(c, bytes, k, out, err)
                            : td_codec_unpack(k, c->incoming, GRPC_SLICE_START_PTR(bytes), GRPC_SLICE_LENGTH(bytes),
                                              c->max_incoming_bytes, out, err);
    grpc_slice_unref(bytes); /* the message holds copies */
    return st;
}

static void deliver(struct td_rpc_call *c)
{
    struct td_err err = {.text = ""};
    struct td_codec k;
    ProtobufCMessage *msg;
    enum td_status st = decode(c, c->arrived, &k, &msg, &err);
    grpc_byte_buffer_destroy(c->arrived);
    c->arrived = NULL;
    if (st != TD_OK) {
        refuse(c, st, err.text);
        return;
    }
    c->n_messages++;
    if (c->h.on_message != NULL) c->h.on_message(c, msg);
    td_codec_release(&k, msg);
}

static bool is_deaf(const struct td_rpc_call *c) { return c->is_closed || c->is_cut || (c->is_server && c->wants_end); }

static void on_read(struct rpc_tag *t, bool ok)
{
    (void)ok; /* a failure leaves arrived NULL, and the end says why */
    struct td_rpc_call *c = TD_CONTAINER_OF(t, struct td_rpc_call, read);
    c->n_in_flight--;
    stop_first_wait(c);
    if (c->arrived == NULL) {
        if (c->is_server && !is_deaf(c) && !grpc_call_failed_before_recv_message(c->call)) {
            if (c->h.on_half_close != NULL)
                c->h.on_half_close(c);
            else if (c->n_messages == 0)
                td_rpc_finish(c, TD_E_INVALID, "no request message");
        }
    } else if (is_deaf(c)) {
        grpc_byte_buffer_destroy(c->arrived);
        c->arrived = NULL;
    } else {
        deliver(c);
        if (!is_deaf(c)) start_read(c);
    }
    settle(c);
}

/* --- sending ----------------------------------------------------------------------------------------------- */
static void on_sent(struct rpc_tag *t, bool ok)
{
    struct td_rpc_call *c = TD_CONTAINER_OF(t, struct td_rpc_call, send);
    c->n_in_flight--;
    c->is_sending = false;
    bool had_message = c->sending != NULL;
    if (had_message) c->queued_bytes -= c->sending->n;
    out_free(c->sending);
    c->sending = NULL;
    if (!ok) {
        c->is_send_broken = true;
        drop_queue(c);
    } else if (c->has_sent_end) {
        c->is_end_done = true;
    }
    if (ok && had_message && c->queued_bytes == 0 && !is_deaf(c) && !c->wants_end && c->h.on_writable != NULL)
        c->h.on_writable(c);
    rpc_call_flush(c);
    settle(c);
}

static grpc_op end_op(struct td_rpc_call *c)
{
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    if (!c->is_server) return op;
    op.op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    op.data.send_status_from_server.status = rpc_status_to_grpc(c->end_status);
    c->end_slice = grpc_slice_from_copied_string(c->end_text != NULL ? c->end_text : "");
    op.data.send_status_from_server.status_details = &c->end_slice;
    c->md = td_calloc(2, sizeof *c->md); /* without memory the code goes alone */
    if (c->md != NULL) {
        c->md[c->n_md].key = grpc_slice_from_static_string(RPC_STATUS_KEY);
        c->md[c->n_md++].value = grpc_slice_from_static_string(td_status_name(c->end_status));
    }
    if (c->md != NULL && c->end_status != TD_OK) {
        c->md[c->n_md].key = grpc_slice_from_static_string(RPC_DETAILS_KEY);
        c->md[c->n_md++].value = rpc_status_details(c->end_status, c->end_text != NULL ? c->end_text : "");
    }
    op.data.send_status_from_server.trailing_metadata_count = c->n_md;
    op.data.send_status_from_server.trailing_metadata = c->md;
    return op;
}

static void start_send(struct td_rpc_call *c)
{
    if (c->is_sending || c->has_sent_end || c->is_send_broken) return;
    bool has_message = !td_list_is_empty(&c->out);
    if (!has_message && !c->wants_end && (c->is_server || c->has_sent_initial)) return;
    grpc_op ops[3] = {{.op = GRPC_OP_SEND_INITIAL_METADATA}};
    size_t n = 0;
    if (!c->has_sent_initial) {
        c->has_sent_initial = true;
        if (!c->is_server) {
            ops[0].data.send_initial_metadata.count = c->n_md;
            ops[0].data.send_initial_metadata.metadata = c->md;
            if (c->wait_for_ready)
                ops[0].flags =
                    GRPC_INITIAL_METADATA_WAIT_FOR_READY | GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
        }
        n++;
    }
    if (has_message) {
        c->sending = TD_LIST_ENTRY(c->out.next, struct rpc_out, link);
        td_list_remove(&c->sending->link);
        ops[n] = (grpc_op){.op = GRPC_OP_SEND_MESSAGE};
        ops[n++].data.send_message.send_message = c->sending->bytes;
    }
    if (c->wants_end && td_list_is_empty(&c->out)) {
        c->has_sent_end = true;
        ops[n++] = end_op(c);
    }
    c->is_sending = true;
    TD_CHECK(rpc_start_batch(c, ops, n, &c->send));
}

void rpc_call_flush(struct td_rpc_call *c)
{
    if (c->is_closed) return;
    start_send(c);
    if (!c->is_server && !c->is_read_started) {
        start_end(c);
        start_read(c);
    }
}

void rpc_call_mark_dirty(struct td_rpc_call *c)
{
    if (td_list_is_empty(&c->dirty_link)) td_list_push_back(&c->rpc->dirty, &c->dirty_link);
}

/* A client may promise a call and never make it: without a deadline nothing else would end it while the client lives.
 */
static void on_first_wait_over(struct td_timer *t)
{
    struct td_rpc_call *c = TD_CONTAINER_OF(t, struct td_rpc_call, first_wait);
    char text[64];
    snprintf(text, sizeof text, "no request message within %u ms", c->rpc->opt.first_message_ms);
    td_rpc_finish(c, TD_E_DEADLINE, text);
}

void rpc_call_begin_server(struct td_rpc_call *c)
{
    struct td_env *env = td_loop_env(c->rpc->loop);
    start_end(c);
    if (c->method == NULL) return;
    start_read(c);
    c->first_wait.fire = on_first_wait_over;
    if (c->deadline_ns == TD_NEVER_NS)
        env->timer_start(env, &c->first_wait, c->rpc->opt.first_message_ms * TD_NS_PER_MS);
}

/* Packs straight into the slice that core sends. */
static struct rpc_out *pack(const ProtobufCMessage *msg, size_t n)
{
    struct rpc_out *o = td_calloc(1, sizeof *o);
    if (o == NULL) return NULL;
    grpc_slice s = grpc_slice_malloc(n);
    protobuf_c_message_pack(msg, GRPC_SLICE_START_PTR(s));
    o->bytes = grpc_raw_byte_buffer_create(&s, 1);
    o->n = n;
    grpc_slice_unref(s);
    return o;
}

/* --- what the daemon calls --------------------------------------------------------------------------------- */
void td_rpc_call_accept(struct td_rpc_call *c, const struct td_rpc_handlers *h, void *user)
{
    TD_MAGIC_CHECK(c, CALL_MAGIC);
    TD_CHECK(c->is_server && h->on_closed != NULL && c->h.on_closed == NULL);
    c->h = *h;
    c->user = user;
}

void *td_rpc_call_user(const struct td_rpc_call *c)
{
    TD_MAGIC_CHECK(c, CALL_MAGIC);
    return c->user;
}

uint64_t td_rpc_call_deadline_ns(const struct td_rpc_call *c) { return c->deadline_ns; }

const char *td_rpc_call_metadata(const struct td_rpc_call *call, const char *key)
{
    struct td_rpc_call *c = (struct td_rpc_call *)(uintptr_t)call; /* keeps NUL-terminated copies as it goes */
    if (!c->is_server || c->metadata.count == 0) return NULL;
    if (c->metadata_text == NULL) c->metadata_text = td_calloc(c->metadata.count, sizeof *c->metadata_text);
    if (c->metadata_text == NULL) return NULL;
    for (size_t i = 0; i < c->metadata.count; i++) {
        if (!slice_is(c->metadata.metadata[i].key, key)) continue;
        grpc_slice v = c->metadata.metadata[i].value;
        if (c->metadata_text[i] == NULL)
            c->metadata_text[i] = td_strndup((const char *)GRPC_SLICE_START_PTR(v), GRPC_SLICE_LENGTH(v));
        return c->metadata_text[i];
    }
    return NULL;
}

const char *td_rpc_call_peer(const struct td_rpc_call *call)
{
    struct td_rpc_call *c = (struct td_rpc_call *)(uintptr_t)call;
    if (c->channel != NULL) return c->channel->address;
    if (c->peer == NULL) c->peer = grpc_call_get_peer(c->call);
    return c->peer != NULL ? c->peer : "";
}

enum td_status td_rpc_send(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    TD_MAGIC_CHECK(c, CALL_MAGIC);
    if (c->is_closed || c->is_cut || c->wants_end || c->is_send_broken) return TD_E_CANCELED;
    size_t n = protobuf_c_message_get_packed_size(msg);
    if (c->queued_bytes > 0 && c->queued_bytes + n > c->rpc->opt.max_queued_bytes) return TD_E_BUSY;
    struct rpc_out *o = pack(msg, n);
    if (o == NULL) return TD_E_NO_MEMORY;
    td_list_push_back(&c->out, &o->link);
    c->queued_bytes += n;
    rpc_call_mark_dirty(c);
    return TD_OK;
}

uint64_t td_rpc_queued_bytes(const struct td_rpc_call *c) { return c->queued_bytes; }

void td_rpc_finish(struct td_rpc_call *c, enum td_status st, const char *text)
{
    TD_MAGIC_CHECK(c, CALL_MAGIC);
    TD_CHECK(c->is_server);
    if (c->is_closed || c->is_cut || c->wants_end) return;
    set_end(c, st, text);
    c->wants_end = true;
    rpc_call_mark_dirty(c);
}

void td_rpc_half_close(struct td_rpc_call *c)
{
    TD_MAGIC_CHECK(c, CALL_MAGIC);
    TD_CHECK(!c->is_server);
    if (c->is_closed || c->is_cut || c->wants_end) return;
    c->wants_end = true;
    rpc_call_mark_dirty(c);
}

void td_rpc_abort(struct td_rpc_call *c, enum td_status st, const char *text)
{
    TD_MAGIC_CHECK(c, CALL_MAGIC);
    TD_CHECK(st != TD_OK && st != TD_IN_PROGRESS);
    if (c->is_closed || c->is_cut || (c->is_server && c->has_sent_end)) return;
    set_end(c, st, text);
    c->is_cut = true;
    drop_queue(c);
    if (c->is_server && !c->is_sending) { /* the way is free: the ordinary end, with our trailer */
        c->wants_end = true;
        rpc_call_mark_dirty(c);
        return;
    }
    c->is_send_broken = true;
    grpc_call_cancel_with_status(c->call, rpc_status_to_grpc(st), c->end_text != NULL ? c->end_text : "", NULL);
    if (!c->is_server) rpc_call_mark_dirty(c); /* its end may not have been asked for yet */
}

void td_rpc_cancel(struct td_rpc_call *c) { td_rpc_abort(c, TD_E_CANCELED, ""); }
