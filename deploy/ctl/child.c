#include "deploy/ctl/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"

/* In the new process: only async-signal-safe calls. Reports errno through fd if the program cannot be executed. */
static void become(const struct td_child *c, int log_fd, int fd, pid_t parent)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127); /* we were too late: it has died already */
    int in = open("/dev/null", O_RDONLY);
    if (in >= 0 && dup2(in, 0) >= 0 && dup2(log_fd, 1) >= 0 && dup2(log_fd, 2) >= 0) {
        if (in > 2) close(in);
        execv(c->argv[0], (char *const *)c->argv);
    }
    int why = errno;
    ssize_t ignored = write(fd, &why, sizeof why);
    (void)ignored;
    _exit(127);
}

enum td_status td_child_start(struct td_child *c, struct td_err *err)
{
    int fds[2], why = 0;
    int log_fd = open(c->log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (c->n_starts == 0 ? O_TRUNC : 0), 0644);
    if (log_fd < 0) return td_err_set(err, TD_E_IO, "%s: %s", c->log_path, strerror(errno));
    if (pipe2(fds, O_CLOEXEC) != 0) {
        why = errno;
        close(log_fd);
        return td_err_set(err, TD_E_IO, "pipe: %s", strerror(why));
    }
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) become(c, log_fd, fds[1], parent);
    why = errno;
    close(log_fd);
    close(fds[1]);
    if (pid < 0) {
        close(fds[0]);
        return td_err_set(err, TD_E_IO, "%s: fork: %s", c->name, strerror(why));
    }
    ssize_t n;
    while ((n = read(fds[0], &why, sizeof why)) < 0 && errno == EINTR) {
    }
    close(fds[0]);
    if (n == (ssize_t)sizeof why) { /* exec failed; on success the pipe closes without a word */
        while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {
        }
        return td_err_set(err, TD_E_IO, "%s: %s", c->argv[0], strerror(why));
    }
    c->pid = pid;
    c->has_ended = false;
    c->started_ns = td_clock_ns();
    c->n_starts++;
    return TD_OK;
}

bool td_child_reap(struct td_child *c)
{
    int status;
    if (c->pid == 0 || waitpid(c->pid, &status, WNOHANG) != c->pid) return false;
    c->pid = 0;
    c->has_ended = true;
    c->wait_status = status;
    return true;
}

void td_child_signal(const struct td_child *c, int signum)
{
    if (c->pid != 0) kill(c->pid, signum);
}

const char *td_child_describe_end(const struct td_child *c, char *buf, size_t n)
{
    if (WIFSIGNALED(c->wait_status))
        snprintf(buf, n, "killed by SIG%s", sigabbrev_np(WTERMSIG(c->wait_status)));
    else
        snprintf(buf, n, "exit status %d", WEXITSTATUS(c->wait_status));
    return buf;
}

void td_child_last_words(const struct td_child *c, unsigned n_lines, struct td_buf *out)
{
    char tail[8192];
    int fd = open(c->log_path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    struct stat sb;
    ssize_t n = 0;
    if (fstat(fd, &sb) == 0)
        n = pread(fd, tail, sizeof tail, sb.st_size > (off_t)sizeof tail ? sb.st_size - (off_t)sizeof tail : 0);
    close(fd);
    if (n <= 0) return;
    size_t end = (size_t)n, begin = end;
    if (tail[end - 1] == '\n') begin--;
    for (unsigned lines = 0; begin > 0; begin--) {
        if (tail[begin - 1] == '\n' && ++lines == n_lines) break;
    }
    while (begin < end) {
        const char *stop = memchr(tail + begin, '\n', end - begin);
        size_t len = stop == NULL ? end - begin : (size_t)(stop - tail) - begin;
        td_buf_str(out, "  ");
        td_buf_put(out, tail + begin, len);
        td_buf_str(out, "\n");
        begin += len + 1;
    }
}
