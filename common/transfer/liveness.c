#include "common/transfer/liveness_int.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* the same number on every architecture */
#endif

static ssize_t read_file(const char *path, char *buf, size_t n)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t got = read(fd, buf, n - 1);
    close(fd);
    buf[got > 0 ? got : 0] = 0;
    return got;
}

/* 0: no such process, or not readable. */
static uint64_t start_time_of(uint32_t pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%" PRIu32 "/stat", pid);
    if (read_file(path, text, sizeof text) <= 0) return 0;
    /* Field 2 is the command in parentheses and may hold anything; field 22 is counted from its last ')'. */
    const char *s = strrchr(text, ')');
    for (int field = 2; s != NULL && field < 22; field++) {
        s = strchr(s, ' ');
        if (s != NULL) s++;
    }
    return s == NULL ? 0 : strtoull(s, NULL, 10);
}

static uint64_t pid_namespace(void)
{
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
}

static void boot_id(uint8_t out[16])
{
    char text[64];
    memset(out, 0, 16);
    if (read_file("/proc/sys/kernel/random/boot_id", text, sizeof text) <= 0) return;
    unsigned n = 0;
    for (const char *s = text; *s != 0 && n < 32; s++) {
        unsigned digit;
        if (*s >= '0' && *s <= '9')
            digit = (unsigned)(*s - '0');
        else if (*s >= 'a' && *s <= 'f')
            digit = (unsigned)(*s - 'a') + 10;
        else
            continue; /* dashes */
        out[n / 2] = (uint8_t)(out[n / 2] << 4 | digit);
        n++;
    }
}

void td_process_self(struct td_process_id *out)
{
    *out = (struct td_process_id){.pid = (uint32_t)getpid(), .pid_namespace = pid_namespace()};
    out->start_time = start_time_of(out->pid);
    boot_id(out->boot_id);
}

enum td_status td_process_watch(const struct td_process_id *p, int *fd_out)
{
    static const uint8_t unknown[16];
    struct td_process_id self;
    td_process_self(&self);
    if (memcmp(self.boot_id, unknown, 16) == 0 || memcmp(self.boot_id, p->boot_id, 16) != 0) return TD_E_UNSUPPORTED;
    if (self.pid_namespace == 0 || self.pid_namespace != p->pid_namespace) return TD_E_UNSUPPORTED;
    if (p->pid == 0 || p->pid > INT32_MAX || p->start_time == 0 || self.start_time == 0) return TD_E_UNSUPPORTED;
    int fd = (int)syscall(SYS_pidfd_open, (int)p->pid, 0);
    if (fd < 0) return errno == ESRCH ? TD_E_PEER_LOST : TD_E_UNSUPPORTED;
    /* Only now does the pid stand still: is it still the same life? A zombie keeps its start time, so ask the pidfd
     * too. */
    struct pollfd pfd = {.fd = fd, .events = POLLIN};
    errno = 0;
    uint64_t started = start_time_of(p->pid);
    if (started == 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) { /* our lack, not its death */
        close(fd);
        return TD_E_UNSUPPORTED;
    }
    if (started != p->start_time || (poll(&pfd, 1, 0) == 1 && (pfd.revents & POLLIN) != 0)) {
        close(fd);
        return TD_E_PEER_LOST;
    }
    *fd_out = fd;
    return TD_OK;
}
