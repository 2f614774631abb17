/* Draws with top-k, top-p, min-p, penalties, bias, bans, masks or the likeliest ids' logits. A cluster of thread blocks
 * takes a row and reads it once: each block keeps its share of the logits in shared memory, and everything after that
 * happens there:
 *
 *   maximum -> log-sum of the raw logits -> mask and edits -> cut of top-k -> cut of top-p -> draw
 *
 * A cut is the last id kept in the order (higher logit, then lower id). A histogram between the maximum and the lowest
 * logit that can matter says in which bin it lies. If the ids down to that bin are few, block 0 gathers and sorts them,
 * and the rest is work on that list; else the bin is searched further (find_cut) and the draw walks all ids in order.
 * Weights are counted as whole multiples of 2^-32, so sums do not depend on their order: a draw depends on its row
 * alone. */
#include <cooperative_groups.h>

#include "kernels/cuda/sample_list.cuh"

namespace cg = cooperative_groups;

#define MAX_BLOCKS 8u
/* Ids a block: so many that two blocks share a multiprocessor, and one's loads hide the other's waits; the most. */
#define CHUNK_OF_TWO 25088u
#define CHUNK_MOST   52000u
#define AT_ONCE      264u

struct filtered_args {
    td_sample_args a;
    uint32_t chunk, run; /* ids of a block; of a thread, odd: neighbours then use different banks */
};

struct told {
    uint64_t v[3];
};
struct filtered_smem : list_smem {
    told slots[2][MAX_BLOCKS];
    uint64_t before, picked; /* what a histogram has above its bin; an entry of the list */
    uint32_t bin, n_through;
    uint32_t count[BINS], lo[BINS], hi[BINS];
    alignas(16) float x[];
};

struct row_ctx : scaled {
    cg::cluster_group cluster;
    filtered_smem &sm;
    uint32_t rank, n_blocks, turn;
    uint32_t n_here, first_id; /* of this block */
    uint32_t begin, end;       /* this thread's run, within the block */
};

/* Three reductions over the cluster, in a fixed order; every thread gets them. */
template <class A, class B, class C> static __device__ told reduce_all(row_ctx &c, uint64_t a, uint64_t b, uint64_t d)
{
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        a = A::of(a, __shfl_xor_sync(~0u, a, i));
        b = B::of(b, __shfl_xor_sync(~0u, b, i));
        d = C::of(d, __shfl_xor_sync(~0u, d, i));
    }
    __syncthreads(); /* whoever reads warps from before is done */
    if (threadIdx.x % 32 == 0) {
        c.sm.warps[threadIdx.x / 32][0] = a;
        c.sm.warps[threadIdx.x / 32][1] = b;
        c.sm.warps[threadIdx.x / 32][2] = d;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const uint32_t w = threadIdx.x % WARPS;
        a = c.sm.warps[w][0], b = c.sm.warps[w][1], d = c.sm.warps[w][2];
#pragma unroll
        for (int i = WARPS / 2; i > 0; i /= 2) {
            a = A::of(a, __shfl_xor_sync(~0u, a, i));
            b = B::of(b, __shfl_xor_sync(~0u, b, i));
            d = C::of(d, __shfl_xor_sync(~0u, d, i));
        }
        if (threadIdx.x < c.n_blocks)
            c.cluster.map_shared_rank(&c.sm, threadIdx.x)->slots[c.turn][c.rank] = {{a, b, d}};
    }
    c.cluster.sync();
    told t = c.sm.slots[c.turn][0];
    for (uint32_t i = 1; i < c.n_blocks; i++) {
        told o = c.sm.slots[c.turn][i];
        t.v[0] = A::of(t.v[0], o.v[0]);
        t.v[1] = B::of(t.v[1], o.v[1]);
        t.v[2] = C::of(t.v[2], o.v[2]);
    }
    c.turn ^= 1;
    return t;
}

