// The row of one head of a token in shared memory, computed by a warp: norm, rotation, and the
// write of keys and values to their pages (rules R3, R4 and R6). DTYPE is the storage type of
// pages.

#ifndef HEADS_H
#define HEADS_H

#include "packets.h"
#include "warp.h"
#include "attention_rows.k"
#include "pages.k"

// Rule R3 over the squares of a row, for every lane.
DEVICE float squares_of_row(const float *row, unsigned width, int lane) {
    float total = 0.0f, span = 0.0f;
    for (unsigned first = 0; first < width; first += 256) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const unsigned k = first + lane + WARP_LANES * i;
            v[i] = k < width ? row[k] * row[k] : 0.0f;
        }
#pragma unroll
        for (int half = 4; half; half /= 2)
#pragma unroll
            for (int i = 0; i < half; i++) v[i] = v[i] + v[i + half];
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2)
            v[0] = v[0] + __shfl_xor_sync(ALL_LANES, v[0], lanes);
        span = span + v[0];
    }
    return total + span;
}

// Pair m is channels (m, m + pairs) if neox, else (2 m, 2 m + 1).
DEVICE void rotate_row(float *row, unsigned pairs, bool neox, const float *cosine, int lane) {
    for (unsigned m = lane; m < pairs; m += WARP_LANES) {
        const unsigned i = neox ? m : 2 * m, j = neox ? pairs + m : 2 * m + 1;
        const float a = row[i], b = row[j], c = cosine[m], s = cosine[pairs + m];
        row[i] = a * c - b * s;
        row[j] = a * s + b * c;
    }
    __syncwarp();
}

DEVICE unsigned largest_magnitude(const float *row, unsigned width, int lane) {
    unsigned most = 0;
    for (unsigned k = lane; k < width; k += WARP_LANES)
        most = max(most, __float_as_uint(row[k]) & MAGNITUDE);
    return largest_of_warp(most);
}

// See store_i12 of kv_write_batched.k: lanes take pairs of channels.
DEVICE void store_integers_of(const float *row, unsigned width, unsigned which,
                              unsigned char *record, unsigned i, int lane) {
    const unsigned half = width / 2, step = which ? PAGE_TOKENS : 1;
    const unsigned first = which ? I12_VALUES(width) : 0;
    unsigned char *high = record + first + (which ? i : i * width);
    unsigned char *low = record + first + I12_LOW(width) + (which ? i : i * half);
    const unsigned most = largest_magnitude(row, width, lane);
    const int exponent = row_exponent(most);
    const float factor = row_factor(most, KV_BITS);
    for (unsigned d = lane; d < half; d += WARP_LANES) {
        const bool broken = exponent == BROKEN_ROW;
        const int a = broken ? 0 : row_integer(row[d], factor, KV_MAX);
        const int b = broken ? 0 : row_integer(row[d + half], factor, KV_MAX);
        high[d * step] = (unsigned char)(a >> 4);
        high[(d + half) * step] = (unsigned char)(b >> 4);
        low[d * step] = (unsigned char)((a & 15) | (b & 15) << 4);
    }
    if (lane == 0) record[I12_EXPONENTS(width) + which * PAGE_TOKENS + i] = (unsigned char)exponent;
}

#endif
