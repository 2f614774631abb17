/* One channel for the member's life; on it one Join call after another.
 *
 *   OUT ---- backoff over ----> ASKING ---- JoinReply ----> IN ---- heartbeats ...
 *    ^                            |                          |
 *    +------ call closed, or no reply within REPLY_MS -------+
 * A router that hangs is noticed by rpc's keepalive, one that accepts the call but never replies by REPLY_MS. */
#include "common/handoff/fleet_member.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#define MEMBER_MAGIC         0x6d656d62u /* "memb" */
#define JOIN_PATH            "/tandem.v1.Fleet/Join"
#define FIRST_BACKOFF_MS     100u
#define MAX_BACKOFF_MS       2000u
#define REPLY_MS             5000u
#define DEFAULT_HEARTBEAT_MS 500u
#define MIN_HEARTBEAT_MS     20u /* whatever a router asks for */
#define MAX_HEARTBEAT_MS     10000u

struct td_fleet_member {
    uint32_t magic;
    struct td_rpc *rpc;
    struct td_env *env;
    struct td_rpc_channel *channel;
    struct td_rpc_call *call; /* NULL: OUT */
    struct td_fleet_identity id;
    struct td_descriptor_msg descriptor;
    struct td_fleet_handlers h;
    void *user;
    struct td_timer timer; /* OUT: backoff; ASKING: REPLY_MS; IN: heartbeat */
    uint32_t backoff_ms, heartbeat_ms;
    bool is_joined, has_left;
    bool has_warned; /* of this absence of the router */
    uint64_t router, n_joins;
    bool has_told; /* this router, of the prefix cache */
    uint64_t changes[TD_FLEET_MAX_CHANGES];
    char *address;
};

static void start_timer(struct td_fleet_member *m, uint32_t ms)
{
    m->env->timer_start(m->env, &m->timer, ms * TD_NS_PER_MS);
}

static void member_free(struct td_fleet_member *m)
{
    m->magic = 0;
    free(m->address);
    free(m);
}

/* ---- sending -------------------------------------------------------------------------------------------------------
 */

static enum td_status send_identity(struct td_fleet_member *m)
{
    Tandem__V1__Identity id = TANDEM__V1__IDENTITY__INIT;
    id.role = m->id.role;
    id.name = (char *)m->id.name;
    id.rpc_address = (char *)m->id.rpc_address;
    id.http_address = (char *)m->id.http_address;
    id.model = (char *)m->id.model;
    id.version = (char *)m->id.version;
    id.max_context_tokens = m->id.max_context_tokens;
    id.vocab_size = m->id.vocab_size;
    id.step_timeout_ms = m->id.step_timeout_ms;
    id.n_eos_ids = m->id.n_eos;
    id.eos_ids = (uint32_t *)m->id.eos_ids;
    id.descriptor = &m->descriptor.peer;
    Tandem__V1__JoinUpdate up = TANDEM__V1__JOIN_UPDATE__INIT;
    up.update_case = TANDEM__V1__JOIN_UPDATE__UPDATE_IDENTITY;
    up.identity = &id;
    return td_rpc_send(m->call, &up.base);
}

/* A heartbeat that finds no room is left out: the router does not read, and keepalive will tell whether it lives. */
static void send_load(struct td_fleet_member *m)
{
    Tandem__V1__Load load = TANDEM__V1__LOAD__INIT;
    m->h.load(m->user, &load);
    Tandem__V1__JoinUpdate up = TANDEM__V1__JOIN_UPDATE__INIT;
    up.update_case = TANDEM__V1__JOIN_UPDATE__UPDATE_LOAD;
    up.load = &load;
    enum td_status st = td_rpc_send(m->call, &up.base);
    if (st != TD_OK) TD_DEBUG("heartbeat_left_out", "router=%s status=%s", m->address, td_status_name(st));
}

/* Whatever finds no room is told anew, from the start, another time. */
static void send_prefixes(struct td_fleet_member *m)
{
    if (m->h.prefixes == NULL) return;
    for (;;) {
        Tandem__V1__PrefixNews news = TANDEM__V1__PREFIX_NEWS__INIT;
        bool is_all = false;
        news.n_changes = m->h.prefixes(m->user, !m->has_told, m->changes, &is_all);
        if (news.n_changes == 0 && !is_all) return;
        news.changes = m->changes;
        news.is_all = is_all;
        Tandem__V1__JoinUpdate up = TANDEM__V1__JOIN_UPDATE__INIT;
        up.update_case = TANDEM__V1__JOIN_UPDATE__UPDATE_PREFIXES;
        up.prefixes = &news;
        m->has_told = td_rpc_send(m->call, &up.base) == TD_OK;
        if (!m->has_told) return;
    }
}

/* ---- the stream ----------------------------------------------------------------------------------------------------
 */

static void out_for_a_while(struct td_fleet_member *m)
{
    /* Half of it is random, so that a fleet does not return in step. */
    uint32_t ms = m->backoff_ms / 2 + (uint32_t)(m->env->random(m->env) % (m->backoff_ms / 2 + 1));
    start_timer(m, ms);
    m->backoff_ms = m->backoff_ms * 2 < MAX_BACKOFF_MS ? m->backoff_ms * 2 : MAX_BACKOFF_MS;
}

