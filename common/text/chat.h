/* Chat formats: how a conversation becomes a prompt's tokens, and how the tokens that a model writes become messages.
 * One small interface, one file per format behind it (harmony*.c for gpt-oss, plain.c). A format is bound to a
 * tokenizer and immutable: any thread may render and create parsers; a parser belongs to one thread at a time.
 *
 *   td_chat_format_open("harmony", tokenizer, &f, err)
 *   f->render(f, &conversation, &ids, err)                        prompt ids, ready for the model to go on
 *   f->parser_create(f, &options, &parser)
 *   td_chat_parser_feed(parser, id) ... td_chat_parser_end(parser, hit_limit)
 *
 * Parsing is total: any sequence of ids, even one no model would write, yields a well-formed series of events. */
#ifndef TD_TEXT_CHAT_H
#define TD_TEXT_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/tokenizer.h"

/* --- what is rendered --------------------------------------------------------------------------------------------- */

/* Borrowed UTF-8 that may hold NUL. {NULL, 0}: not given. A given empty text has a non-NULL pointer. */
struct td_text {
    const char *p;
    size_t n;
};

enum td_chat_role { TD_CHAT_SYSTEM, TD_CHAT_DEVELOPER, TD_CHAT_USER, TD_CHAT_ASSISTANT, TD_CHAT_TOOL };
/* "system", ...; false: not a role */
bool td_chat_role_parse(const char *name, enum td_chat_role *out);
const char *td_chat_role_name(enum td_chat_role role);

enum td_chat_effort { TD_CHAT_EFFORT_MEDIUM, TD_CHAT_EFFORT_LOW, TD_CHAT_EFFORT_HIGH };
/* "low", "medium", "high", and "" for medium; false: anything else */
bool td_chat_effort_parse(const char *name, enum td_chat_effort *out);

struct td_chat_call {
    struct td_text name, arguments; /* a function's name without namespace; JSON text as it came */
};

struct td_chat_message {
    enum td_chat_role role;
    const struct td_text *parts; /* the content; parts are encoded apart */
    size_t n_parts;
    struct td_text reasoning;         /* assistant: its earlier analysis */
    const struct td_chat_call *calls; /* assistant */
    size_t n_calls;
    struct td_text name; /* tool: the function that answers (required). user: an optional name */
};

struct json_t;
#define TD_CHAT_TOOL_NAME_MAX 64u
/* 1 to 64 letters, digits, underscores and dashes: what a declared function may be called. */
bool td_chat_is_tool_name(struct td_text name);
struct td_chat_tool {
    struct td_text name, description; /* description may be absent */
    const struct json_t *parameters;  /* JSON schema (jansson), or NULL */
};

enum td_tool_choice {
    TD_TOOL_CHOICE_AUTO,
    TD_TOOL_CHOICE_NONE,     /* the conversation's tools are left out */
    TD_TOOL_CHOICE_REQUIRED, /* some tool must be called */
    TD_TOOL_CHOICE_NAMED,    /* a certain one must be called */
};

struct td_chat_response_format {
    struct td_text name, description, schema; /* schema: compact JSON; absent: no such format */
};

struct td_chat_conversation {
    const struct td_chat_message *messages;
    size_t n_messages;
    const struct td_chat_tool *tools;
    size_t n_tools;
    struct td_chat_response_format response_format;
    enum td_chat_effort effort;
    const char
        *current_date;   /* "YYYY-MM-DD", NULL or "": no date line. Decided by the caller: a format reads no clock */
    bool keep_reasoning; /* do not drop the analysis of finished turns */
};

/* --- what is parsed ----------------------------------------------------------------------------------------------- */

enum td_chat_kind {
    TD_CHAT_REASONING,    /* not for the end user */
    TD_CHAT_CONTENT,      /* the answer */
    TD_CHAT_PREAMBLE,     /* content too: remarks for the user before or between calls */
    TD_CHAT_CALL,         /* a call of a declared function; its text is the arguments */
    TD_CHAT_UNKNOWN_CALL, /* a call of something nobody declared: not shown */
    TD_CHAT_HIDDEN,       /* the model speaks for another party: not shown */
};
static inline bool td_chat_kind_is_visible(enum td_chat_kind k) { return k < TD_CHAT_UNKNOWN_CALL; }

