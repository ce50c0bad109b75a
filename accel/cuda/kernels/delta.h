// Rows of a delta net's state and their products with keys and queries (rule R8), a warp for four rows at
// a time: lane (r, l) = (lane / 8, lane % 8) has of row r the keys l, l + 8, ... STATE_SIZE is how many.

#ifndef DELTA_H
#define DELTA_H

#include "warp.h"

#define ROW_LANES 8
#define LANE_KEYS (STATE_SIZE / ROW_LANES)
#define ROWS_AT_ONCE (WARP_LANES / ROW_LANES)

// Rule R4 over what a lane has, into the first of them. Not a loop over halves, which a compiler leaves in
// memory.
template <int half, int N> DEVICE void fold_in_lane(float (&v)[N]) {
    if constexpr (half > 0) {
#pragma unroll
        for (int i = 0; i < half; i++) v[i] = v[i] + v[i + half];
        fold_in_lane<half / 2>(v);
    }
}

// Rule R4 over values of a warp of which a lane has lane + 32 i; every lane gets it.
template <int N> DEVICE float fold_of_warp(float (&v)[N]) {
    fold_in_lane<N / 2>(v);
    float sum = v[0];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum = sum + __shfl_xor_sync(ALL_LANES, sum, lanes);
    return sum + 0.0f;  // what a segment is padded with
}

// The same over the keys of each of the rows, whose lanes all get it.
DEVICE float fold_of_row(float (&v)[LANE_KEYS]) {
    fold_in_lane<LANE_KEYS / 2>(v);
    float sum = v[0];
#pragma unroll
    for (int lanes = ROW_LANES / 2; lanes; lanes /= 2)
        sum = sum + __shfl_xor_sync(ALL_LANES, sum, lanes);
    return sum + 0.0f;
}

DEVICE void load_keys(float (&m)[LANE_KEYS], const float *row, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) m[i] = row[lane % ROW_LANES + ROW_LANES * i];
}

DEVICE void store_keys(const float (&m)[LANE_KEYS], float *row, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) row[lane % ROW_LANES + ROW_LANES * i] = m[i];
}

// What a token makes of a row: M = g M; r = v - M k; M = M + (b r) k^T.
DEVICE void update_row(float (&m)[LANE_KEYS], const float (&k)[LANE_KEYS], float v, float g,
                       float b, bool starts) {
    float p[LANE_KEYS];
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) {
        m[i] = (starts ? 0.0f : m[i]) * g;
        p[i] = m[i] * k[i];
    }
    const float change = b * (v - fold_of_row(p));
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) m[i] = m[i] + change * k[i];
}

// And what it reads of it: M q.
DEVICE float read_row(const float (&m)[LANE_KEYS], const float (&q)[LANE_KEYS]) {
    float p[LANE_KEYS];
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) p[i] = m[i] * q[i];
    return fold_of_row(p);
}

#endif
