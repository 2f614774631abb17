#include "router/fleet.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mem.h"

#define MAX_NAME_BYTES 128u /* names and addresses: they stand in log lines, /statez and replies */

static const char *role_name(Tandem__V1__Role role)
{
    return role == TANDEM__V1__ROLE__ROLE_DECODE ? "decode" : "prefill";
}

static void kick_reaper(struct td_fleet *f) { f->ports->env->timer_start(f->ports->env, &f->reap, 0); }

static void free_worker(struct td_fleet *f, struct td_worker *w)
{
    f->ports->forget(f->ports->self, w);
    td_list_remove(&w->link);
    tandem__v1__identity__free_unpacked(w->identity, NULL);
    td_prefixes_deinit(&w->prefixes);
    free(w);
}

static void on_reap(struct td_timer *t)
{
    struct td_fleet *f = TD_CONTAINER_OF(t, struct td_fleet, reap);
    TD_LIST_FOREACH_SAFE (it, &f->workers) {
        struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (!w->is_live && w->n_requests == 0) free_worker(f, w);
    }
}

static void on_tick(struct td_timer *t)
{
    struct td_fleet *f = TD_CONTAINER_OF(t, struct td_fleet, tick);
    struct td_env *env = f->ports->env;
    uint64_t now = env->now_ns(env);
    TD_LIST_FOREACH_SAFE (it, &f->workers) {
        struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (w->is_live && now - w->seen_ns > f->timeout_ns)
            td_fleet_lose(f, w, "silent for longer than --worker-timeout");
    }
    env->timer_start(env, &f->tick, f->timeout_ns / 8);
}

void td_fleet_init(struct td_fleet *f, const struct td_fleet_ports *ports, const char *model, uint32_t timeout_ms)
{
    *f = (struct td_fleet){
        .ports = ports,
        .model = model,
        .timeout_ns = timeout_ms * TD_NS_PER_MS,
        .tick.fire = on_tick,
        .reap.fire = on_reap,
    };
    td_list_init(&f->workers);
    ports->env->timer_start(ports->env, &f->tick, f->timeout_ns / 8);
}

void td_fleet_deinit(struct td_fleet *f)
{
    if (f->ports == NULL) return;
    f->ports->env->timer_stop(f->ports->env, &f->tick);
    f->ports->env->timer_stop(f->ports->env, &f->reap);
    TD_LIST_FOREACH_SAFE (it, &f->workers) free_worker(f, TD_LIST_ENTRY(it, struct td_worker, link));
    f->ports = NULL;
}

/* --- joining --------------------------------------------------------------------------------------------- */

static enum td_status check_word(const char *field, const char *s, bool may_be_empty, struct td_err *err)
{
    size_t n = strlen(s);
    if (n == 0 && !may_be_empty) return td_err_set(err, TD_E_INVALID, "%s: must be set", field);
    if (n > MAX_NAME_BYTES) return td_err_set(err, TD_E_INVALID, "%s: %zu bytes are too many", field, n);
    for (; *s != '\0'; s++)
        if (*s <= ' ' || *s > '~' || *s == '"' || *s == '\\')
            return td_err_set(err, TD_E_INVALID, "%s: only printable ASCII without spaces, quotes and backslashes",
                              field);
    return TD_OK;
}

