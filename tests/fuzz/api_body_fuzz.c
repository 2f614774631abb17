/* The way from a body to an order: the first byte chooses the endpoint, the rest is what a client sends. Whatever it
 * is, it becomes an order that keeps to its bounds, or an error that says why; the chat format then renders what it
 * can. */
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/text/utf8.h"
#include "router/api_int.h"
#include "router/router_int.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const struct td_api_endpoint *const endpoints[] = {
    &td_api_chat, &td_api_completions, &td_api_responses, &td_api_tokenize, &td_api_detokenize,
};
static struct td_router router; /* what endpoints may use while they read: the tokenizer, the format, the settings */

/* main.c's, which is not linked here: nothing begins, so nobody leaves. */
void td_router_client_left(struct td_router *ro) { (void)ro; }
void td_router_update_ready(struct td_router *ro) { (void)ro; }

static void open_router(void)
{
    struct td_err err = {{0}};
    TD_CHECK(td_tokenizer_load("tests/tiny/tiny-model", &router.tokenizer, &err) == TD_OK);
    TD_CHECK(td_chat_format_open("auto", router.tokenizer, &router.format, &err) == TD_OK);
    strcpy(router.cfg.current_date, "2025-11-03");
    strcpy(router.cfg.model_name, "tiny-model");
}

static void check_order(const struct td_order *o)
{
    TD_CHECK(o->n_choices >= 1 && o->n_choices <= TD_ORDER_MAX_CHOICES);
    TD_CHECK(o->n_stop_strings <= TD_ORDER_MAX_STOP_STRINGS && o->n_logprobs <= TD_ORDER_MAX_LOGPROBS);
    for (size_t i = 0; i < o->n_stop_strings; i++) TD_CHECK(o->stop_strings[i].n > 0);
    if (!o->is_chat) return;
    TD_CHECK(o->chat.n_messages > 0);
    for (size_t i = 0; i < o->chat.n_messages; i++) {
        const struct td_chat_message *m = &o->chat.messages[i];
        for (size_t k = 0; k < m->n_parts; k++) TD_CHECK(td_utf8_is_valid(m->parts[k].p, m->parts[k].n));
        TD_CHECK(m->role != TD_CHAT_TOOL || m->name.n > 0);
    }
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    enum td_status st = router.format->render(router.format, &o->chat, &ids, &err);
    TD_CHECK(st == TD_OK && ids.n > 0);
    td_token_list_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (router.tokenizer == NULL) open_router();
    if (n == 0 || n > 65536) return 0;
    struct td_api_call call = {.router = &router, .endpoint = endpoints[data[0] % TD_COUNT(endpoints)]};
    struct td_buf body = {0};
    struct td_err err = {{0}};
    td_buf_put(&body, data + 1, n - 1);
    call.state = calloc(1, call.endpoint->state_bytes + 1);
    td_order_init(&call.order);
    enum td_status st = td_api_read_body(&call, &body, &err);
    if (st == TD_OK && call.endpoint->answer == NULL)
        check_order(&call.order);
    else
        TD_CHECK(st == TD_OK || err.text[0] != '\0');
    if (call.endpoint->drop != NULL) call.endpoint->drop(&call);
    td_order_deinit(&call.order);
    td_buf_free(&body);
    free(call.state);
    return 0;
}
