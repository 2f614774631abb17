#include "common/base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/log.h"

#define FEW_FILES 256u /* a worker has 40 when idle, and one more for each client, peer and segment */

void td_process_hold_std_fds(void)
{
    signal(SIGPIPE, SIG_IGN); /* already reading the settings may log, and the reader of stderr may be gone */
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) < 0)
            return; /* takes the lowest: fd */
}

/* main is too late: libraries open descriptors when they are loaded (UCX an eventfd). A program's own list of functions
 * that run before them; sanitizers are not ready then. */
#if defined(__has_feature)
#define IS_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define IS_SANITIZED 1
#else
#define IS_SANITIZED 0
#endif
#if !IS_SANITIZED
__attribute__((section(".preinit_array"), used)) static void (*const before_libraries)(void) = td_process_hold_std_fds;
#endif

static void raise_file_limit(void)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
    if (files.rlim_cur < files.rlim_max) {
        struct rlimit most = {files.rlim_max, files.rlim_max};
        if (setrlimit(RLIMIT_NOFILE, &most) == 0) files = most;
    }
    if (files.rlim_cur < FEW_FILES)
        TD_WARN("few_open_files", "limit=%llu wanted=%u text=\"connections beyond it are refused: raise ulimit -n\"",
                (unsigned long long)files.rlim_cur, FEW_FILES);
}

enum td_status td_process_prepare(struct td_err *err)
{
    signal(SIGHUP, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    raise_file_limit();
#ifdef TD_FAULTS
    const char *faults = getenv("TANDEM_FAULT");
    if (faults != NULL && !td_fault_parse(faults))
        return td_err_set(err, TD_E_BAD_CONFIG, "TANDEM_FAULT: \"%s\" is not understood", faults);
#else
    (void)err;
#endif
    return TD_OK;
}
