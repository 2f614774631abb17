/* The JSON of chats, as OpenAI's APIs have it, read into a conversation (chat.h): for the router's endpoints, and for
 * `tandemctl render`, which thereby shows what the router does. Errors stick in the fields and begin with the path of
 * what is wrong. Texts point into the JSON document, everything else lies in the arena: both must outlive the
 * conversation. Any thread. */
#ifndef TD_TEXT_CHAT_JSON_H
#define TD_TEXT_CHAT_JSON_H

#include "common/base/arena.h"
#include "common/text/chat.h"
#include "common/text/fields.h"

/* "messages" of Chat Completions. A tool's answer names the call it answers by id; the function's name, which the model
 * sees, is looked up among all calls, those before it first. */
void td_chat_json_messages(struct td_fields *f, struct td_arena *a, struct td_chat_conversation *out);
/* "instructions" and "input" of Responses: a text, or items as earlier responses gave them, one message each. */
void td_chat_json_input(struct td_fields *f, struct td_arena *a, struct td_chat_conversation *out);
/* "tools": [{"type":"function","function":{...}}], or with is_flat (Responses) the function's fields beside type; and
 * "tool_choice". After it, out->tools are those that are offered. *name_out: the function's, with CHOICE_NAMED. */
void td_chat_json_tools(struct td_fields *f, struct td_arena *a, bool is_flat, struct td_chat_conversation *out,
                        enum td_tool_choice *choice_out, const char **name_out);
/* "low", "medium", "high" under name. */
void td_chat_json_effort(struct td_fields *f, const char *name, enum td_chat_effort *out);
/* A string, or an array of parts whose type is one of types (NULL-terminated) with their text under "text": parts and
 * their number. Absent: neither is touched. */
void td_chat_json_content(struct td_fields *f, struct td_arena *a, const char *name, const char *const *types,
                          const struct td_text **parts_out, size_t *n_out);
/* "response_format": a json_schema is written into the prompt; nothing here enforces it. */
void td_chat_json_response_format(struct td_fields *f, struct td_arena *a, struct td_chat_response_format *out);

#endif
