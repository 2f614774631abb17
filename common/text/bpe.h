/* Merging one piece: from its bytes to token ids. */
#ifndef TD_TEXT_BPE_H
#define TD_TEXT_BPE_H

#include <stdint.h>

#include "common/base/status.h"
#include "common/text/vocab.h"

/* Memory for long pieces, kept between pieces of one text and of one vocabulary. Zero-initialised is empty. */
struct td_bpe_scratch {
    void *memory;
    size_t n_bytes;
    struct td_bpe_buckets *buckets;
    uint64_t
        n_steps; /* of all long pieces so far: pairs looked at, places taken and sorted; what tests hold against n */
};
void td_bpe_scratch_free(struct td_bpe_scratch *s);

/* Starts with single bytes; among all neighbours that may merge, merges those with the lowest priority (the leftmost on
 * ties) until none is left; appends the ids to out. n in 1 .. INT32_MAX. O(n log n), and O(n) on a text that repeats
 * itself. NO_MEMORY also shows in
 * out->failed. */
enum td_status td_bpe_merge(const struct td_vocab *v, const uint8_t *piece, size_t n, struct td_bpe_scratch *scratch,
                            struct td_token_list *out);

#endif
