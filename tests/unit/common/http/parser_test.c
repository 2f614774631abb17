#include "common/http/parser_int.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/fault.h"

/* Feeds text in pieces of at most step bytes; takes complete requests down as one line each. */
static void parse(struct td_http_parser *p, const char *text, size_t step, struct td_buf *log)
{
    size_t n = strlen(text), used;
    for (size_t at = 0; at < n; at += used) {
        switch (td_http_parser_feed(p, text + at, step < n - at ? step : n - at, &used)) {
        case TD_HTTP_PARSE_MORE: break;
        case TD_HTTP_PARSE_HEAD: td_buf_str(log, "head "); break;
        case TD_HTTP_PARSE_DONE:
            td_buf_printf(log, "%s %s x=%s q=%s body=%s%s\n", p->msg.method,
                          (const char *)p->msg.text.data + p->msg.path, td_http_message_header(&p->msg, "X"),
                          td_http_message_query(&p->msg, "q"), (const char *)p->msg.body.data,
                          p->msg.is_keep_alive ? "" : " close");
            td_http_message_free(&p->msg);
            break;
        case TD_HTTP_PARSE_BAD: td_buf_printf(log, "refused %u\n", p->status); return;
        }
    }
}

static void however_it_is_cut_a_stream_gives_the_same_requests(void **state)
{
    (void)state;
    static const char text[] = "GET /a%20b?p=1&q=2&q=3 HTTP/1.1\r\nHost: h\r\nX: one\r\n\r\n"
                               "\r\n" /* stray line break between requests: allowed */
                               "POST /b?q HTTP/1.1\r\nHost: h\r\nx:  two  \r\nContent-Length: 4\r\n\r\nbody"
                               "POST /c?q=+ HTTP/1.1\r\nHost: h\r\nX:\r\nTransfer-Encoding: chunked\r\n\r\n"
                               "3\r\nabc\r\n2\r\nde\r\n0\r\nX: trailer\r\n\r\n"
                               "DELETE /d?q=%zz%4 HTTP/1.0\r\nX: last\r\n\r\n";
    static const char want[] = "GET /a b x=one q=2 body=\n"
                               "head POST /b x=two q= body=body\n"
                               "head POST /c x= q=  body=abcde\n"
                               "DELETE /d x=last q=%zz%4 body= close\n";
    for (size_t step = 1; step <= sizeof text; step++) {
        struct td_http_parser p;
        struct td_buf log = {0};
        td_http_parser_init(&p, 1000, 100);
        parse(&p, text, step, &log);
        assert_string_equal(td_buf_cstr(&log), want);
        td_http_parser_deinit(&p);
        td_buf_free(&log);
    }
}

static unsigned status_of(const char *text)
{
    struct td_http_parser p;
    struct td_buf log = {0};
    size_t used;
    td_http_parser_init(&p, 200, 50);
    parse(&p, text, 1000, &log);
    unsigned status = p.status;
    if (status != 0) assert_int_equal(td_http_parser_feed(&p, "GET", 3, &used), TD_HTTP_PARSE_BAD); /* stays so */
    td_http_parser_deinit(&p);
    td_buf_free(&log);
    return status;
}

static void each_refusal_has_its_status(void **state)
{
    (void)state;
    assert_int_equal(status_of("GET / HTTP/1.1\r\nHost: h\r\n\r\n"), 0);
    assert_int_equal(status_of("GET / HTTP/1.1\r\n\r\n"), 400);
    assert_int_equal(status_of("GET /%00 HTTP/1.1\r\nHost: h\r\n\r\n"), 400);
    assert_int_equal(status_of("GET / HTTP/1.1\r\nHost: h\r\nExpect: x\r\n\r\n"), 417);
    assert_int_equal(status_of("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 51\r\n\r\n"), 413);
    assert_int_equal(status_of("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 50\r\n\r\n"), 0);
    assert_int_equal(status_of("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n33\r\n"
                               "123456789 123456789 123456789 123456789 123456789 1\r\n0\r\n\r\n"),
                     413);
    assert_int_equal(status_of("GET /\r\n\r\n"), 505);
    char big[400];
    snprintf(big, sizeof big, "GET / HTTP/1.1\r\nHost: h\r\nX: %0200d\r\n\r\n", 7);
    assert_int_equal(status_of(big), 431);
}

static void no_allocation_that_fails_does_harm(void **state)
{
    (void)state;
    static const char text[] =
        "POST /some/path?with=query&and=more HTTP/1.1\r\nHost: h\r\nA: b\r\nContent-Length: 40\r\n\r\n"
        "0123456789012345678901234567890123456789";
    unsigned n_refused = 0, countdown = 0;
    for (bool is_over = false; !is_over && countdown < 50; countdown++) {
        struct td_http_parser p;
        struct td_buf log = {0};
        td_buf_reserve(&log, 1000);
        td_http_parser_init(&p, 1000, 100);
        td_fault_arm(TD_FAULT_ALLOC, countdown, 1);
        parse(&p, text, 7, &log);
        td_fault_disarm_all();
        if (p.status != 0) assert_int_equal(p.status, 503);
        n_refused += p.status != 0;
        is_over = p.status == 0;
        td_http_parser_deinit(&p);
        td_buf_free(&log);
    }
    assert_in_range(n_refused, 2, 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(however_it_is_cut_a_stream_gives_the_same_requests),
        cmocka_unit_test(each_refusal_has_its_status),
        cmocka_unit_test(no_allocation_that_fails_does_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
