#include "common/rpc/codec.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

#define BUDGET_FACTOR 8u          /* memory per wire byte; token lists need 4 to 8 */
#define BUDGET_SLACK  (64u << 10) /* small messages: fixed-size structs and scan slabs */

size_t td_codec_budget(size_t max_bytes)
{
    if (max_bytes > (SIZE_MAX - BUDGET_SLACK) / BUDGET_FACTOR) return SIZE_MAX;
    return max_bytes * BUDGET_FACTOR + BUDGET_SLACK;
}

/* Freed memory is not given back to the budget: it bounds the work of one message too. */
static void *budget_alloc(void *user, size_t n)
{
    struct td_codec *k = user;
    if (n > k->budget_bytes) {
        k->is_over_budget = true;
        return NULL;
    }
    k->budget_bytes -= n;
    void *p = td_calloc(1, n);
    if (p == NULL) k->is_out_of_memory = true;
    return p;
}

static void budget_free(void *user, void *p)
{
    (void)user;
    free(p);
}

/* Length of the valid UTF-8 character at s (its bytes end at a NUL at the latest), 0 if there is none. */
static size_t utf8_length(const unsigned char *s)
{
    if (s[0] < 0x80) return 1;
    size_t n = s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : 2;
    if (s[0] < 0xC2 || s[0] > 0xF4) return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    bool is_overlong = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
    bool is_surrogate = s[0] == 0xED && s[1] > 0x9F;
    bool is_beyond = s[0] == 0xF4 && s[1] > 0x8F;
    return is_overlong || is_surrogate || is_beyond ? 0 : n;
}

static bool is_utf8(const char *text)
{
    for (const unsigned char *s = (const unsigned char *)text; *s != 0;) {
        size_t n = utf8_length(s);
        if (n == 0) return false;
        s += n;
    }
    return true;
}

size_t td_codec_clean_text(const char *text, char *out, size_t n)
{
    size_t m = 0;
    for (const unsigned char *s = (const unsigned char *)text; *s != 0;) {
        size_t len = utf8_length(s), step = len == 0 ? 1 : len;
        if (m + step >= n) break;
        if (len == 0)
            out[m] = '?';
        else
            memcpy(out + m, s, len);
        m += step;
        s += step;
    }
    out[m] = 0;
    return m;
}

static const ProtobufCFieldDescriptor *find_bad_text(const ProtobufCMessage *msg);

static const ProtobufCFieldDescriptor *check_one(const ProtobufCFieldDescriptor *f, const void *value)
{
    if (value == NULL) return NULL;
    if (f->type == PROTOBUF_C_TYPE_MESSAGE) return find_bad_text(value);
    return is_utf8(value) ? NULL : f;
}

/* The first string field that is not UTF-8, NULL if all are. Depth is that of our message types, which never nest in
 * themselves. */
static const ProtobufCFieldDescriptor *find_bad_text(const ProtobufCMessage *msg)
{
    const ProtobufCMessageDescriptor *d = msg->descriptor;
    for (unsigned i = 0; i < d->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &d->fields[i], *bad = NULL;
        if (f->type != PROTOBUF_C_TYPE_MESSAGE && f->type != PROTOBUF_C_TYPE_STRING) continue;
        const char *base = (const char *)msg;
        void *const *field = (void *const *)(const void *)(base + f->offset);
        if (f->label == PROTOBUF_C_LABEL_REPEATED) {
            size_t n;
            memcpy(&n, base + f->quantifier_offset, sizeof n);
            void *const *items = *field;
            for (size_t j = 0; j < n && bad == NULL; j++) bad = check_one(f, items[j]);
        } else {
            uint32_t chosen = f->id;
            if ((f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0)
                memcpy(&chosen, base + f->quantifier_offset, sizeof chosen);
            if (chosen == f->id) bad = check_one(f, *field);
        }
        if (bad != NULL) return bad;
    }
    return NULL;
}

enum td_status td_codec_unpack(struct td_codec *k, const ProtobufCMessageDescriptor *type, const void *data, size_t n,
                               size_t max_bytes, ProtobufCMessage **out, struct td_err *err)
{
    *k = (struct td_codec){.budget_bytes = td_codec_budget(max_bytes)};
    k->allocator = (ProtobufCAllocator){budget_alloc, budget_free, k};
    if (n > max_bytes)
        return td_err_set(err, TD_E_TOO_LARGE, "%s has %zu bytes, the limit is %zu", type->name, n, max_bytes);
    ProtobufCMessage *msg = protobuf_c_message_unpack(type, &k->allocator, n, data);
    if (msg == NULL && k->is_over_budget)
        return td_err_set(err, TD_E_TOO_LARGE, "%s of %zu bytes needs more than %zu bytes of memory", type->name, n,
                          td_codec_budget(max_bytes));
    if (msg == NULL && k->is_out_of_memory) return td_err_set(err, TD_E_NO_MEMORY, "no memory for %s", type->name);
    if (msg == NULL) return td_err_set(err, TD_E_INVALID, "%s of %zu bytes cannot be decoded", type->name, n);
    const ProtobufCFieldDescriptor *bad = find_bad_text(msg);
    if (bad != NULL) {
        td_codec_release(k, msg);
        return td_err_set(err, TD_E_INVALID, "%s: is not valid UTF-8, in %s", bad->name, type->name);
    }
    *out = msg;
    return TD_OK;
}

void td_codec_release(struct td_codec *k, ProtobufCMessage *msg)
{
    if (msg != NULL) protobuf_c_message_free_unpacked(msg, &k->allocator);
}
