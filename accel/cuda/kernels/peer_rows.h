// Activations of some tokens that all blocks of a cluster need: each makes those of a share of the tokens
// and sends them to the others.

#ifndef PEER_ROWS_H
#define PEER_ROWS_H

#include "warp.h"
#include "activations.h"
#if CLUSTER > 1
#include "groups.h"
#endif

// One block by itself.
template <int CLUSTER_BLOCKS, int most_tokens> struct PEER_ROWS;
template <int most_tokens> struct PEER_ROWS<1, most_tokens> {
    const ACTIVATIONS &x;
    unsigned first, mine;

    __device__ __forceinline__ PEER_ROWS(const ACTIVATIONS &x_, unsigned tokens, COPY_BARRIER *)
        : x(x_), first(0), mine(tokens) {}
    __device__ __forceinline__ void begin() const {}
    __device__ __forceinline__ void exchange() const {}
    __device__ __forceinline__ void end() const {}
};

#if CLUSTER > 1
// `x` are those of the block's own tokens, `mine` from token `first` on; `barrier` counts what the
// others send.
template <int blocks, int most_tokens> struct PEER_ROWS {
    static constexpr unsigned each = most_tokens / blocks;
    ACTIVATIONS x;
    COPY_BARRIER *barrier;
    unsigned rank, first, mine, tokens;

    __device__ __forceinline__ PEER_ROWS(const ACTIVATIONS &all, unsigned tokens_,
                                         COPY_BARRIER *barrier_)
        : barrier(barrier_), tokens(tokens_) {
        rank = blockIdx.x % blocks, first = rank * each;
        mine = first < tokens ? min(tokens - first, each) : 0;
        x = from_token(all, first);
    }
    __device__ __forceinline__ void begin() const {
        if (threadIdx.x == 0) {
            open_stages(barrier, 1);
            announce(barrier, (tokens - mine) * x.units * (UNIT_PLANES + 2 * UNIT_SUMS + 4));
        }
        arrive_unfenced();
    }
    // Sends what the block has made, a warp to each of the others, and waits for what they have.
    __device__ __forceinline__ void exchange() const {
        const unsigned warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
        show_to_copies();
        await_cluster();
        __syncthreads();
        if (warp < blocks - 1) {
            const unsigned peer = (rank + 1 + warp) % blocks, units = mine * x.units;
            if (lane == 0 && units) {
                copy_to_peer(barrier, x.planes, units * UNIT_PLANES, peer);
                copy_to_peer(barrier, x.sums, units * UNIT_SUMS * 2, peer);
            }
            for (unsigned i = lane; i < units; i += WARP_LANES)
                word_to_peer(barrier, (const unsigned *)x.scales + i, peer);
            __syncwarp();
        }
        await_stage(barrier, 0);
        arrive_unfenced();
    }
    // Nobody leaves before what it sent has come.
    __device__ __forceinline__ void end() const { await_cluster(); }
};
#endif

#endif
