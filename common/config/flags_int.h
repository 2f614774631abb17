/* flags.def as an array that can be walked, and reading and printing of one value. */
#ifndef TD_CONFIG_FLAGS_INT_H
#define TD_CONFIG_FLAGS_INT_H

#include <stddef.h>

#include "common/config/config.h"

enum flag_type { FLAG_u32, FLAG_u64, FLAG_ms, FLAG_bool, FLAG_str, FLAG_bytes };

struct td_flag {
    const char *name; /* as in flags.def: with underscores */
    enum flag_type type;
    size_t offset; /* in struct td_config */
    const char *def_str;
    uint64_t def, min, max;
    enum td_daemon daemons;
    const char *help;
};
extern const struct td_flag td_flags[];
extern const unsigned td_n_flags;

/* Reads text into c. source is what the user wrote ("--kv-bytes" or "TANDEM_KV_BYTES"), for err. */
enum td_status td_flag_read(const struct td_flag *f, struct td_config *c, const char *source, const char *text,
                            struct td_err *err);
void td_flag_set_default(const struct td_flag *f, struct td_config *c);
void td_flag_print_number(enum flag_type type, uint64_t v, struct td_buf *out); /* "256M", "30000" */
uint64_t td_flag_number(const struct td_flag *f, const struct td_config *c);
char *td_flag_str_of(const struct td_flag *f, struct td_config *c);
void td_flag_dashes(const char *name, char out[64]); /* kv_bytes -> kv-bytes */

#endif
