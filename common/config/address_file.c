#include "common/config/address_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/bytes.h"
#include "common/base/json.h"

static void put_field(struct td_buf *b, const char *key, const char *value)
{
    td_buf_printf(b, "\"%s\":", key);
    td_json_quote_str(b, value == NULL ? "" : value);
}

static int write_all(int fd, const uint8_t *p, size_t n)
{
    while (n > 0) {
        ssize_t w = write(fd, p, n);
        if (w < 0 && errno == EINTR) continue;
        if (w < 0) return -1;
        p += w;
        n -= (size_t)w;
    }
    return 0;
}

enum td_status td_address_file_write(const char *path, const char *role, const char *name, int pid,
                                     const char *rpc_addr, const char *http_addr, struct td_err *err)
{
    enum td_status st = TD_OK;
    struct td_buf b = {0}, tmp = {0};
    td_buf_str(&b, "{");
    put_field(&b, "role", role);
    td_buf_str(&b, ",");
    put_field(&b, "name", name);
    td_buf_printf(&b, ",\"pid\":%d,", pid);
    put_field(&b, "rpc", rpc_addr);
    td_buf_str(&b, ",");
    put_field(&b, "http", http_addr);
    td_buf_str(&b, "}\n");
    td_buf_printf(&tmp, "%s.%d.tmp", path, (int)getpid());
    const char *tmp_path = td_buf_cstr(&tmp);
    if (b.failed || tmp.failed) {
        st = td_err_set(err, TD_E_NO_MEMORY, "address file %s: out of memory", path);
        goto out;
    }
    int fd = open(tmp_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    bool is_written = fd >= 0 && write_all(fd, b.data, b.n) == 0;
    int e = errno;
    if (fd >= 0 && close(fd) != 0 && is_written) {
        is_written = false;
        e = errno;
    }
    if (is_written && rename(tmp_path, path) != 0) {
        is_written = false;
        e = errno;
    }
    if (!is_written) {
        if (fd >= 0) unlink(tmp_path);
        st = td_err_set(err, TD_E_IO, "cannot write address file %s: %s", path, strerror(e));
    }
out:
    td_buf_free(&b);
    td_buf_free(&tmp);
    return st;
}