static enum td_status check_identity(const struct td_fleet *f, const Tandem__V1__Identity *id, struct td_err *err)
{
    enum td_status st = TD_OK;
    if (id->role != TANDEM__V1__ROLE__ROLE_PREFILL && id->role != TANDEM__V1__ROLE__ROLE_DECODE)
        return td_err_set(err, TD_E_INVALID, "role: %d is neither prefill nor decode", (int)id->role);
    TD_TRY(check_word("name", id->name, false, err));
    TD_TRY(check_word("rpc_address", id->rpc_address, false, err));
    TD_TRY(check_word("http_address", id->http_address, true, err));
    TD_TRY(check_word("version", id->version, true, err));
    if (strcmp(id->model, f->model) != 0)
        return td_err_set(err, TD_E_MISMATCH, "model: this worker serves \"%s\", this router \"%s\"", id->model,
                          f->model);
    if (id->max_context_tokens < 2)
        return td_err_set(err, TD_E_INVALID, "max_context_tokens: %u", id->max_context_tokens);
    if (id->vocab_size == 0) return td_err_set(err, TD_E_INVALID, "vocab_size: must be set");
    for (size_t i = 0; i < id->n_eos_ids; i++)
        if (id->eos_ids[i] >= id->vocab_size)
            return td_err_set(err, TD_E_INVALID, "eos_ids: %u is not below vocab_size %u", id->eos_ids[i],
                              id->vocab_size);
    if (id->n_eos_ids > 64) return td_err_set(err, TD_E_INVALID, "eos_ids: %zu are too many", id->n_eos_ids);
    if (id->descriptor == NULL) return td_err_set(err, TD_E_INVALID, "descriptor: must be set");
    if (id->descriptor->incarnation == 0) return td_err_set(err, TD_E_INVALID, "descriptor.incarnation: must not be 0");
    if (id->descriptor->layout == NULL) return td_err_set(err, TD_E_INVALID, "descriptor.layout: must be set");
out:
    return st;
}

/* Everything that two workers of one fleet must have in common, whatever their roles. */
static enum td_status check_same(const Tandem__V1__Identity *ours, const Tandem__V1__Identity *theirs,
                                 struct td_err *err)
{
    const Tandem__V1__KvLayout *a = ours->descriptor->layout, *b = theirs->descriptor->layout;
#define SAME_NUMBER(field, x, y)                                                                                       \
    if ((x) != (y))                                                                                                    \
    return td_err_set(err, TD_E_MISMATCH, "%s: %u here, %u at %s", field, (unsigned)(y), (unsigned)(x), ours->name)
#define SAME_TEXT(field, x, y)                                                                                         \
    if (strcmp((x), (y)) != 0)                                                                                         \
    return td_err_set(err, TD_E_MISMATCH, "%s: \"%.80s\" here, \"%.80s\" at %s", field, (y), (x), ours->name)
    SAME_TEXT("model_fingerprint", a->model_fingerprint, b->model_fingerprint);
    SAME_NUMBER("vocab_size", ours->vocab_size, theirs->vocab_size);
    if (ours->n_eos_ids != theirs->n_eos_ids ||
        (ours->n_eos_ids > 0 && memcmp(ours->eos_ids, theirs->eos_ids, ours->n_eos_ids * sizeof *ours->eos_ids) != 0))
        return td_err_set(err, TD_E_MISMATCH, "eos_ids: differ from those of %s", ours->name);
    SAME_NUMBER("layout_version", a->layout_version, b->layout_version);
    SAME_NUMBER("page_tokens", a->page_tokens, b->page_tokens);
    SAME_NUMBER("n_sliding_layers", a->n_sliding_layers, b->n_sliding_layers);
    SAME_NUMBER("n_full_layers", a->n_full_layers, b->n_full_layers);
    SAME_NUMBER("n_kv_heads", a->n_kv_heads, b->n_kv_heads);
    SAME_NUMBER("head_dim", a->head_dim, b->head_dim);
    SAME_NUMBER("window_tokens", a->window_tokens, b->window_tokens);
    SAME_TEXT("kv_dtype_sliding", a->kv_dtype_sliding, b->kv_dtype_sliding);
    SAME_TEXT("kv_dtype_full", a->kv_dtype_full, b->kv_dtype_full);
    SAME_TEXT("weight_form", a->weight_form, b->weight_form);
#undef SAME_NUMBER
#undef SAME_TEXT
    return TD_OK;
}

static Tandem__V1__Identity *copy_identity(const Tandem__V1__Identity *id)
{
    size_t n = tandem__v1__identity__get_packed_size(id);
    uint8_t *bytes = td_calloc(1, n);
    if (bytes == NULL) return NULL;
    tandem__v1__identity__pack(id, bytes);
    Tandem__V1__Identity *copy = tandem__v1__identity__unpack(NULL, n, bytes);
    free(bytes);
    return copy;
}

