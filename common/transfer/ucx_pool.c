/* Pools: memory that peers may write. UCX stores directly only into shared memory that it allocated itself, so that is
 * what pool_create asks for; if there is none (a transport list without shared memory, or too little of it), the pool
 * is plain memory and puts into it are emulated: they work, slowly and only while our transfer thread runs. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "common/base/log.h"
#include "common/base/mem.h"
#include "common/base/rng.h"
#include "common/transfer/ucx_int.h"

struct pool_call {
    struct ucx_call call;
    struct ucx_pool *p;
    bool is_given; /* register memory that exists */
    enum td_status status;
    struct td_err *err;
};

static struct ucx_pool *pool_of(struct td_xfer_pool *p)
{
    struct ucx_pool *q = (struct ucx_pool *)(void *)p;
    TD_MAGIC_CHECK(q, UCX_POOL_MAGIC);
    return q;
}

/* What the kernel mapped at base: UCX does not tell which of its allocators served. */
static enum td_pool_kind kind_of_mapping(const void *base)
{
    enum td_pool_kind kind = TD_POOL_HEAP;
    FILE *f = fopen("/proc/self/maps", "re");
    char line[512];
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        uintptr_t from, to;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &from, &to) != 2) continue;
        if ((uintptr_t)base < from || (uintptr_t)base >= to) continue;
        if (strstr(line, "/SYSV") != NULL) kind = TD_POOL_SYSV;
        if (strstr(line, "ucx_shm_posix") != NULL) kind = TD_POOL_POSIX;
        break;
    }
    if (f != NULL) fclose(f);
    return kind;
}

static void say_not_shared(const struct ucx *x, size_t n_bytes)
{
    if (!x->has_shared_memory) {
        TD_INFO("pool_not_shared", "bytes=%zu why=\"no shared-memory transport in use\" puts=emulated", n_bytes);
        return;
    }
    struct statvfs v;
    uint64_t dev_shm = statvfs("/dev/shm", &v) == 0 ? (uint64_t)v.f_bavail * v.f_frsize : 0;
    TD_WARN("pool_not_shared",
            "bytes=%zu why=\"no System V segment of that size (kernel.shmmax, kernel.shmall, memory limit), and "
            "/dev/shm has only %" PRIu64 " bytes free\" puts=\"emulated in software: slow\"",
            n_bytes, dev_shm);
}

static ucs_status_t map(struct ucx_pool *p, bool is_given)
{
    struct ucx *x = p->x;
    ucp_mem_map_params_t m = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
        .address = is_given ? p->base : NULL,
        .length = p->n_bytes,
        .flags = is_given ? 0 : UCP_MEM_MAP_ALLOCATE,
    };
    ucs_status_t s = ucp_mem_map(x->context, &m, &p->memh);
    if (s != UCS_OK) return s;
    ucp_mem_attr_t a = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_MEM_TYPE};
    s = ucp_mem_query(p->memh, &a);
    if (s != UCS_OK) return s;
    p->kind = a.mem_type == UCS_MEMORY_TYPE_HOST ? TD_POOL_HEAP : TD_POOL_DEVICE;
    if (is_given) return UCS_OK;
    p->base = a.address;
    p->kind = kind_of_mapping(a.address);
    if (p->kind == TD_POOL_HEAP) say_not_shared(x, p->n_bytes);
    memset(p->base, 0, p->n_bytes); /* not every allocator promises zeros; and better out of memory now than later */
    return UCS_OK;
}

static void create_call(struct ucx_call *call)
{
    struct pool_call *c = TD_CONTAINER_OF(call, struct pool_call, call);
    struct ucx_pool *p = c->p;
    char what[96];
    snprintf(what, sizeof what, "%s a pool of %zu bytes", c->is_given ? "registering" : "allocating", p->n_bytes);
    ucs_status_t s = map(p, c->is_given);
    if (s != UCS_OK) {
        c->status = td_ucx_err(c->err, s, what);
        return;
    }
    void *rkey;
    size_t n_rkey;
    s = ucp_rkey_pack(p->x->context, p->memh, &rkey, &n_rkey);
    if (s != UCS_OK) {
        c->status = td_ucx_err(c->err, s, "packing a pool's key");
        return;
    }
    struct td_card_key k = {.base = (uint64_t)(uintptr_t)p->base,
                            .n_bytes = p->n_bytes,
                            .secret = p->secret,
                            .kind = p->kind,
                            .rkey = rkey,
                            .n_rkey = (uint32_t)n_rkey};
    td_card_pack_key(&k, &p->key);
    ucp_rkey_buffer_release(rkey);
    td_list_push_back(&p->x->mapped, &p->map_link);
    c->status = p->key.failed ? td_err_set(c->err, TD_E_NO_MEMORY, "%s: out of memory", what) : TD_OK;
}

