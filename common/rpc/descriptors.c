#include "common/rpc/descriptors.h"

#include <string.h>

#include "common/base/check.h"

/* Field numbers of descriptor.proto. */
enum { SET_FILE = 1, NAME = 1, FILE_PACKAGE = 2, FILE_DEPENDENCY = 3 };

/* What may be declared inside what, by which field. */
enum scope { IN_FILE, IN_MESSAGE, IN_ENUM, IN_SERVICE, IN_NOTHING };
static const struct {
    uint8_t scope, field, inner;
} members[] = {
    {IN_FILE, 4, IN_MESSAGE},    {IN_FILE, 5, IN_ENUM},       {IN_FILE, 6, IN_SERVICE},    {IN_FILE, 7, IN_NOTHING},
    {IN_MESSAGE, 2, IN_NOTHING}, {IN_MESSAGE, 3, IN_MESSAGE}, {IN_MESSAGE, 4, IN_ENUM},    {IN_MESSAGE, 6, IN_NOTHING},
    {IN_MESSAGE, 8, IN_NOTHING}, {IN_ENUM, 2, IN_NOTHING},    {IN_SERVICE, 2, IN_NOTHING},
};

/* --- the wire ---------------------------------------------------------------------------------------------- */
static bool read_varint(struct td_descriptor_view *v, uint64_t *out)
{
    *out = 0;
    for (unsigned shift = 0; shift < 64 && v->n > 0; shift += 7) {
        uint8_t b = *v->p++;
        v->n--;
        *out |= (uint64_t)(b & 0x7F) << shift;
        if (b < 0x80) return true;
    }
    return false;
}

static bool skip(struct td_descriptor_view *v, uint64_t n)
{
    if (n > v->n) return false;
    v->p += n;
    v->n -= (size_t)n;
    return true;
}

/* Moves v behind its next length-delimited field with that number, whose content goes to out. */
static bool next_part(struct td_descriptor_view *v, uint32_t number, struct td_descriptor_view *out)
{
    uint64_t tag, n;
    while (read_varint(v, &tag)) {
        switch (tag & 7) {
        case 0:
            if (!read_varint(v, &n)) return false;
            break;
        case 1:
            if (!skip(v, 8)) return false;
            break;
        case 5:
            if (!skip(v, 4)) return false;
            break;
        case 2:
            if (!read_varint(v, &n) || n > v->n) return false;
            *out = (struct td_descriptor_view){v->p, (size_t)n};
            skip(v, n);
            if (tag >> 3 == number) return true;
            break;
        default: return false;
        }
    }
    return false;
}

static struct td_descriptor_view text_of(struct td_descriptor_view v, uint32_t number)
{
    struct td_descriptor_view text;
    return next_part(&v, number, &text) ? text : (struct td_descriptor_view){NULL, 0};
}

static bool is_text(struct td_descriptor_view v, const char *s, size_t n)
{
    return n > 0 && v.n == n && memcmp(v.p, s, n) == 0;
}

/* --- look-ups ---------------------------------------------------------------------------------------------- */
static bool is_declared(struct td_descriptor_view v, enum scope scope, const char *symbol)
{
    const char *dot = strchr(symbol, '.');
    size_t n = dot != NULL ? (size_t)(dot - symbol) : strlen(symbol);
    if (n == 0) return false;
    for (unsigned i = 0; i < TD_COUNT(members); i++) {
        if (members[i].scope != scope) continue;
        enum scope inner = (enum scope)members[i].inner;
        struct td_descriptor_view rest = v, part;
        while (next_part(&rest, members[i].field, &part)) {
            if (is_text(text_of(part, NAME), symbol, n)) return dot == NULL || is_declared(part, inner, dot + 1);
            if (inner == IN_ENUM && dot == NULL && is_declared(part, IN_ENUM, symbol))
                return true; /* values are siblings */
        }
    }
    return false;
}

bool td_descriptors_file(struct td_descriptor_view set, const char *name, struct td_descriptor_view *out)
{
    struct td_descriptor_view file;
    while (next_part(&set, SET_FILE, &file))
        if (is_text(text_of(file, NAME), name, strlen(name))) {
            *out = file;
            return true;
        }
    return false;
}

bool td_descriptors_symbol(struct td_descriptor_view set, const char *symbol, struct td_descriptor_view *out)
{
    struct td_descriptor_view file;
    while (next_part(&set, SET_FILE, &file)) {
        struct td_descriptor_view package = text_of(file, FILE_PACKAGE);
        const char *rest = symbol;
        if (package.n > 0) {
            if (strncmp(symbol, (const char *)package.p, package.n) != 0 || symbol[package.n] != '.') continue;
            rest += package.n + 1;
        }
        if (is_declared(file, IN_FILE, rest)) {
            *out = file;
            return true;
        }
    }
    return false;
}

static bool find_named(struct td_descriptor_view set, struct td_descriptor_view name, struct td_descriptor_view *out)
{
    while (next_part(&set, SET_FILE, out))
        if (is_text(text_of(*out, NAME), (const char *)name.p, name.n)) return true;
    return false;
}

size_t td_descriptors_with_imports(struct td_descriptor_view set, struct td_descriptor_view file,
                                   struct td_descriptor_view *out, size_t n_out)
{
    size_t n = 0;
    if (n_out > 0) out[n++] = file;
    for (size_t i = 0; i < n; i++) {
        struct td_descriptor_view rest = out[i], name, found;
        while (n < n_out && next_part(&rest, FILE_DEPENDENCY, &name)) {
            if (!find_named(set, name, &found)) continue;
            bool is_known = false;
            for (size_t j = 0; j < n; j++) is_known |= out[j].p == found.p;
            if (!is_known) out[n++] = found;
        }
    }
    return n;
}
