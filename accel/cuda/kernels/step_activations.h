// The row of one token that other blocks make becomes ACTIVATIONS, normalized first or not (rules R3 to
// R5), by a block of a step kernel. Its text is short: what all phases share is there once, and what has
// not come is asked for by the instructions that asked first.

#ifndef STEP_ACTIVATIONS_H
#define STEP_ACTIVATIONS_H

#include "one_row.h"

// What each warp holds of the row: units `warps` apart, `most` of them at once, `normal` where the row
// has a norm, which then is no longer. Everything of `normal` units is done side by side: it is one chain
// after the other whose latency counts here.
template <int warps, int normal, int most, bool early> struct AWAITED_ROW {
    EIGHT held[most], weight[normal];
    const ACTIVATIONS &x;
    const FLOAT_ROWS<INCOMING> &rows;
    int lane, warp;
    bool normed;

    __device__ __forceinline__ AWAITED_ROW(const ACTIVATIONS &x_,
                                           const FLOAT_ROWS<INCOMING> &rows_, bool normed_)
        : x(x_),
          rows(rows_),
          lane(threadIdx.x % WARP_LANES),
          warp(threadIdx.x / WARP_LANES),
          normed(normed_) {}

    __device__ __forceinline__ void load_weights() {
        if (!normed || !rows.weight) return;
#pragma unroll
        for (int i = 0; i < normal; i++)
            weight[i] = load_eight(rows.weight, warp + i * warps, rows.columns, lane);
    }
    // Asks for those of `count` units from `first` on that are `wanted`, two bits a unit, and again for what
    // is missing, until the first `normal` of them have come. That they have is a number of its own: made of
    // `wanted` alone, NVRTC 13.0 compiles `missing one or other` of two bits as `missing both`, and the loop never ends.
    // Once it has asked for the first ones it does what `meanwhile` says.
    template <class MEANWHILE>
    __device__ __forceinline__ void await(unsigned first, unsigned wanted, bool &asked,
                                          const MEANWHILE &meanwhile) {
        const float *row = rows.x + rows.source.row(0) * rows.stride;
        row += first * UNIT_COLUMNS + 4 * lane;
        const int columns = early && !rows.tokens ? 0 : (int)rows.columns;
        const int left = columns - (int)(first * UNIT_COLUMNS + 4 * lane);
        unsigned spins = 0, least;
        do {
#pragma unroll
            for (int i = 0; i < 2 * most; i++) {
                const int column = i / 2 * warps * UNIT_COLUMNS + i % 2 * 128;
                if (!(wanted >> i & 1) || column >= left) continue;
                const uint4 four = rows.source.four(row + column);
                float *v = held[i / 2].of + i % 2 * 4;
                v[0] = __uint_as_float(four.x), v[1] = __uint_as_float(four.y);
                v[2] = __uint_as_float(four.z), v[3] = __uint_as_float(four.w);
            }
            wanted = 0, least = ~0u;
            if (early && !asked) meanwhile(), asked = true;
#pragma unroll
            for (int i = 0; i < 2 * normal; i++) {
                const int column = i / 2 * warps * UNIT_COLUMNS + i % 2 * 128;
                const float *v = held[i / 2].of + i % 2 * 4;
                const unsigned own = min(min(__float_as_uint(v[0]), __float_as_uint(v[1])),
                                         min(__float_as_uint(v[2]), __float_as_uint(v[3])));
                if (column >= left) continue;
                wanted |= (own == 0 ? 1u : 0u) << i;
                least = min(least, own);
            }
        } while (rows.source.waits(least == 0, spins));
        __syncwarp();
        if (!rows.source.awaited) return;
#pragma unroll
        for (int i = 0; i < 2 * normal; i++) {
            const int column = i / 2 * warps * UNIT_COLUMNS + i % 2 * 128;
            float *v = held[i / 2].of + i % 2 * 4;
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (column < left) v[e] = __uint_as_float(~__float_as_uint(v[e]));
        }
    }
    // `squares` has room for a float a unit. Units are asked for all at once, but quantized as they come: the
    // last ones of a long row come late, when the others have been there for a while.
    // `early`: `meanwhile` is something to do, in a step without rows, too.
    __device__ __forceinline__ void run(float *squares) {
        run(squares, []() {});
    }
    template <class MEANWHILE>
    __device__ __forceinline__ void run(float *squares, const MEANWHILE &meanwhile) {
        const int count = normed ? normal : most;
        bool asked = false;
        unsigned first = warp;
        while (early || rows.tokens) {
#pragma unroll
            for (int i = 0; i < most; i++) held[i] = EIGHT{};
            unsigned wanted = (1u << 2 * count) - 1;
#pragma unroll 1
            for (int at = 0; at < count && (at == 0 || first < x.units); at += normal) {
                await(first, wanted, asked, meanwhile);
                if (normed)
                    normalize_units<warps>(held, weight, x, rows,
                                           ROW_SQUARES{squares, x.units, rows.columns});
                quantize_units<warps, normal>(held, x, first, lane);
                first += warps * normal, wanted = 0;
            }
            if (first >= x.units) break;
        }
        __syncthreads();
    }
};

#endif