enum td_status td_fleet_join(struct td_fleet *f, const Tandem__V1__Identity *identity, void *join,
                             struct td_worker **out, void **old_join_out, struct td_err *err)
{
    struct td_env *env = f->ports->env;
    enum td_status st = check_identity(f, identity, err);
    if (st != TD_OK) return st;
    uint64_t incarnation = identity->descriptor->incarnation;
    struct td_worker *w = td_fleet_find(f, incarnation);
    if (w != NULL && (w->role != identity->role || strcmp(w->identity->rpc_address, identity->rpc_address) != 0))
        return td_err_set(err, TD_E_INVALID, "descriptor.incarnation: belongs to %s at %s", w->identity->name,
                          w->identity->rpc_address);
    TD_LIST_FOREACH (it, &f->workers) {
        const struct td_worker *o = TD_LIST_ENTRY(it, struct td_worker, link);
        /* An old life at the same address is dead, whatever its stream says, so it cannot forbid new settings. */
        if (!o->is_live || o == w || strcmp(o->identity->rpc_address, identity->rpc_address) == 0) continue;
        st = check_same(o->identity, identity, err);
        if (st != TD_OK) return st;
        if (o->role == identity->role && strcmp(o->identity->name, identity->name) == 0)
            TD_WARN("worker_name_twice", "name=%s addr=%s other=%s", identity->name, identity->rpc_address,
                    o->identity->rpc_address);
    }
    Tandem__V1__Identity *copy = copy_identity(identity);
    if (copy == NULL) return td_err_set(err, TD_E_NO_MEMORY, "no memory for another worker");
    if (w == NULL) {
        w = td_calloc(1, sizeof *w);
        if (w == NULL) {
            tandem__v1__identity__free_unpacked(copy, NULL);
            return td_err_set(err, TD_E_NO_MEMORY, "no memory for another worker");
        }
        w->incarnation = incarnation;
        w->role = identity->role;
        w->is_wired = w->role == TANDEM__V1__ROLE__ROLE_PREFILL;
        tandem__v1__load__init(&w->load);
        td_list_push_back(&f->workers, &w->link);
    } else {
        tandem__v1__identity__free_unpacked(w->identity, NULL);
    }
    w->identity = copy;
    *old_join_out = w->join;
    w->join = join;
    w->is_live = true;
    w->is_full = w->has_reported = false;
    w->joined_ns = w->seen_ns = env->now_ns(env);
    *out = w;
    TD_INFO("worker_joined", "role=%s name=%s addr=%s incarnation=%016" PRIx64, role_name(w->role), copy->name,
            copy->rpc_address, w->incarnation);
    TD_LIST_FOREACH_SAFE (it, &f->workers) {
        struct td_worker *o = TD_LIST_ENTRY(it, struct td_worker, link);
        if (o != w && strcmp(o->identity->rpc_address, copy->rpc_address) == 0 && (o->is_live || o->n_requests > 0))
            td_fleet_lose(f, o, "another process answers at its address");
    }
    f->ports->up(f->ports->self, w);
    f->ports->changed(f->ports->self);
    return TD_OK;
}

/* --- news of a worker ------------------------------------------------------------------------------------ */

