/* The simulated cluster as a program.
 *   sim --seeds N [--first S]   N seeds from S on, a process each, as many at once as there are processors
 *   sim --seed S [--trace]      one of them
 *   --calm                      without trouble
 *   --plant NAME                with a mistake planted (planted.h); --caught: succeed only if some seed sees it
 *   --plants                    their names
 * Exit status 0 if no rule was broken. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/log.h"
#include "tests/sim/check.h"
#include "tests/sim/planted.h"
#include "tests/sim/trouble.h"

#define BUSY_NS  (12 * TD_NS_PER_S) /* then everything that was broken is mended ... */
#define LIMIT_NS (60 * TD_NS_PER_S) /* ... and all must have come to rest by then */

struct options {
    uint64_t first, n_seeds;
    bool is_single, is_traced, is_calm, must_be_caught;
    const char *plant;
};

static void run_until(struct sim_cluster *c, uint64_t until_ns, bool may_rest, const struct sim_clients *clients)
{
    while (sim_world_step(c->world, until_ns)) {
        sim_check_event(c);
        sim_reap(c);
        if (may_rest && clients->n_over == clients->n && sim_is_at_rest(c)) return;
    }
}

static void run_seed(uint64_t seed, const struct options *o)
{
    static struct sim_world world; /* static: what the dead leave behind stays reachable */
    static struct sim_cluster cluster;
    static struct sim_clients clients;
    static struct sim_plot plot;
    td_log_open("sim", o->is_traced ? TD_LOG_DEBUG : TD_LOG_OFF);
    sim_world_init(&world, seed, o->is_traced);
    sim_cluster_init(&cluster, &world);
    sim_clients_init(&clients, &cluster);
    sim_check_init(&cluster, &clients);
    cluster.router_cfg.request_timeout = 20000;
    uint64_t begin = world.now_ns;
    sim_plot_make(&plot, &cluster, &clients, o->is_calm);
    /* Troubles last a while past the last order; a calm run is over when its clients are. */
    run_until(&cluster, begin + (plot.n_troubles > 0 ? BUSY_NS : LIMIT_NS), plot.n_troubles == 0, &clients);
    sim_plot_end(&plot);
    run_until(&cluster, begin + LIMIT_NS, true, &clients);
    sim_check_end(&cluster, &clients);
    if (o->is_single)
        printf("seed %llu: %u of %u clients got their answer, %u troubles, %llu events, %.3f virtual seconds\n",
               (unsigned long long)seed, clients.n_good, clients.n, plot.n_troubles, (unsigned long long)world.n_events,
               (double)(world.now_ns - begin) / 1e9);
}

/* --- many seeds -------------------------------------------------------------------------------------------- */

struct child {
    pid_t pid;
    uint64_t seed;
};

static int run_many(const struct options *o)
{
    long n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    struct child children[64] = {{0}};
    uint32_t n_slots = n_cpus < 1 ? 1 : n_cpus > 64 ? 64 : (uint32_t)n_cpus, n_running = 0;
    uint64_t next = o->first, n_failed = 0, first_failed = 0;
    while (next < o->first + o->n_seeds || n_running > 0) {
        if (next < o->first + o->n_seeds && n_running < n_slots && !(o->must_be_caught && n_failed > 0)) {
            fflush(NULL);
            pid_t pid = fork();
            if (pid < 0) {
                perror("fork");
                return 1;
            }
            if (pid == 0) {
                if (o->must_be_caught && freopen("/dev/null", "w", stderr) == NULL) _exit(2);
                run_seed(next, o);
                exit(0);
            }
            uint32_t i = 0;
            while (children[i].pid != 0) i++;
            children[i] = (struct child){pid, next++};
            n_running++;
            continue;
        }
        if (n_running == 0) break;
        int status;
        pid_t pid = wait(&status);
        if (pid < 0) break;
        n_running--;
        for (uint32_t i = 0; i < n_slots; i++) {
            if (children[i].pid != pid) continue;
            children[i].pid = 0;
            if (status == 0) continue;
            if (n_failed++ == 0 || children[i].seed < first_failed) first_failed = children[i].seed;
            if (o->must_be_caught) continue;
            if (WIFSIGNALED(status))
                fprintf(stderr, "seed %llu: signal %d\n", (unsigned long long)children[i].seed, WTERMSIG(status));
            fprintf(stderr, "again, with a trace: make sim SEED=%llu\n", (unsigned long long)children[i].seed);
        }
    }
    if (o->must_be_caught) {
        if (n_failed > 0)
            printf("%s: caught, seed %llu\n", o->plant, (unsigned long long)first_failed);
        else
            printf("%s: not caught within %llu seeds\n", o->plant, (unsigned long long)o->n_seeds);
        return n_failed > 0 ? 0 : 1;
    }
    printf("%llu seeds from %llu on, %llu failed\n", (unsigned long long)o->n_seeds, (unsigned long long)o->first,
           (unsigned long long)n_failed);
    return n_failed > 0;
}

static int usage(void)
{
    fprintf(stderr, "usage: sim --seeds N [--first S] | --seed S [--trace]   [--calm] [--plant NAME [--caught]]\n");
    sim_planted_list(stderr, true);
    return 2;
}

int main(int argc, char **argv)
{
    struct options o = {.first = 1};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        bool has_value = i + 1 < argc;
        if (strcmp(a, "--trace") == 0) {
            o.is_traced = true;
        } else if (strcmp(a, "--plants") == 0) {
            sim_planted_list(stdout, false);
            return 0;
        } else if (strcmp(a, "--calm") == 0) {
            o.is_calm = true;
        } else if (strcmp(a, "--caught") == 0) {
            o.must_be_caught = true;
        } else if (strcmp(a, "--seeds") == 0 && has_value) {
            o.n_seeds = strtoull(argv[++i], NULL, 10);
        } else if (strcmp(a, "--first") == 0 && has_value) {
            o.first = strtoull(argv[++i], NULL, 10);
        } else if (strcmp(a, "--seed") == 0 && has_value) {
            o.first = strtoull(argv[++i], NULL, 10);
            o.is_single = true;
        } else if (strcmp(a, "--plant") == 0 && has_value) {
            o.plant = argv[++i];
            if (!sim_plant(o.plant)) return usage();
        } else {
            return usage();
        }
    }
    if (o.is_single == (o.n_seeds > 0) || (o.must_be_caught && o.plant == NULL)) return usage();
    if (!o.is_single) return run_many(&o);
    run_seed(o.first, &o);
    return 0;
}
