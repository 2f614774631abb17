/* tandemctl up: one router and its workers on this machine, in the foreground.
 *
 * 1. The router starts; its address file tells where it listens.
 * 2. The workers start and join it.
 * 3. All have written their address files, the router says it is ready and shows every worker: cluster.json appears.
 * 4. From here on a process that ends is reported and started again, the router at its old addresses, so that workers
 * and clients find it. cluster.json follows. A process that ends before 3 was reached ends the whole: it cannot start,
 * and its last words say why. SIGINT or SIGTERM: the router drains (its port closes, running requests finish), then the
 * workers; exit 0. A second one kills at once. If this process is killed, the kernel kills the others. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/bytes.h"
#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/commands.h"
#include "deploy/ctl/supervisor.h"

#define STEP_MS               20u /* while waiting for files and pages; ends of processes wake us at once */
#define GET_TIMEOUT_MS        1000u
#define MAX_WORKERS           31u /* of a kind */
#define LAST_LINES            20u
#define GRACE_BEYOND_DRAIN_MS 5000u

enum { ROUTER, PREFILL, DECODE };
static const char *const roles[] = {"router", "prefill", "decode"};

struct member {
    struct td_supervised *process;
    unsigned role;
    char address_path[1100];
    const char *argv[96];
    struct td_buf words[16]; /* arguments that had to be put together */
    unsigned n_args, n_words;
    struct td_address address;
    bool has_address;
};

struct up {
    const char *model, *model_name, *device, *run_dir, *bin_dir, *rpc_address, *http_address, *log_level;
    uint32_t n_prefill, n_decode, prefill_tp, decode_tp, prefill_ep, decode_ep, drain_timeout_ms, ready_timeout_s;
    struct td_option_list flags[3];
    struct td_supervisor s;
    struct member members[1 + 2 * MAX_WORKERS];
    unsigned n_members;
    char cluster_path[1100];
    bool is_up, is_changed;
    int lock_fd;
};

/* --- command lines -------------------------------------------------------------------------------------------------
 */

static void add_arg(struct member *m, const char *arg)
{
    TD_CHECK(m->n_args + 1 < TD_COUNT(m->argv)); /* 16 of ours and 32 of the user's at most */
    m->argv[m->n_args++] = arg;
    m->argv[m->n_args] = NULL;
}

static void add_flag(struct member *m, const char *flag, const char *value)
{
    TD_CHECK(m->n_words < TD_COUNT(m->words));
    struct td_buf *b = &m->words[m->n_words++];
    td_buf_printf(b, "--%s=%s", flag, value);
    add_arg(m, td_buf_cstr(b));
}

static void add_number(struct member *m, const char *flag, uint32_t value)
{
    char text[16];
    snprintf(text, sizeof text, "%u", value);
    add_flag(m, flag, text);
}

/* The command line; the user's flags come last, so that they win. */
static void build_argv(struct up *u, struct member *m, const char *router_rpc, const char *rpc, const char *http)
{
    for (unsigned i = 0; i < m->n_words; i++) td_buf_free(&m->words[i]);
    m->n_args = m->n_words = 0;
    struct td_buf *b = &m->words[m->n_words++];
    td_buf_printf(b, "%s/tandem-%s", u->bin_dir, roles[m->role]);
    add_arg(m, td_buf_cstr(b));
    add_flag(m, "name", m->process->child.name);
    add_flag(m, "model", u->model);
    if (u->model_name != NULL) add_flag(m, "model-name", u->model_name);
    add_flag(m, "rpc-address", rpc);
    add_flag(m, "http-address", http);
    add_flag(m, "address-file", m->address_path);
    if (u->log_level != NULL) add_flag(m, "log-level", u->log_level);
    add_number(m, "drain-timeout", u->drain_timeout_ms);
    if (m->role != ROUTER) {
        add_flag(m, "router", router_rpc);
        add_flag(m, "device", u->device);
        add_number(m, "tp", m->role == PREFILL ? u->prefill_tp : u->decode_tp);
        add_number(m, "ep", m->role == PREFILL ? u->prefill_ep : u->decode_ep);
    }
    const struct td_option_list *more = &u->flags[m->role];
    for (unsigned i = 0; i < more->n; i++) add_arg(m, more->items[i]);
}

