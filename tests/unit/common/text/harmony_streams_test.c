/* Random streams, and mutations of streams that real models write, against what must hold for any stream. 20,000 of
 * them, or TANDEM_STREAMS; a failure names the number of its stream, and TANDEM_STREAMS_FIRST begins there. */
#include "tests/unit/common/text/text_cases.h"

#include "common/text/chat.h"
#include "common/text/utf8.h"

#define MAX_IDS 512u

static struct td_tokenizer *tokenizer;
static struct td_chat_format *harmony, *plain;
static json_t *cases;
static struct td_token_list *seeds;
static size_t n_seeds;
static uint32_t *ordinary; /* ids of tokens that hold none of <|>, so that a special token's name cannot be spelt */
static size_t n_ordinary;
static uint32_t special[64], n_special; /* ids of special tokens, and of rows without a token */
static uint32_t byte_ids[256];
static unsigned long long number; /* of the stream, for messages */

/* --- what must hold ----------------------------------------------------------------------------------------------- */

struct seen {
    struct td_buf log; /* the messages, whatever pieces their texts came in */
    struct td_chat_event now;
    struct td_buf names; /* of the message that is open: channel, recipient, content type, function */
    struct td_buf body;
    uint32_t n_messages, n_calls;
    bool is_open, is_over, was_cut, has_text[2]; /* reasoning, content */
};

#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) fail_msg("stream %llu: %s", number, #condition);                                             \
    } while (0)

static bool is_same(const struct td_buf *a, const struct td_buf *b)
{
    return a->n == b->n && (a->n == 0 || memcmp(a->data, b->data, a->n) == 0);
}

static void put_names(struct td_buf *b, const struct td_chat_event *e)
{
    const char *const names[] = {e->channel, e->recipient, e->content_type, e->function};
    td_buf_clear(b);
    td_buf_printf(b, "%d", e->kind);
    for (size_t i = 0; i < TD_COUNT(names); i++) td_buf_printf(b, "/%s", names[i] != NULL ? names[i] : "-");
}

static bool same_names(struct seen *s, const struct td_chat_event *e)
{
    struct td_buf b = {0};
    put_names(&b, e);
    bool are_same = is_same(&b, &s->names);
    td_buf_free(&b);
    return are_same;
}

static bool is_blank(const struct td_buf *b)
{
    for (size_t i = 0; i < b->n; i++)
        if (strchr(" \t\r\n\v\f", b->data[i]) == NULL || b->data[i] == 0) return false;
    return true;
}

static void on_start(struct seen *s, const struct td_chat_event *e)
{
    REQUIRE(!s->is_open && !s->was_cut);
    REQUIRE(e->message == s->n_messages++);
    REQUIRE((e->function != NULL) == (e->kind == TD_CHAT_CALL));
    if (e->kind == TD_CHAT_CALL) REQUIRE(e->call == s->n_calls++);
    const char *const names[] = {e->channel, e->recipient, e->function};
    for (size_t i = 0; i < TD_COUNT(names); i++) {
        if (names[i] == NULL) continue;
        REQUIRE(td_utf8_is_valid(names[i], strlen(names[i])));
        REQUIRE(strstr(names[i], "<|") == NULL && strpbrk(names[i], " \t\r\n") == NULL);
    }
    s->is_open = true;
    s->now = *e;
    put_names(&s->names, e);
    td_buf_clear(&s->body);
    td_buf_put(&s->log, s->names.data, s->names.n);
}

static void on_text(struct seen *s, const struct td_chat_event *e)
{
    REQUIRE(s->is_open && e->message == s->now.message && same_names(s, e));
    REQUIRE(e->text.n > 0 && td_utf8_is_valid(e->text.p, e->text.n));
    bool is_reasoning = e->kind == TD_CHAT_REASONING;
    bool is_joined = is_reasoning || e->kind == TD_CHAT_CONTENT || e->kind == TD_CHAT_PREAMBLE;
    REQUIRE(e->starts_line == (is_joined && s->body.n == 0 && s->has_text[!is_reasoning]));
    if (is_joined) s->has_text[!is_reasoning] = true;
    td_buf_put(&s->body, e->text.p, e->text.n);
}

static void on_end(struct seen *s, const struct td_chat_event *e)
{
    REQUIRE(s->is_open && e->message == s->now.message && same_names(s, e));
    REQUIRE(s->body.n == 0 || memmem(s->body.data, s->body.n, "<|", 2) == NULL);
    if (e->kind == TD_CHAT_CALL && e->is_complete) REQUIRE(!is_blank(&s->body));
    s->is_open = false;
    s->was_cut = !e->is_complete;
    td_buf_printf(&s->log, "{%zu:", s->body.n);
    td_buf_put(&s->log, s->body.data, s->body.n);
    td_buf_printf(&s->log, "}%d\n", e->is_complete);
}

