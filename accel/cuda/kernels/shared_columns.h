// Rows whose columns are divided among the blocks of a cluster. Each block computes the activations
// of its own units, multiplies by them, and sends the values of a tile to the block that folds the
// tile. A norm also needs the squares of the units of the other blocks.

#ifndef SHARED_COLUMNS_H
#define SHARED_COLUMNS_H

#include "one_row.h"
#include "unit_stream.h"

// Sends the squares of a row of which this block has some units to the other blocks.
template <int blocks> struct SHARED_SQUARES : ROW_SQUARES {
    COPY_BARRIER *barrier;
    unsigned rank, first;

    __device__ __forceinline__ void put(unsigned unit, float square) const {
        of[first + unit] = square;
#pragma unroll
        for (unsigned block = 0; block < blocks; block++)
            if (block != rank)
                word_at_peer(barrier, (unsigned *)of + first + unit, __float_as_uint(square), block);
    }
    __device__ __forceinline__ void meet() const {
        __syncthreads();
        await_stage(barrier, 0);
    }
};

template <class S> struct SHARED_COLUMNS {
    const typename S::WORK &work;
    const STREAM_MEMORY<S> &memory;
    unsigned tokens;

    // Announces what will arrive from other blocks: values, and squares if there is a norm.
    __device__ __forceinline__ void begin(bool norm) const {
        if constexpr (S::blocks > 1) {
            const unsigned warp = threadIdx.x / WARP_LANES;
            if (threadIdx.x % WARP_LANES == 0) {
                for (unsigned i = warp; i < MAX_TILE_SLOTS; i += S::warps) {
                    open_stages(memory.values_of_peers + i, 1);
                    announce(memory.values_of_peers + i, bytes_of_peers<S>(work, tokens));
                }
                if (warp == S::warps - 1 && norm) {
                    open_stages(memory.peers, 1);
                    announce(memory.peers, (work.units - work.own_units()) * tokens * 4);
                }
            }
            __syncwarp();
            arrive_unfenced();
        }
    }
    // Other blocks may receive data from here on.
    __device__ __forceinline__ void meet() const {
        if constexpr (S::blocks > 1) await_cluster();
    }
    // The squares of a token's row.
    __device__ __forceinline__ auto squares_of(unsigned token, unsigned columns) const {
        const ROW_SQUARES all = {memory.squares + token * work.units, work.units, columns};
        if constexpr (S::blocks > 1)
            return SHARED_SQUARES<S::blocks>{all, memory.peers, work.rank(), work.first_unit()};
        else
            return all;
    }
};

#endif
