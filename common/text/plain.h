/* A chat format without special tokens, for base models and as the second implementation that keeps chat.h honest:
 *   System: ...\n\nUser: ...\n\nAssistant: ...\n\nUser: ...\n\nAssistant:
 * Whatever the model writes is content. */
#ifndef TD_TEXT_PLAIN_H
#define TD_TEXT_PLAIN_H

#include "common/text/chat.h"

enum td_status td_plain_create(const struct td_tokenizer *t, struct td_chat_format **out, struct td_err *err);

#endif