void td_ucx_pool_unmap(struct ucx_pool *p)
{
    if (p->memh != NULL) ucp_mem_unmap(p->x->context, p->memh);
    p->memh = NULL;
    td_list_remove(&p->map_link);
}

static void destroy_call(struct ucx_call *call) { td_ucx_pool_unmap(TD_CONTAINER_OF(call, struct pool_call, call)->p); }

void td_ucx_free_pool(struct ucx_pool *p)
{
    td_list_remove(&p->link);
    td_buf_free(&p->key);
    p->magic = 0;
    free(p);
}

static void destroy(struct ucx_pool *p)
{
    struct pool_call c = {.call.run = destroy_call, .p = p};
    td_ucx_call(p->x, &c.call);
    td_ucx_free_pool(p);
}

static enum td_status create(struct ucx *x, void *base, size_t n_bytes, struct td_xfer_pool **out, struct td_err *err)
{
    if (n_bytes == 0 || n_bytes > PTRDIFF_MAX) return td_err_set(err, TD_E_INVALID, "a pool of %zu bytes", n_bytes);
    if (x->is_destroying) return TD_E_CANCELED;
    struct ucx_pool *p = td_calloc(1, sizeof *p);
    if (p == NULL) return td_err_set(err, TD_E_NO_MEMORY, "out of memory");
    p->magic = UCX_POOL_MAGIC;
    p->x = x;
    p->base = base;
    p->n_bytes = n_bytes;
    while (p->secret == 0) p->secret = td_rng_system();
    td_list_push_back(&x->pools, &p->link);
    td_list_init(&p->map_link);
    struct pool_call c = {.call.run = create_call, .p = p, .is_given = base != NULL, .err = err};
    td_ucx_call(x, &c.call);
    if (c.status != TD_OK) {
        destroy(p);
        return c.status;
    }
    *out = (struct td_xfer_pool *)(void *)p;
    return TD_OK;
}

enum td_status td_ucx_pool_create(struct td_xfer *x, size_t n_bytes, struct td_xfer_pool **out, struct td_err *err)
{
    return create(ucx_of(x), NULL, n_bytes, out, err);
}

enum td_status td_ucx_pool_register(struct td_xfer *x, void *base, size_t n_bytes, struct td_xfer_pool **out,
                                    struct td_err *err)
{
    if (base == NULL) return td_err_set(err, TD_E_INVALID, "no memory to register");
    return create(ucx_of(x), base, n_bytes, out, err);
}

enum td_status td_ucx_pool_register_device(struct td_xfer *x, void *base, size_t n_bytes, struct td_xfer_pool **out,
                                           struct td_err *err)
{
    /* UCX without CUDA takes such an address for the host's, and would store through it. */
    if (!td_ucx_has_device_memory(ucx_of(x)->context))
        return td_err_set(err, TD_E_UNSUPPORTED, "UCX has no cuda_ipc here");
    enum td_status st = td_ucx_pool_register(x, base, n_bytes, out, err);
    if (st != TD_OK || pool_of(*out)->kind == TD_POOL_DEVICE) return st;
    destroy(pool_of(*out));
    *out = NULL;
    return td_err_set(err, TD_E_UNSUPPORTED, "UCX does not know this memory for a device's");
}

void td_ucx_pool_destroy(struct td_xfer_pool *p)
{
    if (p != NULL && !pool_of(p)->x->is_destroying) destroy(pool_of(p)); /* else it goes with the rest */
}

void *td_ucx_pool_base(struct td_xfer_pool *p) { return pool_of(p)->base; }

const void *td_ucx_pool_key(struct td_xfer_pool *p, size_t *n_out)
{
    struct ucx_pool *q = pool_of(p);
    *n_out = q->key.n;
    return q->key.data;
}
