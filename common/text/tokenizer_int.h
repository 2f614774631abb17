/* What a tokenizer consists of, for the files that build one (tokenizer_json.c, tokenizer_ranks.c) and the one that
 * uses it. */
#ifndef TD_TEXT_TOKENIZER_INT_H
#define TD_TEXT_TOKENIZER_INT_H

#include "common/text/split.h"
#include "common/text/tokenizer.h"
#include "common/text/vocab.h"

struct td_tokenizer {
    struct td_vocab vocab;
    struct td_split *split;
    bool ignore_merges; /* a piece that is itself a token becomes that token at once */
};

#endif
