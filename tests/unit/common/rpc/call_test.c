/* Calls between a client and a server of ours: messages, order, ends, limits, back-pressure. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/log.h"
#include "common/metrics/metrics.h"
#include "proto/inference.pb-c.h"
#include "tests/support/rpc_pair.h"

static struct rpc_pair pair;

static int set_up(void **state)
{
    rpc_pair_open(&pair);
    *state = &pair;
    return 0;
}

static int tear_down(void **state)
{
    rpc_pair_close(*state);
    return 0;
}

static void unary_call_gets_its_reply_and_ok(void **state)
{
    struct rpc_pair *p = *state;
    uint64_t calls = td_metric_count(TD_M_rpc_calls), errors = td_metric_count(TD_M_rpc_errors);
    p->next_echoes = p->next_finishes = true;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &e);
    assert_int_equal(rpc_pair_send(e.call, 7, "grüße", 10), TD_OK);
    td_rpc_half_close(e.call);
    assert_int_equal(td_rpc_send(e.call, NULL), TD_E_CANCELED); /* refused before it is looked at */
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(e.st, TD_OK);
    assert_string_equal(e.text, "");
    assert_int_equal(e.n_messages, 1);
    assert_int_equal(e.last_number, 7);
    assert_string_equal(e.last_model, "grüße");
    assert_int_equal(p->served[0].st, TD_OK);
    assert_int_equal(p->served[0].n_messages, 1);
    assert_int_equal(td_metric_count(TD_M_rpc_calls), calls + 1);
    assert_int_equal(td_metric_count(TD_M_rpc_errors), errors);
}

static void stream_of_replies_arrives_in_order_before_the_end(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &e);
    rpc_pair_send(e.call, 0, "", 0);
    td_rpc_half_close(e.call);
    RPC_PAIR_UNTIL(p, p->n_served == 1 && p->served[0].n_messages == 1);
    for (uint32_t i = 0; i < 200; i++) assert_int_equal(rpc_pair_send(p->served[0].call, 100 + i, "", 0), TD_OK);
    td_rpc_finish(p->served[0].call, TD_OK, NULL);
    assert_int_equal(rpc_pair_send(p->served[0].call, 0, "", 0), TD_E_CANCELED);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.n_messages, 200);
    assert_int_equal(e.last_number, 299);
    assert_false(e.is_out_of_order);
    assert_int_equal(e.st, TD_OK);
}

static void bidi_stream_carries_both_ways_and_ends_with_the_half_close(void **state)
{
    struct rpc_pair *p = *state;
    p->next_echoes = p->next_finishes = true;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    for (uint32_t i = 0; i < 50; i++) {
        assert_int_equal(rpc_pair_send(e.call, i, "ping", 3), TD_OK);
        RPC_PAIR_UNTIL(p, e.n_messages == i + 1);
        assert_int_equal(e.last_number, i);
    }
    assert_int_equal(p->served[0].n_half_closes, 0);
    td_rpc_half_close(e.call);
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(e.st, TD_OK);
    assert_int_equal(p->served[0].n_half_closes, 1);
    assert_int_equal(p->served[0].n_messages, 50);
    assert_false(p->served[0].is_out_of_order);
}

static void every_status_and_its_text_reach_the_client_exactly(void **state)
{
    struct rpc_pair *p = *state;
    for (unsigned st = 0; st < TD_N_STATUS; st++) {
        if (st == TD_IN_PROGRESS) continue;
        struct rpc_end e;
        unsigned i = p->n_served;
        rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &e);
        RPC_PAIR_UNTIL(p, p->n_served == i + 1);
        td_rpc_finish(p->served[i].call, (enum td_status)st, "größer als 100 % \"x\"");
        RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == i + 1);
        assert_int_equal(e.st, st);
        assert_string_equal(e.text, "größer als 100 % \"x\"");
        assert_int_equal(p->served[i].st, TD_OK); /* its word was given */
    }
}

static void status_text_defaults_and_is_made_valid(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end a, b, c;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &a);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    td_rpc_finish(p->served[0].call, TD_E_NO_PAGES, NULL);
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &b);
    RPC_PAIR_UNTIL(p, p->n_served == 2);
    td_rpc_finish(p->served[1].call, TD_E_INVALID, "bad \xC3( byte");
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &c);
    RPC_PAIR_UNTIL(p, p->n_served == 3);
    char longest[4000];
    for (unsigned i = 0; i + 2 < sizeof longest; i += 2) memcpy(longest + i, "ü", 3);
    td_rpc_finish(p->served[2].call, TD_E_INVALID, longest);
    RPC_PAIR_UNTIL(p, a.n_closed == 1 && b.n_closed == 1 && c.n_closed == 1);
    assert_string_equal(a.text, td_status_text(TD_E_NO_PAGES));
    assert_string_equal(b.text, "bad ?( byte");
    assert_int_equal(c.st, TD_E_INVALID);
    assert_true(strlen(c.text) > 500 && strlen(c.text) % 2 == 0);
    assert_memory_equal(c.text, longest, strlen(c.text));
}

