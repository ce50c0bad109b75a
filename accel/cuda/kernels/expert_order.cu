// Groups tokens by expert: one block writes the table of expert_table.h. Larger chunks
// come first, so that blocks that take them in turn end together.
//
// Compiled with THREADS, CHUNK_ROWS_MOST (tokens of a chunk), MOST_CHUNKS, TABLE_AT (the word of
// the workspace at which the table begins), USED, EXPERTS, HAS_SHARED, and the operand number of
// IDS (see packets.h); TOPK is a packet number.

#include "expert_table.h"
#include "packets.h"

#define MOST_EIGHTS (CHUNK_ROWS_MOST / 8)
#define EXPERTS_OF_LANE ((EXPERTS + WARP_LANES - 1) / WARP_LANES)

// The sum of the values of all lanes before this one.
DEVICE unsigned before_lane(unsigned value, int lane) {
    unsigned sum = value;
#pragma unroll
    for (int lanes = 1; lanes < WARP_LANES; lanes *= 2) {
        const unsigned other = __shfl_sync(ALL_LANES, sum, max(lane - lanes, 0));
        if (lane >= lanes) sum += other;
    }
    return sum - value;
}

// Of the chunk at `at` of so many pairs.
DEVICE unsigned eights_at(unsigned pairs, unsigned at) {
    return (min(pairs - at, (unsigned)CHUNK_ROWS_MOST) + 7) / 8;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    expert_order(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned *counts = (unsigned *)shared, *starts = counts + EXPERTS, *eights = starts + EXPERTS;
    unsigned *sizes = eights + EXPERTS;  // of so many eights, the larger chunks
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const unsigned tokens = count_of(launch, packet_of(launch, TOPK)), pairs = tokens * USED;
    FOLLOWING_MAY_START;
    for (unsigned i = threadIdx.x; i < EXPERTS; i += THREADS) counts[i] = 0;
    if (threadIdx.x <= MOST_EIGHTS) sizes[threadIdx.x] = 0;
    __syncthreads();
    PRECEDING_DONE;
    const unsigned *ids = (const unsigned *)operand_at(launch, IDS);
    const size_t stride = stride_at(launch, IDS);
    for (unsigned pair = threadIdx.x; pair < pairs; pair += THREADS)
        atomicAdd(counts + ids[pair / USED * stride + pair % USED], 1);
    __syncthreads();
    for (unsigned expert = threadIdx.x; expert < EXPERTS; expert += THREADS)
        for (unsigned at = 0; at < counts[expert]; at += CHUNK_ROWS_MOST)
            for (unsigned less = 0; less < eights_at(counts[expert], at); less++)
                atomicAdd(sizes + less, 1);
    if (threadIdx.x < WARP_LANES) {
        const int lane = threadIdx.x;
        unsigned of_lane = 0, eights_of_lane = 0;
        for (unsigned i = 0; i < EXPERTS_OF_LANE; i++) {
            const unsigned expert = lane * EXPERTS_OF_LANE + i;
            if (expert >= EXPERTS) break;
            of_lane += counts[expert], eights_of_lane += (counts[expert] + 7) / 8;
        }
        unsigned first = before_lane(of_lane, lane), eight = before_lane(eights_of_lane, lane);
        for (unsigned i = 0; i < EXPERTS_OF_LANE; i++) {
            const unsigned expert = lane * EXPERTS_OF_LANE + i;
            if (expert >= EXPERTS) break;
            starts[expert] = first, eights[expert] = eight;
            first += counts[expert], eight += (counts[expert] + 7) / 8;
        }
    }
    __syncthreads();
    unsigned *table = (unsigned *)workspace + TABLE_AT, *records = table + TABLE_CHUNKS;
    const unsigned routed = sizes[0];
    const unsigned shared_chunks =
        HAS_SHARED ? (tokens + CHUNK_ROWS_MOST - 1) / CHUNK_ROWS_MOST : 0;
    if (threadIdx.x == 0) *table = routed + shared_chunks;
    __syncthreads();
    for (unsigned expert = threadIdx.x; expert < EXPERTS; expert += THREADS)
        for (unsigned at = 0; at < counts[expert]; at += CHUNK_ROWS_MOST) {
            const unsigned place = atomicAdd(sizes + eights_at(counts[expert], at), 1);
            unsigned *record = records + place * CHUNK_WORDS;
            record[0] = expert, record[1] = starts[expert] + at;
            record[2] = min(counts[expert] - at, (unsigned)CHUNK_ROWS_MOST);
            record[3] = eights[expert] + at / 8;
        }
    for (unsigned i = threadIdx.x; i < shared_chunks; i += THREADS) {
        unsigned *record = records + (routed + i) * CHUNK_WORDS;
        record[0] = EXPERTS, record[1] = i * CHUNK_ROWS_MOST;
        record[2] = min(tokens - i * CHUNK_ROWS_MOST, (unsigned)CHUNK_ROWS_MOST);
    }
    __syncthreads();
    unsigned *order = records + MOST_CHUNKS * CHUNK_WORDS;
    for (unsigned pair = threadIdx.x; pair < pairs; pair += THREADS)
        order[atomicAdd(starts + ids[pair / USED * stride + pair % USED], 1)] = pair;
}
