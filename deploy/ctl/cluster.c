#include "deploy/ctl/cluster.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/bytes.h"
#include "common/base/json.h"

/* --- files ---------------------------------------------------------------------------------------------------------
 */

static bool copy(char *out, size_t cap, const json_t *v)
{
    const char *s = json_string_value(v);
    return s != NULL && (size_t)snprintf(out, cap, "%s", s) < cap;
}

static bool read_address(const json_t *v, struct td_address *out)
{
    *out = (struct td_address){.pid = (int)json_integer_value(json_object_get(v, "pid"))};
    copy(out->name, sizeof out->name, json_object_get(v, "name"));
    return copy(out->rpc, sizeof out->rpc, json_object_get(v, "rpc")) &&
           copy(out->http, sizeof out->http, json_object_get(v, "http"));
}

bool td_address_file_read(const char *path, int pid, struct td_address *out)
{
    json_t *v = json_load_file(path, 0, NULL);
    struct td_address a;
    bool ok = v != NULL && read_address(v, &a) && a.pid == pid;
    if (ok) *out = a;
    json_decref(v);
    return ok;
}

static void put_address(struct td_buf *b, const struct td_address *a)
{
    td_buf_str(b, "{\"name\":");
    td_json_quote_str(b, a->name);
    td_buf_str(b, ",\"rpc\":");
    td_json_quote_str(b, a->rpc);
    td_buf_str(b, ",\"http\":");
    td_json_quote_str(b, a->http);
    td_buf_printf(b, ",\"pid\":%d}", a->pid);
}

static void put_addresses(struct td_buf *b, const char *key, const struct td_address *list, unsigned n)
{
    td_buf_printf(b, ",\n \"%s\":[", key);
    for (unsigned i = 0; i < n; i++) {
        if (i > 0) td_buf_str(b, ",\n  ");
        put_address(b, &list[i]);
    }
    td_buf_str(b, "]");
}

static enum td_status write_whole(const char *path, const struct td_buf *b, struct td_err *err)
{
    char temporary[1100];
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid()) >= sizeof temporary)
        return td_err_set(err, TD_E_INVALID, "%s: path is too long", path);
    FILE *f = fopen(temporary, "we");
    if (f == NULL) return td_err_set(err, TD_E_IO, "%s: %s", temporary, strerror(errno));
    bool ok = fwrite(b->data, 1, b->n, f) == b->n;
    ok = fclose(f) == 0 && ok && rename(temporary, path) == 0;
    if (ok) return TD_OK;
    int why = errno;
    unlink(temporary);
    return td_err_set(err, TD_E_IO, "%s: %s", path, strerror(why));
}

enum td_status td_cluster_write(const char *path, const struct td_cluster *c, struct td_err *err)
{
    struct td_buf b = {0};
    td_buf_str(&b, "{\"router\":");
    put_address(&b, c->router);
    put_addresses(&b, "prefill", c->prefill, c->n_prefill);
    put_addresses(&b, "decode", c->decode, c->n_decode);
    td_buf_str(&b, ",\n \"model\":");
    td_json_quote_str(&b, c->model);
    td_buf_str(&b, "}\n");
    enum td_status st = b.failed ? td_err_set(err, TD_E_NO_MEMORY, "out of memory") : write_whole(path, &b, err);
    td_buf_free(&b);
    return st;
}

enum td_status td_cluster_read_router(const char *run_dir, struct td_address *out, struct td_err *err)
{
    char path[1100];
    if ((size_t)snprintf(path, sizeof path, "%s/cluster.json", run_dir) >= sizeof path)
        return td_err_set(err, TD_E_INVALID, "--run-dir: too long");
    if (access(path, R_OK) != 0)
        return td_err_set(err, TD_E_NOT_FOUND,
                          "%s: %s; is a cluster up (tandemctl up), or do you mean --router ADDRESS?", path,
                          strerror(errno));
    json_error_t why;
    json_t *v = json_load_file(path, 0, &why);
    enum td_status st = TD_OK;
    if (v == NULL)
        st = td_err_set(err, TD_E_BAD_FILE, "%s: line %d: %s", path, why.line, why.text);
    else if (!read_address(json_object_get(v, "router"), out))
        st = td_err_set(err, TD_E_BAD_FILE, "%s: no router in it", path);
    json_decref(v);
    return st;
}