static void on_reply(struct td_rpc_call *c, const ProtobufCMessage *msg)
{
    struct td_fleet_member *m = td_rpc_call_user(c);
    TD_MAGIC_CHECK(m, MEMBER_MAGIC);
    if (m->has_left || m->call != c) return;
    const Tandem__V1__JoinReply *reply = (const Tandem__V1__JoinReply *)msg;
    uint32_t ms = reply->heartbeat_ms == 0 ? DEFAULT_HEARTBEAT_MS : reply->heartbeat_ms;
    if (ms < MIN_HEARTBEAT_MS) ms = MIN_HEARTBEAT_MS;
    if (ms > MAX_HEARTBEAT_MS) ms = MAX_HEARTBEAT_MS;
    m->heartbeat_ms = ms;
    start_timer(m, ms);
    if (m->is_joined) return; /* only a new rhythm */
    m->is_joined = true;
    m->has_warned = false;
    m->router = reply->router;
    m->backoff_ms = FIRST_BACKOFF_MS;
    m->n_joins++;
    m->has_told = false;
    TD_INFO("fleet_joined", "router=%s incarnation=%016" PRIx64 " heartbeat_ms=%u", m->address, m->router, ms);
    send_load(m);
    send_prefixes(m);
    if (m->h.on_joined != NULL) m->h.on_joined(m->user, true, m->router);
}

static void on_closed(struct td_rpc_call *c, enum td_status st, const char *text)
{
    struct td_fleet_member *m = td_rpc_call_user(c);
    TD_MAGIC_CHECK(m, MEMBER_MAGIC);
    TD_CHECK(m->call == c);
    m->call = NULL;
    if (m->has_left) {
        member_free(m);
        return;
    }
    bool was_joined = m->is_joined;
    m->is_joined = false;
    if (!m->has_warned) { /* once per absence: a router may start much later */
        m->has_warned = true;
        TD_WARN(was_joined ? "fleet_left_alone" : "fleet_not_joined", "router=%s status=%s %s", m->address,
                td_status_name(st), text);
    }
    out_for_a_while(m);
    if (was_joined && m->h.on_joined != NULL) m->h.on_joined(m->user, false, m->router);
}

static const struct td_rpc_handlers call_handlers = {.on_message = on_reply, .on_closed = on_closed};

static void ask(struct td_fleet_member *m)
{
    enum td_status st = td_rpc_call_start(m->channel, JOIN_PATH, &tandem__v1__join_reply__descriptor, TD_NEVER_NS,
                                          false, NULL, &call_handlers, m, &m->call);
    if (st != TD_OK) {
        m->call = NULL;
        out_for_a_while(m);
        return;
    }
    st = send_identity(m);
    if (st != TD_OK) {
        TD_WARN("fleet_not_joined", "router=%s sending the identity: %s", m->address, td_status_name(st));
        td_rpc_cancel(m->call);
    }
    start_timer(m, REPLY_MS);
}

static void on_timer(struct td_timer *t)
{
    struct td_fleet_member *m = TD_CONTAINER_OF(t, struct td_fleet_member, timer);
    if (m->call == NULL) {
        ask(m);
    } else if (m->is_joined) {
        send_load(m);
        send_prefixes(m);
        start_timer(m, m->heartbeat_ms);
    } else {
        td_rpc_cancel(m->call); /* on_closed goes on */
    }
}

/* ---- life ----------------------------------------------------------------------------------------------------------
 */

enum td_status td_fleet_member_create(struct td_rpc *rpc, struct td_env *env, const char *router,
                                      const struct td_fleet_identity *id, const struct td_fleet_handlers *h, void *user,
                                      struct td_fleet_member **out)
{
    enum td_status st = TD_E_NO_MEMORY;
    TD_CHECK(h->load != NULL);
    struct td_fleet_member *m = td_calloc(1, sizeof *m);
    if (m == NULL) goto out;
    *m = (struct td_fleet_member){
        .magic = MEMBER_MAGIC,
        .rpc = rpc,
        .env = env,
        .id = *id,
        .h = *h,
        .user = user,
        .timer.fire = on_timer,
        .backoff_ms = FIRST_BACKOFF_MS,
        .heartbeat_ms = DEFAULT_HEARTBEAT_MS,
        .address = td_strdup(router),
    };
    if (m->address == NULL) goto out;
    td_descriptor_to_msg(id->descriptor, &m->descriptor);
    TD_TRY(td_rpc_channel_open(rpc, router, &m->channel));
    start_timer(m, 0);
    *out = m;
    m = NULL;
out:
    if (m != NULL) member_free(m);
    return st;
}

void td_fleet_member_report(struct td_fleet_member *m)
{
    if (m->is_joined && m->call != NULL) send_load(m);
}

void td_fleet_member_leave(struct td_fleet_member *m)
{
    if (m == NULL) return;
    m->env->timer_stop(m->env, &m->timer);
    m->has_left = true;
    bool has_call = m->call != NULL;
    td_rpc_channel_close(m->channel); /* cancels the call, whose on_closed frees m */
    m->channel = NULL;
    if (!has_call) member_free(m);
}

bool td_fleet_member_is_joined(const struct td_fleet_member *m) { return m->is_joined; }

void td_fleet_member_describe(const struct td_fleet_member *m, struct td_buf *out)
{
    td_buf_printf(out, "{\"is_joined\":%s,\"router\":\"%016" PRIx64 "\",\"heartbeat_ms\":%u,\"joins\":%" PRIu64 "}",
                  m->is_joined ? "true" : "false", m->router, m->heartbeat_ms, m->n_joins);
}
