#include "tests/bench/shape.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct {
    const char *name;
    uint32_t n_layers, n_experts;
} shapes[] = {{"20b", 24, 32}, {"120b", 36, 128}};

enum td_status td_bench_shape_config(const char *name, uint32_t n_layers, struct td_buf *out, struct td_err *err)
{
    uint32_t n_experts = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        if (strcmp(name, shapes[i].name) == 0) {
            n_experts = shapes[i].n_experts;
            if (n_layers == 0) n_layers = shapes[i].n_layers;
        }
    if (n_experts == 0) return td_err_set(err, TD_E_INVALID, "--config: \"%s\" is neither 20b nor 120b", name);
    td_buf_printf(
        out,
        "{\"architectures\": [\"GptOssForCausalLM\"], \"model_type\": \"gpt_oss\", \"hidden_act\": \"silu\",\n"
        " \"hidden_size\": 2880, \"intermediate_size\": 2880, \"num_attention_heads\": 64,\n"
        " \"num_key_value_heads\": 8, \"head_dim\": 64, \"vocab_size\": 201088, \"num_hidden_layers\": %u,\n"
        " \"num_local_experts\": %u, \"num_experts_per_tok\": 4, \"experts_per_token\": 4,\n"
        " \"sliding_window\": 128, \"initial_context_length\": 4096, \"max_position_embeddings\": 131072,\n"
        " \"rms_norm_eps\": 1e-05, \"swiglu_limit\": 7.0, \"attention_bias\": true,\n"
        " \"tie_word_embeddings\": false, \"eos_token_id\": 200002, \"pad_token_id\": 199999,\n"
        " \"rope_theta\": 150000, \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 32.0,\n"
        "   \"beta_fast\": 32.0, \"beta_slow\": 1.0, \"truncate\": false,\n"
        "   \"original_max_position_embeddings\": 4096},\n"
        " \"quantization_config\": {\"quant_method\": \"mxfp4\"},\n \"layer_types\": [",
        n_layers, n_experts);
    for (uint32_t i = 0; i < n_layers; i++)
        td_buf_printf(out, "%s\"%s_attention\"", i > 0 ? ", " : "", i % 2 == 0 ? "sliding" : "full");
    td_buf_str(out, "]}\n");
    return TD_OK;
}

static enum td_status write_file(const char *path, const void *bytes, size_t n, struct td_err *err)
{
    FILE *f = fopen(path, "wb");
    bool is_written = f != NULL && fwrite(bytes, 1, n, f) == n;
    if (f != NULL && fclose(f) != 0) is_written = false;
    return is_written ? TD_OK : td_err_set(err, TD_E_IO, "%s: %s", path, strerror(errno));
}

/* A file that is not there is left out, unless it must be there. */
static enum td_status copy_file(const char *from_dir, const char *dir, const char *name, bool must_be,
                                struct td_err *err)
{
    char from[4096], to[4096];
    snprintf(from, sizeof from, "%s/%s", from_dir, name);
    snprintf(to, sizeof to, "%s/%s", dir, name);
    FILE *f = fopen(from, "rb");
    if (f == NULL)
        return must_be ? td_err_set(err, TD_E_BAD_FILE, "--tokenizer: %s: %s", from, strerror(errno)) : TD_OK;
    struct td_buf b = {0};
    char part[65536];
    for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) td_buf_put(&b, part, n);
    bool is_read = ferror(f) == 0;
    fclose(f);
    enum td_status st =
        is_read ? write_file(to, b.data, b.n, err) : td_err_set(err, TD_E_IO, "%s: cannot be read", from);
    td_buf_free(&b);
    return st;
}

enum td_status td_bench_shape_write(const char *name, uint32_t n_layers, const char *dir, const char *tokenizer,
                                    struct td_err *err)
{
    struct td_buf config = {0};
    char path[4096];
    enum td_status st = td_bench_shape_config(name, n_layers, &config, err);
    if (st == TD_OK && mkdir(dir, 0777) != 0 && errno != EEXIST)
        st = td_err_set(err, TD_E_IO, "%s: %s", dir, strerror(errno));
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (st == TD_OK) st = write_file(path, config.data, config.n, err);
    if (st == TD_OK && tokenizer != NULL) st = copy_file(tokenizer, dir, "tokenizer.json", true, err);
    static const char *const others[] = {"generation_config.json", "tokenizer_config.json", "special_tokens_map.json"};
    for (size_t i = 0; i < sizeof others / sizeof others[0] && tokenizer != NULL && st == TD_OK; i++)
        st = copy_file(tokenizer, dir, others[i], false, err);
    td_buf_free(&config);
    return st;
}

void td_bench_shape_remove(const char *dir)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    rmdir(dir);
}
