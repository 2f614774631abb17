#include "common/handoff/descriptor.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- names of element types ----------------------------------------------------------------------------------------
 */

static const struct {
    const char *name;
    enum td_dtype type;
} kv_dtypes[] = {{"f32", TD_F32}, {"bf16", TD_BF16}, {"e4m3", TD_E4M3}};

const char *td_kv_dtype_name(enum td_dtype t)
{
    for (size_t i = 0; i < TD_COUNT(kv_dtypes); i++)
        if (kv_dtypes[i].type == t) return kv_dtypes[i].name;
    return "?";
}

enum td_status td_kv_dtype_parse(const char *name, enum td_dtype *out)
{
    for (size_t i = 0; i < TD_COUNT(kv_dtypes); i++)
        if (strcmp(kv_dtypes[i].name, name) == 0) {
            *out = kv_dtypes[i].type;
            return TD_OK;
        }
    return TD_E_INVALID;
}

/* ---- ours ----------------------------------------------------------------------------------------------------------
 */

void td_peer_layout_of(const struct td_model_config *c, const char *fingerprint, const char *weight_form,
                       const struct td_kv_group_layout kv[TD_KV_N_GROUPS], struct td_peer_layout *out)
{
    memset(out, 0, sizeof *out);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        out->kv[g] = kv[g];
        out->kv[g].n_heads = c->n_kv_heads;
        out->kv[g].n_pages = 0;
    }
    out->window_tokens = c->window;
    out->version = TD_KV_LAYOUT_VERSION;
    snprintf(out->fingerprint, sizeof out->fingerprint, "%s", fingerprint);
    snprintf(out->weight_form, sizeof out->weight_form, "%s", weight_form);
}

void td_peer_rank_layout(const struct td_descriptor *d, uint32_t rank, struct td_kv_group_layout out[TD_KV_N_GROUPS])
{
    TD_CHECK(rank < d->n_ranks);
    for (int g = 0; g < TD_KV_N_GROUPS; g++) {
        out[g] = d->layout.kv[g];
        out[g].n_heads /= d->n_ranks;
        out[g].n_pages = d->ranks[rank].n_pages[g];
    }
}

void td_descriptor_to_msg(const struct td_descriptor *d, struct td_descriptor_msg *out)
{
    const struct td_kv_group_layout *sliding = &d->layout.kv[TD_KV_SLIDING], *full = &d->layout.kv[TD_KV_FULL];
    tandem__v1__peer_descriptor__init(&out->peer);
    tandem__v1__kv_layout__init(&out->layout);
    Tandem__V1__KvLayout *l = &out->layout;
    l->page_tokens = full->page_tokens;
    l->n_sliding_layers = sliding->n_layers;
    l->n_full_layers = full->n_layers;
    l->n_kv_heads = full->n_heads;
    l->head_dim = full->head_dim;
    l->window_tokens = d->layout.window_tokens;
    l->kv_dtype_sliding = (char *)td_kv_dtype_name(sliding->dtype);
    l->kv_dtype_full = (char *)td_kv_dtype_name(full->dtype);
    l->model_fingerprint = (char *)d->layout.fingerprint;
    l->weight_form = (char *)d->layout.weight_form;
    l->layout_version = d->layout.version;
    for (uint32_t i = 0; i < d->n_ranks; i++) {
        const struct td_peer_rank *r = &d->ranks[i];
        Tandem__V1__RankMemory *m = &out->ranks[i];
        tandem__v1__rank_memory__init(m);
        m->worker_address = (ProtobufCBinaryData){.len = r->n_address, .data = (uint8_t *)r->address};
        m->sliding_base = r->pools[TD_KV_SLIDING].base;
        m->full_base = r->pools[TD_KV_FULL].base;
        m->sliding_rkey = (ProtobufCBinaryData){r->pools[TD_KV_SLIDING].n_key, (uint8_t *)r->pools[TD_KV_SLIDING].key};
        m->full_rkey = (ProtobufCBinaryData){r->pools[TD_KV_FULL].n_key, (uint8_t *)r->pools[TD_KV_FULL].key};
        m->n_sliding_pages = r->n_pages[TD_KV_SLIDING];
        m->n_full_pages = r->n_pages[TD_KV_FULL];
        out->rank_list[i] = m;
    }
    out->peer.incarnation = d->incarnation;
    out->peer.name = (char *)d->name;
    out->peer.layout = l;
    out->peer.n_ranks = d->n_ranks;
    out->peer.ranks = out->rank_list;
}