static void call_can_be_refused_without_accepting_it(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_REFUSE, TD_NEVER_NS, false, &e);
    rpc_pair_send(e.call, 1, "", 0);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_NO_PAGES);
    assert_string_equal(e.text, "no room");
}

static void unknown_method_is_named(void **state)
{
    struct rpc_pair *p = *state;
    uint64_t errors = td_metric_count(TD_M_rpc_errors);
    struct rpc_end e;
    rpc_pair_call(p, "/tandem.test.Echo/Nothing", TD_NEVER_NS, false, &e);
    rpc_pair_send(e.call, 1, "", 0);
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && td_metric_value(TD_M_rpc_calls_open) == 0);
    assert_int_equal(td_metric_count(TD_M_rpc_errors), errors + 1);
    assert_int_equal(e.st, TD_E_UNIMPLEMENTED);
    assert_non_null(strstr(e.text, "/tandem.test.Echo/Nothing"));
    assert_int_equal(p->n_served, 0);
}

static void deadline_is_seen_by_both_ends(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    uint64_t deadline = rpc_pair_in_ms(300);
    rpc_pair_call(p, RPC_PAIR_STREAM, deadline, false, &e);
    rpc_pair_send(e.call, 1, "", 0);
    RPC_PAIR_UNTIL(p, p->n_served == 1 || e.n_closed == 1);
    if (p->n_served == 1) { /* else the machine was too busy to open the call in time */
        uint64_t seen = td_rpc_call_deadline_ns(p->served[0].call);
        assert_true(seen > deadline - 250 * TD_NS_PER_MS && seen < deadline + 30000 * TD_NS_PER_MS);
        RPC_PAIR_UNTIL(p, p->n_served_closed == 1);
        assert_int_equal(p->served[0].st, TD_E_DEADLINE);
    }
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_DEADLINE);
    assert_true(td_clock_ns() >= deadline);
}

static void call_without_deadline_shows_none(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &e);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    assert_true(td_rpc_call_deadline_ns(p->served[0].call) == TD_NEVER_NS);
    assert_int_equal(strncmp(td_rpc_call_peer(p->served[0].call), "ipv4:127.0.0.1:", 15), 0);
    assert_string_equal(td_rpc_call_peer(e.call), p->address);
    td_rpc_cancel(e.call);
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
}

static void cancel_by_the_client_reaches_an_idle_server_call(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    td_rpc_cancel(e.call);
    assert_int_equal(e.n_closed, 0); /* never from within */
    assert_int_equal(rpc_pair_send(e.call, 1, "", 0), TD_E_CANCELED);
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(e.st, TD_E_CANCELED);
    assert_int_equal(p->served[0].st, TD_E_CANCELED);
    assert_int_equal(p->served[0].n_half_closes, 0);
}

static void call_cancelled_before_it_left_closes_once(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &e);
    rpc_pair_send(e.call, 1, "", 0);
    td_rpc_cancel(e.call);
    td_rpc_cancel(e.call);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_CANCELED);
    assert_int_equal(e.n_messages, 0);
}

static void server_may_finish_while_the_client_still_sends(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    uint32_t sent = 0;
    while (rpc_pair_send(e.call, sent, "", 100) == TD_OK) sent++;
    RPC_PAIR_UNTIL(p, p->n_served == 1 && p->served[0].n_messages >= 2);
    unsigned seen = p->served[0].n_messages;
    td_rpc_finish(p->served[0].call, TD_E_STALE, "enough");
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(e.st, TD_E_STALE);
    assert_string_equal(e.text, "enough");
    assert_int_equal(p->served[0].st, TD_OK);
    assert_int_equal(p->served[0].n_messages, seen); /* none after the end */
}

static void full_queue_says_busy_and_then_writable(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    struct rpc_end *s = &p->served[0];
    uint32_t sent = 0;
    enum td_status st;
    while ((st = rpc_pair_send(s->call, sent, "", 100)) == TD_OK) sent++;
    assert_int_equal(st, TD_E_BUSY);
    assert_true(td_rpc_queued_bytes(s->call) > RPC_PAIR_MAX_QUEUED - 200);
    assert_true(td_rpc_queued_bytes(s->call) <= RPC_PAIR_MAX_QUEUED);
    assert_int_equal(s->n_writable, 0);
    RPC_PAIR_UNTIL(p, s->n_writable == 1);
    assert_int_equal(td_rpc_queued_bytes(s->call), 0);
    assert_int_equal(rpc_pair_send(s->call, sent++, "", 20000), TD_OK); /* larger than the limit, alone: goes */
    assert_int_equal(rpc_pair_send(s->call, sent, "", 0), TD_E_BUSY);
    td_rpc_finish(s->call, TD_OK, NULL);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.n_messages, sent); /* what was refused never came, the rest all and in order */
    assert_false(e.is_out_of_order);
}

