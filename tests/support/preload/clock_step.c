/* Preloaded into a daemon: its wall clock is off by what a file says (8 bytes, nanoseconds, CLOCK_STEP_FILE), so that a
 * test can step the clock of one daemon and leave the machine's alone. Waits until a time of day are moved likewise, as
 * the kernel does not know of the step. */
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S INT64_C(1000000000)

static const volatile int64_t *offset;
static long (*real_syscall)(long number, ...);

__attribute__((constructor)) static void open_file(void)
{
    const char *path = getenv("CLOCK_STEP_FILE");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *p = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (p != MAP_FAILED) offset = p;
}

static struct timespec moved(struct timespec t, int64_t by)
{
    int64_t ns = t.tv_sec * NS_PER_S + t.tv_nsec + by;
    if (ns < 0) ns = 0;
    return (struct timespec){.tv_sec = ns / NS_PER_S, .tv_nsec = ns % NS_PER_S};
}

static int64_t step(void) { return offset == NULL ? 0 : *offset; }

static void find_real(void)
{
    void *p = dlsym(RTLD_NEXT, "syscall");
    memcpy(&real_syscall, &p, sizeof p);
}

long syscall(long number, ...)
{
    va_list args;
    long a[6];
    va_start(args, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(args, long);
    va_end(args);
    if (real_syscall == NULL) find_real();
    struct timespec t;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) != 0 && a[3] != 0) {
        t = moved(*(const struct timespec *)(uintptr_t)a[3], -step());
        a[3] = (long)(uintptr_t)&t;
    }
    return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int clock_gettime(clockid_t id, struct timespec *out)
{
    if (real_syscall == NULL) find_real();
    int rc = (int)real_syscall(SYS_clock_gettime, (long)id, out, 0L, 0L, 0L, 0L);
    if (rc == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) *out = moved(*out, step());
    return rc;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone)
{
    (void)zone;
    struct timespec t;
    int rc = clock_gettime(CLOCK_REALTIME, &t);
    if (rc == 0) *out = (struct timeval){.tv_sec = t.tv_sec, .tv_usec = t.tv_nsec / 1000};
    return rc;
}

time_t time(time_t *out)
{
    struct timespec t;
    if (clock_gettime(CLOCK_REALTIME, &t) != 0) return (time_t)-1;
    if (out != NULL) *out = t.tv_sec;
    return t.tv_sec;
}
