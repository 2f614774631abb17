/* How fast text becomes tokens, on one core.
 *   bench/tokenizer MODEL FILE...     MODEL: a checkpoint, its tokenizer.json, or a .tiktoken file
 * Prints the best of five runs per file: bytes, tokens, MB/s, nanoseconds a token (CPU time of this process). */
#include <stdio.h>
#include <time.h>

#include "common/text/tokenizer.h"

#define RUNS 5

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int measure(const struct td_tokenizer *t, const char *path)
{
    struct td_buf text = {0};
    struct td_token_list ids = {0};
    struct td_err err = {{0}};
    size_t n;
    double best = 1e9;
    enum td_status st = TD_OK;
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        perror(path);
        return 1;
    }
    while (td_buf_reserve(&text, 1u << 20) && (n = fread(text.data + text.n, 1, text.cap - text.n, f)) > 0) text.n += n;
    fclose(f);
    for (int i = 0; i < RUNS && st == TD_OK; i++) {
        td_token_list_clear(&ids);
        double start = cpu_seconds();
        st = td_tokenizer_encode(t, td_buf_cstr(&text), text.n, TD_TEXT_ORDINARY, &ids, &err);
        double took = cpu_seconds() - start;
        if (took < best) best = took;
    }
    if (st != TD_OK)
        fprintf(stderr, "%s: %s\n", path, err.text);
    else if (ids.n > 0)
        printf("%s: %zu bytes, %zu tokens, %.1f MB/s, %.0f ns/token\n", path, text.n, ids.n,
               (double)text.n / best / 1e6, best * 1e9 / (double)ids.n);
    td_buf_free(&text);
    td_token_list_free(&ids);
    return st == TD_OK ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct td_tokenizer *t = NULL;
    struct td_err err = {{0}};
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL FILE...\n", argv[0]);
        return 2;
    }
    double start = cpu_seconds();
    if (td_tokenizer_load(argv[1], &t, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    printf("%s: loaded in %.2f s\n", argv[1], cpu_seconds() - start);
    int rc = 0;
    for (int i = 2; i < argc; i++) rc |= measure(t, argv[i]);
    td_tokenizer_destroy(t);
    return rc;
}
