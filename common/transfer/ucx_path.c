/* Which way puts into a peer's pool go, decided when the peer is opened. UCX has no call that says so in every version,
 * but it prints an endpoint's lanes ("lane[0]:  3:sysv/memory.0 md[3] -> ... am am_bw#0"), the key card says what the
 * memory there is, and ucp_rkey_ptr says whether it is mapped here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"
#include "common/transfer/ucx_int.h"

#define MAX_LANES 32

struct lanes {
    unsigned n;
    struct {
        char transport[32];
        bool is_am;
    } lane[MAX_LANES];
};

static void read_line(const char *line, struct lanes *l)
{
    const char *s = strstr(line, "lane[");
    if (s == NULL || l->n == MAX_LANES || (s = strchr(s, ']')) == NULL || s[1] != ':') return;
    s = strchr(s + 2, ':'); /* behind the resource's number */
    if (s == NULL) return;
    size_t n = strcspn(++s, "/ ");
    if (n == 0 || n >= sizeof l->lane[0].transport || s[n] != '/') return;
    memcpy(l->lane[l->n].transport, s, n);
    l->lane[l->n].transport[n] = 0;
    size_t end = strcspn(s, "\n");
    const char *am = strstr(s, " am");
    while (am != NULL && am < s + end && am[3] != ' ' && am[3] != '\n' && am[3] != 0) am = strstr(am + 1, " am");
    l->lane[l->n].is_am = am != NULL && am < s + end;
    l->n++;
}

static void read_lanes(ucp_ep_h ep, struct lanes *l)
{
    char *text = NULL;
    size_t n = 0;
    l->n = 0;
    FILE *f = open_memstream(&text, &n);
    if (f == NULL) return;
    ucp_ep_print_info(ep, f);
    fclose(f);
    for (char *line = text; line != NULL && *line != 0;) {
        char *next = strchr(line, '\n');
        if (next != NULL) *next++ = 0;
        read_line(line, l);
        line = next;
    }
    free(text);
}

static const char *find(const struct lanes *l, const char *prefix)
{
    for (unsigned i = 0; i < l->n; i++)
        if (strncmp(l->lane[i].transport, prefix, strlen(prefix)) == 0) return l->lane[i].transport;
    return NULL;
}

static void find_path(const struct ucx_peer *p, const struct lanes *l, struct ucx_remote *r)
{
    /* Networks whose adapters write the memory themselves. */
    static const char *const adapters[] = {"rc", "dc", "gga", "srd", "ugni"};
    const char *direct = NULL, *other = l->n != 0 ? l->lane[0].transport : "?";
    void *here;
    bool is_mapped = ucp_rkey_ptr(r->rkey, r->base, &here) == UCS_OK;
    switch (r->kind) {
    case TD_POOL_SYSV:
    case TD_POOL_POSIX:
        if (is_mapped) direct = find(l, r->kind == TD_POOL_SYSV ? "sysv" : "posix");
        break;
    case TD_POOL_DEVICE: direct = is_mapped ? "cuda_ipc" : find(l, "cuda_ipc"); break;
    default: break;
    }
    if (is_mapped && direct != NULL && td_ucx_mapped_suits(p->x, r->kind)) r->here = here;
    for (size_t i = 0; direct == NULL && i < TD_COUNT(adapters); i++) direct = find(l, adapters[i]);
    for (unsigned i = 0; i < l->n; i++)
        if (l->lane[i].is_am) other = l->lane[i].transport;
    snprintf(r->transport, sizeof r->transport, "%s%s", direct != NULL ? direct : other,
             r->here != NULL ? " mapped" : "");
    r->is_one_sided = direct != NULL;
    r->is_emulated = direct == NULL && r->kind != TD_POOL_DEVICE; /* only UCX can copy into a device */
    TD_INFO("xfer_path", "peer=%016llx transport=\"%s\" one_sided=%s lanes=%u", (unsigned long long)p->incarnation,
            r->transport, r->is_one_sided ? "yes" : "no", l->n);
}

void td_ucx_find_paths(struct ucx_peer *p)
{
    struct lanes l;
    read_lanes(p->ep, &l);
    p->is_tcp = find(&l, "tcp") != NULL;
    p->is_all_mapped = p->n_pools != 0;
    for (unsigned i = 0; i < p->n_pools; i++) {
        find_path(p, &l, &p->pools[i]);
        if (p->pools[i].here == NULL) p->is_all_mapped = false;
    }
}

static bool uses(ucp_context_h c, const char *one, const char *other)
{
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (f == NULL) return false;
    ucp_context_print_info(c, f);
    fclose(f);
    /* "resource 0  :  md 0  dev 0  flags -- sysv/memory": what is in use, not merely built in */
    bool has = text != NULL && (strstr(text, one) != NULL || strstr(text, other) != NULL);
    free(text);
    return has;
}

bool td_ucx_has_shared_memory(ucp_context_h c) { return uses(c, " sysv/", " posix/"); }
bool td_ucx_has_device_memory(ucp_context_h c) { return uses(c, " cuda_ipc/", " cuda_ipc/"); }
