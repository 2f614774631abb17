/* What the API's own files share: the endpoints, and the way from a body to an order (for the fuzz target too). */
#ifndef TD_ROUTER_API_INT_H
#define TD_ROUTER_API_INT_H

#include "router/api.h"

extern const struct td_api_endpoint td_api_chat;                           /* api_chat.c */
extern const struct td_api_endpoint td_api_responses;                      /* api_responses.c */
extern const struct td_api_endpoint td_api_completions;                    /* api_completions.c */
extern const struct td_api_endpoint td_api_tokenize, td_api_detokenize;    /* api_tokens.c */
enum td_status td_api_add_models(struct td_router *ro, struct td_http *h); /* api_models.c: routes of GET */

/* JSON -> api->endpoint->read. api->order owns the document afterwards. Any thread. */
enum td_status td_api_read_body(struct td_api_call *api, const struct td_buf *body, struct td_err *err);

#endif
