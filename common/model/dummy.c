#include "common/model/dummy_int.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>
#include <xxhash.h>

/* SplitMix64 (Steele et al., 2014), its i-th number. */
static uint64_t number(uint64_t start, uint64_t i)
{
    uint64_t z = start + (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* About normal, deviation 1: four 16-bit uniforms. */
static float normal(uint64_t r)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)((r >> (16 * i)) & 0xffff);
    return (sum / 65535.0f - 2.0f) * 1.7320508f;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

/* What a layer adds to the residual stays small beside the embedding: attention averages what tokens have of their own
 * and keeps what they share, so that a few layers of full size would make all tokens alike, and send them to the same
 * experts. A power of two, for MXFP4's scales. */
#define RESIDUAL_SHARE 0.125f

static bool adds_to_residual(const char *name)
{
    return strstr(name, "o_proj.") != NULL || strstr(name, "experts.down_proj") != NULL;
}

/* Mean and deviation of a tensor's values; k is what its products sum over. */
static void choose(const char *name, uint64_t k, float *mean, float *deviation)
{
    *mean = 0;
    *deviation = 1.5f / sqrtf((float)k);
    if (strstr(name, "norm.weight") != NULL) {
        *mean = 1;
        *deviation = 0.1f;
    } else if (ends_with(name, "router.bias")) {
        *deviation = 0;
    } else if (ends_with(name, "bias")) {
        *deviation = 0.1f;
    } else if (ends_with(name, "sinks") || ends_with(name, "embed_tokens.weight")) {
        *deviation = 1;
    } else if (ends_with(name, "router.weight")) {
        *deviation = 4 / sqrtf((float)k);
    }
    if (adds_to_residual(name)) *deviation *= RESIDUAL_SHARE;
}

/* Codes of MXFP4, eight a number. */
static void make_codes(uint64_t start, uint64_t at, uint64_t n, uint8_t *out)
{
    for (uint64_t end = at + n, word = at / 8; at < end; word++) {
        uint64_t r = number(start, word), first = at % 8, k = 8 - first < end - at ? 8 - first : end - at;
        memcpy(out, (const uint8_t *)&r + first, k);
        out += k;
        at += k;
    }
}

void td_dummy_bytes(uint64_t seed, const struct td_tensor *t, uint64_t at, uint64_t n, uint8_t *out)
{
    const uint64_t start = XXH3_64bits_withSeed(t->name, strlen(t->name), seed), last = t->shape[t->n_dims - 1];
    if (t->type == TD_T_U8 && ends_with(t->name, "_scales")) {
        /* A random code's root mean square is 2.93; products sum over 32 elements a scale. */
        float want = 1.5f / (2.93f * sqrtf((float)(last * 32)));
        if (adds_to_residual(t->name)) want *= RESIDUAL_SHARE;
        memset(out, 127 + (int)lrintf(log2f(want)), n);
        return;
    }
    if (t->type == TD_T_U8) {
        make_codes(start, at, n, out);
        return;
    }
    bool is_input_major = t->n_dims == 3; /* unquantised experts */
    float mean, deviation;
    choose(t->name, is_input_major ? t->shape[1] : last, &mean, &deviation);
    for (uint64_t i = 0; i < n / 2; i++) {
        float v = mean + (deviation == 0 ? 0 : deviation * normal(number(start, at / 2 + i)));
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        uint16_t half = (uint16_t)(bits >> 16);
        memcpy(out + 2 * i, &half, sizeof half);
    }
}
