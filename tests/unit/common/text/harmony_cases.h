/* What the tests of Harmony share: its cases, and the format over both vocabularies. */
#ifndef TD_TEST_HARMONY_CASES_H
#define TD_TEST_HARMONY_CASES_H

#include "tests/unit/common/text/text_cases.h"

#include "common/text/chat.h"

static struct td_tokenizer *tiny;
static struct td_chat_format *tiny_format, *released_format; /* the latter NULL without the released vocabulary */
static json_t *cases;

static int load(void **state)
{
    (void)state;
    struct td_err err = {{0}};
    tiny = load_tokenizer(TINY_MODEL);
    cases = load_json("tests/cases/harmony-cases.json");
    if (td_chat_format_open("harmony", tiny, &tiny_format, &err) != TD_OK) fail_msg("%s", err.text);
    if (released_tokenizer() != NULL &&
        td_chat_format_open("harmony", released_tokenizer(), &released_format, &err) != TD_OK)
        fail_msg("%s", err.text);
    return 0;
}

static int unload(void **state)
{
    (void)state;
    td_chat_format_destroy(tiny_format);
    td_chat_format_destroy(released_format);
    td_tokenizer_destroy(tiny);
    td_tokenizer_destroy(released_tokenizer());
    json_decref(cases);
    return 0;
}

#endif
