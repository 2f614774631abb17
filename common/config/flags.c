#include "common/config/flags_int.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define DEFAULT_u32(d)   .def = (d)
#define DEFAULT_u64(d)   .def = (d)
#define DEFAULT_ms(d)    .def = (d)
#define DEFAULT_bool(d)  .def = (d)
#define DEFAULT_bytes(d) .def = (d)
#define DEFAULT_str(d)   .def_str = (d)

const struct td_flag td_flags[] = {
#define X(t, n, d, lo, hi, who, h)                                                                                     \
    {.name = #n,                                                                                                       \
     .type = FLAG_##t,                                                                                                 \
     .offset = offsetof(struct td_config, n),                                                                          \
     DEFAULT_##t(d),                                                                                                   \
     .min = (lo),                                                                                                      \
     .max = (hi),                                                                                                      \
     .daemons = (who),                                                                                                 \
     .help = (h)},
#include "common/config/flags.def"
#undef X
};
const unsigned td_n_flags = sizeof td_flags / sizeof td_flags[0];

static void *slot(const struct td_flag *f, struct td_config *c) { return (char *)c + f->offset; }

char *td_flag_str_of(const struct td_flag *f, struct td_config *c) { return slot(f, c); }

uint64_t td_flag_number(const struct td_flag *f, const struct td_config *c)
{
    const void *p = (const char *)c + f->offset;
    switch (f->type) {
    case FLAG_u32:
    case FLAG_ms: return *(const uint32_t *)p;
    case FLAG_u64:
    case FLAG_bytes: return *(const uint64_t *)p;
    case FLAG_bool: return *(const bool *)p;
    case FLAG_str: break;
    }
    return 0;
}

static void store_number(const struct td_flag *f, struct td_config *c, uint64_t v)
{
    switch (f->type) {
    case FLAG_u32:
    case FLAG_ms: *(uint32_t *)slot(f, c) = (uint32_t)v; break;
    case FLAG_u64:
    case FLAG_bytes: *(uint64_t *)slot(f, c) = v; break;
    case FLAG_bool: *(bool *)slot(f, c) = v != 0; break;
    case FLAG_str: break;
    }
}

void td_flag_set_default(const struct td_flag *f, struct td_config *c)
{
    if (f->type == FLAG_str)
        snprintf(slot(f, c), sizeof(td_flag_str), "%s", f->def_str);
    else
        store_number(f, c, f->def);
}

void td_flag_dashes(const char *name, char out[64])
{
    snprintf(out, 64, "%s", name);
    for (char *p = out; *p != 0; p++)
        if (*p == '_') *p = '-';
}

void td_flag_print_number(enum flag_type type, uint64_t v, struct td_buf *out)
{
    static const char unit[] = "KMGT";
    int u = -1;
    if (type == FLAG_bool) {
        td_buf_str(out, v != 0 ? "true" : "false");
        return;
    }
    while (type == FLAG_bytes && u < 3 && v != 0 && v % 1024 == 0) {
        v /= 1024;
        u++;
    }
    td_buf_printf(out, "%" PRIu64, v);
    if (u >= 0) td_buf_u8(out, (uint8_t)unit[u]);
}

/* The factor of a suffix; 0: not one of this type. */
static uint64_t unit_of(enum flag_type type, const char *s)
{
    static const struct {
        enum flag_type type;
        const char *suffix;
        uint64_t factor;
    } units[] = {{FLAG_bytes, "K", 1ull << 10},
                 {FLAG_bytes, "M", 1ull << 20},
                 {FLAG_bytes, "G", 1ull << 30},
                 {FLAG_bytes, "T", 1ull << 40},
                 {FLAG_ms, "ms", 1},
                 {FLAG_ms, "s", 1000},
                 {FLAG_ms, "m", 60000},
                 {FLAG_ms, "h", 3600000}};
    if (*s == 0) return 1;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (units[i].type == type && strcasecmp(units[i].suffix, s) == 0) return units[i].factor;
    return 0;
}

static enum td_status read_number(const struct td_flag *f, const char *source, const char *text, uint64_t *out,
                                  struct td_err *err)
{
    static const char *const expects[] = {
        [FLAG_u32] = "a whole number",
        [FLAG_u64] = "a whole number",
        [FLAG_ms] = "milliseconds (or a number with ms, s, m or h)",
        [FLAG_bytes] = "bytes (or a number with K, M, G or T)",
    };
    char *end = NULL;
    errno = 0;
    uint64_t v = text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0; /* strtoull would accept "-1" */
    uint64_t factor = end == NULL ? 0 : unit_of(f->type, end);
    if (factor == 0) return td_err_set(err, TD_E_BAD_CONFIG, "%s: \"%s\" is not %s", source, text, expects[f->type]);
    bool too_big = errno == ERANGE || v > UINT64_MAX / factor;
    v = too_big ? UINT64_MAX : v * factor;
    if (too_big || v < f->min || v > f->max) {
        struct td_buf lo = {0}, hi = {0};
        td_flag_print_number(f->type, f->min, &lo);
        td_flag_print_number(f->type, f->max, &hi);
        td_err_set(err, TD_E_BAD_CONFIG, "%s: %s is out of bounds, %s to %s%s", source, text, td_buf_cstr(&lo),
                   td_buf_cstr(&hi), f->type == FLAG_ms ? " ms" : "");
        td_buf_free(&lo);
        td_buf_free(&hi);
        return TD_E_BAD_CONFIG;
    }
    *out = v;
    return TD_OK;
}

static enum td_status read_bool(const char *source, const char *text, uint64_t *out, struct td_err *err)
{
    static const char *const words[2][4] = {{"false", "0", "no", "off"}, {"true", "1", "yes", "on"}};
    for (unsigned v = 0; v < 2; v++)
        for (unsigned i = 0; i < 4; i++)
            if (strcasecmp(text, words[v][i]) == 0) {
                *out = v;
                return TD_OK;
            }
    return td_err_set(err, TD_E_BAD_CONFIG, "%s: \"%s\" is not true or false", source, text);
}

enum td_status td_flag_read(const struct td_flag *f, struct td_config *c, const char *source, const char *text,
                            struct td_err *err)
{
    if (f->type == FLAG_str) {
        size_t n = strlen(text);
        if (n >= sizeof(td_flag_str))
            return td_err_set(err, TD_E_BAD_CONFIG, "%s: %zu bytes are too long, at most %zu", source, n,
                              sizeof(td_flag_str) - 1);
        memcpy(slot(f, c), text, n + 1);
        return TD_OK;
    }
    uint64_t v = 0;
    enum td_status st = f->type == FLAG_bool ? read_bool(source, text, &v, err) : read_number(f, source, text, &v, err);
    if (st == TD_OK) store_number(f, c, v);
    return st;
}
