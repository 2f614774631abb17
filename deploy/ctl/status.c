/* tandemctl status: what the router sees of its fleet. tandemctl drain: a worker finishes what it has and takes no
 * more. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "deploy/ctl/client.h"
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/commands.h"
#include "proto/worker.pb-c.h"

#define GET_TIMEOUT_MS 5000u

int td_ctl_fail(const struct td_command *c, enum td_status st, const struct td_err *err)
{
    fprintf(stderr, "tandemctl %s: %s: %s\n", c->name, td_status_name(st),
            err->text[0] != '\0' ? err->text : td_status_text(st));
    return TD_CTL_FAILED;
}

static const char *string_of(const json_t *v, const char *key)
{
    const char *s = json_string_value(json_object_get(v, key));
    return s != NULL ? s : "?";
}

static long long number_of(const json_t *v, const char *key)
{
    return (long long)json_integer_value(json_object_get(v, key));
}

static void print_fleet(const json_t *root)
{
    const json_t *state = json_object_get(root, "state"), *workers = json_object_get(state, "workers");
    printf("router %s: %s%s, up %.1f s, %lld running, %lld waiting\n", string_of(root, "name"),
           json_is_true(json_object_get(root, "is_ready")) ? "ready" : "not ready",
           json_is_true(json_object_get(state, "is_draining")) ? ", draining" : "",
           (double)number_of(root, "uptime_ms") / 1e3, number_of(state, "running"), number_of(state, "waiting"));
    printf("%-16s %-8s %-9s %-22s %7s %7s %11s %11s %11s %8s\n", "worker", "role", "state", "rpc", "running", "waiting",
           "free full", "free slide", "quarantine", "seen ms");
    size_t i;
    json_t *w;
    json_array_foreach (workers, i, w) {
        const json_t *load = json_object_get(w, "load");
        bool is_draining = json_is_true(json_object_get(w, "is_draining"));
        printf("%-16s %-8s %-9s %-22s %7lld %7lld %11lld %11lld %11lld %8lld\n", string_of(w, "name"),
               string_of(w, "role"), is_draining ? "draining" : string_of(w, "state"), string_of(w, "rpc_address"),
               number_of(load, "n_running"), number_of(load, "n_waiting"), number_of(load, "free_full_pages"),
               number_of(load, "free_sliding_pages"), number_of(load, "quarantined_pages"),
               number_of(w, "seen_ms_ago"));
    }
}

static int run_status(const char *http, const char *run_dir, bool wants_json)
{
    struct td_err err = {{0}};
    struct td_address router;
    struct td_buf body = {0};
    unsigned status = 0;
    enum td_status st = TD_OK;
    if (http == NULL) {
        st = td_cluster_read_router(run_dir, &router, &err);
        http = router.http;
    }
    if (st == TD_OK) st = td_http_get(http, "/statez", GET_TIMEOUT_MS, &status, &body, &err);
    if (st == TD_OK && status != 200)
        st = td_err_set(&err, TD_E_UNAVAILABLE, "http://%s/statez answers %u", http, status);
    json_t *root = st == TD_OK ? json_loadb((char *)body.data, body.n, 0, NULL) : NULL;
    if (st == TD_OK && root == NULL) st = td_err_set(&err, TD_E_PROTOCOL, "http://%s/statez is not JSON", http);
    if (st == TD_OK && wants_json)
        fwrite(body.data, 1, body.n, stdout);
    else if (st == TD_OK)
        print_fleet(root);
    json_decref(root);
    td_buf_free(&body);
    return st == TD_OK ? 0 : td_ctl_fail(&td_ctl_status, st, &err);
}

static int status_main(int argc, char **argv)
{
    const char *http = NULL, *run_dir = TD_DEFAULT_RUN_DIR;
    bool wants_json = false;
    struct td_option options[] = {
        {"http", TD_OPTION_STR, &http, "HOST:PORT",
         "the router's HTTP address; default: that of the cluster in --run-dir", 0, 0, NULL},
        {"run-dir", TD_OPTION_STR, &run_dir, "DIR", "of tandemctl up", 0, 0, NULL},
        {"json", TD_OPTION_FLAG, &wants_json, NULL, "the router's /statez as it is", 0, 0, NULL},
        {NULL, TD_OPTION_FLAG, NULL, NULL, NULL, 0, 0, NULL},
    };
    unsigned n_words;
    enum td_parse_result how = td_options_parse(&td_ctl_status, options, argc, argv, NULL, 0, &n_words);
    if (how != TD_PARSE_RUN) return how == TD_PARSE_EXIT_OK ? 0 : TD_CTL_USAGE;
    return run_status(http, run_dir, wants_json);
}

static void on_drain_reply(void *user, const ProtobufCMessage *msg) { (void)user, (void)msg; }

static int drain_main(int argc, char **argv)
{
    struct td_client_options o = {.run_dir = "", .timeout_s = 10};
    struct td_option options[] = {
        {"timeout", TD_OPTION_U32, &o.timeout_s, "S", "how long to wait for the worker's answer", 1, 3600, NULL},
        {NULL, TD_OPTION_FLAG, NULL, NULL, NULL, 0, 0, NULL},
    };
    unsigned n_words;
    enum td_parse_result how = td_options_parse(&td_ctl_drain, options, argc, argv, &o.router, 1, &n_words);
    if (how != TD_PARSE_RUN) return how == TD_PARSE_EXIT_OK ? 0 : TD_CTL_USAGE;
    if (n_words == 0) {
        fprintf(stderr,
                "tandemctl drain: ADDRESS is missing: the worker's HOST:PORT for gRPC (see tandemctl status)\n");
        return TD_CTL_USAGE;
    }
    struct td_err err = {{0}};
    struct td_client *c = NULL;
    Tandem__V1__DrainRequest m = TANDEM__V1__DRAIN_REQUEST__INIT;
    enum td_status st = td_client_open(&o, &c, &err);
    if (st == TD_OK)
        st = td_client_call(c, "/tandem.v1.Worker/Drain", &m.base, &tandem__v1__drain_reply__descriptor, on_drain_reply,
                            NULL, &err);
    td_client_close(c);
    if (st != TD_OK) return td_ctl_fail(&td_ctl_drain, st, &err);
    printf("%s takes no more requests\n", o.router);
    return 0;
}

const struct td_command td_ctl_status = {"status", "", "Shows the router's fleet.", status_main};
const struct td_command td_ctl_drain = {
    "drain", "ADDRESS", "Tells a worker to take no more requests and to finish those it has.", drain_main};