/* The same over the cluster. Costs one exchange. */
template <class Sum> static __device__ uint64_t scan_all(row_ctx &c, uint64_t v, uint64_t &total_out)
{
    uint64_t of_block, before = scan_block<Sum>(c.sm, v, of_block);
    if (threadIdx.x < c.n_blocks)
        c.cluster.map_shared_rank(&c.sm, threadIdx.x)->slots[c.turn][c.rank] = {{of_block, 0, 0}};
    c.cluster.sync();
    uint64_t ahead = 0, total = 0;
    for (uint32_t i = 0; i < c.n_blocks; i++) {
        if (i == c.rank) ahead = total;
        total = Sum::of(total, c.sm.slots[c.turn][i].v[0]);
    }
    c.turn ^= 1;
    total_out = total;
    return Sum::of(ahead, before);
}

static __device__ __forceinline__ bool is_kept(cut k, uint32_t key, uint32_t id)
{
    return key > k.key || (key == k.key && id <= k.id);
}

/* The `want`-th of the ids with this key that `within` keeps, in rising order, or the last if there are fewer. */
static __device__ uint32_t find_nth(row_ctx &c, uint32_t key, cut within, uint64_t want)
{
    uint64_t n = 0, total;
    for (uint32_t i = c.begin; i < c.end; i++) n += key_of(c.sm.x[i]) == key && is_kept(within, key, c.first_id + i);
    uint64_t before = scan_all<sum_of>(c, n, total), id = 0;
    want = min(max(want, (uint64_t)1), total);
    if (before < want && want <= before + n)
        for (uint32_t i = c.begin; i < c.end; i++)
            if (key_of(c.sm.x[i]) == key && is_kept(within, key, c.first_id + i) && ++before == want) {
                id = c.first_id + i;
                break;
            }
    return (uint32_t)reduce_all<max_of, max_of, max_of>(c, id, 0, 0).v[0];
}

/* Every element of this block's share, in any order: four at a time. */
template <class F> static __device__ __forceinline__ void for_each(const row_ctx &c, const F &f)
{
    const uint32_t n4 = c.n_here / 4;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < n4; i += THREADS) {
        const float4 v = ((const float4 *)c.sm.x)[i];
        f(v.x, i * 4);
        f(v.y, i * 4 + 1);
        f(v.z, i * 4 + 2);
        f(v.w, i * 4 + 3);
    }
    const uint32_t i = n4 * 4 + threadIdx.x;
    if (i < c.n_here) f(c.sm.x[i], i);
}

/* The other blocks' lists behind block 0's own; its thread blocks only. Returns how many there are. */
static __device__ uint32_t gather(const row_ctx &c)
{
    uint32_t n = min(c.sm.n_list, LIST);
    for (uint32_t r = 1; r < c.n_blocks; r++) {
        const filtered_smem *there = c.cluster.map_shared_rank(&c.sm, r);
        const uint32_t n_there = min(there->n_list, LIST - n);
        for (uint32_t i = threadIdx.x; i < n_there; i += THREADS) c.sm.list[n + i] = there->list[i];
        n += n_there;
    }
    return n;
}

/* Of the cluster's counts, a bin a thread. */
static __device__ void sum_bins(const row_ctx &c, bool by_weight, uint64_t &n_out, uint64_t &w_out)
{
    n_out = w_out = 0;
    for (uint32_t r = 0; r < c.n_blocks; r++) {
        const filtered_smem *there = c.cluster.map_shared_rank(&c.sm, r);
        n_out += there->count[threadIdx.x];
        if (by_weight) w_out += there->lo[threadIdx.x] + ((uint64_t)there->hi[threadIdx.x] << 16);
    }
}

static __device__ void clear_bins(filtered_smem &sm)
{
    __syncthreads();
    sm.count[threadIdx.x] = sm.lo[threadIdx.x] = sm.hi[threadIdx.x] = 0;
    if (threadIdx.x == 0) sm.bin = sm.n_found = sm.n_list = 0;
    __syncthreads();
}

/* Of those that `within` keeps, whose keys lie between lo and hi: the shortest run, most likely first, that has `want`
 * ids, or weighs `want` units. */
