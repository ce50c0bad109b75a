// The product of one token's integers and a matrix of a stack stored in units (units.h), computed
// by a single warp.

#ifndef EXPERT_UNITS_H
#define EXPERT_UNITS_H

#include "activations.h"
#include "chunk_product.h"

// A warp's part of a tile: consecutive units, each chunk in one of SLOTS slots of shared memory.
// Copies may begin as soon as the address of the units is known.
template <int dtype, int slots> struct UNIT_RUN {
    static constexpr unsigned unit_bytes = UNIT_FORMAT<dtype>::unit_bytes;
    static constexpr unsigned slot_bytes = CHUNK_UNITS * unit_bytes;
    unsigned char *ring;
    COPY_BARRIER *barriers;
    const unsigned char *source;
    unsigned count, fetched;

    __device__ __forceinline__ void open(unsigned char *ring_, COPY_BARRIER *barriers_) {
        ring = ring_, barriers = barriers_, fetched = 0;
        open_copies(barriers, slots);
    }
    __device__ __forceinline__ void begin(const unsigned char *units, unsigned count_) {
        source = units, count = count_;
        for (int i = 0; i < slots; i++) fetch();
    }
    __device__ __forceinline__ void fetch() {
        const unsigned first = fetched * CHUNK_UNITS, slot = fetched % slots;
        if (first < count) {
            begin_copy(barriers + slot, ring + slot * slot_bytes, source + first * unit_bytes,
                       min((unsigned)CHUNK_UNITS, count - first) * unit_bytes);
            fetched++;
        } else {
            no_copy();
        }
    }
    // Rule R3 over all units and the activations from unit `index` on. Lanes t = 0 get row g, lanes t = 2
    // row g + 8.
    __device__ __forceinline__ float total(const ACTIVATIONS &x, unsigned index, int lane) {
        float all = 0.0f, span = 0.0f;
        unsigned in_span = 0;
#pragma unroll 1
        for (unsigned chunk = 0; chunk * CHUNK_UNITS < count; chunk++) {
            const unsigned first = chunk * CHUNK_UNITS, units = min(count - first, (unsigned)CHUNK_UNITS);
            await_copy<slots>(barriers + chunk % slots, chunk / slots);
            const unsigned char *stored = ring + chunk % slots * slot_bytes;
            LANE_CHUNK own;
            own.load(x, index + first, index + count - 1, lane);
            CHUNK_NIBBLES nibbles;
            nibbles.load(stored, unit_bytes, lane);
            CHUNK_SUMS sums;
            multiply_chunk<dtype>(stored, nibbles, own, lane, sums);
            const float mine = value_of_chunk<dtype>(sums, own, lane);
            const float value[CHUNK_UNITS] = {mine, __shfl_xor_sync(ALL_LANES, mine, 1)};
            __syncwarp();
            fetch();
#pragma unroll
            for (int n = 0; n < CHUNK_UNITS; n++) {
                if (n >= units) break;
                span = span + value[n];
                if (++in_span == SPAN_UNITS) all = all + span, span = 0.0f, in_span = 0;
            }
        }
        return in_span ? all + span : all;
    }
};

// Converts unit `unit` of a row of quantize_activation to unit `index` of x, as take_rows of
// row_quantizer.h does.
DEVICE void take_unit(const ACTIVATIONS &x, unsigned index, const unsigned *m,
                      const unsigned *sums, const float *scale, unsigned unit, int lane) {
    unsigned char *planes = x.planes + (size_t)index * UNIT_PLANES + lane / 8 * 128 +
                            lane % 4 * 16 + lane / 4 % 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const unsigned *block =
            m + unit * (UNIT_COLUMNS / 2) + (lane / 8 + 4 * half) * 16 + lane % 8;
        *(unsigned *)(planes + 8 * half) = __byte_perm(block[0], 0, 0x3120);
        *(unsigned *)(planes + 8 * half + 64) = __byte_perm(block[8], 0, 0x3120);
    }
    if (lane < UNIT_SUB_BLOCKS) {
        const unsigned both = sums[unit * UNIT_SUB_BLOCKS + lane];
        short *to = x.sums + (size_t)index * UNIT_SUMS + sum_index(2 * lane);
        to[0] = (short)both;
        to[1] = (short)(both >> 16);
    }
    if (lane == 0) x.scales[index] = scale[unit];
}

// Bytes of the activations of `units` units, and memory for them.
#define ROW_BYTES(units) (((units) * (UNIT_PLANES + 2 * UNIT_SUMS + 4) + 15) / 16 * 16)

DEVICE ACTIVATIONS activations_at(unsigned char *address, unsigned units) {
    ACTIVATIONS x;
    x.planes = address;
    x.sums = (short *)(address + units * UNIT_PLANES);
    x.scales = (float *)(address + units * (UNIT_PLANES + 2 * UNIT_SUMS));
    x.units = units;
    x.in_eights = false;
    return x;
}

#endif