static void on_event(void *user, const struct td_chat_event *e)
{
    struct seen *s = user;
    REQUIRE(!s->is_over);
    switch (e->type) {
    case TD_CHAT_MESSAGE_START: on_start(s, e); return;
    case TD_CHAT_TEXT: on_text(s, e); return;
    case TD_CHAT_MESSAGE_END: on_end(s, e); return;
    case TD_CHAT_TURN_END:
        REQUIRE(!s->is_open);
        s->is_over = true;
        return;
    }
    fail_msg("stream %llu: an event of type %d", number, e->type);
}

/* by_bytes: ordinary tokens are fed as one token per byte, which changes nothing. */
static void parse(const struct td_chat_format *f, const uint32_t *ids, size_t n, bool hit_limit, bool by_bytes,
                  struct seen *s)
{
    struct td_text functions[] = {{"f", 1}, {"get_weather", 11}};
    struct td_chat_parser_options o = {.on_event = on_event, .user = s, .functions = functions, .n_functions = 2};
    struct td_chat_parser *p = NULL;
    *s = (struct seen){.is_open = false};
    assert_int_equal(f->parser_create(f, &o, &p), TD_OK);
    for (size_t i = 0; i < n; i++) {
        size_t n_bytes;
        const uint8_t *bytes = td_tokenizer_bytes(tokenizer, ids[i], &n_bytes);
        if (!by_bytes || td_tokenizer_is_special(tokenizer, ids[i])) {
            td_chat_parser_feed(p, ids[i]);
            continue;
        }
        for (size_t k = 0; k < n_bytes; k++) td_chat_parser_feed(p, byte_ids[bytes[k]]);
    }
    REQUIRE(by_bytes || p->n_reasoning_tokens <= n);
    td_chat_parser_end(p, hit_limit);
    REQUIRE(s->is_over && !p->failed);
    td_chat_parser_destroy(p);
}

static void seen_free(struct seen *s)
{
    td_buf_free(&s->log);
    td_buf_free(&s->names);
    td_buf_free(&s->body);
}

