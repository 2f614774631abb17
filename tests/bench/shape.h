/* Model directories with the shapes of gpt-oss and no weights, for --load-format dummy. */
#ifndef TESTS_BENCH_SHAPE_H
#define TESTS_BENCH_SHAPE_H

#include "common/base/bytes.h"
#include "common/base/status.h"

/* config.json of "20b" or "120b", with all their layers (0) or so many. INVALID: neither. */
enum td_status td_bench_shape_config(const char *name, uint32_t n_layers, struct td_buf *out, struct td_err *err);

/* Makes dir, unless it is there, with that config.json. tokenizer: NULL, or a model directory whose tokenizer and stop
 * tokens the new one gets: routers need them, and ids beyond that tokenizer's are never drawn. */
enum td_status td_bench_shape_write(const char *name, uint32_t n_layers, const char *dir, const char *tokenizer,
                                    struct td_err *err);
void td_bench_shape_remove(const char *dir); /* what td_bench_shape_write made without a tokenizer */

#endif
