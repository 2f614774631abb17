/* How harmony declares tools: TypeScript-like types made from JSON schemas. The layout is odd (an object's closing
 * brace sits at its own indent, a description is repeated inside the type) and must stay so: the model was trained on
 * it. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"
#include "common/text/harmony.h"

/* Text that is being put together, and the indent of the line. */
static void put_indent(struct td_buf *out, unsigned n)
{
    for (unsigned i = 0; i < n; i++) td_buf_str(out, " ");
}

static void put_string(struct td_buf *out, const json_t *s)
{
    td_buf_put(out, json_string_value(s), json_string_length(s));
}

static bool same_string(const json_t *a, const json_t *b)
{
    return json_is_string(a) && json_is_string(b) && json_equal(a, b);
}

/* --- default values ------------------------------------------------------------------------------------------------
 */

/* Shortest digits that read back as v, written plainly where the exponent is small: 100.0, 0.001, 1e100, 1.5e-7. */
static void put_real(struct td_buf *out, double v)
{
    char text[32];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*e", digits - 1, v);
        if (strtod(text, NULL) == v) break;
    }
    /* text is [-]d[.ddd]e[+-]xx */
    char digits[20];
    size_t n = 0;
    const char *p = text;
    if (*p == '-') td_buf_u8(out, (uint8_t)*p++);
    for (; *p != 'e'; p++) {
        if (*p != '.') digits[n++] = *p;
    }
    int exponent = atoi(p + 1), point = exponent + 1; /* digits before the point */
    if (point > 0 && point <= 16) {
        for (int i = 0; i < point; i++) td_buf_u8(out, (size_t)i < n ? (uint8_t)digits[i] : '0');
        td_buf_str(out, ".");
        if ((size_t)point < n)
            td_buf_put(out, digits + point, n - (size_t)point);
        else
            td_buf_str(out, "0");
    } else if (point > -5 && point <= 0) {
        td_buf_str(out, "0.");
        for (int i = point; i < 0; i++) td_buf_str(out, "0");
        td_buf_put(out, digits, n);
    } else {
        td_buf_put(out, digits, 1);
        if (n > 1) td_buf_str(out, ".");
        td_buf_put(out, digits + 1, n - 1);
        td_buf_printf(out, "e%d", exponent);
    }
}

static void put_json_string(struct td_buf *out, const char *s, size_t n)
{
    td_buf_str(out, "\"");
    for (size_t i = 0; i < n; i++) {
        static const char short_forms[] = "\bb\ff\nn\rr\tt\"\"\\\\";
        const char *form = s[i] == '\0' ? NULL : strchr(short_forms, s[i]);
        /* Only even places are characters to escape; the odd ones are what follows the backslash. */
        if (form != NULL && (form - short_forms) % 2 != 0) form = NULL;
        if (form != NULL)
            td_buf_printf(out, "\\%c", form[1]);
        else if ((unsigned char)s[i] < 0x20)
            td_buf_printf(out, "\\u%04x", (unsigned)s[i]);
        else
            td_buf_put(out, s + i, 1);
    }
    td_buf_str(out, "\"");
}

static void put_json(struct td_buf *out, const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_NULL: td_buf_str(out, "null"); break;
    case JSON_TRUE: td_buf_str(out, "true"); break;
    case JSON_FALSE: td_buf_str(out, "false"); break;
    case JSON_INTEGER: td_buf_printf(out, "%lld", (long long)json_integer_value(v)); break;
    case JSON_REAL: put_real(out, json_real_value(v)); break;
    case JSON_STRING: put_json_string(out, json_string_value(v), json_string_length(v)); break;
    case JSON_ARRAY: {
        size_t n = json_array_size(v);
        td_buf_str(out, "[");
        for (size_t i = 0; i < n; i++) {
            if (i > 0) td_buf_str(out, ",");
            put_json(out, json_array_get(v, i));
        }
        td_buf_str(out, "]");
        break;
    }
    case JSON_OBJECT: {
        bool is_first = true;
        td_buf_str(out, "{");
        for (void *it = json_object_iter((json_t *)v); it != NULL; it = json_object_iter_next((json_t *)v, it)) {
            if (!is_first) td_buf_str(out, ",");
            is_first = false;
            const char *key = json_object_iter_key(it);
            put_json_string(out, key, strlen(key));
            td_buf_str(out, ":");
            put_json(out, json_object_iter_value(it));
        }
        td_buf_str(out, "}");
        break;
    }
    }
}

/* A string stands bare where the schema lists values, unless the caller wants quotes all the same. */
static void put_default(struct td_buf *out, const json_t *schema, bool always_quotes)
{
    const json_t *v = json_object_get(schema, "default");
    if (!json_is_string(v)) {
        put_json(out, v);
        return;
    }
    bool is_bare = !always_quotes && json_array_size(json_object_get(schema, "enum")) > 0;
    if (!is_bare) td_buf_str(out, "\"");
    put_string(out, v);
    if (!is_bare) td_buf_str(out, "\"");
}

/* --- types -------------------------------------------------------------------------------------------------------- */