enum td_chat_event_type {
    TD_CHAT_MESSAGE_START, /* kind, channel, recipient, content_type, function */
    TD_CHAT_TEXT,          /* text: whole characters, never special tokens, never empty */
    TD_CHAT_MESSAGE_END,   /* is_complete */
    TD_CHAT_TURN_END,      /* exactly once, last: from td_chat_parser_end */
};

/* All pointers are borrowed for the callback. TEXT and MESSAGE_END repeat what MESSAGE_START said. */
struct td_chat_event {
    enum td_chat_event_type type;
    enum td_chat_kind kind;
    uint32_t message;                               /* index among this turn's messages, from 0, hidden ones counted */
    const char *channel, *recipient, *content_type; /* as the model wrote them, cleaned; NULL: none */
    const char *function;                           /* CALL: the function's name without namespace; else NULL */
    uint32_t call;                                  /* CALL: index among this turn's calls, from 0 */
    struct td_text text;                            /* TEXT */
    bool starts_line; /* TEXT: the first text of a second or later non-empty message of its kind (reasoning, or
                       * content with preamble): who joins the messages puts "\n" before it */
    bool is_complete; /* MESSAGE_END: ended by the model, not cut off */
};

struct td_chat_parser_options {
    void (*on_event)(void *user, const struct td_chat_event *e); /* runs inside feed and end */
    void *user;
    const struct td_text *functions; /* names of declared functions, borrowed until the parser's end */
    size_t n_functions;
};

struct td_chat_parser {
    const struct td_chat_parser_ops *ops;
    uint64_t n_reasoning_tokens; /* body tokens of reasoning messages so far */
    bool failed;                 /* out of memory: events stopped; check at the end */
};
struct td_chat_parser_ops {
    void (*feed)(struct td_chat_parser *p, uint32_t id);
    void (*end)(struct td_chat_parser *p, bool hit_limit);
    void (*destroy)(struct td_chat_parser *p);
};
/* Feed everything that was sampled, special and stop tokens too. */
static inline void td_chat_parser_feed(struct td_chat_parser *p, uint32_t id) { p->ops->feed(p, id); }
/* hit_limit: generation ended for length, not by a stop token. Once; no feed after it. */
static inline void td_chat_parser_end(struct td_chat_parser *p, bool hit_limit) { p->ops->end(p, hit_limit); }
static inline void td_chat_parser_destroy(struct td_chat_parser *p)
{
    if (p != NULL) p->ops->destroy(p);
}

/* --- the interface ------------------------------------------------------------------------------------------------ */

struct td_chat_format {
    const char *name;
    const struct td_tokenizer *tokenizer; /* borrowed */
    /* Appends the prompt's ids. INVALID: err says which message. TOO_LARGE: the tools' text. NO_MEMORY. On failure out
     * keeps its length. */
    enum td_status (*render)(const struct td_chat_format *f, const struct td_chat_conversation *c,
                             struct td_token_list *out, struct td_err *err);
    enum td_status (*parser_create)(const struct td_chat_format *f, const struct td_chat_parser_options *o,
                                    struct td_chat_parser **out);
    /* Appends the beginning of a call to a rendered prompt, so that the model cannot but go on with one: of function
     * name, or of any if name is NULL. The parser is fed these ids before the model's. NULL: the format has no calls.
     */
    enum td_status (*force_call)(const struct td_chat_format *f, const char *name, struct td_token_list *out,
                                 struct td_err *err);
    void (*destroy)(struct td_chat_format *f);
};
/* Formats: "harmony"; "plain"; "auto" takes the first whose special tokens the vocabulary has. NOT_FOUND: no such name.
 * BAD_CONFIG: the vocabulary lacks a token that the format needs; err names it. */
enum td_status td_chat_format_open(const char *name, const struct td_tokenizer *t, struct td_chat_format **out,
                                   struct td_err *err);
static inline void td_chat_format_destroy(struct td_chat_format *f)
{
    if (f != NULL) f->destroy(f);
}

/* The prompt of a conversation; with a choice that demands a call (name: with NAMED) its beginning follows,
 * *n_forced_out ids: the answer begins with them. As render, and UNIMPLEMENTED: the format has no calls. */
enum td_status td_chat_prompt(const struct td_chat_format *f, const struct td_chat_conversation *c,
                              enum td_tool_choice choice, const char *name, struct td_token_list *out,
                              uint32_t *n_forced_out, struct td_err *err);

#endif
