#include "common/text/chat.h"

#include <string.h>

#include "common/base/check.h"
#include "common/text/harmony.h"
#include "common/text/plain.h"

static const char *const role_names[] = {"system", "developer", "user", "assistant", "tool"};

bool td_chat_role_parse(const char *name, enum td_chat_role *out)
{
    for (size_t i = 0; i < TD_COUNT(role_names); i++) {
        if (strcmp(name, role_names[i]) != 0) continue;
        *out = (enum td_chat_role)i;
        return true;
    }
    return false;
}

const char *td_chat_role_name(enum td_chat_role role) { return role_names[role]; }

bool td_chat_effort_parse(const char *name, enum td_chat_effort *out)
{
    if (*name == '\0' || strcmp(name, "medium") == 0)
        *out = TD_CHAT_EFFORT_MEDIUM;
    else if (strcmp(name, "low") == 0)
        *out = TD_CHAT_EFFORT_LOW;
    else if (strcmp(name, "high") == 0)
        *out = TD_CHAT_EFFORT_HIGH;
    else
        return false;
    return true;
}

bool td_chat_is_tool_name(struct td_text t)
{
    if (t.n == 0 || t.n > TD_CHAT_TOOL_NAME_MAX) return false;
    for (size_t i = 0; i < t.n; i++) {
        char c = t.p[i];
        bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!is_letter && !(c >= '0' && c <= '9') && c != '_' && c != '-') return false;
    }
    return true;
}

/* In the order that "auto" tries them; the last one fits every vocabulary. */
static const struct {
    const char *name;
    enum td_status (*create)(const struct td_tokenizer *t, struct td_chat_format **out, struct td_err *err);
} formats[] = {
    {"harmony", td_harmony_create},
    {"plain", td_plain_create},
};

enum td_status td_chat_format_open(const char *name, const struct td_tokenizer *t, struct td_chat_format **out,
                                   struct td_err *err)
{
    bool is_auto = strcmp(name, "auto") == 0;
    for (size_t i = 0; i < TD_COUNT(formats); i++) {
        if (!is_auto && strcmp(name, formats[i].name) != 0) continue;
        enum td_status st = formats[i].create(t, out, err);
        if (!is_auto || st != TD_E_BAD_CONFIG) return st;
    }
    return td_err_set(err, TD_E_NOT_FOUND, "no chat format \"%s\"; there are auto, harmony and plain", name);
}

enum td_status td_chat_prompt(const struct td_chat_format *f, const struct td_chat_conversation *c,
                              enum td_tool_choice choice, const char *name, struct td_token_list *out,
                              uint32_t *n_forced_out, struct td_err *err)
{
    size_t n_before = out->n;
    *n_forced_out = 0;
    enum td_status st = f->render(f, c, out, err);
    if (st != TD_OK || (choice != TD_TOOL_CHOICE_REQUIRED && choice != TD_TOOL_CHOICE_NAMED)) return st;
    if (f->force_call == NULL) {
        out->n = n_before;
        return td_err_set(err, TD_E_UNIMPLEMENTED, "tool_choice: the chat format has no tool calls");
    }
    if (choice == TD_TOOL_CHOICE_REQUIRED) name = c->n_tools == 1 ? c->tools[0].name.p : NULL;
    size_t n = out->n;
    st = f->force_call(f, name, out, err);
    *n_forced_out = (uint32_t)(out->n - n);
    return st;
}
