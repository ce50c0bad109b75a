// Samples rows at a temperature (rule R9) with many blocks for each row, in two launches. Nothing
// is sorted.
//
// sample_bins.cu counts and weighs tokens in bins, by their distance from the largest value. The
// last block of a row to end finds the bins between which the prefix of the order ends that top-k,
// top-p and min-p select. sample_draw.cu weighs the tokens above those bins, separately for each of
// PARTS parts of the vocabulary, and lists the few tokens inside the bins. The last block to end
// finds where the prefix ends in the list, draws, and walks over the one part that contains the
// token.
//
// Of a row of which top-k keeps few tokens, nothing is weighed that it does not keep. A value that so
// many parts of sample_part.cu reach is not above the last kept one, so the first launch does nothing
// and the second lists what is not below it. Without parts, the first launch counts in bins.
//
// The workspace has a ROW_STATE for each row, zeros between steps. Compiled with THREADS of a
// block, PARTS, and SAMPLE as the op. If LOGITS_AT is not -1, the values are the logits of that
// operand divided by the temperature, and best has one record, of the largest logit; the packet
// before SAMPLE's is the one that names them.

#ifndef SAMPLE_ROW_H
#define SAMPLE_ROW_H

#include "packets.h"
#include "sample.k"
#include "warp.h"

#define TEMPERED (LOGITS_AT >= 0)
#define WARPS (THREADS / WARP_LANES)
#define BINS 2048u
#define BIN_SCALE (BINS / 18.0f)  // a token so far below the largest has no weight
#define NO_BIN BINS
#define HALF_WEIGHT_BITS 12u      // weights are added up as two halves, so that no sum overflows
#define HALF_WEIGHT ((1u << HALF_WEIGHT_BITS) - 1u)

struct SUMS {
    U64 weight;
    unsigned count, enough;  // tokens; those that min-p keeps
};
DEVICE SUMS plus(const SUMS &a, const SUMS &b) {
    return {a.weight + b.weight, a.count + b.count, a.enough + b.enough};
}

// The end of a row's prefix: in bins `first` to `last`, NO_BIN if everything is kept. top-k keeps
// `kept` tokens and ends in bin `cut` if that is one; sums of the weights above `first`, above
// `cut`, and of all.
struct BOUNDS {
    SUMS above_first, above_cut, all;
    unsigned first, last, cut, kept;
};

// For a row: the weight of a bin's tokens with their count above it, so that a block adds both at
// once. 2^19 tokens of at most 2^24 are below the first bit of the count, and their number fits
// above it.
#define COUNT_SHIFT 44
struct TALLY {
    U64 sums[BINS];
    unsigned enough[BINS];
};

struct ROW_STATE {
    TALLY tally;
    BOUNDS bounds;
    U64 above[PARTS];  // weight of what is above the bins, by part
    unsigned listed, arrived;
};

// A quotient as sample_part.k has it.
DEVICE float tempered(float logit, float temperature) {
    const bool tiny = (__float_as_uint(logit) & MAGNITUDE) < (64u << 23);
    return tiny ? integer_divide(logit, temperature) : __fdiv_rn(logit, temperature);
}

// A row of the step.
struct SAMPLED {
    const float *stored;
    float temperature;
    ADDRESS how;
    unsigned *ids, *weights;
    int *token;
    ROW_STATE *state;
    unsigned vocab;
    unsigned few;  // tokens that top-k keeps, 0 if those are many or all
    BEST best;
    U64 least;  // of a weight that min-p keeps, times 2^THRESHOLD_BITS

    __device__ __forceinline__ float value(unsigned id) const {
        return TEMPERED ? tempered(stored[id], temperature) : stored[id];
    }
    __device__ __forceinline__ bool is_drawn() const { return temperature > 0.0f && is_sound(); }
    __device__ __forceinline__ bool is_sound() const {
        return best.finite != 0 && is_finite(best.value);
    }
    __device__ __forceinline__ unsigned weight_at(float value) const {
        return is_near(value) ? weight_of(value, best.value) : 0u;
    }
    __device__ __forceinline__ bool is_near(float value) const {
        return value - best.value >= WEIGHTLESS;
    }
    __device__ __forceinline__ unsigned bin_of(float value) const {
        return min((unsigned)((best.value - value) * BIN_SCALE), BINS - 1u);
    }
    __device__ __forceinline__ bool is_enough(unsigned weight) const {
        return (U64)weight << THRESHOLD_BITS >= least;
    }
    // Whether all tokens are kept, so that their bins do not matter.
    __device__ __forceinline__ bool is_whole() const {
        return I32_AT(how, SAMPLING_TOP_K) <= 0 && F32_AT(how, SAMPLING_TOP_P) >= 1.0f && least == 0;
    }
    __device__ __forceinline__ unsigned part_size() const { return (vocab + PARTS - 1) / PARTS; }
    __device__ __forceinline__ unsigned part_end(unsigned part) const {
        return min((part + 1) * part_size(), vocab);
    }
};