static enum td_status add_member(struct up *u, unsigned role, unsigned index, struct td_err *err)
{
    struct member *m = &u->members[u->n_members++];
    char name[32], log_path[1024];
    m->role = role;
    if (role == ROUTER)
        snprintf(name, sizeof name, "router");
    else
        snprintf(name, sizeof name, "%s-%u", roles[role], index);
    snprintf(log_path, sizeof log_path, "%s/%s.log", u->run_dir, name);
    snprintf(m->address_path, sizeof m->address_path, "%s/%s.json", u->run_dir, name);
    m->process = td_supervisor_add(&u->s, name, log_path, m->argv, role == ROUTER ? 0 : 1);
    if (m->process == NULL) return td_err_set(err, TD_E_INVALID, "too many processes");
    unlink(m->address_path);
    return TD_OK;
}

/* --- reaching readiness --------------------------------------------------------------------------------------------
 */

static void read_addresses(struct up *u)
{
    for (unsigned i = 0; i < u->n_members; i++) {
        struct member *m = &u->members[i];
        if (m->has_address || m->process->child.pid == 0) continue;
        m->has_address = td_address_file_read(m->address_path, m->process->child.pid, &m->address);
    }
}

static bool all_have_addresses(const struct up *u)
{
    for (unsigned i = 0; i < u->n_members; i++) {
        if (!u->members[i].has_address) return false;
    }
    return true;
}

/* The router's /statez lists the workers that have joined. */
static unsigned count_live(const json_t *workers, const char *role)
{
    unsigned n = 0;
    size_t i;
    json_t *w;
    json_array_foreach (workers, i, w) {
        const char *r = json_string_value(json_object_get(w, "role")),
                   *state = json_string_value(json_object_get(w, "state"));
        n += r != NULL && state != NULL && strcmp(r, role) == 0 && strcmp(state, "live") == 0;
    }
    return n;
}

static bool is_fleet_complete(const struct up *u, const char *http)
{
    unsigned status = 0;
    struct td_buf body = {0};
    if (td_http_get(http, "/readyz", GET_TIMEOUT_MS, &status, NULL, NULL) != TD_OK || status != 200) return false;
    bool ok = td_http_get(http, "/statez", GET_TIMEOUT_MS, &status, &body, NULL) == TD_OK && status == 200;
    json_t *v = ok ? json_loadb((char *)body.data, body.n, 0, NULL) : NULL;
    const json_t *workers = json_object_get(json_object_get(v, "state"), "workers");
    ok = count_live(workers, roles[PREFILL]) >= u->n_prefill && count_live(workers, roles[DECODE]) >= u->n_decode;
    json_decref(v);
    td_buf_free(&body);
    return ok;
}

/* True while start-up may go on. */
static bool check_start(struct up *u, uint64_t deadline_ns)
{
    if (u->s.n_interrupts > 0) return false;
    for (unsigned i = 0; i < u->n_members; i++) {
        const struct td_child *c = &u->members[i].process->child;
        if (!c->has_ended) continue;
        struct td_buf words = {0};
        char how[64];
        td_child_last_words(c, LAST_LINES, &words);
        fprintf(stderr, "tandemctl: %s ended before it was ready (%s). The end of %s:\n%s", c->name,
                td_child_describe_end(c, how, sizeof how), c->log_path, td_buf_cstr(&words));
        td_buf_free(&words);
        return false;
    }
    if (td_clock_ns() < deadline_ns) return true;
    fprintf(stderr, "tandemctl: not ready after %u s (--ready-timeout); logs are in %s\n", u->ready_timeout_s,
            u->run_dir);
    return false;
}

static bool start_members(struct up *u, unsigned first, unsigned end)
{
    const char *router = u->members[0].address.rpc;
    for (unsigned i = first; i < end; i++) {
        struct member *m = &u->members[i];
        struct td_err err = {{0}};
        if (m->role == ROUTER)
            build_argv(u, m, NULL, u->rpc_address, u->http_address);
        else
            build_argv(u, m, router, "127.0.0.1:0", "127.0.0.1:0");
        if (td_supervisor_start(&u->s, m->process, &err) == TD_OK) continue;
        fprintf(stderr, "tandemctl: %s: %s\n", m->process->child.name, err.text);
        return false;
    }
    return true;
}