/* Sends bytes that are not of the type that the server expects, by packing another type. */
static void send_text(struct td_rpc_call *c, void *bytes, size_t n)
{
    Tandem__V1__DetokenizeReply m = TANDEM__V1__DETOKENIZE_REPLY__INIT;
    m.text = (ProtobufCBinaryData){n, bytes}; /* field 1 is a string for the server */
    assert_int_equal(td_rpc_send(c, &m.base), TD_OK);
}

static void string_that_is_not_utf8_is_refused_by_field(void **state)
{
    struct rpc_pair *p = *state;
    uint64_t bad = td_metric_count(TD_M_rpc_bad_messages);
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    send_text(e.call, "ab\xFF", 3);
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(e.st, TD_E_INVALID);
    assert_non_null(strstr(e.text, "model: is not valid UTF-8"));
    assert_int_equal(p->served[0].st, TD_E_INVALID);
    assert_int_equal(p->served[0].n_messages, 0);
    assert_int_equal(td_metric_count(TD_M_rpc_bad_messages), bad + 1);
}

static void undecodable_message_ends_the_call_as_invalid(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    Tandem__V1__Stop m = TANDEM__V1__STOP__INIT; /* field 1 a number: not a string; skipped as unknown */
    uint32_t ids[3] = {0x80, 0x80, 0x80};
    m.n_token_ids = 3;
    m.token_ids = ids;
    Tandem__V1__DetokenizeReply r = TANDEM__V1__DETOKENIZE_REPLY__INIT;
    uint8_t cut_varint[] = {0x80};
    r.raw = (ProtobufCBinaryData){sizeof cut_varint, cut_varint}; /* field 2: packed numbers, the last one cut off */
    assert_int_equal(td_rpc_send(e.call, &m.base), TD_OK);        /* decodable */
    assert_int_equal(td_rpc_send(e.call, &r.base), TD_OK);        /* not */
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(e.st, TD_E_INVALID);
    assert_non_null(strstr(e.text, "tandem.v1.DetokenizeRequest"));
    assert_int_equal(p->served[0].n_messages, 1);
}

static void oversize_message_is_refused_with_both_sizes(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end near, far, fits;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &near);
    rpc_pair_send(near.call, 1, "", RPC_PAIR_LIMIT);
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &far);
    rpc_pair_send(far.call, 1, "", 4 * RPC_PAIR_LIMIT);
    p->next_finishes = true;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &fits);
    rpc_pair_send(fits.call, 1, "", RPC_PAIR_LIMIT - 10);
    RPC_PAIR_UNTIL(p, near.n_closed == 1 && far.n_closed == 1 && fits.n_closed == 1);
    assert_int_equal(near.st, TD_E_TOO_LARGE);
    assert_non_null(strstr(near.text, "65536"));
    assert_int_equal(far.st, TD_E_TOO_LARGE);
    assert_int_equal(fits.st, TD_OK);
}

static void second_message_of_a_unary_call_is_refused(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &e);
    rpc_pair_send(e.call, 1, "", 0);
    rpc_pair_send(e.call, 2, "", 0);
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(e.st, TD_E_INVALID);
    assert_int_equal(p->served[0].n_messages, 1);
}

static void unary_call_without_a_message_is_refused(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_UNARY, TD_NEVER_NS, false, &e);
    td_rpc_half_close(e.call);
    RPC_PAIR_UNTIL(p, e.n_closed == 1);
    assert_int_equal(e.st, TD_E_INVALID);
    assert_string_equal(e.text, "no request message");
}

static void reply_that_cannot_be_decoded_is_a_protocol_error(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    send_text(p->served[0].call, "\xFE", 1);
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(e.st, TD_E_PROTOCOL);
    assert_int_equal(p->served[0].st, TD_E_CANCELED);
}

