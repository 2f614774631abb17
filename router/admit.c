#include "router/admit.h"

static enum td_status choose(struct td_admit *a, struct td_request *r, struct td_err *err)
{
    td_block_names_extend(&r->names, r->tokens, r->n_tokens, td_fleet_page_tokens(a->fleet));
    struct td_place_query q = {
        .n_tokens = r->n_tokens,
        .names = r->names.names,
        .n_names = r->names.n,
        .is_back = r->is_back,
        .failed_decode = r->failed_decode,
        .failed_prefill = r->failed_prefill,
        .blame = r->blame,
        .same_ok = r->same_ok,
        .on = a->prefill_on,
        .n_behind = a->n_waiting,
        .is_last_try = r->n_retries >= TD_ROUTER_MAX_RETRIES,
    };
    struct td_place place;
    enum td_status st = td_place_choose(a->fleet, &q, &place, err);
    if (st != TD_OK) return st;
    td_fleet_claim(a->fleet, place.decode, place.prefill, place.n_compute);
    r->n_charged = place.n_compute;
    r->decode = place.decode;
    r->prefill = place.prefill;
    return TD_OK;
}

/* Those in front first. One that cannot be placed stops the rest, so that what it waits for is not taken by those that
 * need less; unless it is a retry: what that waits for, others may not need. */
static void on_pump(struct td_timer *t)
{
    struct td_admit *a = TD_CONTAINER_OF(t, struct td_admit, pump);
    /* What placing and refusing sets in motion may change the queue, so the survivors go round through a list of ours.
     */
    struct td_list stay;
    td_list_init(&stay);
    while (!td_list_is_empty(&a->queue)) {
        struct td_request *r = TD_LIST_ENTRY(a->queue.next, struct td_request, queue_link);
        struct td_err err = {{0}};
        enum td_status st = choose(a, r, &err);
        if (st == TD_E_BUSY) {
            td_list_remove(&r->queue_link);
            td_list_push_back(&stay, &r->queue_link);
            if (r->failed_decode == 0) break;
        } else {
            td_admit_remove(a, r);
            if (st == TD_OK)
                td_request_on_placed(r);
            else
                td_request_on_refused(r, st, err.text);
        }
    }
    while (!td_list_is_empty(&stay)) {
        struct td_list *last = stay.prev;
        td_list_remove(last);
        td_list_push_front(&a->queue, last);
    }
}

void td_admit_init(struct td_admit *a, struct td_env *env, struct td_fleet *fleet, uint32_t n_max)
{
    *a = (struct td_admit){.fleet = fleet, .env = env, .n_max = n_max, .pump.fire = on_pump};
    td_list_init(&a->queue);
}

void td_admit_deinit(struct td_admit *a)
{
    if (a->env != NULL) a->env->timer_stop(a->env, &a->pump);
}

enum td_status td_admit_check(const struct td_admit *a, struct td_err *err)
{
    if (td_fleet_n(a->fleet, TANDEM__V1__ROLE__ROLE_DECODE) == 0)
        return td_err_set(err, TD_E_UNAVAILABLE, "no decode worker is available");
    if (a->n_waiting + a->n_tokenizing >= a->n_max)
        return td_err_set(err, TD_E_BUSY, "%u requests are waiting already (--max-queue)",
                          a->n_waiting + a->n_tokenizing);
    return TD_OK;
}

/* Those that had their turn stand before all others, among themselves by age. Returns whom r goes before. */
static struct td_list *place_in_front(struct td_admit *a, const struct td_request *r)
{
    TD_LIST_FOREACH (it, &a->queue) {
        const struct td_request *o = TD_LIST_ENTRY(it, struct td_request, queue_link);
        if (!o->had_turn || o->t_received > r->t_received) return it;
    }
    return &a->queue;
}

enum td_status td_admit_place(struct td_admit *a, struct td_request *r, struct td_err *err)
{
    struct td_list *before = r->had_turn ? place_in_front(a, r) : &a->queue;
    if (before == a->queue.next) { /* nobody stands before it */
        enum td_status st = choose(a, r, err);
        if (st != TD_E_BUSY) return st;
    } else if (td_fleet_n(a->fleet, TANDEM__V1__ROLE__ROLE_DECODE) == 0) {
        return td_err_set(err, TD_E_UNAVAILABLE, "no decode worker is available");
    }
    if (!r->had_turn && a->n_waiting >= a->n_max)
        return td_err_set(err, TD_E_BUSY, "%u requests are waiting already (--max-queue)", a->n_waiting);
    td_list_push_back(before, &r->queue_link); /* of that element: before it */
    a->n_waiting++;
    if (r->had_turn) td_admit_kick(a); /* those before it may wait for what it does not need */
    return TD_IN_PROGRESS;
}

void td_admit_remove(struct td_admit *a, struct td_request *r)
{
    if (td_list_is_empty(&r->queue_link)) return;
    td_list_remove(&r->queue_link);
    a->n_waiting--;
}

void td_admit_kick(struct td_admit *a)
{
    if (a->n_waiting > 0 && !a->pump.is_armed) a->env->timer_start(a->env, &a->pump, 0);
}