static bool write_cluster(struct up *u)
{
    struct td_address prefill[MAX_WORKERS], decode[MAX_WORKERS];
    struct td_cluster c = {.model = u->model, .router = &u->members[0].address, .prefill = prefill, .decode = decode};
    for (unsigned i = 1; i < u->n_members; i++) {
        const struct member *m = &u->members[i];
        if (m->role == PREFILL)
            prefill[c.n_prefill++] = m->address;
        else
            decode[c.n_decode++] = m->address;
    }
    struct td_err err = {{0}};
    if (td_cluster_write(u->cluster_path, &c, &err) == TD_OK) return true;
    fprintf(stderr, "tandemctl: %s\n", err.text);
    return false;
}

static bool reach_readiness(struct up *u)
{
    uint64_t deadline = td_clock_ns() + u->ready_timeout_s * TD_NS_PER_S;
    if (!start_members(u, 0, 1)) return false;
    while (!u->members[0].has_address) {
        if (!check_start(u, deadline)) return false;
        td_supervisor_step(&u->s, STEP_MS);
        read_addresses(u);
    }
    if (!start_members(u, 1, u->n_members)) return false;
    while (!all_have_addresses(u) || !is_fleet_complete(u, u->members[0].address.http)) {
        if (!check_start(u, deadline)) return false;
        td_supervisor_step(&u->s, STEP_MS);
        read_addresses(u);
    }
    return check_start(u, deadline) && write_cluster(u);
}

/* --- keeping it up --------------------------------------------------------------------------------------------------
 */

static void on_change(struct td_supervisor *s, struct td_supervised *who, bool is_start)
{
    struct up *u = s->user;
    struct member *m = NULL;
    for (unsigned i = 0; i < u->n_members; i++) {
        if (u->members[i].process == who) m = &u->members[i];
    }
    TD_CHECK(m != NULL);
    if (!u->is_up) return;
    if (is_start) {
        printf("started %s again (pid %d)\n", who->child.name, (int)who->child.pid);
    } else {
        char how[64];
        td_child_describe_end(&who->child, how, sizeof how);
        m->has_address = false;
        unlink(m->address_path);
        if (s->restarts) {
            fprintf(stderr, "tandemctl: %s ended (%s); starting it again. Its log: %s\n", who->child.name, how,
                    who->child.log_path);
            /* The others know the router by its addresses. */
            if (m->role == ROUTER) build_argv(u, m, NULL, m->address.rpc, m->address.http);
        }
    }
    u->is_changed = true;
    fflush(stdout);
}

static void keep_up(struct up *u)
{
    u->s.restarts = true;
    while (u->s.n_interrupts == 0) {
        td_supervisor_step(&u->s, u->is_changed ? STEP_MS : 3600000);
        if (!u->is_changed) continue;
        read_addresses(u);
        if (!all_have_addresses(u)) continue;
        write_cluster(u);
        u->is_changed = false;
    }
}

/* What the daemons make of the directory when no name is given. */
static void model_name_of(const struct up *u, char *out, size_t size)
{
    char path[1024];
    snprintf(path, sizeof path, "%s", u->model);
    snprintf(out, size, "%s", u->model_name != NULL ? u->model_name : basename(path));
}

static void print_summary(const struct up *u)
{
    const struct td_address *router = &u->members[0].address;
    char model[256];
    model_name_of(u, model, sizeof model);
    printf("ready: %u prefill and %u decode, serving %s\n", u->n_prefill, u->n_decode, u->model);
    for (unsigned i = 0; i < u->n_members; i++) {
        const struct td_address *a = &u->members[i].address;
        printf("  %-12s rpc %-22s http %-22s pid %d\n", u->members[i].process->child.name, a->rpc, a->http, a->pid);
    }
    printf("logs and addresses: %s\n", u->run_dir);
    printf("ask something:\n  %s/tandemctl chat --router %s 'Hello'\n", u->bin_dir, router->rpc);
    printf("  curl http://%s/v1/chat/completions -H 'Content-Type: application/json' \\\n"
           "    -d '{\"model\": \"%s\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'\n",
           router->http, model);
    printf("OpenAI's API: base URL http://%s/v1, model %s, any key\n", router->http, model);
    printf("Ctrl-C stops it\n");
    fflush(stdout);
}