static void check(const struct td_chat_format *f, const uint32_t *ids, size_t n, bool hit_limit)
{
    struct seen whole, bytes;
    parse(f, ids, n, hit_limit, false, &whole);
    parse(f, ids, n, hit_limit, true, &bytes);
    if (!is_same(&whole.log, &bytes.log))
        fail_msg("stream %llu: by tokens\n%s\nby bytes\n%s", number, td_buf_cstr(&whole.log), td_buf_cstr(&bytes.log));
    seen_free(&whole);
    seen_free(&bytes);
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

static uint32_t any_id(uint64_t *s)
{
    static const char letters[] = "to=functions. json{}";
    switch (draw(s, 4)) {
    case 0: return special[draw(s, n_special)];
    case 1:
        return 0x40u < draw(s, 0x80) ? byte_ids[0x80 + draw(s, 0x80)]
                                     : byte_ids[(uint8_t)letters[draw(s, sizeof letters - 1)]];
    default: return ordinary[draw(s, (uint32_t)n_ordinary)];
    }
}

static size_t random_stream(uint64_t *s, uint32_t *ids)
{
    size_t n = draw(s, 120);
    for (size_t i = 0; i < n; i++) ids[i] = any_id(s);
    return n;
}

static size_t insert(uint32_t *ids, size_t n, size_t at, const uint32_t *more, size_t n_more)
{
    if (n + n_more > MAX_IDS) return n;
    memmove(ids + at + n_more, ids + at, (n - at) * sizeof *ids);
    memcpy(ids + at, more, n_more * sizeof *ids);
    return n + n_more;
}

static size_t mutate(uint64_t *s, uint32_t *ids, size_t n)
{
    const struct td_token_list *other = &seeds[draw(s, (uint32_t)n_seeds)];
    size_t at = draw(s, (uint32_t)n + 1), length = draw(s, 6);
    if (length > n - at) length = n - at;
    uint32_t id = any_id(s), copy[8];
    memcpy(copy, ids + at, length * sizeof *ids);
    switch (draw(s, 7)) {
    case 0: /* take some out */
        memmove(ids + at, ids + at + length, (n - at - length) * sizeof *ids);
        return n - length;
    case 1: return insert(ids, n, at, copy, length); /* say it twice */
    case 2: return insert(ids, n, at, &id, 1);
    case 3: return insert(ids, n, at, &special[draw(s, n_special)], 1);
    case 4: return insert(ids, n, at, other->ids, draw(s, (uint32_t)other->n + 1));
    case 5: return at; /* end here */
    default:
        if (at < n) ids[at] = id;
        return n;
    }
}

static size_t mutated_stream(uint64_t *s, uint32_t *ids)
{
    const struct td_token_list *seed = &seeds[draw(s, (uint32_t)n_seeds)];
    size_t n = seed->n < MAX_IDS ? seed->n : MAX_IDS;
    memcpy(ids, seed->ids, n * sizeof *ids);
    for (uint32_t i = draw(s, 6); i > 0; i--) n = mutate(s, ids, n);
    return n;
}

static unsigned long long setting(const char *name, unsigned long long otherwise)
{
    const char *v = getenv(name);
    return v != NULL && *v != '\0' ? strtoull(v, NULL, 10) : otherwise;
}

static void any_stream_ends_in_well_formed_messages_however_it_is_cut(void **state)
{
    (void)state;
    unsigned long long first = setting("TANDEM_STREAMS_FIRST", 0), n = setting("TANDEM_STREAMS", 20000);
    for (number = first; number < first + n; number++) {
        uint32_t ids[MAX_IDS];
        uint64_t s = (number + 1) * 0x9E3779B97F4A7C15ull; /* each stream by itself, so that one can be run again */
        for (unsigned i = 0; i < 4; i++) draw(&s, 2);
        size_t n_ids = draw(&s, 3) == 0 ? random_stream(&s, ids) : mutated_stream(&s, ids);
        check(draw(&s, 16) == 0 ? plain : harmony, ids, n_ids, draw(&s, 2) == 0);
    }
    print_message("%llu streams\n", n);
}

/* --- fixtures ----------------------------------------------------------------------------------------------------- */

static void add_seed(const char *text, size_t n)
{
    if (td_tokenizer_encode(tokenizer, text, n, TD_TEXT_SPECIAL, &seeds[n_seeds], NULL) == TD_OK &&
        seeds[n_seeds].n > 0)
        n_seeds++;
}

static void read_vocabulary(void)
{
    uint32_t n_ids = td_tokenizer_n_ids(tokenizer);
    ordinary = calloc(n_ids, sizeof *ordinary);
    assert_non_null(ordinary);
    for (uint32_t id = 0; id < n_ids; id++) {
        size_t n;
        const uint8_t *bytes = td_tokenizer_bytes(tokenizer, id, &n);
        if (td_tokenizer_is_special(tokenizer, id) || n == 0) {
            if (n_special < TD_COUNT(special) - 1) special[n_special++] = id;
            continue;
        }
        if (n == 1) byte_ids[bytes[0]] = id;
        bool can_spell = false;
        for (size_t i = 0; i < n; i++) can_spell = can_spell || memchr("<|>", bytes[i], 3) != NULL;
        if (!can_spell) ordinary[n_ordinary++] = id;
    }
    special[n_special++] = n_ids + 7; /* a row of the model that is no token */
    assert_true(n_ordinary > 1000 && n_special > 10);
}

static int load(void **state)
{
    (void)state;
    static const char *const malformed[] = {
#define X(kind, how, text, yields) text,
#include "common/text/harmony_malformed.def"
#undef X
    };
    struct td_err err = {{0}};
    tokenizer = load_tokenizer(TINY_MODEL);
    if (td_chat_format_open("harmony", tokenizer, &harmony, &err) != TD_OK) fail_msg("%s", err.text);
    if (td_chat_format_open("plain", tokenizer, &plain, &err) != TD_OK) fail_msg("%s", err.text);
    cases = load_json("tests/cases/harmony-cases.json");
    const json_t *list = json_object_get(cases, "parse");
    seeds = calloc(TD_COUNT(malformed) + json_array_size(list), sizeof *seeds);
    assert_non_null(seeds);
    for (size_t i = 0; i < TD_COUNT(malformed); i++) add_seed(malformed[i], strlen(malformed[i]));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *text = json_object_get(json_array_get(list, i), "text");
        add_seed(json_string_value(text), json_string_length(text));
    }
    read_vocabulary();
    return 0;
}

static int unload(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_seeds; i++) td_token_list_free(&seeds[i]);
    free(seeds);
    free(ordinary);
    json_decref(cases);
    td_chat_format_destroy(harmony);
    td_chat_format_destroy(plain);
    td_tokenizer_destroy(tokenizer);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_stream_ends_in_well_formed_messages_however_it_is_cut),
    };
    return cmocka_run_group_tests_name("harmony_streams", tests, load, unload);
}