// The values of a thread's tokens from `base` on, one after the other: requested at once, and
// processed by one loop.
#define LOADED 5
DEVICE void load_values(const SAMPLED &row, unsigned base, unsigned end, float (&value)[LOADED]) {
#pragma unroll
    for (int i = 0; i < LOADED; i++) {
        const unsigned id = base + i * THREADS + threadIdx.x;
        value[i] = id < end ? row.stored[id] : 0.0f;
    }
    if (!TEMPERED) return;
#pragma unroll
    for (int i = 0; i < LOADED; i++) value[i] = tempered(value[i], row.temperature);
}
DEVICE void shift_values(float (&value)[LOADED]) {
#pragma unroll
    for (int i = 0; i + 1 < LOADED; i++) value[i] = value[i + 1];
}

// The results of sample_part.k, for every thread. `room` has BEST_WORDS words for each warp.
DEVICE BEST best_of_records(ADDRESS records, unsigned count, unsigned *room) {
    BEST best = nothing_seen();
    for (unsigned i = threadIdx.x; i < count; i += THREADS) best = best_of(best, load_best(records, i));
    const unsigned lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
#pragma unroll
    for (int lanes = WARP_LANES / 2; lanes; lanes /= 2) {
        BEST other;
        other.value = __shfl_xor_sync(ALL_LANES, best.value, lanes);
        other.id = __shfl_xor_sync(ALL_LANES, best.id, lanes);
        other.finite = __shfl_xor_sync(ALL_LANES, best.finite, lanes);
        best = best_of(best, other);
    }
    if (lane == 0) store_best((ADDRESS)room, warp, best);
    __syncthreads();
    best = nothing_seen();
#pragma unroll 1
    for (unsigned i = 0; i < WARPS; i++) best = best_of(best, load_best((ADDRESS)room, i));
    __syncthreads();
    return best;
}

DEVICE SAMPLED open_row(const LAUNCH &launch, const OP &op, unsigned row, U64 workspace,
                        unsigned *room) {
    SAMPLED sampled;
    sampled.how = ROW(op.sampling, row, SAMPLING_WORDS);
    sampled.temperature = F32_AT(sampled.how, SAMPLING_TEMPERATURE);
    sampled.ids = (unsigned *)ROW(op.ids, row, op.vocab);
    sampled.weights = (unsigned *)ROW(op.weights, row, op.vocab);
    sampled.token = (int *)op.token + row;
    sampled.state = (ROW_STATE *)workspace + row;
    sampled.vocab = op.vocab;
#if TEMPERED
    const LAUNCH first = {launch.scratch, launch.inputs, launch.packets, 0u};
    sampled.stored = (const float *)operand_at(first, LOGITS_AT);
    sampled.best = load_best(op.best, 0u);
    sampled.best.value = tempered(sampled.best.value, sampled.temperature);
#else
    sampled.stored = (const float *)ROW(op.values, row, op.vocab);
    sampled.best = best_of_records(ROW(op.best, row * op.parts, BEST_WORDS), op.parts, room);
#endif
    const unsigned top_k = max(I32_AT(sampled.how, SAMPLING_TOP_K), 0);
    const bool bounded = TEMPERED || (top_k <= op.parts && op.parts <= THREADS);
    sampled.few = bounded && top_k <= THREADS ? top_k : 0;
    sampled.least = threshold_of(F32_AT(sampled.how, SAMPLING_MIN_P)) << 24;
    return sampled;
}

// Sums over the threads before this one, and in `all` over all threads. `room` has one for each
// warp.
DEVICE SUMS sums_before(const SUMS &mine, SUMS *room, SUMS &all) {
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES;
    SUMS sums = mine;
#pragma unroll
    for (int lanes = 1; lanes < WARP_LANES; lanes *= 2) {
        const int from = max(lane - lanes, 0);
        const SUMS other = {__shfl_sync(ALL_LANES, sums.weight, from),
                            __shfl_sync(ALL_LANES, sums.count, from),
                            __shfl_sync(ALL_LANES, sums.enough, from)};
        if (lane >= lanes) sums = plus(sums, other);
    }
    if (lane == WARP_LANES - 1) room[warp] = sums;
    __syncthreads();
    SUMS before = {0, 0, 0};
    all = before;
#pragma unroll 4
    for (unsigned i = 0; i < WARPS; i++) {
        if (i == warp) before = all;
        all = plus(all, room[i]);
    }
    __syncthreads();
    before = plus(before, sums);
    return {before.weight - mine.weight, before.count - mine.count, before.enough - mine.enough};
}

// Whether this block is the last of the row's; the results of the others are then visible.
DEVICE bool comes_last(ROW_STATE *state, unsigned *room) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool last = atomicAdd(&state->arrived, 1u) + 1 == PARTS;
        if (last) state->arrived = 0;
        *room = last;
    }
    __syncthreads();
    const bool last = *room;
    __threadfence();
    __syncthreads();
    return last;
}

DEVICE U64 limit_of(const SAMPLED &row, U64 total) {
    const U64 part = threshold_of(F32_AT(row.how, SAMPLING_TOP_P)) * total;
    const U64 limit = (part + 65535u) >> THRESHOLD_BITS;
    return limit ? limit : 1;  // the first token is always kept
}

#endif
