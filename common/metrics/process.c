/* What the kernel knows of this process, under the names that dashboards for any program expect. */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/metrics/metrics_int.h"

static void put(struct td_buf *out, const char *name, const char *type, const char *help, double v)
{
    td_buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n%s ", name, help, name, type, name);
    td_metrics_put_number(out, v);
    td_buf_str(out, "\n");
}

static double resident_bytes(void)
{
    unsigned long total, resident;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f == NULL) return -1;
    int n = fscanf(f, "%lu %lu", &total, &resident);
    fclose(f);
    return n == 2 ? (double)resident * (double)sysconf(_SC_PAGESIZE) : -1;
}

static double open_files(void)
{
    DIR *d = opendir("/proc/self/fd");
    if (d == NULL) return -1;
    int n = 0;
    for (struct dirent *e = readdir(d); e != NULL; e = readdir(d)) n += e->d_name[0] != '.';
    closedir(d);
    return n - 1; /* d itself */
}

void td_metrics_put_process(struct td_buf *out)
{
    struct rusage u;
    if (getrusage(RUSAGE_SELF, &u) == 0)
        put(out, "process_cpu_seconds_total", "counter", "user and system time",
            (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6);
    double rss = resident_bytes(), fds = open_files();
    if (rss >= 0) put(out, "process_resident_memory_bytes", "gauge", "resident memory", rss);
    if (fds >= 0) put(out, "process_open_fds", "gauge", "open file descriptors", fds);
}