static void metadata_of_the_client_can_be_read(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e = {.pair = p};
    static const struct td_rpc_metadata md[] = {{"x-tandem-test", "some value"}, {"x-empty", ""}, {NULL, NULL}};
    static const struct td_rpc_metadata bad_key[] = {{"Not Legal", "x"}, {NULL, NULL}};
    static const struct td_rpc_metadata bad_value[] = {{"x-key", "line\nbreak"}, {NULL, NULL}};
    const ProtobufCMessageDescriptor *type = &tandem__v1__detokenize_request__descriptor;
    struct td_rpc_call *none = NULL;
    assert_int_equal(td_rpc_call_start(p->channel, RPC_PAIR_STREAM, type, TD_NEVER_NS, false, bad_key,
                                       &rpc_pair_client_handlers, &e, &none),
                     TD_E_INVALID);
    assert_int_equal(td_rpc_call_start(p->channel, RPC_PAIR_STREAM, type, TD_NEVER_NS, false, bad_value,
                                       &rpc_pair_client_handlers, &e, &none),
                     TD_E_INVALID);
    assert_null(none);
    assert_int_equal(td_rpc_call_start(p->channel, RPC_PAIR_STREAM, type, TD_NEVER_NS, false, md,
                                       &rpc_pair_client_handlers, &e, &e.call),
                     TD_OK);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    struct td_rpc_call *s = p->served[0].call;
    assert_string_equal(td_rpc_call_metadata(s, "x-tandem-test"), "some value");
    assert_string_equal(td_rpc_call_metadata(s, "x-tandem-test"), "some value");
    assert_string_equal(td_rpc_call_metadata(s, "x-empty"), "");
    assert_null(td_rpc_call_metadata(s, "x-tandem"));
    td_rpc_cancel(e.call);
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
}

static void aborting_a_stalled_call_does_not_wait_for_the_reader(void **state)
{
    struct rpc_pair *p = *state;
    struct rpc_end e;
    rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e);
    RPC_PAIR_UNTIL(p, p->n_served == 1);
    struct td_rpc_call *s = p->served[0].call;
    for (uint32_t i = 0; rpc_pair_send(s, i, "", 1000) == TD_OK; i++) {
    }
    td_rpc_abort(s, TD_E_SLOW_CLIENT, "read faster");
    assert_int_equal(td_rpc_queued_bytes(s), 0);
    assert_int_equal(rpc_pair_send(s, 0, "", 0), TD_E_CANCELED);
    RPC_PAIR_UNTIL(p, e.n_closed == 1 && p->n_served_closed == 1);
    assert_int_equal(e.st, TD_E_SLOW_CLIENT);
    assert_string_equal(e.text, "read faster");
    assert_int_equal(p->served[0].st, TD_E_SLOW_CLIENT);
    assert_string_equal(p->served[0].text, "read faster");
    assert_int_equal(e.n_messages, 0);
}

static void three_hundred_calls_run_at_once(void **state)
{
    struct rpc_pair *p = *state;
    enum { N = 300 };
    static struct rpc_end e[N];
    for (uint32_t i = 0; i < N; i++) rpc_pair_call(p, RPC_PAIR_STREAM, TD_NEVER_NS, false, &e[i]);
    RPC_PAIR_UNTIL(p, p->n_served == N); /* all open together */
    for (uint32_t i = 0; i < N; i++) p->served[i].does_echo = p->served[i].does_finish = true;
    for (uint32_t i = 0; i < N; i++) {
        for (uint32_t j = 0; j < 5; j++) rpc_pair_send(e[i].call, 1000 * i + j, "", i);
        td_rpc_half_close(e[i].call);
    }
    RPC_PAIR_UNTIL(p, p->n_served_closed == N);
    for (uint32_t i = 0; i < N; i++) {
        RPC_PAIR_UNTIL(p, e[i].n_closed == 1);
        assert_int_equal(e[i].st, TD_OK);
        assert_int_equal(e[i].n_messages, 5);
        assert_int_equal(e[i].last_number, 1000 * i + 4);
        assert_false(e[i].is_out_of_order);
    }
}

int main(void)
{
    td_log_open("test", TD_LOG_ERROR);
#define T(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        T(unary_call_gets_its_reply_and_ok),
        T(stream_of_replies_arrives_in_order_before_the_end),
        T(bidi_stream_carries_both_ways_and_ends_with_the_half_close),
        T(every_status_and_its_text_reach_the_client_exactly),
        T(status_text_defaults_and_is_made_valid),
        T(call_can_be_refused_without_accepting_it),
        T(unknown_method_is_named),
        T(deadline_is_seen_by_both_ends),
        T(call_without_deadline_shows_none),
        T(cancel_by_the_client_reaches_an_idle_server_call),
        T(call_cancelled_before_it_left_closes_once),
        T(server_may_finish_while_the_client_still_sends),
        T(full_queue_says_busy_and_then_writable),
        T(string_that_is_not_utf8_is_refused_by_field),
        T(undecodable_message_ends_the_call_as_invalid),
        T(oversize_message_is_refused_with_both_sizes),
        T(second_message_of_a_unary_call_is_refused),
        T(unary_call_without_a_message_is_refused),
        T(reply_that_cannot_be_decoded_is_a_protocol_error),
        T(metadata_of_the_client_can_be_read),
        T(aborting_a_stalled_call_does_not_wait_for_the_reader),
        T(three_hundred_calls_run_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
