#include "router/order.h"

#include <jansson.h>

#include "common/base/clock.h"

void td_order_init(struct td_order *o)
{
    *o = (struct td_order){.chat_field = "messages", .model = "", .deadline_ns = TD_NEVER_NS, .n_choices = 1};
    tandem__v1__sampling__init(&o->sampling);
    tandem__v1__stop__init(&o->stop);
}

void td_order_deinit(struct td_order *o)
{
    td_arena_free(&o->arena);
    json_decref(o->doc);
    o->doc = NULL;
}

void *td_order_alloc(struct td_order *o, size_t n, size_t size) { return td_arena_alloc(&o->arena, n, size); }
