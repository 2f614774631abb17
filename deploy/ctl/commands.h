/* What tandemctl can do: one file per command. */
#ifndef TD_CTL_COMMANDS_H
#define TD_CTL_COMMANDS_H

#include "deploy/ctl/options.h"

extern const struct td_command td_ctl_up, td_ctl_generate, td_ctl_chat, td_ctl_tokenize, td_ctl_detokenize,
    td_ctl_render, td_ctl_parse, td_ctl_status, td_ctl_drain;

/* Exit statuses beside 0. */
#define TD_CTL_FAILED      1
#define TD_CTL_USAGE       2
#define TD_CTL_INTERRUPTED 130

/* "tandemctl COMMAND: STATUS: text" on stderr; returns TD_CTL_FAILED. */
int td_ctl_fail(const struct td_command *c, enum td_status st, const struct td_err *err);

#endif