/* --- the command ----------------------------------------------------------------------------------------------------
 */

static enum td_status make_dirs(const char *path, struct td_err *err)
{
    char part[1024];
    size_t n = strlen(path);
    if (n == 0 || n >= 900) return td_err_set(err, TD_E_INVALID, "--run-dir: empty or too long");
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != '\0') continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, 0755) != 0 && errno != EEXIST)
            return td_err_set(err, TD_E_IO, "--run-dir: %s: %s", part, strerror(errno));
    }
    return TD_OK;
}

/* One cluster a folder: the lock goes with the process. */
static enum td_status take_run_dir(struct up *u, struct td_err *err)
{
    char path[1024];
    enum td_status st = make_dirs(u->run_dir, err);
    if (st != TD_OK) return st;
    snprintf(path, sizeof path, "%s/lock", u->run_dir);
    u->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (u->lock_fd < 0) return td_err_set(err, TD_E_IO, "%s: %s", path, strerror(errno));
    if (flock(u->lock_fd, LOCK_EX | LOCK_NB) != 0)
        return td_err_set(err, TD_E_BUSY, "%s: another cluster runs in this folder (choose another --run-dir)",
                          u->run_dir);
    snprintf(u->cluster_path, sizeof u->cluster_path, "%s/cluster.json", u->run_dir);
    unlink(u->cluster_path);
    return TD_OK;
}

static enum td_status prepare(struct up *u, struct td_err *err)
{
    enum td_status st;
    if (u->model == NULL) return td_err_set(err, TD_E_INVALID, "--model is missing");
    if (access(u->model, R_OK) != 0) return td_err_set(err, TD_E_INVALID, "--model: %s: %s", u->model, strerror(errno));
    TD_TRY(take_run_dir(u, err));
    TD_TRY(td_supervisor_init(&u->s, err));
    u->s.on_change = on_change;
    u->s.user = u;
    TD_TRY(add_member(u, ROUTER, 0, err));
    for (unsigned i = 0; i < u->n_prefill; i++) TD_TRY(add_member(u, PREFILL, i, err));
    for (unsigned i = 0; i < u->n_decode; i++) TD_TRY(add_member(u, DECODE, i, err));
out:
    return st;
}

static char *own_folder(char *buf, size_t cap)
{
    ssize_t n = readlink("/proc/self/exe", buf, cap - 1);
    if (n <= 0) return ".";
    buf[n] = '\0';
    return dirname(buf);
}

static int run_up(struct up *u)
{
    struct td_err err = {{0}};
    enum td_status st = prepare(u, &err);
    if (st != TD_OK) return td_ctl_fail(&td_ctl_up, st, &err);
    u->is_up = reach_readiness(u);
    if (u->is_up) {
        print_summary(u);
        keep_up(u);
        printf("stopping\n");
        fflush(stdout);
    }
    bool was_asked = u->s.n_interrupts > 0;
    unlink(u->cluster_path);
    bool is_clean = td_supervisor_stop(&u->s, u->drain_timeout_ms + GRACE_BEYOND_DRAIN_MS);
    if (u->s.n_interrupts > 1) return TD_CTL_INTERRUPTED;
    return was_asked && is_clean ? 0 : TD_CTL_FAILED;
}