template <bool BY_WEIGHT>
static __device__ cut find_cut(row_ctx &c, uint32_t lo, uint32_t hi, cut within, uint64_t want)
{
    filtered_smem &sm = c.sm;
    uint64_t above = 0; /* ids or units before the bin */
    const float top = value_of(hi), span = top - value_of(lo), step = (float)(BINS - 1) / span;
    bool is_linear = span > 0 && span <= FLT_MAX && step <= FLT_MAX; /* the first time: bins of even width */
    for (;;) {
        if (lo == hi) {
            uint64_t left = want > above ? want - above : 1, each = BY_WEIGHT ? units_of(c, value_of(lo)) : 1u;
            return {lo, find_nth(c, lo, within, each == 0 ? left : (left + each - 1) / each)};
        }
        uint32_t shift = 0;
        while ((hi - lo) >> shift >= BINS) shift++;
        auto bin_of = [&](float x, uint32_t key) {
            return is_linear ? min((uint32_t)((top - x) * step), BINS - 1) : (hi - key) >> shift;
        };
        auto is_in = [&](float x, uint32_t i, uint32_t key) {
            return key >= lo && key <= hi && is_kept(within, key, c.first_id + i) &&
                   (!BY_WEIGHT || units_of(c, x) != 0);
        };
        clear_bins(sm);
        for_each(c, [&](float x, uint32_t i) {
            const uint32_t key = key_of(x);
            if (!is_in(x, i, key)) return;
            const uint32_t b = bin_of(x, key);
            if (BY_WEIGHT) {
                const uint32_t u = units_of(c, x);
                atomicAdd(&sm.lo[b], u & 0xffffu);
                atomicAdd(&sm.hi[b], u >> 16);
            }
            atomicAdd(&sm.count[b], 1);
        });
        c.cluster.sync();
        uint64_t n, w, total;
        sum_bins(c, BY_WEIGHT, n, w);
        const uint64_t here = BY_WEIGHT ? w : n, at = above + scan_block<sum_of>(sm, here, total);
        if (at < want && want <= at + here) {
            sm.bin = threadIdx.x;
            sm.before = at;
            sm.n_in = (uint32_t)n;
            sm.n_found = 1;
        }
        c.cluster.sync(); /* nobody reads these counts any more, and all know the bin */
        const uint32_t b = sm.bin, n_in = sm.n_in, n_found = sm.n_found;
        const uint64_t before_bin = sm.before;
        __syncthreads();                            /* all have read them */
        if (n_found == 0) return {lo, 0xffffffffu}; /* less than wanted in all: everything stays */
        above = before_bin;
        if (is_linear) {
            uint64_t least = 0xffffffffu, most = 0;
            for_each(c, [&](float x, uint32_t i) {
                const uint32_t key = key_of(x);
                if (!is_in(x, i, key) || bin_of(x, key) != b) return;
                least = min(least, (uint64_t)key);
                most = max(most, (uint64_t)key);
            });
            told t = reduce_all<min_of, max_of, max_of>(c, least, most, 0);
            lo = (uint32_t)t.v[0];
            hi = (uint32_t)t.v[1];
            is_linear = false;
        } else {
            hi -= b << shift;
            lo = max(lo, hi - ((1u << shift) - 1));
        }
        if (n_in > LIST || lo == hi) continue;

        for_each(c, [&](float x, uint32_t i) {
            const uint32_t key = key_of(x);
            if (is_in(x, i, key)) push(sm, entry_of(key, c.first_id + i));
        });
        c.cluster.sync();
        if (c.rank == 0) {
            const uint32_t n_all = gather(c);
            sort_falling(sm, n_all);
            uint64_t pair[2], units[2];
            for (int j = 0; j < 2; j++) {
                const uint32_t i = threadIdx.x * 2 + j;
                pair[j] = i < n_all ? sm.list[i] : 0;
                units[j] = i >= n_all ? 0 : BY_WEIGHT ? units_of(c, entry_value(pair[j])) : 1;
            }
            uint64_t passed = above + scan_block<sum_of>(sm, units[0] + units[1], total);
            for (int j = 0; j < 2; passed += units[j], j++) {
                const bool is_last = threadIdx.x * 2 + j + 1 == n_all;
                if (units[j] == 0 || passed >= want || (want > passed + units[j] && !is_last)) continue;
                for (uint32_t r = 0; r < c.n_blocks; r++) c.cluster.map_shared_rank(&sm, r)->picked = pair[j];
            }
        }
        c.cluster.sync();
        return {(uint32_t)(sm.picked >> 32), entry_id(sm.picked)};
    }
}