/* ---- theirs --------------------------------------------------------------------------------------------------------
 */

/* Strings end up in logs and JSON: printable ASCII, no quotes. */
static void copy_text(char *dst, size_t n_dst, const char *src)
{
    size_t n = 0;
    for (; src[n] != 0 && n < n_dst - 1; n++) {
        char c = src[n];
        dst[n] = c >= ' ' && c < 0x7f && c != '"' && c != '\\' ? c : '?';
    }
    dst[n] = 0;
}

static enum td_status check_range(struct td_err *err, const char *field, uint64_t v, uint64_t min, uint64_t max)
{
    if (v >= min && v <= max) return TD_OK;
    return td_err_set(err, TD_E_INVALID, "descriptor.%s is %" PRIu64 ", expected %" PRIu64 " to %" PRIu64, field, v,
                      min, max);
}

static enum td_status read_layout(const Tandem__V1__KvLayout *m, struct td_peer_layout *out, struct td_err *err)
{
    enum td_status st;
    enum td_dtype sliding, full;
    if (m == NULL) return td_err_set(err, TD_E_INVALID, "descriptor.layout is missing");
    TD_TRY(check_range(err, "layout.page_tokens", m->page_tokens, 1, 4096));
    TD_TRY(check_range(err, "layout.n_sliding_layers", m->n_sliding_layers, 0, TD_MAX_LAYERS));
    TD_TRY(check_range(err, "layout.n_full_layers", m->n_full_layers, 0, TD_MAX_LAYERS));
    TD_TRY(check_range(err, "layout.n_kv_heads", m->n_kv_heads, 1, 1024));
    TD_TRY(check_range(err, "layout.head_dim", m->head_dim, 1, 4096));
    TD_TRY(check_range(err, "layout.window_tokens", m->window_tokens, 1, 1u << 24));
    if (td_kv_dtype_parse(m->kv_dtype_sliding, &sliding) != TD_OK)
        return td_err_set(err, TD_E_INVALID, "descriptor.layout.kv_dtype_sliding is not a KV type");
    if (td_kv_dtype_parse(m->kv_dtype_full, &full) != TD_OK)
        return td_err_set(err, TD_E_INVALID, "descriptor.layout.kv_dtype_full is not a KV type");
    if (strlen(m->model_fingerprint) >= sizeof out->fingerprint)
        return td_err_set(err, TD_E_INVALID, "descriptor.layout.model_fingerprint is too long");
    if (strlen(m->weight_form) >= sizeof out->weight_form)
        return td_err_set(err, TD_E_INVALID, "descriptor.layout.weight_form is too long");
    struct td_kv_group_layout common = {
        .n_heads = m->n_kv_heads, .head_dim = m->head_dim, .page_tokens = m->page_tokens};
    out->kv[TD_KV_SLIDING] = out->kv[TD_KV_FULL] = common;
    out->kv[TD_KV_SLIDING].n_layers = m->n_sliding_layers;
    out->kv[TD_KV_FULL].n_layers = m->n_full_layers;
    out->kv[TD_KV_SLIDING].dtype = sliding;
    out->kv[TD_KV_FULL].dtype = full;
    out->window_tokens = m->window_tokens;
    out->version = m->layout_version;
    copy_text(out->fingerprint, sizeof out->fingerprint, m->model_fingerprint);
    copy_text(out->weight_form, sizeof out->weight_form, m->weight_form);
out:
    return st;
}

