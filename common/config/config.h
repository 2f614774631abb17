/* Settings: one table (flags.def) makes the struct, the reader, the environment twins and --help.
 * Order: default, then TANDEM_<NAME> in the environment, then --name value or --name=value. Unknown flags, values out
 * of bounds and contradictions stop the daemon with a message that names the flag. A flag of another daemon is refused
 * on the command line, but its environment twin is ignored: the daemons of one pod may share their environment. */
#ifndef TD_CONFIG_CONFIG_H
#define TD_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/bytes.h"
#include "common/base/status.h"

#define TD_VERSION "0.1.0"

enum td_daemon { TD_ROUTER = 1, TD_PREFILL = 2, TD_DECODE = 4, TD_WORKERS = TD_PREFILL | TD_DECODE, TD_ALL = 7 };

typedef uint32_t td_flag_u32;
typedef uint64_t td_flag_u64;
typedef uint32_t td_flag_ms;
typedef bool td_flag_bool;
typedef char td_flag_str[256];
typedef uint64_t td_flag_bytes; /* 64M, 2G */

struct td_config {
    enum td_daemon daemon;
#define X(type, name, def, min, max, daemons, help) td_flag_##type name;
#include "common/config/flags.def"
#undef X
};

enum td_config_result { TD_CONFIG_RUN, TD_CONFIG_EXIT_OK /* --help, --version */, TD_CONFIG_EXIT_BAD };
/* Prints help or the error itself, and warns of TANDEM_ variables that nobody reads. */
enum td_config_result td_config_load(struct td_config *c, enum td_daemon d, int argc, char **argv);
/* The same without printing. err names the flag. env is like environ, NULL: none. Fills the defaults that depend on
 * others too: name, model_name. */
enum td_status td_config_parse(struct td_config *c, enum td_daemon d, int argc, char **argv, char **env,
                               struct td_err *err);

const char *td_daemon_role(enum td_daemon d); /* "router"; the binary is tandem-<role> */
void td_config_help(enum td_daemon d, struct td_buf *out);
/* The settings in effect as a JSON object, for /statez. */
void td_config_json(const struct td_config *c, struct td_buf *out);

#endif
