// Products of rows of a delta net's state with keys and queries (rule R8). A warp computes
// ROWS_AT_ONCE rows at a time: ROW_LANES lanes have one, of which lane l holds keys l,
// l + ROW_LANES, and so on. STATE_SIZE is the number of keys.

#ifndef DELTA_H
#define DELTA_H

#include "warp.h"

#ifndef ROW_LANES
#define ROW_LANES 8
#endif
#define LANE_KEYS (STATE_SIZE / ROW_LANES)
#define ROWS_AT_ONCE (WARP_LANES / ROW_LANES)
#define R4_VALUES 256  // a segment of rule R4, which shorter rows are padded to with +0

// Rule R4 over a lane's values, into the first of them. Not a loop over halves, which a compiler
// leaves in memory.
template <int half, int N> DEVICE void fold_in_lane(float (&v)[N]) {
    if constexpr (half > 0) {
#pragma unroll
        for (int i = 0; i < half; i++) v[i] = v[i] + v[i + half];
        fold_in_lane<half / 2>(v);
    }
}

// Rule R4 over values of a warp, of which a lane holds numbers lane + 32 i; every lane gets the
// result.
template <int N> DEVICE float fold_of_warp(float (&v)[N]) {
    fold_in_lane<N / 2>(v);
    float sum = v[0];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum = sum + __shfl_xor_sync(ALL_LANES, sum, lanes);
    return sum + 0.0f;  // what a segment is padded with
}

// The same over the keys of rows, of each of which the lanes have folded their own; all lanes get
// the results. The exchanges of all rows are written together, since a compiler does not reorder
// exchanges.
template <int N> DEVICE void fold_of_rows(float (&sum)[N]) {
#pragma unroll
    for (int lanes = ROW_LANES / 2; lanes; lanes /= 2) {
        float other[N];
#pragma unroll
        for (int n = 0; n < N; n++) other[n] = __shfl_xor_sync(ALL_LANES, sum[n], lanes);
#pragma unroll
        for (int n = 0; n < N; n++) sum[n] = sum[n] + other[n];
    }
#pragma unroll
    for (int n = 0; n < N; n++)
        if (STATE_SIZE < R4_VALUES) sum[n] = sum[n] + 0.0f;
}

// A lane's part of the product of a row and keys or queries.
DEVICE float product_in_lane(const float (&m)[LANE_KEYS], const float (&keys)[LANE_KEYS]) {
    float p[LANE_KEYS];
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) p[i] = m[i] * keys[i];
    fold_in_lane<LANE_KEYS / 2>(p);
    return p[0];
}

DEVICE void load_keys(float (&m)[LANE_KEYS], const float *row, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) m[i] = row[lane % ROW_LANES + ROW_LANES * i];
}

DEVICE void store_keys(const float (&m)[LANE_KEYS], float *row, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) row[lane % ROW_LANES + ROW_LANES * i] = m[i];
}

// In chunks of four rows, lane (r, l) holds keys l + 8 (i ^ r) of row r, so that no two lanes read
// the same bank. Rule R4 adds pairs whose indices differ in one bit, which this order keeps
// together. Where the keys of i < 4 are; those of i + 4 n are 32 n behind them.
DEVICE unsigned key_index(int i, int lane) {
    return lane % ROW_LANES + ROW_LANES * (i ^ lane / ROW_LANES);
}

DEVICE void take_keys(float (&m)[LANE_KEYS], const float *row, int lane) {
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const float *keys = row + key_index(i, lane);
#pragma unroll
        for (int k = i; k < LANE_KEYS; k += ROWS_AT_ONCE) m[k] = keys[ROW_LANES * (k - i)];
    }
}

DEVICE void put_keys(const float (&m)[LANE_KEYS], float *row, int lane) {
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        float *keys = row + key_index(i, lane);
#pragma unroll
        for (int k = i; k < LANE_KEYS; k += ROWS_AT_ONCE) keys[ROW_LANES * (k - i)] = m[k];
    }
}

// A token's changes to rows: M = g M; r = v - M k; M = M + (b r) k^T, in two halves, of which the
// first leaves a lane's part of M k.
template <int N>
DEVICE void decay_rows(float (&m)[N][LANE_KEYS], const float (&k)[LANE_KEYS], float g, bool starts,
                       float *sum) {
    if (starts)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < LANE_KEYS; i++) m[n][i] = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i++) m[n][i] = m[n][i] * g;
        sum[n] = product_in_lane(m[n], k);
    }
}

// `v` belongs to the first of the rows, which are `apart` apart.
template <int N, int apart = ROWS_AT_ONCE>
DEVICE void change_rows(float (&m)[N][LANE_KEYS], const float (&k)[LANE_KEYS], const float *v,
                        float b, const float *sum) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float change = b * (v[n * apart] - sum[n]);
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i++) m[n][i] = m[n][i] + change * k[i];
    }
}

template <int N>
DEVICE void update_rows(float (&m)[N][LANE_KEYS], const float (&k)[LANE_KEYS], const float *v,
                        float g, float b, bool starts) {
    float sum[N];
    decay_rows(m, k, g, starts, sum);
    fold_of_rows(sum);
    change_rows(m, k, v, b, sum);
}

// The output of the rows: M q, written to `y`, which has the first of the rows.
template <int N>
DEVICE void read_rows(const float (&m)[N][LANE_KEYS], const float (&q)[LANE_KEYS], float *y,
                      int lane) {
    float sum[N];
#pragma unroll
    for (int n = 0; n < N; n++) sum[n] = product_in_lane(m[n], q);
    fold_of_rows(sum);
    if (lane % ROW_LANES == 0)
#pragma unroll
        for (int n = 0; n < N; n++) y[n * ROWS_AT_ONCE] = sum[n];
}

#endif
