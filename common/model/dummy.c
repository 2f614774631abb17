#include "common/model/dummy_int.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>
#include <xxhash.h>

/* SplitMix64 (Steele et al., 2014). */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* About normal, deviation 1: four 16-bit uniforms. */
static float normal(uint64_t *state)
{
    uint64_t r = next(state);
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)((r >> (16 * i)) & 0xffff);
    return (sum / 65535.0f - 2.0f) * 1.7320508f;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
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
}

void td_dummy_tensor(uint64_t seed, const char *name, enum td_tensor_type type, const uint64_t *shape, uint32_t n_dims,
                     uint8_t *out)
{
    uint64_t state = XXH3_64bits_withSeed(name, strlen(name), seed), n = 1;
    for (uint32_t i = 0; i < n_dims; i++) n *= shape[i];
    if (type == TD_T_U8 && ends_with(name, "_scales")) {
        /* A random code's root mean square is 2.93; products sum over 32 elements a scale. */
        float want = 1.5f / (2.93f * sqrtf((float)(shape[n_dims - 1] * 32)));
        memset(out, 127 + (int)lrintf(log2f(want)), n);
        return;
    }
    if (type == TD_T_U8) {
        for (uint64_t i = 0; i < n; i += 8) {
            uint64_t r = next(&state);
            memcpy(out + i, &r, n - i < 8 ? n - i : 8);
        }
        return;
    }
    bool is_input_major = n_dims == 3; /* unquantised experts */
    float mean, deviation;
    choose(name, is_input_major ? shape[1] : shape[n_dims - 1], &mean, &deviation);
    for (uint64_t i = 0; i < n; i++) {
        float v = mean + (deviation == 0 ? 0 : deviation * normal(&state));
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        uint16_t half = (uint16_t)(bits >> 16);
        memcpy(out + 2 * i, &half, sizeof half);
    }
}
