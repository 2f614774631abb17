/* The in-process twin: nodes, their pools and peers, and the registry through which addresses are found. What travels
 * between them is in memory_wire.c. */
#include "common/transfer/memory.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/base/rng.h"
#include "common/transfer/memory_int.h"

#define MAGIC_ADDRESS 0x414d4454u /* "TDMA" */
#define MAGIC_KEY     0x4b4d4454u /* "TDMK" */
#define POOL_ALIGN    4096u

struct td_list td_memory_nodes = {&td_memory_nodes, &td_memory_nodes};
static uint64_t last_id;

struct memory_node *td_memory_find(uint64_t id)
{
    TD_LIST_FOREACH (it, &td_memory_nodes) {
        struct memory_node *n = TD_LIST_ENTRY(it, struct memory_node, link);
        if (n->id == id) return n;
    }
    return NULL;
}

struct memory_peer *td_memory_find_peer(uint64_t node, uint64_t peer)
{
    struct memory_node *n = td_memory_find(node);
    if (n == NULL || n->is_destroying) return NULL;
    TD_LIST_FOREACH (it, &n->peers) {
        struct memory_peer *p = TD_LIST_ENTRY(it, struct memory_peer, link);
        if (p->id == peer) return p;
    }
    return NULL;
}

uint64_t td_memory_between(struct memory_node *n, uint64_t min, uint64_t max)
{
    if (max <= min) return min;
    uint32_t r[4];
    td_rng_philox(n->seed, n->n_random++, 0, r);
    uint64_t span = max - min;
    return min + (span == UINT64_MAX ? ((uint64_t)r[0] << 32 | r[1]) : ((uint64_t)r[0] << 32 | r[1]) % (span + 1));
}

bool td_memory_chance(struct memory_node *n, uint32_t ppm)
{
    return ppm != 0 && td_memory_between(n, 1, 1000000) <= ppm;
}

/* --- nodes ---------------------------------------------------------------------------------------------------------
 */

enum td_status td_xfer_memory_open_env(struct td_env *env, uint64_t seed, const struct td_xfer_memory_trouble *trouble,
                                       const struct td_xfer_options *o, const struct td_xfer_handlers *h, void *user,
                                       struct td_xfer **out, struct td_err *err)
{
    struct memory_node *n = td_calloc(1, sizeof *n);
    if (n == NULL) return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    n->magic = MEMORY_MAGIC;
    n->id = ++last_id;
    n->env = env;
    n->seed = seed;
    if (trouble != NULL) n->trouble = *trouble;
    n->incarnation = o->incarnation;
    if (h != NULL) n->handlers = *h;
    n->user = user;
    struct td_list *const lists[] = {&n->pools, &n->peers, &n->canceled, &n->arrivals, &n->parked};
    for (size_t i = 0; i < TD_COUNT(lists); i++) td_list_init(lists[i]);
    td_buf_u32(&n->address, MAGIC_ADDRESS);
    td_buf_u64(&n->address, n->id);
    td_buf_u64(&n->address, n->incarnation);
    if (n->address.failed) {
        td_buf_free(&n->address);
        free(n);
        return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    }
    td_list_push_back(&td_memory_nodes, &n->link);
    *out = (struct td_xfer *)(void *)n;
    return TD_OK;
}

static enum td_status memory_open(struct td_loop *loop, const struct td_xfer_options *o,
                                  const struct td_xfer_handlers *h, void *user, struct td_xfer **out,
                                  struct td_err *err)
{
    struct td_env *env = td_loop_env(loop);
    return td_xfer_memory_open_env(env, env->random(env), NULL, o, h, user, out, err);
}

/* Everyone with a way to it learns of it in a while. */
static void be_noticed(const struct memory_node *gone)
{
    TD_LIST_FOREACH (it, &td_memory_nodes) {
        struct memory_node *n = TD_LIST_ENTRY(it, struct memory_node, link);
        TD_LIST_FOREACH (q, &n->peers) {
            struct memory_peer *p = TD_LIST_ENTRY(q, struct memory_peer, link);
            if (p->target == gone->id) td_memory_watch(p);
        }
    }
}

void td_xfer_memory_kill(struct td_xfer *x)
{
    struct memory_node *n = memory_node_of(x);
    if (n->is_dead) return;
    n->is_dead = true;
    td_memory_lose_wire(n);
    be_noticed(n);
}

void td_xfer_memory_pause(struct td_xfer *x, bool is_paused)
{
    struct memory_node *n = memory_node_of(x);
    if (n->is_paused == is_paused) return;
    n->is_paused = is_paused;
    if (!is_paused && !n->is_dead) td_memory_resume(n);
}

void td_xfer_memory_set_trouble(struct td_xfer *x, const struct td_xfer_memory_trouble *trouble)
{
    memory_node_of(x)->trouble = trouble == NULL ? (struct td_xfer_memory_trouble){0} : *trouble;
}

