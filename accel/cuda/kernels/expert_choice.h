// A token's experts from its logits (rule R7), and rule R4 over several runs of values at once.
// Compiled with EXPERT_SEGMENTS, segments of 256 that cover all experts.

#ifndef EXPERT_CHOICE_H
#define EXPERT_CHOICE_H

#include "activations.h"

#define LANES_OF(runs) (WARP_LANES / (runs))
#define EXPERTS_OF_LANE (8 * EXPERT_SEGMENTS)
#define SMALLEST_SUM 6.103515625e-05f  // 2^-14
#define SMALLEST_NORMAL 0x00800000u

// Rule R4 over each of N runs of 256 values, where N is a power of two and a lane holds numbers
// lane + 32 i of each run; a lane gets the result of run lane / (32 / N). Lanes that differ in one
// bit each continue with half of the runs.
template <int N> DEVICE float fold_segments(float (&v)[N][8], int lane) {
    float sum[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[n][i] = v[n][i] + v[n][i + 4];
        sum[n] = (v[n][0] + v[n][2]) + (v[n][1] + v[n][3]);
    }
    int runs = N;
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) {
        if (runs == 1) {
            sum[0] = sum[0] + __shfl_xor_sync(ALL_LANES, sum[0], lanes);
            continue;
        }
        runs /= 2;
        const bool upper = lane & lanes;
#pragma unroll
        for (int n = 0; n < runs; n++) {
            const float other = upper ? sum[n] : sum[n + runs];
            const float own = upper ? sum[n + runs] : sum[n];
            sum[n] = own + __shfl_xor_sync(ALL_LANES, other, lanes);
        }
    }
    return sum[0];
}

DEVICE void load_segment(float (&v)[8], const float *row, unsigned segment, unsigned columns,
                         int lane) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const unsigned k = segment * UNIT_COLUMNS + 32 * i + lane;
        v[i] = row && k < columns ? row[k] : 0.0f;
    }
}

// One more than the bits of a probability, so that 0 marks a chosen or missing expert.
DEVICE unsigned expert_key(float exponential, float total) {
    const unsigned bits = __float_as_uint(DIVIDE(exponential, total));
    return bits < SMALLEST_NORMAL ? 1u : bits + 1;
}

// The experts with the largest keys and their weights, by one warp.
DEVICE void take_largest(unsigned (&key)[EXPERTS_OF_LANE], unsigned used, bool renormalize, int *ids,
                         float *weights, int lane) {
    float sum = 0.0f, chosen = 0.0f;
    int id = 0;
#pragma unroll 1
    for (unsigned rank = 0; rank < used; rank++) {
        unsigned best = 0;
#pragma unroll
        for (int i = 0; i < EXPERTS_OF_LANE; i++) best = max(best, key[i]);
        best = largest_of_warp(best);
        unsigned first = 0;
#pragma unroll
        for (int i = EXPERTS_OF_LANE - 1; i >= 0; i--)
            if (key[i] == best) first = 0xFFFFu - (lane + 32 * i);
        const unsigned expert = 0xFFFFu - largest_of_warp(first);
#pragma unroll
        for (int i = 0; i < EXPERTS_OF_LANE; i++)
            if (expert == (unsigned)(lane + 32 * i)) key[i] = 0;
        const float p = __uint_as_float(best - 1);
        sum = sum + p;
        if (rank % WARP_LANES == (unsigned)lane) chosen = p, id = (int)expert;
    }
    sum = renormalize ? larger(sum, SMALLEST_SUM) : 1.0f;
    if ((unsigned)lane < used) ids[lane] = id, weights[lane] = DIVIDE(chosen, sum);
}

// The experts of one token, by one warp (rule R7): expert lane + 32 i is the lane's i-th.
DEVICE void choose_experts(const float *logits, unsigned experts, unsigned used, bool renormalize,
                           int *ids, float *weights, int lane) {
    float value[EXPERTS_OF_LANE];
    float largest = __uint_as_float(0xFF800000u);
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; i++) {
        const unsigned expert = lane + 32 * i;
        value[i] = expert < experts ? __ldcg(logits + expert) : __uint_as_float(0xFF800000u);
        largest = larger(largest, value[i]);
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
        largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, lanes));
    float total = 0.0f, span = 0.0f;
#pragma unroll
    for (int s = 0; s < EXPERTS_OF_LANE / 8; s++) {
        float v[1][8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const bool exists = (unsigned)(lane + 32 * (8 * s + i)) < experts;
            value[8 * s + i] = v[0][i] = exists ? exp_of(value[8 * s + i] - largest) : 0.0f;
        }
        if ((unsigned)s * UNIT_COLUMNS < experts) span = span + fold_segments(v, lane);
    }
    total = total + span;  // of a span at most
    if (is_nan(total)) {
        for (unsigned rank = lane; rank < used; rank += WARP_LANES)
            ids[rank] = (int)rank, weights[rank] = nan_value();
        return;
    }
    unsigned key[EXPERTS_OF_LANE];
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; i++)
        key[i] = (unsigned)(lane + 32 * i) >= experts ? 0u : expert_key(value[i], total);
    take_largest(key, used, renormalize, ids, weights, lane);
}

#endif