/* Highest and lowest logit above -inf, as keys, and how many there are. */
struct extent {
    uint32_t hi, lo, n;
};
static __device__ extent extent_of(row_ctx &c, float most, float least, uint32_t n)
{
    const uint32_t hi = __reduce_max_sync(~0u, n != 0 ? key_of(most) : 0);
    const uint32_t lo = __reduce_min_sync(~0u, n != 0 ? key_of(least) : 0xffffffffu);
    n = __reduce_add_sync(~0u, n);
    if (threadIdx.x % 32 != 0) n = 0;
    told t = reduce_all<max_of, min_of, sum_of>(c, hi, lo, n);
    return {(uint32_t)t.v[0], (uint32_t)t.v[1], (uint32_t)t.v[2]};
}

/* The row's share of this block, tamed. */
static __device__ extent load(row_ctx &c, const float *row, bool is_aligned)
{
    const float *from = row + c.first_id;
    const uint32_t n = c.n_here, n4 = is_aligned ? n / 4 : 0;
    float most = -INFINITY, least = INFINITY;
    uint32_t n_valid = 0;
    auto see = [&](float x) {
        x = tame(x);
        most = fmaxf(most, x);
        if (x > -INFINITY) {
            least = fminf(least, x);
            n_valid++;
        }
        return x;
    };
#pragma unroll 7
    for (uint32_t i = threadIdx.x; i < n4; i += THREADS) {
        const float4 v = __ldcs((const float4 *)from + i);
        ((float4 *)c.sm.x)[i] = make_float4(see(v.x), see(v.y), see(v.z), see(v.w));
    }
    for (uint32_t i = n4 * 4 + threadIdx.x; i < n; i += THREADS) c.sm.x[i] = see(from[i]);
    return extent_of(c, most, least, n_valid); /* its barriers publish x */
}

static __device__ void adjust(row_ctx &c, const td_sample_args &a, const td_sample_row &r)
{
    if (r.mask != TD_SAMPLE_NO_MASK) {
        const uint32_t *mask = a.masks + (size_t)r.mask * ((a.vocab + 31) / 32);
        for (uint32_t i = c.begin; i < c.end; i++) {
            const uint32_t id = c.first_id + i;
            if (!(mask[id / 32] >> (id % 32) & 1)) c.sm.x[i] = -INFINITY;
        }
        __syncthreads();
    }
    for (uint32_t i = threadIdx.x; i < r.n_edits; i += THREADS) {
        const td_sample_edit e = a.edits[r.first_edit + i];
        const uint32_t at = e.id - c.first_id;
        if (at >= c.n_here) continue;
        float x = e.how & TD_EDIT_BANNED ? -INFINITY : tame((float)((double)c.sm.x[at] + e.bias));
        if (e.how & TD_EDIT_PENALISED) {
            const uint32_t count = e.how & TD_EDIT_COUNT;
            double v = x;
            v = v > 0 ? v / r.repetition : v * r.repetition;
            v -= (double)r.frequency * count;
            if (count > 0) v -= r.presence;
            x = tame((float)fmin(fmax(v, -(double)FLT_MAX), (double)FLT_MAX));
            if (!(v > -INFINITY)) x = -INFINITY;
        }
        c.sm.x[at] = x;
    }
    __syncthreads();
}

/* Writes the n likeliest, falling: block 0 gathers them. For rows whose list would be too long, or edited ones. */
static __device__ void write_tops(row_ctx &c, extent all, uint32_t n, td_sample_top *out)
{
    const cut k = find_cut<false>(c, all.lo, all.hi, {0, 0}, n);
    clear_bins(c.sm);
    for_each(c, [&](float x, uint32_t i) {
        const uint32_t key = key_of(x);
        if (key > NOTHING && is_kept(k, key, c.first_id + i)) push(c.sm, entry_of(key, c.first_id + i));
    });
    c.cluster.sync();
    if (c.rank == 0) {
        sort_falling(c.sm, gather(c));
        if (threadIdx.x < n) out[threadIdx.x] = {entry_value(c.sm.list[threadIdx.x]), entry_id(c.sm.list[threadIdx.x])};
    }
    c.cluster.sync();
}

