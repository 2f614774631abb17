/* A conversation that owns what it is made of: messages, parts, calls and tools are added one by one, and `chat` is
 * ready to be rendered after td_conversation_end. Texts are borrowed: from the JSON document it keeps (chat_json.h), or
 * from wherever the caller holds them. Errors begin with the field's path and a colon: "messages[2].content: is
 * missing".
 *
 * Running out of memory on the way is remembered and told by td_conversation_end; until then every call is harmless.
 * One thread at a time; rendering may be another's. */
#ifndef TD_TEXT_CONVERSATION_H
#define TD_TEXT_CONVERSATION_H

#include <stdbool.h>
#include <stddef.h>

#include "common/base/status.h"
#include "common/text/chat.h"

#define TD_SCHEMA_MAX_DEPTH 64u /* of a function's parameters: each level is indented in the prompt */

struct td_conversation_call { /* a call that a result may answer */
    struct td_text id, name;
    size_t message;
};

struct td_conversation {
    struct td_chat_conversation chat;
    /* private */
    struct td_chat_message *messages;
    struct td_chat_tool *tools;
    struct td_conversation_call *calls;
    void **blocks; /* parts and lists of calls */
    size_t n_messages, cap_messages, n_tools, cap_tools, n_calls, cap_calls, n_blocks, cap_blocks;
    struct td_chat_message spare; /* handed out when memory is out */
    struct json_t *document;      /* a reference, or NULL */
    bool failed;
};

/* Zero-initialised is empty and valid. */
void td_conversation_deinit(struct td_conversation *c);
/* Keeps a reference, so that texts may point into it. */
void td_conversation_keep(struct td_conversation *c, struct json_t *document);

/* Takes over a block of malloc, until deinit. */
bool td_conversation_own(struct td_conversation *c, void *p); /* false: no memory, the block is gone */

/* The pointer is good until the next message is added. */
struct td_chat_message *td_conversation_add(struct td_conversation *c, enum td_chat_role role);
/* Room for the parts of m, zeroed; NULL on no memory. */
struct td_text *td_conversation_parts(struct td_conversation *c, struct td_chat_message *m, size_t n);
/* m's content is this one text. */
void td_conversation_set_text(struct td_conversation *c, struct td_chat_message *m, struct td_text text);
/* One more call of m, which is the last message. id may be absent: then no result can answer it. */
void td_conversation_add_call(struct td_conversation *c, struct td_chat_message *m, struct td_text id,
                              struct td_text name, struct td_text arguments);
/* The function that the call `id` named: the latest before the message at index `before`, else the first behind it. */
bool td_conversation_find_call(const struct td_conversation *c, struct td_text id, size_t before,
                               struct td_text *name_out);
/* INVALID: a name that is no function's name or is there already, parameters that are no object or too deep. path:
 * "tools[0].function". parameters NULL: none. */
enum td_status td_conversation_add_tool(struct td_conversation *c, const char *path, struct td_text name,
                                        struct td_text description, const struct json_t *parameters,
                                        struct td_err *err);
bool td_conversation_has_tool(const struct td_conversation *c, struct td_text name);
/* Fills chat's lists. NO_MEMORY. */
enum td_status td_conversation_end(struct td_conversation *c, struct td_err *err);

#endif
