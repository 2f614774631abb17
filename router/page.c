#include "router/page.h"

#include "common/base/check.h"

/* The file as it is, put here by the assembler. */
__asm__(".pushsection .rodata\n"
        "td_page_begin: .incbin \"router/page.html\"\n"
        "td_page_end:\n"
        ".popsection\n");
extern const char td_page_begin[], td_page_end[];

static void handle(struct td_http_req *r, void *user)
{
    (void)user;
    /* It loads nothing and talks to nobody but us, whatever a model writes into it. */
    td_http_set_header(r, "Content-Security-Policy",
                       "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
                       "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
    td_http_set_header(r, "X-Content-Type-Options", "nosniff");
    td_http_set_header(r, "Cache-Control", "no-cache");
    td_http_respond(r, 200, "text/html; charset=utf-8", td_page_begin, (size_t)(td_page_end - td_page_begin));
}

enum td_status td_page_add_routes(struct td_http *h)
{
    static const struct td_http_route rows[] = {{"GET", "/", handle, NULL}};
    return td_http_add_routes(h, rows, TD_COUNT(rows));
}