/* The first id at which the running sum of kept weights passes u times their total. */
static __device__ uint32_t draw(row_ctx &c, cut top_k, cut top_p, float min_p, double u)
{
    float sum = 0;
    uint64_t last = 0; /* id + 1 */
    auto counts = [&](uint32_t i, float &w) {
        const float x = c.sm.x[i];
        const uint32_t key = key_of(x), id = c.first_id + i;
        if (key <= NOTHING || !is_kept(top_k, key, id) || !is_kept(top_p, key, id)) return false;
        w = weight_of(c, x);
        return w > 0 && w >= min_p;
    };
    for (uint32_t i = c.begin; i < c.end; i++) {
        float w;
        if (!counts(i, w)) continue;
        sum += w;
        last = c.first_id + i + 1;
    }
    uint64_t total_bits;
    const uint64_t before_bits = scan_all<dsum_of>(c, (uint64_t)__double_as_longlong((double)sum), total_bits);
    const double before = __longlong_as_double((long long)before_bits),
                 total = __longlong_as_double((long long)total_bits);
    const double target = u * total;
    uint64_t found = 0xffffffffu;
    if (sum > 0 && before + sum > target) {
        float so_far = 0;
        for (uint32_t i = c.begin; i < c.end; i++) {
            float w;
            if (!counts(i, w)) continue;
            so_far += w;
            if (before + so_far > target) {
                found = c.first_id + i;
                break;
            }
        }
    }
    told t = reduce_all<min_of, max_of, max_of>(c, found, last, 0);
    if (t.v[0] != 0xffffffffu) return (uint32_t)t.v[0];
    return (uint32_t)t.v[1] - 1; /* the product rounded up to the total; the highest logit is always kept */
}

/* One pass: a histogram of the logits from the maximum down, with their number and, BY_WEIGHT, their units; raw_out:
 * the sum of e^(x - max), of this thread. */
template <bool BY_WEIGHT> static __device__ void count_bins(row_ctx &c, float step, float &raw_out, uint64_t &units_out)
{
    const bool is_one = c.scale == 1.44269504f; /* temperature 1: one power serves twice */
    float raw = 0;
    uint64_t units = 0;
    for_each(c, [&](float x, uint32_t) {
        if (!(x > -INFINITY)) return;
        const float d = c.max - x, e = exp2_fast(d * -1.44269504f);
        raw += e;
        const uint32_t b = min((uint32_t)(d * step), BINS - 1);
        if (BY_WEIGHT) {
            const uint32_t u = is_one ? __float2uint_rz(e * 4294967296.0f) : units_of(c, x);
            if (u == 0) return;
            units += u;
            atomicAdd(&c.sm.lo[b], u & 0xffffu);
            atomicAdd(&c.sm.hi[b], u >> 16);
        }
        atomicAdd(&c.sm.count[b], 1);
    });
    raw_out = raw;
    units_out = units;
}