static void put_type(struct td_buf *out, const json_t *schema, unsigned indent);

/* " | null" behind a type that began at `begin`, unless it says so already. */
static void put_null(struct td_buf *out, const json_t *schema, size_t begin)
{
    if (!json_is_true(json_object_get(schema, "nullable")) || out->failed) return;
    if (memmem(out->data + begin, out->n - begin, "null", 4) == NULL) td_buf_str(out, " | null");
}

static const json_t *one_of(const json_t *schema)
{
    const json_t *v = json_object_get(schema, "oneOf");
    return json_is_array(v) ? v : NULL;
}

/* One " | type // comments" per variant, each on a line of its own, begun by the caller's line break if is_inline.
 * property: the schema whose description was printed above, or NULL. */
static void put_variant(struct td_buf *out, const json_t *variant, unsigned indent, bool shows_description,
                        bool always_quotes)
{
    put_indent(out, indent);
    td_buf_str(out, " | ");
    size_t begin = out->n;
    put_type(out, variant, indent + 3);
    put_null(out, variant, begin);
    const json_t *description = json_object_get(variant, "description");
    bool has_comment = false;
    if (shows_description && json_is_string(description)) {
        td_buf_str(out, " // ");
        put_string(out, description);
        has_comment = true;
    }
    if (json_object_get(variant, "default") != NULL) {
        td_buf_str(out, has_comment ? " " : " // ");
        td_buf_str(out, "default: ");
        put_default(out, variant, always_quotes);
    }
}

static void put_description(struct td_buf *out, const json_t *description, unsigned indent)
{
    put_indent(out, indent);
    td_buf_str(out, "// ");
    put_string(out, description);
    td_buf_str(out, "\n");
}

static bool is_required(const json_t *schema, const char *key)
{
    const json_t *list = json_object_get(schema, "required");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (name != NULL && strcmp(name, key) == 0) return true;
    }
    return false;
}

static void put_union_property(struct td_buf *out, const char *key, const json_t *v, bool required, unsigned indent)
{
    const json_t *variants = one_of(v), *description = json_object_get(v, "description");
    const json_t *first = json_object_get(json_array_get(variants, 0), "description");
    bool is_printed = json_is_string(description) && !same_string(description, first);
    if (is_printed) put_description(out, description, indent);
    if (json_object_get(v, "default") != NULL) {
        put_indent(out, indent);
        td_buf_str(out, "// default: ");
        put_default(out, v, false);
        td_buf_str(out, "\n");
    }
    put_indent(out, indent);
    td_buf_printf(out, "%s%s:\n", key, required ? "" : "?");
    for (size_t i = 0; i < json_array_size(variants); i++) {
        const json_t *variant = json_array_get(variants, i);
        bool shows = !same_string(json_object_get(variant, "description"), description) && !(i == 0 && is_printed);
        put_variant(out, variant, indent, shows, false);
        td_buf_str(out, "\n");
    }
    put_indent(out, indent);
    td_buf_str(out, ",\n");
}

static void put_property(struct td_buf *out, const char *key, const json_t *v, bool required, unsigned indent)
{
    const json_t *title = json_object_get(v, "title"), *description = json_object_get(v, "description");
    const json_t *examples = json_object_get(v, "examples");
    if (json_is_string(title)) {
        put_description(out, title, indent);
        put_indent(out, indent);
        td_buf_str(out, "//\n");
    }
    if (json_is_string(description) && one_of(v) == NULL) put_description(out, description, indent);
    if (json_array_size(examples) > 0) {
        put_indent(out, indent);
        td_buf_str(out, "// Examples:\n");
    }
    for (size_t i = 0; i < json_array_size(examples); i++) {
        const json_t *example = json_array_get(examples, i);
        if (!json_is_string(example)) continue;
        put_indent(out, indent);
        td_buf_str(out, "// - \"");
        put_string(out, example);
        td_buf_str(out, "\"\n");
    }
    if (one_of(v) != NULL) {
        put_union_property(out, key, v, required, indent);
        return;
    }
    put_indent(out, indent);
    td_buf_printf(out, "%s%s: ", key, required ? "" : "?");
    size_t begin = out->n;
    put_type(out, v, indent + 4);
    put_null(out, v, begin);
    td_buf_str(out, ",");
    if (json_object_get(v, "default") != NULL) {
        td_buf_str(out, " // default: ");
        put_default(out, v, false);
    }
    td_buf_str(out, "\n");
}

static void put_object(struct td_buf *out, const json_t *schema, unsigned indent)
{
    const json_t *description = json_object_get(schema, "description");
    if (json_is_string(description)) put_description(out, description, indent);
    td_buf_str(out, "{\n");
    json_t *properties = json_object_get(schema, "properties");
    for (void *it = json_object_iter(properties); it != NULL; it = json_object_iter_next(properties, it)) {
        const char *key = json_object_iter_key(it);
        put_property(out, key, json_object_iter_value(it), is_required(schema, key), indent);
    }
    put_indent(out, indent);
    td_buf_str(out, "}");
}

