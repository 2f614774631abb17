/* accept4, for the whole process. gRPC core (1.51) takes any failure of it but EAGAIN and EINTR as the end of the
 * listener: after one moment without a free descriptor, or one client whose network failed early, the daemon would
 * never take a connection again, and nobody would hear of it. This definition comes before libc's in the program's
 * symbols, so that core (and libuv) get ours. It
 *   - says EAGAIN for what passes;
 *   - keeps the last descriptors from clients, who are closed instead: UCX reads /proc to see whether a peer lives, and
 *     takes it for dead if it cannot open that file;
 *   - when there is none at all, takes waiting connections with one kept in reserve and closes them: a client sees a
 *     refusal, not silence.
 * Every listener of the process is non-blocking, so that a lock may be held. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/base/log.h"
#include "common/rpc/rpc_int.h"

#define MAX_REFUSED 64 /* in one go: this runs on a thread that has other work */
#define STUCK_NS    5000000
#define KEPT_SHARE  8  /* an eighth of the limit, */
#define MAX_KEPT    32 /* at most these */

static struct {
    pthread_mutex_t lock;
    int fd;         /* -1: none */
    int first_kept; /* from this number on descriptors are not for clients */
} reserve = {PTHREAD_MUTEX_INITIALIZER, -1, INT_MAX};

static int accept_raw(int listener, struct sockaddr *address, socklen_t *n, int flags)
{
    int fd;
    do fd = (int)syscall(SYS_accept4, listener, address, n, flags);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static void fill_reserve(void)
{
    if (reserve.fd < 0) reserve.fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* Listeners are watched for new arrivals only (core's), so nothing may stay in the queue that could be taken out of it;
 * or for as long as something is in it (libuv's), so what stays would keep the loop busy. Under the lock. */
static unsigned refuse_waiting(int listener)
{
    unsigned n = 0;
    for (int fd = 0; fd >= 0 && n < MAX_REFUSED; n += fd >= 0) {
        if (reserve.fd >= 0) close(reserve.fd);
        reserve.fd = -1;
        fd = accept_raw(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0) close(fd);
        fill_reserve();
    }
    return n;
}

static bool does_pass(int e)
{
    switch (e) {
    case EAGAIN:
    case ECONNABORTED:
    case ENETDOWN: /* these belong to the connection: accept(2) */
    case EPROTO:
    case ENOPROTOOPT:
    case EHOSTDOWN:
    case ENONET:
    case EHOSTUNREACH:
    case EOPNOTSUPP:
    case ENETUNREACH:
    case ENOBUFS:
    case ENOMEM:
    case EPERM: return true; /* a firewall's word */
    default: return false;
    }
}

/* Under a name of its own, since libc's header declares accept4 with a type that only libc can write. */
int rpc_accept4(int listener, struct sockaddr *address, socklen_t *n, int flags) __asm__("accept4");
int rpc_accept4(int listener, struct sockaddr *address, socklen_t *n, int flags)
{
    pthread_mutex_lock(&reserve.lock); /* else one thread's accept takes the place that another has just made free */
    unsigned n_refused = 0;
    int fd, e;
    bool is_short;
    do {
        fd = accept_raw(listener, address, n, flags);
        e = errno;
        is_short = fd < 0 && (e == EMFILE || e == ENFILE);
        if (fd < 0 || fd < reserve.first_kept) break;
        close(fd); /* the lowest free number is this high: what is left is not for clients */
        n_refused++;
        fd = -1;
        e = EAGAIN;
    } while (n_refused < MAX_REFUSED);
    if (is_short) n_refused += refuse_waiting(listener);
    bool is_stuck = is_short && reserve.fd < 0;
    pthread_mutex_unlock(&reserve.lock);
    if (n_refused > 0 || is_short)
        TD_WARN("accept_refused", "connections=%u text=\"too few file descriptors are free: raise ulimit -n\"",
                n_refused);
    if (fd >= 0) return fd;
    if (is_stuck) nanosleep(&(struct timespec){.tv_nsec = STUCK_NS}, NULL); /* they wait, but must not be polled hot */
    errno = is_short || does_pass(e) ? EAGAIN : e;
    return -1;
}

void rpc_accept_prepare(void)
{
    struct rlimit files;
    pthread_mutex_lock(&reserve.lock);
    fill_reserve();
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < INT_MAX) {
        int limit = (int)files.rlim_cur;
        reserve.first_kept = limit - (limit / KEPT_SHARE < MAX_KEPT ? limit / KEPT_SHARE : MAX_KEPT);
    }
    pthread_mutex_unlock(&reserve.lock);
}
