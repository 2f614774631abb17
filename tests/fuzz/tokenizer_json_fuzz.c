/* Any bytes as a tokenizer.json: refused with a message, or a tokenizer that gives every text back. */
#include <stdlib.h>
#include <string.h>

#include "common/base/check.h"
#include "common/text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char text[] =
        "The tokens' text, 12345\r\n\t caf\xC3\xA9 <|end|> \xF0\x9F\xA7\xAA"
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    struct td_tokenizer *t = NULL;
    struct td_err err = {{0}};
    if (td_tokenizer_parse_json((const char *)data, n, "input", &t, &err) != TD_OK) {
        TD_CHECK(t == NULL && err.text[0] != '\0');
        return 0;
    }
    for (int mode = TD_TEXT_ORDINARY; mode <= TD_TEXT_SPECIAL; mode++) {
        struct td_token_list ids = {0};
        struct td_buf back = {0};
        enum td_status st = td_tokenizer_encode(t, text, sizeof text - 1, (enum td_text_mode)mode, &ids, &err);
        td_tokenizer_decode(t, ids.ids, ids.n, true, &back);
        /* A foreign regex may run into its limits; else nothing may be lost. */
        if (st == TD_OK)
            TD_CHECK(strcmp(td_buf_cstr(&back), text) == 0);
        else
            TD_CHECK(st == TD_E_INTERNAL && ids.n == 0);
        td_token_list_free(&ids);
        td_buf_free(&back);
    }
    td_tokenizer_destroy(t);
    return 0;
}
