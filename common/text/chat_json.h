/* The JSON of Chat Completions as a conversation: messages, tools, tool_choice, reasoning_effort, response_format. What
 * else a request holds (sampling, limits) is not looked at.
 *
 * Read, with what comes of it:
 *   content          a string, or parts of type text (and refusal, in an assistant's message), which are encoded apart
 *   tool_call_id     the function's name, found among the request's calls
 *   reasoning        or reasoning_content: an assistant's earlier analysis
 *   tool_choice      "none" offers no tools; a named one must be declared
 *   response_format  json_schema: written into the prompt; whether it can be enforced is for the caller to know */
#ifndef TD_TEXT_CHAT_JSON_H
#define TD_TEXT_CHAT_JSON_H

#include "common/text/conversation.h"

enum td_chat_choice { TD_CHAT_CHOICE_AUTO, TD_CHAT_CHOICE_NONE, TD_CHAT_CHOICE_REQUIRED, TD_CHAT_CHOICE_NAMED };

/* c is zeroed and keeps a reference to the request, an object; td_conversation_deinit on failure too. The date is for
 * the caller to set, in c->chat. INVALID: err begins with the field. */
enum td_status td_chat_json_read(struct td_conversation *c, struct json_t *request, enum td_chat_choice *choice_out,
                                 struct td_err *err);

/* Pieces, for APIs that put the same things elsewhere. v is the field's value or NULL, path its name. */

/* low, medium, high; absent or null: medium. */
enum td_status td_chat_json_effort(const struct json_t *v, const char *path, enum td_chat_effort *out,
                                   struct td_err *err);
/* "none", "auto", "required", or an object {"type":"function","name":N}, where Chat Completions has
 * {"type":"function","function":{"name":N}}: both are understood. Absent or null: auto. After the tools were added. */
enum td_status td_chat_json_choice(const struct td_conversation *c, const struct json_t *v, const char *path,
                                   enum td_chat_choice *out, struct td_err *err);
/* {NULL, 0} if v is no string. */
struct td_text td_chat_json_text(const struct json_t *v);

#endif
