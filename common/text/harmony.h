/* Harmony, the chat format of gpt-oss, one level below chat.h: messages with authors, channels and recipients as the
 * format knows them. chat.h's conversation is mapped to these (harmony.c); tests and tools may use them directly. */
#ifndef TD_TEXT_HARMONY_H
#define TD_TEXT_HARMONY_H

#include "common/base/bytes.h"
#include "common/text/chat.h"

enum td_harmony_token {
    TD_HARMONY_START,
    TD_HARMONY_CHANNEL,
    TD_HARMONY_CONSTRAIN,
    TD_HARMONY_MESSAGE,
    TD_HARMONY_END,
    TD_HARMONY_RETURN,
    TD_HARMONY_CALL,
    TD_HARMONY_N_TOKENS
};

struct td_harmony {
    struct td_chat_format format; /* first: a td_chat_format is a td_harmony */
    uint32_t ids[TD_HARMONY_N_TOKENS];
};
/* "harmony" of td_chat_format_open. BAD_CONFIG: the vocabulary lacks a token. */
enum td_status td_harmony_create(const struct td_tokenizer *t, struct td_chat_format **out, struct td_err *err);

/* A text is absent when p is NULL. */
struct td_harmony_message {
    struct td_text author;    /* "user", "assistant", ...; a tool's full name, e.g. "functions.f" */
    struct td_text name;      /* ":name" behind the author */
    struct td_text recipient; /* "all": not written, yet ends the message as a call */
    struct td_text channel, content_type;
    const struct td_text *parts; /* encoded apart */
    size_t n_parts;
};

enum td_harmony_mode {
    TD_HARMONY_COMPLETION,   /* adds the beginning of an assistant message */
    TD_HARMONY_CONVERSATION, /* adds nothing */
    TD_HARMONY_TRAINING,     /* the last message, if a final one, ends in <|return|> */
};
/* Which reasoning (messages on channel analysis) is left out. */
enum td_harmony_drop {
    TD_HARMONY_DROP_NONE,
    TD_HARMONY_DROP_FINISHED, /* all before the last final message: what serving does with a client's history */
    TD_HARMONY_DROP_FIRST,    /* the published renderer's: all before the first final message, if the last assistant
                               * message    is a final one */
};
/* Appends the messages' ids. INVALID (err says which message), NO_MEMORY; then out keeps its length. */
enum td_status td_harmony_render(const struct td_harmony *h, const struct td_harmony_message *messages, size_t n,
                                 enum td_harmony_mode mode, enum td_harmony_drop drop, struct td_token_list *out,
                                 struct td_err *err);

/* Tools are declared by namespace. */
struct td_harmony_namespace {
    struct td_text name, description;
    const struct td_chat_tool *tools;
    size_t n_tools;
};
/* The content of a system message. Absent parts are left out. */
struct td_harmony_system {
    struct td_text identity, cutoff, date, effort; /* effort in lower case */
    const struct td_text *channels;
    size_t n_channels;
    bool channel_required;
    const struct td_harmony_namespace *tools; /* built-in ones */
    size_t n_tools;
    bool has_functions; /* some developer message declares tools in namespace functions */
};
void td_harmony_system_text(const struct td_harmony_system *s, struct td_buf *out);
/* The content of a developer message. */
struct td_harmony_developer {
    struct td_text instructions; /* given and empty still writes the heading */
    const struct td_harmony_namespace *tools;
    size_t n_tools;
    struct td_chat_response_format response_format;
};
void td_harmony_developer_text(const struct td_harmony_developer *d, struct td_buf *out);

/* "# Tools" and the namespaces, sorted by name. */
void td_harmony_tools_text(const struct td_harmony_namespace *list, size_t n, struct td_buf *out);

/* The parser of td_harmony_create's format. */
enum td_status td_harmony_parser_create(const struct td_chat_format *f, const struct td_chat_parser_options *o,
                                        struct td_chat_parser **out);

#endif