void td_fleet_report(struct td_fleet *f, struct td_worker *w, const Tandem__V1__Load *load)
{
    if (load->is_draining && !w->load.is_draining)
        TD_INFO("worker_draining", "role=%s name=%s", role_name(w->role), w->identity->name);
    tandem__v1__load__init(&w->load); /* field by field: what the wire left in base is not ours to keep */
    w->load.n_running = load->n_running;
    w->load.n_waiting = load->n_waiting;
    w->load.free_sliding_pages = load->free_sliding_pages;
    w->load.free_full_pages = load->free_full_pages;
    w->load.quarantined_pages = load->quarantined_pages;
    w->load.last_step_age_us = load->last_step_age_us;
    w->load.is_draining = load->is_draining;
    w->load.prefill_tokens_per_s = load->prefill_tokens_per_s;
    w->load.step_us = load->step_us;
    w->seen_ns = f->ports->env->now_ns(f->ports->env);
    w->is_full = false;
    w->has_reported = true;
    uint64_t step_timeout_us = w->identity->step_timeout_ms * UINT64_C(1000);
    if (step_timeout_us > 0 && load->last_step_age_us > step_timeout_us)
        td_fleet_lose(f, w, "a step hangs: it has lasted longer than --step-timeout");
    else
        f->ports->changed(f->ports->self);
}

void td_fleet_prefixes(struct td_fleet *f, struct td_worker *w, const Tandem__V1__PrefixNews *news)
{
    (void)f;
    td_prefixes_apply(&w->prefixes, news->is_all, news->changes, news->n_changes);
}

void td_fleet_leave(struct td_fleet *f, struct td_worker *w)
{
    w->join = NULL;
    if (!w->is_live) return;
    w->is_live = false;
    TD_INFO("worker_left", "role=%s name=%s requests=%u", role_name(w->role), w->identity->name, w->n_requests);
    kick_reaper(f);
    f->ports->changed(f->ports->self);
}

void td_fleet_lose(struct td_fleet *f, struct td_worker *w, const char *why)
{
    TD_WARN("worker_lost", "role=%s name=%s requests=%u why=\"%s\"", role_name(w->role), w->identity->name,
            w->n_requests, why);
    w->is_live = false;
    f->ports->lost(f->ports->self, w, why);
    kick_reaper(f);
    f->ports->changed(f->ports->self);
}

void td_fleet_wired(struct td_fleet *f, struct td_worker *w, bool is_wired)
{
    if (w->is_wired == is_wired) return;
    w->is_wired = is_wired;
    f->ports->changed(f->ports->self);
}

void td_fleet_note_handoff(struct td_fleet *f, uint64_t us)
{
    uint64_t step_us = UINT64_MAX; /* the next token takes that long wherever the prompt was computed */
    TD_LIST_FOREACH (it, &f->workers) {
        const struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (w->role == TANDEM__V1__ROLE__ROLE_DECODE && w->is_live && w->load.step_us < step_us)
            step_us = w->load.step_us;
    }
    us = us > step_us ? us - step_us : 0;
    f->handoff_us = f->handoff_us <= 0 ? (double)us : f->handoff_us * 0.9 + (double)us * 0.1;
}

/* --- what we gave them ----------------------------------------------------------------------------------- */

void td_fleet_claim(struct td_fleet *f, struct td_worker *decode, struct td_worker *prefill, uint32_t n_tokens)
{
    struct td_worker *computes = prefill != NULL ? prefill : decode;
    decode->last_pick = computes->last_pick = ++f->n_picks;
    decode->n_requests++;
    if (prefill != NULL) prefill->n_requests++;
    computes->n_prefilling++;
    computes->prefill_tokens += n_tokens;
}

void td_fleet_prefilled(struct td_fleet *f, struct td_worker *w, uint32_t n_tokens)
{
    TD_CHECK(w->n_prefilling > 0 && w->prefill_tokens >= n_tokens);
    w->n_prefilling--;
    w->prefill_tokens -= n_tokens;
    f->ports->changed(f->ports->self);
}

void td_fleet_release(struct td_fleet *f, struct td_worker *w, bool made_room)
{
    TD_CHECK(w->n_requests > 0);
    w->n_requests--;
    if (made_room) w->is_full = false;
    if (!w->is_live && w->n_requests == 0) kick_reaper(f);
    f->ports->changed(f->ports->self);
}

/* --- questions ------------------------------------------------------------------------------------------- */

struct td_worker *td_fleet_find(struct td_fleet *f, uint64_t incarnation)
{
    TD_LIST_FOREACH (it, &f->workers) {
        struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (w->incarnation == incarnation) return w;
    }
    return NULL;
}

