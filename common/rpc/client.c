/* Channels and the start of calls on them. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/rpc/rpc_int.h"

/* A peer that restarts is found again quickly; one attempt may take CONNECT_MS (a host that answers nothing). */
#define BACKOFF_MS     100
#define MAX_BACKOFF_MS 1000
#define CONNECT_MS     2000

enum td_status td_rpc_channel_open(struct td_rpc *r, const char *address, struct td_rpc_channel **out)
{
    if (r->is_destroying) return TD_E_CANCELED;
    struct td_rpc_channel *ch = td_calloc(1, sizeof *ch);
    if (ch == NULL || (ch->address = td_strdup(address)) == NULL) {
        free(ch);
        return TD_E_NO_MEMORY;
    }
    ch->rpc = r;
    grpc_arg args[] = {
        RPC_INT_ARG(GRPC_ARG_ENABLE_RETRIES, 0), /* the router retries, with another worker */
        RPC_INT_ARG(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_MS),
        RPC_INT_ARG(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_MS), /* also the time that one attempt is given */
        RPC_INT_ARG(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, MAX_BACKOFF_MS),
        RPC_INT_ARG(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, MAX_BACKOFF_MS),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_TIME_MS, r->opt.keepalive_ms),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, r->opt.keepalive_timeout_ms),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        RPC_INT_ARG(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        RPC_INT_ARG(GRPC_ARG_HTTP2_BDP_PROBE, 0), /* the reader's window bounds what the writer can lose in buffers */
        RPC_INT_ARG(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, RPC_MAX_REPLY_BYTES),
        RPC_INT_ARG(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0), /* inflate.c does it, within the limit */
        RPC_INT_ARG(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),        /* a channel is a connection of its own */
        RPC_INT_ARG(GRPC_ARG_ENABLE_HTTP_PROXY, 0), /* no environment variable redirects a cluster's inside */
        RPC_INT_ARG(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
    };
    grpc_channel_args list = {TD_COUNT(args), args};
    grpc_channel_credentials *creds = grpc_insecure_credentials_create();
    ch->channel = grpc_channel_create(ch->address, creds, &list); /* never NULL: a bad address fails its calls */
    grpc_channel_credentials_release(creds);
    td_list_push_back(&r->channels, &ch->link);
    *out = ch;
    return TD_OK;
}

void rpc_channel_release(struct td_rpc_channel *ch)
{
    if (!ch->is_closed || ch->n_calls > 0) return;
    free(ch->address);
    free(ch);
}

void td_rpc_channel_close(struct td_rpc_channel *ch)
{
    if (ch == NULL) return;
    TD_CHECK(!ch->is_closed);
    TD_LIST_FOREACH (it, &ch->rpc->calls) {
        struct td_rpc_call *c = TD_LIST_ENTRY(it, struct td_rpc_call, link);
        if (c->channel == ch) td_rpc_cancel(c);
    }
    grpc_channel_destroy(ch->channel); /* its calls hold it until they end */
    ch->channel = NULL;
    ch->is_closed = true;
    td_list_remove(&ch->link);
    rpc_channel_release(ch);
}

static enum td_status copy_metadata(struct td_rpc_call *c, const struct td_rpc_metadata *md)
{
    size_t n = 0;
    while (md[n].key != NULL) n++;
    c->md = td_calloc(n, sizeof *c->md);
    if (c->md == NULL) return TD_E_NO_MEMORY;
    for (; c->n_md < n; c->n_md++) {
        grpc_metadata *m = &c->md[c->n_md];
        m->key = grpc_slice_from_copied_string(md[c->n_md].key);
        m->value = grpc_slice_from_copied_string(md[c->n_md].value);
        if (!grpc_header_key_is_legal(m->key) || !grpc_header_nonbin_value_is_legal(m->value)) {
            c->n_md++; /* its slices are released with the call */
            return TD_E_INVALID;
        }
    }
    return TD_OK;
}

enum td_status td_rpc_call_start(struct td_rpc_channel *ch, const char *path, const ProtobufCMessageDescriptor *reply,
                                 uint64_t deadline_ns, bool wait_for_ready, const struct td_rpc_metadata *md,
                                 const struct td_rpc_handlers *h, void *user, struct td_rpc_call **out)
{
    struct td_rpc *r = ch->rpc;
    TD_CHECK(h->on_closed != NULL);
    if (ch->is_closed || r->is_destroying) return TD_E_CANCELED;
    grpc_slice method = grpc_slice_from_copied_string(path);
    grpc_call *call = grpc_channel_create_call(ch->channel, NULL, GRPC_PROPAGATE_DEFAULTS, r->cq, method, NULL,
                                               rpc_timespec(deadline_ns), NULL);
    grpc_slice_unref(method);
    struct td_rpc_call *c = rpc_call_create(r, call);
    if (c == NULL) return TD_E_NO_MEMORY;
    c->incoming = reply;
    c->max_incoming_bytes = RPC_MAX_REPLY_BYTES;
    c->deadline_ns = deadline_ns;
    c->wait_for_ready = wait_for_ready;
    enum td_status st = md != NULL ? copy_metadata(c, md) : TD_OK;
    if (st != TD_OK) {
        rpc_call_free(c);
        return st;
    }
    c->h = *h;
    c->user = user;
    c->channel = ch;
    ch->n_calls++;
    rpc_call_mark_dirty(c);
    *out = c;
    return TD_OK;
}
