/* Look-ups in a small descriptor set, written by hand as bytes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/bytes.h"
#include "common/base/check.h"
#include "common/rpc/descriptors.h"

/* A length-delimited field. */
static void put(struct td_buf *b, unsigned number, const void *p, size_t n)
{
    assert_true(n < 128);
    td_buf_u8(b, (uint8_t)(number << 3 | 2));
    td_buf_u8(b, (uint8_t)n);
    td_buf_put(b, p, n);
}

static void put_text(struct td_buf *b, unsigned number, const char *s) { put(b, number, s, strlen(s)); }

static void put_buf(struct td_buf *b, unsigned number, struct td_buf *inner)
{
    put(b, number, inner->data, inner->n);
    td_buf_free(inner);
}

static struct td_buf named(const char *name)
{
    struct td_buf b = {0};
    put_text(&b, 1, name);
    td_buf_u8(&b, 3 << 3); /* a number among the fields: skipped */
    td_buf_u8(&b, 9);
    return b;
}

/* a.proto (package x.y): message M { field f; message N { field g }; enum E { V } }, service S { method Go }; imports
 * b, c. b.proto (package x): enum F { W }; imports c.  c.proto (no package): message M. */
static struct td_buf make_set(void)
{
    struct td_buf set = {0}, file, m, n, e, s, item;
    file = named("a.proto");
    put_text(&file, 2, "x.y");
    put_text(&file, 3, "b.proto");
    put_text(&file, 3, "c.proto");
    m = named("M");
    item = named("f"), put_buf(&m, 2, &item);
    n = named("N");
    item = named("g"), put_buf(&n, 2, &item);
    put_buf(&m, 3, &n);
    e = named("E");
    item = named("V"), put_buf(&e, 2, &item);
    put_buf(&m, 4, &e);
    put_buf(&file, 4, &m);
    s = named("S");
    item = named("Go"), put_buf(&s, 2, &item);
    put_buf(&file, 6, &s);
    put_buf(&set, 1, &file);

    file = named("b.proto");
    put_text(&file, 2, "x");
    put_text(&file, 3, "c.proto");
    e = named("F");
    item = named("W"), put_buf(&e, 2, &item);
    put_buf(&file, 5, &e);
    put_buf(&set, 1, &file);

    file = named("c.proto");
    m = named("M"), put_buf(&file, 4, &m);
    put_buf(&set, 1, &file);
    assert_false(set.failed);
    return set;
}

static struct td_descriptor_view view(const struct td_buf *b) { return (struct td_descriptor_view){b->data, b->n}; }

static bool is_file(struct td_descriptor_view v, const char *name)
{
    return v.n > 2 && v.p[0] == 10 && v.p[1] == strlen(name) && memcmp(v.p + 2, name, v.p[1]) == 0;
}

static void files_are_found_by_name(void **state)
{
    (void)state;
    struct td_buf b = make_set();
    struct td_descriptor_view f;
    assert_true(td_descriptors_file(view(&b), "b.proto", &f) && is_file(f, "b.proto"));
    assert_false(td_descriptors_file(view(&b), "b.prot", &f));
    assert_false(td_descriptors_file(view(&b), "", &f));
    td_buf_free(&b);
}

static void symbols_are_found_in_their_file(void **state)
{
    (void)state;
    static const struct {
        const char *symbol, *file;
    } cases[] = {
        {"x.y.M", "a.proto"},
        {"x.y.M.f", "a.proto"},
        {"x.y.M.N", "a.proto"},
        {"x.y.M.N.g", "a.proto"},
        {"x.y.M.E", "a.proto"},
        {"x.y.M.V", "a.proto"},
        {"x.y.S", "a.proto"},
        {"x.y.S.Go", "a.proto"},
        {"x.F", "b.proto"},
        {"x.W", "b.proto"},
        {"M", "c.proto"},
        {"x.y.M.E.V", "a.proto"},
        {"x.y.M.N.h", NULL},
        {"x.y", NULL},
        {"x.y.", NULL},
        {"x.M", NULL},
        {"x.y.M.", NULL},
        {"", NULL},
        {".", NULL},
        {"x.y.S.Go.f", NULL},
        {"x.y.M.f.g", NULL},
        {"M.f", NULL},
        {"x.y.m", NULL},
        {"x.yM", NULL},
    };
    struct td_buf b = make_set();
    for (unsigned i = 0; i < TD_COUNT(cases); i++) {
        struct td_descriptor_view f;
        bool found = td_descriptors_symbol(view(&b), cases[i].symbol, &f);
        if (found != (cases[i].file != NULL)) fail_msg("%s: found %d", cases[i].symbol, found);
        if (found && !is_file(f, cases[i].file)) fail_msg("%s: wrong file", cases[i].symbol);
    }
    td_buf_free(&b);
}

static void imports_follow_once_each(void **state)
{
    (void)state;
    struct td_buf b = make_set();
    struct td_descriptor_view f, list[8];
    assert_true(td_descriptors_file(view(&b), "a.proto", &f));
    assert_int_equal(td_descriptors_with_imports(view(&b), f, list, 8), 3);
    assert_true(is_file(list[0], "a.proto") && is_file(list[1], "b.proto") && is_file(list[2], "c.proto"));
    assert_int_equal(td_descriptors_with_imports(view(&b), f, list, 2), 2);
    assert_true(td_descriptors_file(view(&b), "c.proto", &f));
    assert_int_equal(td_descriptors_with_imports(view(&b), f, list, 8), 1);
    td_buf_free(&b);
}

static void damaged_set_only_ends_the_search(void **state)
{
    (void)state;
    struct td_buf b = make_set();
    for (size_t n = 0; n < b.n; n++) { /* cut anywhere; a copy of that size lets the sanitizer see a step too far */
        uint8_t *cut = malloc(n + 1);
        memcpy(cut, b.data, n);
        struct td_descriptor_view set = {cut, n}, f, list[8];
        td_descriptors_symbol(set, "x.y.M.N.h", &f);
        if (td_descriptors_file(set, "a.proto", &f)) td_descriptors_with_imports(set, f, list, 8);
        for (size_t i = 0; i < n; i++) {
            cut[i] ^= 0x81;
            td_descriptors_symbol(set, "nothing", &f);
            cut[i] ^= 0x81;
        }
        free(cut);
    }
    td_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(files_are_found_by_name),
        cmocka_unit_test(symbols_are_found_in_their_file),
        cmocka_unit_test(imports_follow_once_each),
        cmocka_unit_test(damaged_set_only_ends_the_search),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