static int up_main(int argc, char **argv)
{
    static struct up u; /* too large for a stack, one per process */
    char exe[1024];
    u.device = "cpu";
    u.run_dir = TD_DEFAULT_RUN_DIR;
    u.bin_dir = own_folder(exe, sizeof exe);
    u.rpc_address = u.http_address = "127.0.0.1:0";
    u.n_prefill = u.n_decode = u.prefill_tp = u.decode_tp = u.prefill_ep = u.decode_ep = 1;
    u.drain_timeout_ms = 30000;
    u.ready_timeout_s = 600;
    u.lock_fd = u.s.signal_fd = -1;
    struct td_option options[] = {
        {"model", TD_OPTION_STR, &u.model, "DIR", "checkpoint to serve (required)", 0, 0, NULL},
        {"model-name", TD_OPTION_STR, &u.model_name, "NAME", "name that clients use; default: the directory's", 0, 0,
         NULL},
        {"prefill", TD_OPTION_U32, &u.n_prefill, "N", "prefill workers", 1, MAX_WORKERS, NULL},
        {"decode", TD_OPTION_U32, &u.n_decode, "N", "decode workers", 1, MAX_WORKERS, NULL},
        {"prefill-tp", TD_OPTION_U32, &u.prefill_tp, "N", "tensor-parallel ranks in each prefill worker", 1, 8, NULL},
        {"decode-tp", TD_OPTION_U32, &u.decode_tp, "N", "tensor-parallel ranks in each decode worker", 1, 8, NULL},
        {"prefill-ep", TD_OPTION_U32, &u.prefill_ep, "N", "1: slices of experts a rank; that --prefill-tp: whole ones",
         1, 8, NULL},
        {"decode-ep", TD_OPTION_U32, &u.decode_ep, "N", "1: slices of experts a rank; that --decode-tp: whole ones", 1,
         8, NULL},
        {"device", TD_OPTION_STR, &u.device, "cpu|cuda", "where workers compute", 0, 0, NULL},
        {"run-dir", TD_OPTION_STR, &u.run_dir, "DIR", "logs, addresses and cluster.json", 0, 0, NULL},
        {"rpc-address", TD_OPTION_STR, &u.rpc_address, "HOST:PORT", "the router's gRPC; port 0 picks a free one", 0, 0,
         NULL},
        {"http-address", TD_OPTION_STR, &u.http_address, "HOST:PORT", "the router's HTTP", 0, 0, NULL},
        {"log-level", TD_OPTION_STR, &u.log_level, "LEVEL", "of all daemons: debug, info, warn, error", 0, 0, NULL},
        {"drain-timeout", TD_OPTION_U32, &u.drain_timeout_ms, "MS",
         "on stop, running requests may finish for this long", 0, 600000, NULL},
        {"ready-timeout", TD_OPTION_U32, &u.ready_timeout_s, "S", "give up if not ready by then", 1, 86400, NULL},
        {"router-flag", TD_OPTION_LIST, &u.flags[ROUTER], "--FLAG=VALUE", "one more flag for the router; repeatable", 0,
         0, NULL},
        {"prefill-flag", TD_OPTION_LIST, &u.flags[PREFILL], "--FLAG=VALUE", "for the prefill workers", 0, 0, NULL},
        {"decode-flag", TD_OPTION_LIST, &u.flags[DECODE], "--FLAG=VALUE", "for the decode workers", 0, 0, NULL},
        {"bin-dir", TD_OPTION_STR, &u.bin_dir, "DIR", "where the daemons are", 0, 0, NULL},
        {NULL, TD_OPTION_FLAG, NULL, NULL, NULL, 0, 0, NULL},
    };
    unsigned n_words;
    enum td_parse_result how = td_options_parse(&td_ctl_up, options, argc, argv, NULL, 0, &n_words);
    if (how != TD_PARSE_RUN) return how == TD_PARSE_EXIT_OK ? 0 : TD_CTL_USAGE;
    int rc = run_up(&u);
    if (u.s.signal_fd >= 0) td_supervisor_deinit(&u.s);
    for (unsigned i = 0; i < u.n_members; i++) {
        for (unsigned k = 0; k < u.members[i].n_words; k++) td_buf_free(&u.members[i].words[k]);
    }
    if (u.lock_fd >= 0) close(u.lock_fd);
    return rc;
}

const struct td_command td_ctl_up = {
    "up", "",
    "Starts a router and its workers on this machine and keeps them running until Ctrl-C.\n"
    "When all are ready, RUN_DIR/cluster.json tells their addresses; other commands find the router there.",
    up_main};