void td_xfer_memory_watch(struct td_xfer *x, td_xfer_memory_land_fn *fn, void *user)
{
    struct memory_node *n = memory_node_of(x);
    n->watch = fn;
    n->watch_user = user;
}

static void free_pool(struct memory_pool *p)
{
    td_list_remove(&p->link);
    td_buf_free(&p->key);
    if (p->is_ours) free(p->base);
    p->magic = 0;
    free(p);
}

static void memory_destroy(struct td_xfer *x)
{
    if (x == NULL) return;
    struct memory_node *n = memory_node_of(x);
    TD_CHECK(!n->is_destroying);
    n->is_destroying = true;
    if (!n->is_dead) td_memory_cancel_now(n); /* a killed process calls nothing back */
    bool was_dead = n->is_dead;
    n->is_dead = true;
    td_memory_drop(n);
    TD_LIST_FOREACH_SAFE (it, &n->peers) td_memory_free_peer(TD_LIST_ENTRY(it, struct memory_peer, link));
    td_memory_free_ops(&n->canceled);
    TD_LIST_FOREACH_SAFE (it, &n->pools) free_pool(TD_LIST_ENTRY(it, struct memory_pool, link));
    td_list_remove(&n->link);
    if (!was_dead) be_noticed(n);
    td_buf_free(&n->address);
    n->magic = 0;
    free(n);
}

static const void *memory_address(struct td_xfer *x, size_t *n_out)
{
    *n_out = memory_node_of(x)->address.n;
    return memory_node_of(x)->address.data;
}

static void memory_stats(const struct td_xfer *x, struct td_xfer_stats *out) { *out = memory_node_of(x)->stats; }

/* --- pools ---------------------------------------------------------------------------------------------------------
 */

static enum td_status make_pool(struct memory_node *n, uint8_t *base, bool is_ours, size_t n_bytes,
                                struct td_xfer_pool **out, struct td_err *err)
{
    struct memory_pool *p = td_calloc(1, sizeof *p);
    if (p == NULL) return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    *p = (struct memory_pool){
        .magic = MEMORY_POOL_MAGIC, .node = n, .id = ++last_id, .base = base, .n_bytes = n_bytes, .is_ours = is_ours};
    td_buf_u32(&p->key, MAGIC_KEY);
    td_buf_u64(&p->key, p->id);
    td_buf_u64(&p->key, (uint64_t)(uintptr_t)base);
    td_buf_u64(&p->key, n_bytes);
    td_list_push_back(&n->pools, &p->link);
    if (p->key.failed) {
        p->is_ours = false;
        free_pool(p);
        return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    }
    *out = (struct td_xfer_pool *)(void *)p;
    return TD_OK;
}

