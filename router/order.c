#include "router/order.h"

#include <jansson.h>
#include <stddef.h>
#include <stdlib.h>

#include "common/base/clock.h"
#include "common/base/mem.h"

struct td_order_block {
    struct td_order_block *next;
    max_align_t data[];
};

void td_order_init(struct td_order *o)
{
    *o = (struct td_order){.chat_field = "messages", .model = "", .deadline_ns = TD_NEVER_NS, .n_choices = 1};
    tandem__v1__sampling__init(&o->sampling);
    tandem__v1__stop__init(&o->stop);
}

void td_order_deinit(struct td_order *o)
{
    while (o->blocks != NULL) {
        struct td_order_block *b = o->blocks;
        o->blocks = b->next;
        free(b);
    }
    json_decref(o->doc);
    o->doc = NULL;
}

void *td_order_alloc(struct td_order *o, size_t n, size_t size)
{
    if (size > 0 && n > (SIZE_MAX - sizeof(struct td_order_block)) / size) return NULL;
    struct td_order_block *b = td_calloc(1, sizeof *b + n * size);
    if (b == NULL) return NULL;
    b->next = o->blocks;
    o->blocks = b;
    return b->data;
}