/* Draws from final logits. raw_sum: in, or, if is_raw, out: the sum of e^(x - max). Only block 0's answer counts. */
static __device__ uint32_t choose(row_ctx &c, const wish &r, extent all, bool is_raw, double &raw_sum,
                                  td_sample_top *top)
{
    filtered_smem &sm = c.sm;
    const bool by_weight = r.top_p < 1;
    float range = c.max - value_of(all.lo);
    if (by_weight) range = fminf(range, 32 / c.scale);
    const float step = (float)(BINS - 1) / range;
    const bool is_even = range > 0 && range <= FLT_MAX && step <= FLT_MAX;
    float raw = 0;
    uint64_t units = 0;
    clear_bins(sm);
    if (by_weight)
        count_bins<true>(c, is_even ? step : 0, raw, units);
    else
        count_bins<false>(c, is_even ? step : 0, raw, units);
    told t = reduce_all<dsum_of, sum_of, max_of>(c, (uint64_t)__double_as_longlong((double)raw), units, 0);
    if (is_raw) raw_sum = __longlong_as_double((long long)t.v[0]);
    const uint64_t total = t.v[1], want = max((uint64_t)1, (uint64_t)ceil((double)r.top_p * (double)total));

    /* The bin that has the last id somebody asked for. */
    uint64_t n, w, sum;
    const bool is_cut = r.top_k != 0 || by_weight;
    const uint32_t n_wanted = (is_cut ? 1 : 0) + (r.n_top != 0 ? 1 : 0);
    sum_bins(c, by_weight, n, w);
    const uint64_t n_before = scan_block<sum_of>(sm, n, sum);
    uint64_t w_before = 0;
    if (by_weight && r.top_k == 0) w_before = scan_block<sum_of>(sm, w, sum);
    const bool has_top = r.n_top != 0 && n_before < r.n_top && r.n_top <= n_before + n;
    const bool has_cut = r.top_k != 0 ? n_before < r.top_k && r.top_k <= n_before + n
                                      : by_weight && w_before < want && want <= w_before + w;
    if (has_top || has_cut) {
        atomicAdd(&sm.n_found, (has_top ? 1 : 0) + (has_cut ? 1 : 0));
        atomicMax(&sm.bin, threadIdx.x);
    }
    __syncthreads();
    const uint32_t b = sm.bin;
    if (threadIdx.x == b) sm.n_through = (uint32_t)(n_before + n);
    __syncthreads();
    if (is_even && n_wanted != 0 && sm.n_found == n_wanted && sm.n_through <= LIST) {
        for_each(c, [&](float x, uint32_t i) {
            const float d = c.max - x;
            if (!(x > -INFINITY) || (uint32_t)(d * step) > b) return;
            if (by_weight && units_of(c, x) == 0) return;
            push(sm, entry_of(key_of(x), c.first_id + i));
        });
        c.cluster.sync();
        if (is_cut) { /* the others leave as soon as block 0 has their lists */
            const uint32_t n_all = c.rank == 0 ? gather(c) : 0;
            c.cluster.sync();
            return c.rank == 0 ? draw_from_list(sm, c, r, n_all, total, top) : 0;
        }
        if (c.rank == 0) {
            sort_falling(sm, gather(c));
            if (threadIdx.x < r.n_top)
                top[threadIdx.x] = {entry_value(sm.list[threadIdx.x]), entry_id(sm.list[threadIdx.x])};
        }
        c.cluster.sync();
        return draw(c, {0, 0}, {0, 0}, r.min_p, r.u);
    }
    c.cluster.sync(); /* nobody reads these counts any more */
    if (r.n_top != 0) write_tops(c, all, r.n_top, top);
    cut top_k = {0, 0}, top_p = {0, 0};
    if (r.top_k != 0) top_k = find_cut<false>(c, all.lo, all.hi, {0, 0}, r.top_k);
    if (by_weight) {
        uint64_t kept = total;
        if (r.top_k != 0) {
            uint64_t mine = 0;
            for_each(c, [&](float x, uint32_t i) {
                const uint32_t key = key_of(x);
                if (key > NOTHING && is_kept(top_k, key, c.first_id + i)) mine += units_of(c, x);
            });
            kept = reduce_all<sum_of, max_of, max_of>(c, mine, 0, 0).v[0];
        }
        top_p = find_cut<true>(c, max(all.lo, top_k.key), all.hi, top_k,
                               max((uint64_t)1, (uint64_t)ceil((double)r.top_p * (double)kept)));
    }
    return draw(c, top_k, top_p, r.min_p, r.u);
}

