#include "tests/kernels/planted.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const struct planted_trap planted_traps[] = {
#define X(name, check, mistake) {#name, #check, mistake},
#include "kernels/cuda/traps.def"
#undef X
};
const uint32_t planted_n = sizeof planted_traps / sizeof planted_traps[0];

/* It is loaded already: the device did that. */
static void *plugin(void)
{
    char path[1200], dir[1024] = "";
    const char *given = getenv("TANDEM_PLUGIN_DIR");
    ssize_t n = readlink("/proc/self/exe", dir, sizeof dir - 1);
    dir[n < 0 ? 0 : n] = '\0';
    char *slash = strrchr(dir, '/');
    if (slash != NULL) *slash = '\0';
    snprintf(path, sizeof path, "%s%s/libtandem-" PLANTED_BACKEND ".so", given != NULL ? given : dir,
             given != NULL ? "" : "/../lib");
    return dlopen(path, RTLD_NOW | RTLD_NOLOAD);
}

void planted_switch(uint32_t trap)
{
    static int (*set)(uint32_t trap);
    if (set == NULL) {
        void *lib = plugin(), *symbol = lib != NULL ? dlsym(lib, "td_cuda_set_trap") : NULL;
        memcpy(&set, &symbol, sizeof set); /* ISO C has no cast from object to function pointer */
    }
    int e = set != NULL ? set(trap) : -1;
    if (e == 0) return;
    fprintf(stderr, "planted mistakes: the plug-in's switch failed (%d)\n", e);
    exit(1);
}

uint32_t planted_run(bool (*check)(void *user, const char *name), void *user, const uint32_t *n_failed,
                     uint32_t *n_seen)
{
    uint32_t n_missed = 0;
    *n_seen = 0;
    for (uint32_t i = 0; i < planted_n; i++) {
        const struct planted_trap *t = &planted_traps[i];
        bool is_new = true;
        for (uint32_t j = 0; j < i; j++) is_new &= strcmp(planted_traps[j].check, t->check) != 0;
        uint32_t before = *n_failed;
        planted_switch(0);
        if (is_new && check(user, t->check) && *n_failed != before) {
            printf("  planted mistakes: the check of %s fails without any\n", t->check);
            n_missed++;
        }
        before = *n_failed;
        planted_switch(i + 1);
        if (!check(user, t->check)) continue; /* another program's */
        if (*n_failed != before) {
            ++*n_seen;
            continue;
        }
        printf("  a planted mistake passes: %s, %s\n", t->check, t->mistake);
        n_missed++;
    }
    planted_switch(0);
    return n_missed;
}
