/* UCX's settings, made here rather than in the environment, and UCX's voice, led into our log. Built against 1.13
 * headers this runs with later libraries, so options are set by name and one that a version does not know is passed
 * over. */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#include "common/base/log.h"
#include "common/transfer/ucx_int.h"

static ucs_log_func_rc_t to_our_log(const char *file, unsigned line, const char *function, ucs_log_level_t level,
                                    const ucs_log_component_config_t *component, const char *message, va_list ap)
{
    (void)function;
    (void)component;
    char text[512];
    vsnprintf(text, sizeof text, message, ap);
    for (char *c = text; *c != 0; c++)
        if (*c == '\n' || *c == '"') *c = ' ';
    const char *name = strrchr(file, '/');
    name = name == NULL ? file : name + 1;
    /* "invalid configuration" is about what td_ucx_config sets for transports that are then not in use. */
    bool is_expected = strncmp(text, "invalid configuration", 21) == 0;
    /* Its errors are warnings to us: whoever called it decides what is lost, and says so. */
    if (level <= UCS_LOG_LEVEL_WARN && !is_expected)
        TD_WARN("ucx_says", "at=%s:%u text=\"%s\"", name, line, text);
    else
        TD_DEBUG("ucx_says", "at=%s:%u text=\"%s\"", name, line, text);
    return UCS_LOG_FUNC_RC_STOP;
}

/* libucs installs crash handlers when it is loaded, before any code of ours can ask it not to. They would print a
 * backtrace and wait for a debugger: a dead worker must die. */
static void give_back_signals(void)
{
    static const int caught[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
    for (size_t i = 0; i < TD_COUNT(caught); i++) {
        struct sigaction sa;
        Dl_info info;
        if (sigaction(caught[i], NULL, &sa) != 0 || sa.sa_handler == SIG_DFL || sa.sa_handler == SIG_IGN) continue;
        void *handler;
        memcpy(&handler, &sa.sa_handler, sizeof handler);
        if (dladdr(handler, &info) != 0 && info.dli_fname != NULL && strstr(info.dli_fname, "libucs") != NULL)
            ucs_debug_disable_signal(caught[i]);
    }
}

static void quieten(void)
{
    static const char *const opts[][2] = {
        {"HANDLE_ERRORS", "none"}, {"ERROR_SIGNALS", ""}, {"WARN_UNUSED_ENV_VARS", "n"}};
    for (size_t i = 0; i < TD_COUNT(opts); i++) ucs_global_opts_set_value(opts[i][0], opts[i][1]);
    ucs_log_push_handler(to_our_log);
    give_back_signals();
}

void td_ucx_quieten(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, quieten);
}

enum td_status td_ucx_config(const struct ucx *x, ucp_config_t **out, struct td_err *err)
{
    ucp_config_t *c;
    ucs_status_t s = ucp_config_read(NULL, NULL, &c);
    if (s != UCS_OK) return td_ucx_err(err, s, "reading UCX's settings (UCX_* in the environment)");
    char interval[32];
    snprintf(interval, sizeof interval, "%ums", x->keepalive_ms);
    const char *const opts[][2] = {
        {"KEEPALIVE_INTERVAL", interval},
        /* Without it, shared memory is not offered to endpoints that want to hear of a peer's death. (MM_ is the part
         * that posix and sysv have in common; versions differ in whether they take the longer names here.) */
        {"MM_ERROR_HANDLING", "y"},
        /* What a key has mapped goes with the key. Else UCX keeps the memory of a dead peer for a put that will never
         * come, and its successor finds the GPU full. */
        {"CUDA_IPC_CACHE", "n"},
    };
    for (size_t i = 0; i < TD_COUNT(opts); i++) {
        if (x->device == NULL && strncmp(opts[i][0], "CUDA", 4) == 0) continue;
        s = ucp_config_modify(c, opts[i][0], opts[i][1]);
        if (s != UCS_OK)
            TD_INFO("ucx_option_unknown", "option=%s value=%s text=\"%s\"", opts[i][0], opts[i][1],
                    ucs_status_string(s));
    }
    const char *tls = x->tls != NULL ? x->tls : x->tls_left;
    if (tls != NULL && (s = ucp_config_modify(c, "TLS", tls)) != UCS_OK) {
        ucp_config_release(c);
        return td_err_set(err, TD_E_BAD_CONFIG, "UCX does not accept the transports \"%s\": %s", tls,
                          ucs_status_string(s));
    }
    *out = c;
    return TD_OK;
}
