/* Conversations and model output as JSON, in the form of tests/cases/harmony-cases.json: what `tandemctl render` and
 * `tandemctl parse` read and print. No cluster, no clock. Errors name the field. */
#ifndef TD_CTL_CASES_H
#define TD_CTL_CASES_H

#include <jansson.h>

#include "common/text/chat.h"

/* Appends the prompt's ids, and the beginning of a call that the tool choice demands. What c may be:
 *   {"request": ..., "date": ...}     a request of Chat Completions, or of Responses if it has "input"
 *   {"mode": ..., "messages": ...}    messages as harmony knows them; "auto_drop" true unless it says otherwise
 *   anything else                     such a request itself
 * date: unless c has one; NULL: no date line. */
enum td_status td_case_render(const struct td_chat_format *f, json_t *c, const char *date, struct td_token_list *out,
                              struct td_err *err);

/* What a model wrote, as messages, visible stream and chat result, and the parser's events one by one. tools: a list of
 * names, or NULL. *out is the caller's: {"messages", "hidden", "stream", "chat", "events"}. */
enum td_status td_case_parse(const struct td_chat_format *f, const uint32_t *ids, size_t n, bool hit_limit,
                             const json_t *tools, json_t **out, struct td_err *err);

#endif
