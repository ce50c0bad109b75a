// Rows of heads, a warp for each row: norm, rotation, and the bytes of queries, keys and values
// (rules R3, R4 and R6).
//
// A lane holds channels lane + 32 i, so that it first adds its own channels of a sum over the row,
// and holds both channels of a pair that lies half a row apart. WHOLE_TURN if channels m and
// HEAD_DIM / 2 + m are rotated together, for all m.

#ifndef STEP_ROWS_H
#define STEP_ROWS_H

#include "attention_group.h"
#include "exchange.h"
#include "heads.h"
#if IS_CODED
#include "rotated_rows.h"
#endif

#define ROW_CHANNELS (HEAD_DIM / WARP_LANES)
#define HALF_CHANNELS (ROW_CHANNELS / 2)

// The norm's weights and the rotation of a row, which exist before the row.
struct ROW_FACTORS {
    float weight[ROW_CHANNELS], cosine[HALF_CHANNELS], sine[HALF_CHANNELS];

    __device__ __forceinline__ void load(const float *weights, const float *angles, int lane) {
#pragma unroll
        for (int i = 0; i < ROW_CHANNELS; i++)
            weight[i] = weights ? weights[lane + WARP_LANES * i] : 1.0f;
#if WHOLE_TURN
#pragma unroll
        for (int i = 0; i < HALF_CHANNELS; i++) {
            cosine[i] = angles[lane + WARP_LANES * i];
            sine[i] = angles[HALF_DIM + lane + WARP_LANES * i];
        }
#endif
    }
};

struct HEAD_ROW {
    float of[ROW_CHANNELS];

