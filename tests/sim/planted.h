/* Mistakes that the simulation must see, each a function of the tree replaced by a wrong one (the linker's --wrap), so
 * that the tree itself has no switch for them. */
#ifndef TESTS_SIM_PLANTED_H
#define TESTS_SIM_PLANTED_H

#include <stdbool.h>
#include <stdio.h>

/* clang-format off */
#define SIM_PLANTED(X) /* name, what is wrong */                                                                        \
    X(early_release,   "a decode worker takes back the pages of a reservation before its sender has stopped")          \
    X(no_generation,   "a prefill worker forgets which generations were stopped")                                      \
    X(no_quarantine,   "pages of a dead sender come back at once, though a put of it may be under way")                \
    X(no_flush,        "COMPLETE is sent before the puts are known to have landed")                                    \
    X(first_twice,     "a decode worker sends the first token too, which the prefill worker has sent")                 \
    X(lost_token,      "a decode worker forgets the token of a step now and then")                                     \
    X(double_end,      "a decode worker tells the end of a request twice")                                             \
    X(double_terminal, "a client gets the last event twice")                                                           \
    X(page_leak,       "a page is not given back now and then")                                                        \
    X(lost_migrating,  "a request that goes on elsewhere forgets its last token")                                       \
    X(forgotten_draws, "a request that goes on elsewhere draws as if its answer so far were prompt")                    \
    X(no_copy,         "a block that is known in part is not copied from the prefix cache")                             \
    X(early_pages,     "a decode worker takes back a request's pages while a step in flight still has it")              \
    X(late_index,      "a step planned ahead draws as if the token before were not being drawn")                      \
    X(wrong_draw,      "a decode worker draws with the index of the token before")
/* clang-format on */

bool sim_plant(const char *name); /* false: no such mistake */
void sim_planted_list(FILE *to, bool with_meaning);

#endif
