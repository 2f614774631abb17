/* GET /v1/models and /v1/models/NAME. */
#include <inttypes.h>

#include "router/api_int.h"
#include "router/router_int.h"

static void put_model(struct td_buf *b, const struct td_router *ro)
{
    struct td_params_facts f = td_front_facts(ro);
    td_buf_str(b, "{\"id\":");
    td_json_quote_str(b, f.model);
    td_buf_printf(b, ",\"object\":\"model\",\"created\":%" PRIu64 ",\"owned_by\":\"tandem\",\"max_model_len\":%u}",
                  ro->created_s, f.served_context);
}

static void respond(struct td_http_req *r, struct td_buf *b)
{
    if (b->failed)
        td_http_error(r, 503, NULL, NULL, "out of memory");
    else
        td_http_respond(r, 200, "application/json", b->data, b->n);
    td_buf_free(b);
}

static void list(struct td_http_req *r, void *user)
{
    struct td_buf b = {0};
    td_buf_str(&b, "{\"object\":\"list\",\"data\":[");
    put_model(&b, user);
    td_buf_str(&b, "]}\n");
    respond(r, &b);
}

static void one(struct td_http_req *r, void *user)
{
    const struct td_router *ro = user;
    const char *name = td_http_path_rest(r);
    struct td_buf b = {0};
    if (strcmp(name, ro->cfg.model_name) != 0) {
        td_http_error(r, 404, "model", "model_not_found", "model: \"%.200s\" is not served here; \"%s\" is", name,
                      ro->cfg.model_name);
        return;
    }
    put_model(&b, ro);
    respond(r, &b);
}

enum td_status td_api_add_models(struct td_router *ro, struct td_http *h)
{
    const struct td_http_route rows[] = {{"GET", "/v1/models", list, ro}, {"GET", "/v1/models/*", one, ro}};
    return td_http_add_public_routes(h, rows, 2);
}