static __device__ void draw_row(row_ctx &c, const td_sample_args &a, const filtered_args &f, uint32_t i)
{
    const uint32_t row = a.filtered[i];
    if (scratch_of(a, row).status == ROW_DONE) return;
    const td_sample_row r = a.rows[row];
    const float *logits = a.logits + (size_t)row * a.vocab;
    td_sample_top *top = a.top + (size_t)row * TD_SAMPLE_TOPS;
    const extent in = load(c, logits, a.vocab % 4 == 0 && f.chunk % 4 == 0);

    uint32_t token = 0xffffffffu;
    double raw_sum = 1;
    if (in.n >= r.n_top && in.n > 0) {
        const bool is_raw = r.mask == TD_SAMPLE_NO_MASK && r.n_edits == 0 && r.temperature != 0;
        extent all = in;
        c.max = value_of(in.hi);
        c.scale = 1.44269504f;
        if (!is_raw) {
            float part = 0;
            for_each(c, [&](float x, uint32_t) { part += weight_of(c, x); });
            told t = reduce_all<dsum_of, max_of, max_of>(c, (uint64_t)__double_as_longlong((double)part), 0, 0);
            raw_sum = __longlong_as_double((long long)t.v[0]);
            if (r.n_top > 0) write_tops(c, in, r.n_top, top);
            adjust(c, a, r);
            float most = -INFINITY, least = INFINITY;
            uint32_t n = 0;
            for_each(c, [&](float x, uint32_t) {
                if (!(x > -INFINITY)) return;
                most = fmaxf(most, x);
                least = fminf(least, x);
                n++;
            });
            all = extent_of(c, most, least, n);
        }
        if (all.n == 0) {
            token = 0xffffffffu;
        } else if (r.temperature == 0) {
            uint64_t id = 0xffffffffu;
            for_each(c, [&](float x, uint32_t i) {
                if (key_of(x) == all.hi) id = min(id, (uint64_t)(c.first_id + i));
            });
            token = (uint32_t)reduce_all<min_of, max_of, max_of>(c, id, 0, 0).v[0];
        } else {
            c.max = value_of(all.hi);
            c.scale = fminf(1.44269504f * inverse(r.temperature), FLT_MAX);
            const wish w = {r.top_k < all.n ? r.top_k : 0, is_raw ? r.n_top : 0, r.top_p, r.min_p, r.u};
            token = choose(c, w, all, is_raw, raw_sum, top);
        }
    }
    if (c.rank == 0 && threadIdx.x == 0)
        a.out[row] = {(double)value_of(in.hi) + log(raw_sum), token == 0xffffffffu ? 0 : tame(logits[token]), token};
    c.cluster.sync(); /* nobody goes on or leaves while others read its memory */
}

static __global__ void __launch_bounds__(THREADS, 2) sample_filtered(const filtered_args f)
{
    extern __shared__ __align__(16) uint8_t raw[];
    const td_sample_args &a = f.a;
    row_ctx c = {{}, cg::this_cluster(), *reinterpret_cast<filtered_smem *>(raw)};
    c.rank = c.cluster.block_rank();
    c.n_blocks = c.cluster.num_blocks();
    c.turn = 0;
    c.first_id = c.rank * f.chunk;
    c.n_here = c.first_id < a.n_ids ? min(f.chunk, a.n_ids - c.first_id) : 0;
    c.begin = min(threadIdx.x * f.run, c.n_here);
    c.end = min(c.begin + f.run, c.n_here);
    let_next();
    c.cluster.sync(); /* all blocks have begun: their memory may be written */
    before();
    const uint32_t n_clusters = gridDim.x / c.n_blocks;
    for (uint32_t i = blockIdx.x / c.n_blocks; i < a.n_filtered; i += n_clusters) draw_row(c, a, f, i);
}

enum td_status td_cuda_sample_filtered(cudaStream_t s, const struct td_sample_args *a)
{
    filtered_args f = {*a, 0, 0};
    uint32_t n_blocks = 1;
    while (n_blocks < MAX_BLOCKS && td_ceil_div(a->n_ids, n_blocks) > CHUNK_OF_TWO) n_blocks *= 2;
    f.chunk = td_ceil_div(td_ceil_div(a->n_ids, n_blocks), 4) * 4;
    if (f.chunk > CHUNK_MOST) return TD_E_UNSUPPORTED;
    f.run = td_ceil_div(f.chunk, THREADS) | 1;
    const size_t bytes = sizeof(filtered_smem) + (size_t)f.chunk * sizeof(float);
    cudaError_t e = cudaFuncSetAttribute(sample_filtered, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e != cudaSuccess) return td_cuda_status(e, "sample");
    cudaLaunchAttribute how[2] = {};
    how[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    how[0].val.programmaticStreamSerializationAllowed = 1;
    how[1].id = cudaLaunchAttributeClusterDimension;
    how[1].val.clusterDim = {n_blocks, 1, 1};
    cudaLaunchConfig_t cfg = {};
    /* About as many as fit: most rows are done already, and blocks with so much memory take long to come up. */
    cfg.gridDim = dim3(td_min_u32(a->n_filtered, AT_ONCE / n_blocks) * n_blocks);
    cfg.blockDim = dim3(THREADS);
    cfg.dynamicSmemBytes = bytes;
    cfg.stream = s;
    cfg.attrs = how;
    cfg.numAttrs = 2;
    return td_cuda_status(cudaLaunchKernelEx(&cfg, sample_filtered, f), "sample");
}