    // Waits for a row that other blocks compute.
    __device__ __forceinline__ void load(const float *x, const INCOMING &source, int lane) {
        unsigned word[ROW_CHANNELS], spins = 0;
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (int i = 0; i < ROW_CHANNELS; i++) {
                word[i] = load_shared_word((const unsigned *)x + lane + WARP_LANES * i);
                missing |= word[i] == 0;
            }
        } while (source.waits(missing, spins));
        const unsigned flip = source.awaited ? 0xFFFFFFFFu : 0u;
#pragma unroll
        for (int i = 0; i < ROW_CHANNELS; i++) of[i] = __uint_as_float(word[i] ^ flip);
        __syncwarp();
    }
    // A row that is complete.
    __device__ __forceinline__ void read(const float *x, int lane) {
#pragma unroll
        for (int i = 0; i < ROW_CHANNELS; i++) of[i] = x[lane + WARP_LANES * i];
    }
    __device__ __forceinline__ void normalize(const ROW_FACTORS &factors, bool weighted, float eps) {
        float square[ROW_CHANNELS];
#pragma unroll
        for (int i = 0; i < ROW_CHANNELS; i++) square[i] = of[i] * of[i];
#pragma unroll
        for (int half = HALF_CHANNELS; half; half /= 2)
#pragma unroll
            for (int i = 0; i < half; i++) square[i] = square[i] + square[i + half];
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2)
            square[0] = square[0] + __shfl_xor_sync(ALL_LANES, square[0], lanes);
        const float mean = __fdiv_rn(square[0], (float)HEAD_DIM);
        const float r = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll
        for (int i = 0; i < ROW_CHANNELS; i++) {
            of[i] = of[i] * r;
            if (weighted) of[i] = of[i] * factors.weight[i];
        }
    }
    __device__ __forceinline__ void turn(const ROW_FACTORS &factors, const float *angles,
                                         unsigned pairs, bool neox, float *row, int lane) {
#if WHOLE_TURN
#pragma unroll
        for (int i = 0; i < HALF_CHANNELS; i++) {
            const float a = of[i], b = of[i + HALF_CHANNELS];
            of[i] = a * factors.cosine[i] - b * factors.sine[i];
            of[i + HALF_CHANNELS] = a * factors.sine[i] + b * factors.cosine[i];
        }
#else
#pragma unroll
        for (int i = 0; i < ROW_CHANNELS; i++) row[lane + WARP_LANES * i] = of[i];
        __syncwarp();
        rotate_row(row, pairs, neox, angles, lane);
#pragma unroll
        for (int i = 0; i < ROW_CHANNELS; i++) of[i] = row[lane + WARP_LANES * i];
        __syncwarp();
#endif
    }
    // Of coded pages rows are rotated (rule R13).
    __device__ __forceinline__ void mix(int lane) {
#if IS_CODED
        rotate_channels(of, lane);
#endif
    }
    __device__ __forceinline__ unsigned largest() const {
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < ROW_CHANNELS; i++)
            most = max(most, __float_as_uint(of[i]) & MAGNITUDE);
        return largest_of_warp(most);
    }
    // See split_query in attention_tiles.h.
    __device__ __forceinline__ void split(bool exists, float scale, unsigned char *memory,
                                          unsigned head, int lane) const {
        const unsigned most = exists ? largest() : 0;
        const int bits = query_bits(HEAD_DIM), exponent = row_exponent(most);
        const float factor = row_factor(most, bits);
        unsigned char *high = memory + AT_QUERIES + head * 2 * QUERY_BYTES + lane;
#pragma unroll
        for (int i = 0; i < ROW_CHANNELS; i++) {
            const int m = factor != 0.0f ? row_integer(of[i], factor, (2 << bits) - 1) : 0;
            high[WARP_LANES * i] = (unsigned char)(m >> Q_SHIFT);
            high[QUERY_BYTES + WARP_LANES * i] = (unsigned char)(m & ((1 << Q_SHIFT) - 1));
        }
        if (lane == 0) {
            float *unit = (float *)(memory + AT_UNITS) + 2 * head;
            const bool broken = exponent == BROKEN_ROW;
            unit[0] = broken ? 0.0f : scale * LOG2E * two_to(exponent - bits - KV_BITS);
            unit[1] = broken ? 1.0f : 0.0f;
        }
    }
    // Writes keys or values of position i of a page to its record, if there `always` is one or it
    // is not 0, and to a copy of it, see store_integers_of in heads.h.
    template <bool always = true>
    __device__ __forceinline__ void store(bool values, unsigned char *record, unsigned char *copy,
                                          unsigned i, int lane) const {
#if IS_CODED
        store_codes(of, values, {record, copy}, i, lane);
#else
        const unsigned step = values ? PAGE_TOKENS : 1, first = values ? I12_VALUES(HEAD_DIM) : 0;
        const unsigned high = first + (values ? i : i * HEAD_DIM) + lane * step;
        const unsigned low = first + I12_LOW(HEAD_DIM) + (values ? i : i * HALF_DIM) + lane * step;
        const unsigned most = largest();
        const int exponent = row_exponent(most);
        const float factor = row_factor(most, KV_BITS);
        const bool broken = exponent == BROKEN_ROW;
#pragma unroll
        for (int n = 0; n < HALF_CHANNELS; n++) {
            const int a = broken ? 0 : row_integer(of[n], factor, KV_MAX);
            const int b = broken ? 0 : row_integer(of[n + HALF_CHANNELS], factor, KV_MAX);
            const unsigned at = WARP_LANES * n * step, both = (a & 15) | (b & 15) << 4;
            copy[high + at] = (unsigned char)(a >> 4);
            copy[high + at + HALF_DIM * step] = (unsigned char)(b >> 4);
            copy[low + at] = (unsigned char)both;
            if (!always && !record) continue;
            record[high + at] = (unsigned char)(a >> 4);
            record[high + at + HALF_DIM * step] = (unsigned char)(b >> 4);
            record[low + at] = (unsigned char)both;
        }
        const unsigned at_exponent = I12_EXPONENTS(HEAD_DIM) + (values ? PAGE_TOKENS : 0) + i;
        if (lane == 0) copy[at_exponent] = (unsigned char)exponent;
        if (lane == 0 && (always || record)) record[at_exponent] = (unsigned char)exponent;
#endif
    }
};

#endif