/* Strings of the list joined by " | "; false: there are none. */
static bool put_alternatives(struct td_buf *out, const json_t *list, bool are_types)
{
    bool has_any = false;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_string(v)) continue;
        if (has_any) td_buf_str(out, " | ");
        has_any = true;
        if (!are_types) td_buf_str(out, "\"");
        if (are_types && strcmp(json_string_value(v), "integer") == 0)
            td_buf_str(out, "number");
        else
            put_string(out, v);
        if (!are_types) td_buf_str(out, "\"");
    }
    return has_any;
}

static void put_type(struct td_buf *out, const json_t *schema, unsigned indent)
{
    const json_t *type = json_object_get(schema, "type");
    const char *name = json_is_string(type) ? json_string_value(type) : "";
    if (one_of(schema) != NULL) {
        for (size_t i = 0; i < json_array_size(one_of(schema)); i++) {
            td_buf_str(out, "\n");
            put_variant(out, json_array_get(one_of(schema), i), indent, true, true);
        }
    } else if (json_is_array(type)) {
        if (!put_alternatives(out, type, true)) td_buf_str(out, "any");
    } else if (strcmp(name, "object") == 0) {
        put_object(out, schema, indent);
    } else if (strcmp(name, "string") == 0) {
        if (!put_alternatives(out, json_object_get(schema, "enum"), false)) td_buf_str(out, "string");
    } else if (strcmp(name, "number") == 0 || strcmp(name, "integer") == 0) {
        td_buf_str(out, "number");
    } else if (strcmp(name, "boolean") == 0) {
        td_buf_str(out, "boolean");
    } else if (strcmp(name, "array") == 0) {
        const json_t *items = json_object_get(schema, "items");
        if (items == NULL)
            td_buf_str(out, "Array<any>");
        else
            put_type(out, items, indent);
        if (items != NULL) td_buf_str(out, "[]");
    } else {
        td_buf_str(out, "any");
    }
}

/* --- sections ------------------------------------------------------------------------------------------------------
 */

/* Each line with the prefix; a trailing line break makes no further line, and CR before LF goes. */
static void put_comment(struct td_buf *out, struct td_text t, const char *prefix)
{
    for (size_t i = 0; i < t.n;) {
        const char *end = memchr(t.p + i, '\n', t.n - i);
        size_t len = end == NULL ? t.n - i : (size_t)(end - t.p) - i;
        size_t shown = end != NULL && len > 0 && t.p[i + len - 1] == '\r' ? len - 1 : len;
        td_buf_str(out, prefix);
        td_buf_put(out, t.p + i, shown);
        td_buf_str(out, "\n");
        i += len + 1;
    }
}

static void put_namespace(struct td_buf *out, const struct td_harmony_namespace *ns)
{
    td_buf_str(out, "## ");
    td_buf_put(out, ns->name.p, ns->name.n);
    td_buf_str(out, "\n\n");
    put_comment(out, ns->description, ns->n_tools > 0 ? "// " : "");
    if (ns->n_tools == 0) {
        if (ns->description.n > 0 && out->n > 0) out->n--; /* the last line's break */
        return;
    }
    td_buf_str(out, "namespace ");
    td_buf_put(out, ns->name.p, ns->name.n);
    td_buf_str(out, " {\n\n");
    for (size_t i = 0; i < ns->n_tools; i++) {
        const struct td_chat_tool *t = &ns->tools[i];
        put_comment(out, t->description, "// ");
        td_buf_str(out, "type ");
        td_buf_put(out, t->name.p, t->name.n);
        if (t->parameters == NULL || json_is_null(t->parameters)) {
            td_buf_str(out, " = () => any;\n\n");
        } else {
            td_buf_str(out, " = (_: ");
            put_type(out, t->parameters, 0);
            td_buf_str(out, ") => any;\n\n");
        }
    }
    td_buf_str(out, "} // namespace ");
    td_buf_put(out, ns->name.p, ns->name.n);
}

static int by_name(const struct td_text *a, const struct td_text *b)
{
    size_t n = a->n < b->n ? a->n : b->n;
    int c = n > 0 ? memcmp(a->p, b->p, n) : 0;
    return c != 0 ? c : (a->n > b->n) - (a->n < b->n);
}

void td_harmony_tools_text(const struct td_harmony_namespace *list, size_t n, struct td_buf *out)
{
    td_buf_str(out, "# Tools");
    /* Selection by rising name: namespaces are few. Equal names keep their order. */
    const struct td_harmony_namespace *last = NULL;
    for (size_t k = 0; k < n; k++) {
        const struct td_harmony_namespace *next = NULL;
        for (size_t i = 0; i < n; i++) {
            int c = last == NULL ? 1 : by_name(&list[i].name, &last->name);
            bool is_later = c > 0 || (c == 0 && &list[i] > last);
            if (is_later && (next == NULL || by_name(&list[i].name, &next->name) < 0)) next = &list[i];
        }
        td_buf_str(out, "\n\n");
        put_namespace(out, next);
        last = next;
    }
}
