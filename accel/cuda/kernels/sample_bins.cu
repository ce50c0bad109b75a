// The first launch for rows that are sampled at a temperature, see sample_row.h. A block computes
// one part of the vocabulary of one row.

#include "sample_row.h"

#define OWN_BINS (BINS / THREADS)

// Of a block's part.
struct PART_TALLY {
    unsigned count[BINS], enough[BINS], low[BINS], high[BINS];
};

// Sums of a bin; its words are zeros from here on.
DEVICE SUMS take_bin(TALLY &tally, unsigned bin) {
    const unsigned *words = (const unsigned *)(tally.sums + bin);
    const U64 both = wide(load_shared_word(words), load_shared_word(words + 1));
    const SUMS sums = {both & (((U64)1 << COUNT_SHIFT) - 1), (unsigned)(both >> COUNT_SHIFT),
                       load_shared_word(tally.enough + bin)};
    tally.sums[bin] = 0, tally.enough[bin] = 0;
    return sums;
}

// Results that the threads of a block share.
struct FOUND {
    SUMS room[WARPS];
    SUMS above_cut, in_cut;
    unsigned cut, of_weight[2], of_count[2];
};

// The bin in which a prefix ends that contains the tokens with less than `bound` before them, in
// weight or in number of tokens.
DEVICE bool ends_inside(U64 before, U64 own, U64 bound) {
    return before < bound && bound <= before + own;
}

DEVICE void find_bounds(const SAMPLED &row, FOUND &found) {
    SUMS own[OWN_BINS], mine = {0, 0, 0}, all;
#pragma unroll
    for (unsigned i = 0; i < OWN_BINS; i++) {
        own[i] = take_bin(row.state->tally, threadIdx.x * OWN_BINS + i);
        mine = plus(mine, own[i]);
    }
    if (threadIdx.x == 0) {
        found.cut = NO_BIN;
        found.in_cut = {0, 0, 0};
        for (int i = 0; i < 2; i++) found.of_weight[i] = found.of_count[i] = NO_BIN;
    }
    const SUMS first = sums_before(mine, found.room, all);
    const int top_k = I32_AT(row.how, SAMPLING_TOP_K);
    const unsigned kept = top_k > 0 ? min((unsigned)top_k, all.count) : all.count;
    if (threadIdx.x == 0) found.above_cut = all;
    __syncthreads();
    SUMS before = first;
#pragma unroll
    for (unsigned i = 0; i < OWN_BINS; i++) {
        if (kept < all.count && ends_inside(before.count, own[i].count, kept)) {
            found.cut = threadIdx.x * OWN_BINS + i;
            found.above_cut = before, found.in_cut = own[i];
        }
        before = plus(before, own[i]);
    }
    __syncthreads();
    // The prefix that top-k keeps weighs at least as much as everything above its last bin, and at
    // most that bin more.
    const SUMS ends[2] = {found.above_cut, plus(found.above_cut, found.in_cut)};
    const bool by_weight = F32_AT(row.how, SAMPLING_TOP_P) < 1.0f, by_least = row.least > 0;
    before = first;
#pragma unroll
    for (unsigned i = 0; i < OWN_BINS; i++) {
#pragma unroll
        for (int end = 0; end < 2; end++) {
            const unsigned bin = threadIdx.x * OWN_BINS + i;
            if (by_weight && ends_inside(before.weight, own[i].weight, limit_of(row, ends[end].weight)))
                found.of_weight[end] = bin;
            if (by_least && ends_inside(before.count, own[i].count, max(ends[end].enough, 1u)))
                found.of_count[end] = bin;
        }
        before = plus(before, own[i]);
    }
    __syncthreads();
    BOUNDS &bounds = row.state->bounds;
    const unsigned first_bin = min(found.cut, min(found.of_weight[0], found.of_count[0]));
    before = first;
#pragma unroll
    for (unsigned i = 0; i < OWN_BINS; i++) {
        if (threadIdx.x * OWN_BINS + i == first_bin) bounds.above_first = before;
        before = plus(before, own[i]);
    }
    if (threadIdx.x != 0) return;
    bounds.above_cut = found.above_cut, bounds.all = all;
    bounds.first = first_bin, bounds.cut = found.cut, bounds.kept = kept;
    bounds.last = min(found.cut, min(found.of_weight[1], found.of_count[1]));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_bins(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, TEMPERED};
    const OP op = opened(launch);
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (blockIdx.y >= op.rows) return;
    PART_TALLY &tally = *(PART_TALLY *)shared;
    const SAMPLED row = open_row(launch, op, blockIdx.y, workspace, (unsigned *)shared);
    if (!row.is_drawn() || row.is_whole() || (row.few && !TEMPERED)) return;
    for (unsigned bin = threadIdx.x; bin < BINS; bin += THREADS)
        tally.count[bin] = tally.enough[bin] = tally.low[bin] = tally.high[bin] = 0;
    __syncthreads();
    const unsigned begin = blockIdx.x * row.part_size(), end = row.part_end(blockIdx.x);
    for (unsigned base = begin; base < end; base += LOADED * THREADS) {
        float value[LOADED];
        load_values(row, base, end, value);
#pragma unroll 1
        for (int i = 0; i < LOADED && base + i * THREADS < end; i++) {
            const unsigned id = base + i * THREADS + threadIdx.x;
            unsigned weight = 0;
            if (id < end) weight = row.few ? row.is_near(value[0]) : row.weight_at(value[0]);
            const unsigned bin = row.bin_of(value[0]);
            shift_values(value);
            if (weight == 0) continue;
            atomicAdd(tally.count + bin, 1u);
            if (row.few) continue;
            atomicAdd(tally.low + bin, weight & HALF_WEIGHT);
            atomicAdd(tally.high + bin, weight >> HALF_WEIGHT_BITS);
            if (row.least > 0 && row.is_enough(weight)) atomicAdd(tally.enough + bin, 1u);
        }
    }
    __syncthreads();
    TALLY &of_row = row.state->tally;
    for (unsigned bin = threadIdx.x; bin < BINS; bin += THREADS) {
        if (tally.count[bin] == 0) continue;
        const U64 weight = ((U64)tally.high[bin] << HALF_WEIGHT_BITS) + tally.low[bin];
        atomicAdd(of_row.sums + bin, ((U64)tally.count[bin] << COUNT_SHIFT) + weight);
        if (tally.enough[bin]) atomicAdd(of_row.enough + bin, tally.enough[bin]);
    }
    __syncthreads();
    if (comes_last(row.state, (unsigned *)shared)) find_bounds(row, *(FOUND *)shared);
}
