/* One call at a time to a daemon, as a command-line tool needs it: start, hand out messages, wait for the end. Ctrl-C
 * cancels the call. */
#ifndef TD_CTL_CLIENT_H
#define TD_CTL_CLIENT_H

#include <protobuf-c/protobuf-c.h>

#include "common/base/status.h"
#include "deploy/ctl/options.h"

/* Where the router is, and how long to wait: the options that every client command has. */
struct td_client_options {
    const char *router; /* NULL: from run_dir */
    const char *run_dir;
    uint32_t timeout_s; /* 0: the server's */
};
#define TD_CLIENT_OPTIONS(o)                                                                                           \
    {"router",                                                                                                         \
     TD_OPTION_STR,                                                                                                    \
     &(o).router,                                                                                                      \
     "HOST:PORT",                                                                                                      \
     "the router's gRPC address; default: that of the cluster in --run-dir",                                           \
     0,                                                                                                                \
     0,                                                                                                                \
     NULL},                                                                                                            \
        {"run-dir", TD_OPTION_STR, &(o).run_dir, "DIR", "of tandemctl up", 0, 0, NULL},                                \
    {                                                                                                                  \
        "timeout", TD_OPTION_U32, &(o).timeout_s, "S", "deadline of a request; 0: the server's", 0, 86400, NULL        \
    }

struct td_client;
enum td_status td_client_open(const struct td_client_options *o, struct td_client **out, struct td_err *err);
void td_client_close(struct td_client *c); /* NULL is fine */

/* Returns when the call is over. on_message borrows its message. err gets the server's words. CANCELED after Ctrl-C. */
enum td_status td_client_call(struct td_client *c, const char *path, const ProtobufCMessage *request,
                              const ProtobufCMessageDescriptor *reply,
                              void (*on_message)(void *user, const ProtobufCMessage *msg), void *user,
                              struct td_err *err);
bool td_client_was_interrupted(const struct td_client *c); /* by SIGINT or SIGTERM since it was opened or last asked */
/* Between calls Ctrl-C ends the process as usual, during calls it cancels. */
void td_client_allow_interrupts(struct td_client *c, bool is_waiting_for_input);

#endif