bool td_fleet_is_usable(const struct td_worker *w)
{
    return w->is_live && w->is_wired && !w->load.is_draining && (w->has_reported || w->identity->step_timeout_ms == 0);
}

uint32_t td_fleet_n(const struct td_fleet *f, Tandem__V1__Role role)
{
    uint32_t n = 0;
    TD_LIST_FOREACH (it, &f->workers) {
        const struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        n += w->role == role && td_fleet_is_usable(w);
    }
    return n;
}

const Tandem__V1__Identity *td_fleet_facts(const struct td_fleet *f)
{
    TD_LIST_FOREACH (it, &f->workers) {
        const struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (w->is_live) return w->identity;
    }
    return NULL;
}

uint32_t td_fleet_page_tokens(const struct td_fleet *f)
{
    const Tandem__V1__Identity *id = td_fleet_facts(f);
    return id != NULL ? id->descriptor->layout->page_tokens : 0;
}

uint32_t td_fleet_least_context(const struct td_fleet *f)
{
    uint32_t least = 0;
    TD_LIST_FOREACH (it, &f->workers) {
        const struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (w->is_live && (least == 0 || w->identity->max_context_tokens < least))
            least = w->identity->max_context_tokens;
    }
    return least;
}

uint32_t td_fleet_most_context(const struct td_fleet *f)
{
    uint32_t most = 0;
    TD_LIST_FOREACH (it, &f->workers) {
        const struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        if (w->is_live && w->identity->max_context_tokens > most) most = w->identity->max_context_tokens;
    }
    return most;
}

static uint64_t ms_ago(uint64_t now, uint64_t then) { return (now - then) / TD_NS_PER_MS; }

void td_fleet_describe(const struct td_fleet *f, struct td_buf *out)
{
    uint64_t now = f->ports->env->now_ns(f->ports->env);
    td_buf_str(out, "[");
    TD_LIST_FOREACH (it, &f->workers) {
        const struct td_worker *w = TD_LIST_ENTRY(it, struct td_worker, link);
        const Tandem__V1__Identity *id = w->identity;
        td_buf_printf(out,
                      "%s{\"name\":\"%s\",\"role\":\"%s\",\"state\":\"%s\",\"incarnation\":\"%016" PRIx64
                      "\",\"rpc_address\":\"%s\",\"http_address\":\"%s\",\"version\":\"%s\",\"max_context_tokens\":%u,",
                      it == f->workers.next ? "" : ",", id->name, role_name(w->role), w->is_live ? "live" : "gone",
                      w->incarnation, id->rpc_address, id->http_address, id->version, id->max_context_tokens);
        td_buf_printf(out,
                      "\"is_draining\":%s,\"is_wired\":%s,\"is_full\":%s,\"joined_ms_ago\":%" PRIu64
                      ",\"seen_ms_ago\":%" PRIu64 ",\"requests\":%u,\"prefilling\":%u,\"prefill_tokens\":%" PRIu64 ",",
                      w->load.is_draining ? "true" : "false", w->is_wired ? "true" : "false",
                      w->is_full ? "true" : "false", ms_ago(now, w->joined_ns), ms_ago(now, w->seen_ns), w->n_requests,
                      w->n_prefilling, w->prefill_tokens);
        td_buf_printf(out,
                      "\"load\":{\"n_running\":%u,\"n_waiting\":%u,\"free_sliding_pages\":%u,\"free_full_pages\":%u,"
                      "\"quarantined_pages\":%u,\"last_step_age_us\":%" PRIu64
                      ",\"prefill_tokens_per_s\":%u,\"step_us\":%u},"
                      "\"known_blocks\":%u}",
                      w->load.n_running, w->load.n_waiting, w->load.free_sliding_pages, w->load.free_full_pages,
                      w->load.quarantined_pages, w->load.last_step_age_us, w->load.prefill_tokens_per_s,
                      w->load.step_us, w->prefixes.n);
    }
    td_buf_str(out, "]");
}
