/* Byte-level BPE tokenizer, read from a model directory's tokenizer.json (or a .tiktoken rank file).
 * Encoding: cut the text with the file's regex, then merge each piece; ids equal tiktoken's.
 * A loaded tokenizer is immutable: any number of threads may encode and decode with it at once. Nothing here blocks
 * except loading; cost is O(n log n) at worst in the text's length (about 10 to 100 ns a byte), so long texts belong on
 * a pool thread. */
#ifndef TD_TEXT_TOKENIZER_H
#define TD_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/base/status.h"
#include "common/text/token_list.h"

struct td_tokenizer;

/* path: a model directory (its tokenizer.json, else its only *.tiktoken file), or such a file itself.
 * BAD_FILE, IO, NO_MEMORY; err names the file and the culprit in it. *out is set on success only. */
enum td_status td_tokenizer_load(const char *path, struct td_tokenizer **out, struct td_err *err);
/* The same from memory; text is borrowed for the call. name stands for the file in messages. */
enum td_status td_tokenizer_parse_json(const char *text, size_t n, const char *name, struct td_tokenizer **out,
                                       struct td_err *err);
enum td_status td_tokenizer_parse_ranks(const char *text, size_t n, const char *name, struct td_tokenizer **out,
                                        struct td_err *err);
void td_tokenizer_destroy(struct td_tokenizer *t); /* NULL is fine */

/* TD_TEXT_ORDINARY: "<|end|>" in the text is ordinary characters; no special id is ever produced (the right choice for
 * whatever a user wrote). TD_TEXT_SPECIAL: strings that name special tokens become them. */
enum td_text_mode { TD_TEXT_ORDINARY, TD_TEXT_SPECIAL };

/* Appends the ids of text[0 .. n) to out. text may hold NUL; it must be UTF-8, else INVALID with the offset in err.
 * TOO_LARGE: n above 1 GiB. NO_MEMORY. INTERNAL: a limit of the regex engine was hit. On failure out keeps its length.
 */
enum td_status td_tokenizer_encode(const struct td_tokenizer *t, const char *text, size_t n, enum td_text_mode mode,
                                   struct td_token_list *out, struct td_err *err);

/* Appends the exact bytes of the ids, which need not be UTF-8 (see detok.h for streams). Special ids give their names
 * if keep_special, else nothing; ids without a token (padding rows of the vocabulary) give nothing. out->failed on no
 * memory. */
void td_tokenizer_decode(const struct td_tokenizer *t, const uint32_t *ids, size_t n, bool keep_special,
                         struct td_buf *out);

/* One token's bytes; a special token's name. NULL and 0 for ids without a token. Valid as long as t. */
const uint8_t *td_tokenizer_bytes(const struct td_tokenizer *t, uint32_t id, size_t *n_out);
bool td_tokenizer_is_special(const struct td_tokenizer *t, uint32_t id);
/* Id of the special token with this exact name, e.g. "<|start|>"; TD_NO_TOKEN if the vocabulary has none. */
uint32_t td_tokenizer_special(const struct td_tokenizer *t, const char *name);
uint32_t td_tokenizer_n_ids(const struct td_tokenizer *t); /* highest id + 1 (the model may have more rows) */
uint32_t td_tokenizer_max_token_bytes(const struct td_tokenizer *t);

#endif
