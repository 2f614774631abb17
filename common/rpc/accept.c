/* accept4, for the whole process. gRPC core (1.51) takes any failure of it but EAGAIN and EINTR as the end of the
 * listener: after one moment without a free descriptor, or one client whose network failed early, the daemon would
 * never take a connection again, and nobody would hear of it. This definition comes before libc's in the program's
 * symbols, so that core (and libuv) get ours. It says EAGAIN for what passes, and when descriptors have run out it
 * takes the waiting connections with one kept in reserve and closes them: a client sees a refusal, not silence. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common/base/log.h"
#include "common/rpc/rpc_int.h"

#define MAX_REFUSED 64 /* in one go: this runs on a thread that has other work */
#define STUCK_NS    5000000

static struct {
    pthread_mutex_t lock;
    int fd; /* -1: none */
} reserve = {PTHREAD_MUTEX_INITIALIZER, -1};

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
    int fd = accept_raw(listener, address, n, flags), e = errno;
    bool is_short = fd < 0 && (e == EMFILE || e == ENFILE);
    unsigned n_refused = is_short ? refuse_waiting(listener) : 0;
    bool is_stuck = reserve.fd < 0;
    pthread_mutex_unlock(&reserve.lock);
    if (fd >= 0) return fd;
    if (is_short) {
        TD_WARN("accept_refused", "connections=%u text=\"no file descriptor is free: raise ulimit -n\"", n_refused);
        if (is_stuck)
            nanosleep(&(struct timespec){.tv_nsec = STUCK_NS}, NULL); /* they wait, but must not be polled hot */
        e = EAGAIN;
    }
    errno = does_pass(e) ? EAGAIN : e;
    return -1;
}

void rpc_accept_prepare(void)
{
    pthread_mutex_lock(&reserve.lock);
    fill_reserve();
    pthread_mutex_unlock(&reserve.lock);
}
