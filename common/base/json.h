/* Writing JSON text. Reading is jansson's job, in the layers that need it. */
#ifndef TD_BASE_JSON_H
#define TD_BASE_JSON_H
#include "common/base/bytes.h"
/* Appends the n bytes at s as a JSON string with its quotes. Bytes that are not UTF-8 become U+FFFD, so that the result
 * is valid JSON whatever a peer, a file or a model produced. */
void td_json_quote(struct td_buf *b, const char *s, size_t n);
void td_json_quote_str(struct td_buf *b, const char *s);
#endif
