/* The chat page at "/": one static file that talks to /v1/chat/completions of the router it came from. */
#ifndef TD_ROUTER_PAGE_H
#define TD_ROUTER_PAGE_H

#include "common/http/http.h"

enum td_status td_page_add_routes(struct td_http *h); /* before td_http_listen */

#endif
