// Blocks that pass over chunks of expert_table.h: a block's chunks, and units that a warp copies ahead
// of them. Compiled with CHUNKS, the most chunks of a block, and EXPERTS.

#ifndef EXPERT_PASSING_H
#define EXPERT_PASSING_H

#include "expert_rows.h"

// What a warp reads of the chunks of a block: consecutive units, each in one of SLOTS slots of
// shared memory. Copies run ahead of the computation, into the chunks behind.
template <class SOURCE, int slots, unsigned slot_bytes> struct UNIT_STREAM {
    unsigned char *ring;
    COPY_BARRIER *barriers;
    SOURCE source;
    unsigned items, units;         // runs of units of the block, units of each
    const unsigned char *next;     // the unit to be fetched next, of which `left` follow
    unsigned item, left, bytes, slot, phase;

    __device__ __forceinline__ void begin() {
        open_copies(barriers, slots);
        item = left = slot = phase = 0;
        if (!units) items = 0;
        for (int i = 0; i < slots; i++) fetch(i);
    }
    __device__ __forceinline__ void fetch(unsigned to) {
        if (!left) {
            if (item == items) return no_copy();
            bytes = source.unit_bytes(item), next = source.first_unit(item);
            left = units, item++;
        }
        begin_copy(barriers + to, ring + to * slot_bytes, next, bytes);
        next += bytes, left--;
    }
    __device__ __forceinline__ const unsigned char *take() {
        await_copy<slots>(barriers + slot, phase);
        return ring + slot * slot_bytes;
    }
    __device__ __forceinline__ void give() {
        __syncwarp();
        fetch(slot);
        if (++slot == slots) slot = 0, phase ^= 1;
    }
};

// The values of a warp's units of the stream's next chunk, folded by rule R3.
template <int dtype, int rows, class STREAM>
DEVICE void total_of_stream(STREAM &stream, const CHUNK_ROWS<rows> &x, unsigned extent, int lane,
                            float (&total)[rows / 2]) {
    float span[rows / 2] = {};
#pragma unroll 1
    for (unsigned unit = 0; unit < stream.units; unit++) {
        add_unit_rows<dtype, rows>(stream.take(), x, unit, extent, lane, span);
        stream.give();
        if (unit % SPAN_UNITS + 1 == SPAN_UNITS || unit + 1 == stream.units)
#pragma unroll
            for (int i = 0; i < rows / 2; i++) total[i] = total[i] + span[i], span[i] = 0.0f;
    }
}

// The chunks of a block, CHUNKS at most: those of its number and every gridDim.y-th behind it.
template <int rows> struct BLOCK_CHUNKS {
    CHUNK *of;
    unsigned *pairs;  // [chunk][rows]

    static constexpr unsigned bytes = CHUNKS * (sizeof(CHUNK) + rows * 4);

    __device__ __forceinline__ BLOCK_CHUNKS(unsigned char *shared)
        : of((CHUNK *)shared), pairs((unsigned *)(shared + CHUNKS * sizeof(CHUNK))) {}
    // By all threads, of which there are `threads`; returns the number of chunks. Rather than wait
    // for the number of all it reads as many as there may be.
    __device__ __forceinline__ unsigned load(const EXPERT_TABLE &table, unsigned threads) const {
        const unsigned all = table.chunks();
        for (unsigned i = threadIdx.x; i < CHUNKS; i += threads) {
            const unsigned number = blockIdx.y + i * gridDim.y;
            if (number < table.max_chunks) of[i] = table.chunk(number);
        }
        __syncthreads();
        return all > blockIdx.y ? (all - blockIdx.y - 1) / gridDim.y + 1 : 0;
    }
    // The pairs of the first `count` chunks.
    __device__ __forceinline__ void load_pairs(const EXPERT_TABLE &table, unsigned count,
                                               unsigned threads) const {
        for (unsigned i = threadIdx.x; i < count * rows; i += threads) {
            const CHUNK &chunk = of[i / rows];
            if (i % rows < chunk.count)
                pairs[i] = chunk.expert < EXPERTS ? table.pair(chunk.first + i % rows)
                                                  : chunk.first + i % rows;
        }
        __syncthreads();
    }
};

#endif