static enum td_status read_rank(const Tandem__V1__RankMemory *m, struct td_peer_rank *out, struct td_err *err)
{
    enum td_status st;
    TD_TRY(check_range(err, "ranks.worker_address (bytes)", m->worker_address.len, 1, TD_XFER_ADDRESS_MAX));
    TD_TRY(check_range(err, "ranks.sliding_rkey (bytes)", m->sliding_rkey.len, 0, TD_XFER_ADDRESS_MAX));
    TD_TRY(check_range(err, "ranks.full_rkey (bytes)", m->full_rkey.len, 0, TD_XFER_ADDRESS_MAX));
    TD_TRY(check_range(err, "ranks.n_sliding_pages", m->n_sliding_pages, 0, TD_MAX_PEER_PAGES));
    TD_TRY(check_range(err, "ranks.n_full_pages", m->n_full_pages, 0, TD_MAX_PEER_PAGES));
    out->address = m->worker_address.data;
    out->n_address = m->worker_address.len;
    out->pools[TD_KV_SLIDING] = (struct td_xfer_remote){m->sliding_base, m->sliding_rkey.data, m->sliding_rkey.len};
    out->pools[TD_KV_FULL] = (struct td_xfer_remote){m->full_base, m->full_rkey.data, m->full_rkey.len};
    out->n_pages[TD_KV_SLIDING] = m->n_sliding_pages;
    out->n_pages[TD_KV_FULL] = m->n_full_pages;
out:
    return st;
}

enum td_status td_descriptor_from_msg(const Tandem__V1__PeerDescriptor *m, struct td_descriptor *out,
                                      struct td_err *err)
{
    enum td_status st;
    memset(out, 0, sizeof *out);
    if (m->incarnation == 0) return td_err_set(err, TD_E_INVALID, "descriptor.incarnation is 0");
    out->incarnation = m->incarnation;
    copy_text(out->name, sizeof out->name, m->name);
    TD_TRY(read_layout(m->layout, &out->layout, err));
    TD_TRY(check_range(err, "ranks (number)", m->n_ranks, 1, TD_MAX_RANKS));
    out->n_ranks = (uint32_t)m->n_ranks;
    if (m->layout->n_kv_heads % out->n_ranks != 0)
        return td_err_set(err, TD_E_INVALID, "descriptor.layout.n_kv_heads %u is not divisible among %u ranks",
                          m->layout->n_kv_heads, out->n_ranks);
    for (uint32_t i = 0; i < out->n_ranks; i++) TD_TRY(read_rank(m->ranks[i], &out->ranks[i], err));
out:
    return st;
}

/* ---- both ----------------------------------------------------------------------------------------------------------
 */

static enum td_status differ_u32(struct td_err *err, const char *field, uint32_t ours, uint32_t theirs)
{
    if (ours == theirs) return TD_OK;
    return td_err_set(err, TD_E_MISMATCH, "%s differs: %u here, %u there", field, ours, theirs);
}

static enum td_status differ_str(struct td_err *err, const char *field, const char *ours, const char *theirs)
{
    if (strcmp(ours, theirs) == 0) return TD_OK;
    return td_err_set(err, TD_E_MISMATCH, "%s differs: %s here, %s there", field, ours, theirs);
}

enum td_status td_peer_layout_check(const struct td_peer_layout *a, const struct td_peer_layout *b, struct td_err *err)
{
    enum td_status st;
    const struct td_kv_group_layout *as = &a->kv[TD_KV_SLIDING], *bs = &b->kv[TD_KV_SLIDING];
    const struct td_kv_group_layout *af = &a->kv[TD_KV_FULL], *bf = &b->kv[TD_KV_FULL];
    TD_TRY(differ_u32(err, "layout_version", a->version, b->version));
    TD_TRY(differ_u32(err, "page_tokens", af->page_tokens, bf->page_tokens));
    TD_TRY(differ_u32(err, "n_sliding_layers", as->n_layers, bs->n_layers));
    TD_TRY(differ_u32(err, "n_full_layers", af->n_layers, bf->n_layers));
    TD_TRY(differ_u32(err, "n_kv_heads", af->n_heads, bf->n_heads));
    TD_TRY(differ_u32(err, "head_dim", af->head_dim, bf->head_dim));
    TD_TRY(differ_u32(err, "window_tokens", a->window_tokens, b->window_tokens));
    TD_TRY(differ_str(err, "kv_dtype_sliding", td_kv_dtype_name(as->dtype), td_kv_dtype_name(bs->dtype)));
    TD_TRY(differ_str(err, "kv_dtype_full", td_kv_dtype_name(af->dtype), td_kv_dtype_name(bf->dtype)));
    TD_TRY(differ_str(err, "model_fingerprint", a->fingerprint, b->fingerprint));
    TD_TRY(differ_str(err, "weight_form", a->weight_form, b->weight_form));
out:
    return st;
}
