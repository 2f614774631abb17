/* The gRPC method Chat: typed messages become an order (chat_order.c), the run's events become typed deltas
 * (chat_events.c), and chat.c is the call between them. It offers what Chat Completions offer over HTTP, by the same
 * order.h, run.h and choice.h. */
#ifndef TD_ROUTER_CHAT_H
#define TD_ROUTER_CHAT_H

#include "proto/inference.pb-c.h"
#include "router/choice.h"
#include "router/order.h"

struct td_rpc_call;

/* Fills o, which is fresh (td_order_init), from a copy of m that o owns. INVALID: err names the field. NO_MEMORY. */
enum td_status td_chat_read_order(const Tandem__V1__ChatRequest *m, struct td_order *o, struct td_err *err);

#define TD_CHAT_N_CHANNELS 5 /* of enum ChatChannel */

/* One choice's way from events to messages. Zeroed at first. Texts of a channel put end to end read as its messages
 * joined by line breaks. */
struct td_chat_writer {
    enum td_status (*send)(void *user, const ProtobufCMessage *event); /* borrows the event for the call */
    void *user;
    uint32_t choice;
    const char *request_id;                    /* borrowed; for the first event */
    uint32_t last_message[TD_CHAT_N_CHANNELS]; /* 1 + index of the last message with text on each channel */
};
/* What the last event of all says. */
struct td_chat_summary {
    Tandem__V1__Usage *usage;
    Tandem__V1__Timing *timing;
    uint32_t reasoning_tokens;
};
/* summary: with the END of the last choice, else NULL. NO_MEMORY, or what send said. */
enum td_status td_chat_write(struct td_chat_writer *w, const struct td_choice_event *e,
                             const struct td_chat_summary *summary);

void td_chat_open(struct td_rpc_call *c, void *service); /* chat.c: the method */

#endif