static enum td_status memory_pool_create(struct td_xfer *x, size_t n_bytes, struct td_xfer_pool **out,
                                         struct td_err *err)
{
    if (n_bytes == 0 || n_bytes > PTRDIFF_MAX - POOL_ALIGN)
        return td_err_set(err, TD_E_INVALID, "a pool of %zu bytes", n_bytes);
    uint8_t *base = aligned_alloc(POOL_ALIGN, (n_bytes + POOL_ALIGN - 1) / POOL_ALIGN * POOL_ALIGN);
    if (base == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for a pool of %zu bytes", n_bytes);
    memset(base, 0, n_bytes);
    enum td_status st = make_pool(memory_node_of(x), base, true, n_bytes, out, err);
    if (st != TD_OK) free(base);
    return st;
}

static enum td_status memory_pool_register(struct td_xfer *x, void *base, size_t n_bytes, struct td_xfer_pool **out,
                                           struct td_err *err)
{
    if (base == NULL || n_bytes == 0) return td_err_set(err, TD_E_INVALID, "no memory to register");
    return make_pool(memory_node_of(x), base, false, n_bytes, out, err);
}

static enum td_status memory_pool_register_device(struct td_xfer *x, void *base, size_t n_bytes,
                                                  struct td_xfer_pool **out, struct td_err *err)
{
    (void)x, (void)base, (void)n_bytes, (void)out;
    return td_err_set(err, TD_E_UNSUPPORTED, "transfer \"memory\" reaches no device's memory");
}

static struct memory_pool *pool_of(struct td_xfer_pool *p)
{
    struct memory_pool *q = (struct memory_pool *)(void *)p;
    TD_MAGIC_CHECK(q, MEMORY_POOL_MAGIC);
    return q;
}

static void memory_pool_destroy(struct td_xfer_pool *p)
{
    if (p != NULL) free_pool(pool_of(p));
}

static void *memory_pool_base(struct td_xfer_pool *p) { return pool_of(p)->base; }

static const void *memory_pool_key(struct td_xfer_pool *p, size_t *n_out)
{
    *n_out = pool_of(p)->key.n;
    return pool_of(p)->key.data;
}

/* --- peers ---------------------------------------------------------------------------------------------------------
 */

static enum td_status read_key(const struct td_xfer_remote *r, unsigned i, struct memory_peer *p, struct td_err *err)
{
    struct td_reader rd = {.p = r->key, .n = r->n_key};
    uint32_t magic = td_read_u32(&rd);
    p->pools[i] = td_read_u64(&rd);
    uint64_t base = td_read_u64(&rd);
    p->n_bytes[i] = td_read_u64(&rd);
    if (rd.failed || rd.n != 0 || magic != MAGIC_KEY)
        return td_err_set(err, TD_E_INVALID, "pool %u: not a pool key", i);
    if (base != r->base)
        return td_err_set(err, TD_E_MISMATCH, "pool %u: key is for base %llx, descriptor says %llx", i,
                          (unsigned long long)base, (unsigned long long)r->base);
    return TD_OK;
}

static enum td_status memory_peer_open(struct td_xfer *x, uint64_t incarnation, const void *address, size_t n_address,
                                       const struct td_xfer_remote *pools, unsigned n_pools, struct td_xfer_peer **out,
                                       struct td_err *err)
{
    struct memory_node *n = memory_node_of(x);
    if (n->is_destroying) return TD_E_CANCELED;
    struct td_reader rd = {.p = address, .n = address == NULL ? 0 : n_address};
    uint32_t magic = td_read_u32(&rd);
    uint64_t target = td_read_u64(&rd), told = td_read_u64(&rd);
    if (rd.failed || rd.n != 0 || magic != MAGIC_ADDRESS)
        return td_err_set(err, TD_E_INVALID, "not a transfer address");
    if (told != incarnation)
        return td_err_set(err, TD_E_MISMATCH, "the address is of incarnation %016llx, wanted is %016llx",
                          (unsigned long long)told, (unsigned long long)incarnation);
    if (n_pools > TD_XFER_POOLS_MAX)
        return td_err_set(err, TD_E_INVALID, "%u pools; at most %d", n_pools, TD_XFER_POOLS_MAX);
    struct memory_node *to = td_memory_find(target);
    bool is_gone = to == NULL || to->is_dead;
    /* On one machine that shows at once, over a network only later: either, when deaths take a while to be noticed. */
    if (is_gone && (n->trouble.notice_max_ns == 0 || td_memory_chance(n, 500000)))
        return td_err_set(err, TD_E_PEER_LOST, "process of incarnation %016llx is gone",
                          (unsigned long long)incarnation);
    struct memory_peer *p = td_calloc(1, sizeof *p);
    if (p == NULL) return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    p->magic = MEMORY_PEER_MAGIC;
    p->node = n;
    p->id = ++last_id;
    p->target = target;
    p->incarnation = incarnation;
    p->n_pools = n_pools;
    td_list_init(&p->ops);
    td_list_push_back(&n->peers, &p->link);
    for (unsigned i = 0; i < n_pools; i++) {
        enum td_status st = read_key(&pools[i], i, p, err);
        if (st == TD_OK) continue;
        td_memory_free_peer(p);
        return st;
    }
    if (is_gone) td_memory_watch(p);
    *out = (struct td_xfer_peer *)(void *)p;
    return TD_OK;
}

void td_memory_free_peer(struct memory_peer *p)
{
    td_memory_free_ops(&p->ops);
    p->node->env->timer_stop(p->node->env, &p->notice);
    td_list_remove(&p->link);
    p->magic = 0;
    free(p);
}

static void memory_peer_close(struct td_xfer_peer *peer)
{
    struct memory_peer *p = memory_peer_of(peer);
    if (p->node->is_destroying) return; /* from within a done: it goes with the rest */
    td_memory_cancel(p);
    td_memory_free_peer(p);
}

static const char *memory_peer_transport(struct td_xfer_peer *p)
{
    return memory_peer_of(p)->n_pools != 0 ? "memory" : "?";
}
static bool memory_peer_is_one_sided(struct td_xfer_peer *p) { return memory_peer_of(p)->n_pools != 0; }

const struct td_xfer_ops td_xfer_memory = {
    .name = "memory",
    .open = memory_open,
    .destroy = memory_destroy,
    .pool_create = memory_pool_create,
    .pool_register = memory_pool_register,
    .pool_register_device = memory_pool_register_device,
    .pool_destroy = memory_pool_destroy,
    .pool_base = memory_pool_base,
    .address = memory_address,
    .pool_key = memory_pool_key,
    .peer_open = memory_peer_open,
    .peer_close = memory_peer_close,
    .put = td_memory_put,
    .flush = td_memory_flush,
    .send = td_memory_send,
    .peer_transport = memory_peer_transport,
    .peer_is_one_sided = memory_peer_is_one_sided,
    .stats = memory_stats,
};