/* --- HTTP ----------------------------------------------------------------------------------------------------------
 */

static bool wait_for(int fd, short events, uint32_t timeout_ms)
{
    struct pollfd p = {.fd = fd, .events = events};
    int n;
    while ((n = poll(&p, 1, (int)timeout_ms)) < 0 && errno == EINTR) {
    }
    return n > 0;
}

/* -1: nobody there. */
static int connect_to(const char *address, uint32_t timeout_ms)
{
    const char *colon = strrchr(address, ':');
    char host[256];
    if (colon == NULL) return -1;
    bool is_v6 = address[0] == '[' && colon > address + 1 && colon[-1] == ']';
    size_t n = (size_t)(colon - address) - (is_v6 ? 2 : 0);
    if (n >= sizeof host) return -1;
    memcpy(host, address + is_v6, n);
    host[n] = '\0';
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    if (getaddrinfo(host, colon + 1, &hints, &list) != 0) return -1;
    int fd = -1;
    for (struct addrinfo *a = list; a != NULL && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, a->ai_protocol);
        if (fd < 0) continue;
        int e = 0;
        socklen_t len = sizeof e;
        bool ok = connect(fd, a->ai_addr, a->ai_addrlen) == 0 ||
                  (errno == EINPROGRESS && wait_for(fd, POLLOUT, timeout_ms) &&
                   getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &len) == 0 && e == 0);
        if (!ok) close(fd);
        if (!ok) fd = -1;
    }
    freeaddrinfo(list);
    return fd;
}

/* The whole reply of a server that closes at its end. */
static bool exchange(int fd, const char *address, const char *path, uint32_t timeout_ms, struct td_buf *reply)
{
    struct td_buf request = {0};
    td_buf_printf(&request, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", path, address);
    size_t sent = 0;
    while (!request.failed && sent < request.n && wait_for(fd, POLLOUT, timeout_ms)) {
        ssize_t n = send(fd, request.data + sent, request.n - sent, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR) break;
        if (n > 0) sent += (size_t)n;
    }
    bool ok = !request.failed && sent == request.n;
    td_buf_free(&request);
    while (ok) {
        if (!wait_for(fd, POLLIN, timeout_ms) || reply->n > (64u << 20) || !td_buf_reserve(reply, 65536)) return false;
        ssize_t n = recv(fd, reply->data + reply->n, reply->cap - reply->n, 0);
        if (n == 0) return true;
        if (n > 0)
            reply->n += (size_t)n;
        else if (errno != EAGAIN && errno != EINTR)
            return false;
    }
    return false;
}

enum td_status td_http_get(const char *address, const char *path, uint32_t timeout_ms, unsigned *status_out,
                           struct td_buf *out, struct td_err *err)
{
    struct td_buf reply = {0};
    *status_out = 0;
    int fd = connect_to(address, timeout_ms);
    if (fd < 0) return td_err_set(err, TD_E_UNAVAILABLE, "nobody answers at %s", address);
    bool ok = exchange(fd, address, path, timeout_ms, &reply);
    close(fd);
    const char *text = td_buf_cstr(&reply), *body = strstr(text, "\r\n\r\n");
    unsigned status = 0;
    ok = ok && body != NULL && sscanf(text, "HTTP/1.%*u %u", &status) == 1;
    if (ok && out != NULL) td_buf_put(out, body + 4, reply.n - (size_t)(body + 4 - text));
    if (ok) *status_out = status;
    td_buf_free(&reply);
    return ok ? TD_OK : td_err_set(err, TD_E_PROTOCOL, "%s does not answer in HTTP", address);
}
