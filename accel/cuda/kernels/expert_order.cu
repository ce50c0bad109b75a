// Groups tokens by expert: one block writes the table of expert_table.h.
//
// Compiled with THREADS, CHUNK_ROWS_MAX (tokens of a chunk), MAX_CHUNKS, TABLE_AT (the word of
// the workspace at which the table begins), USED, EXPERTS, HAS_SHARED, and the operand number of
// IDS (see packets.h); TOPK is a packet number.

#include "expert_table.h"
#include "packets.h"

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

DEVICE unsigned chunks_of(unsigned pairs) {
    return (pairs + CHUNK_ROWS_MAX - 1) / CHUNK_ROWS_MAX;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    expert_order(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned *counts = (unsigned *)shared, *starts = counts + EXPERTS, *chunks = starts + EXPERTS;
    unsigned *eights = chunks + EXPERTS;
    unsigned *routed = eights + EXPERTS;  // chunks of all
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const unsigned tokens = count_of(launch, packet_of(launch, TOPK)), pairs = tokens * USED;
    FOLLOWING_MAY_START;
    for (unsigned expert = threadIdx.x; expert < EXPERTS; expert += THREADS) counts[expert] = 0;
    __syncthreads();
    PRECEDING_DONE;
    const unsigned *ids = (const unsigned *)operand_at(launch, IDS);
    const size_t stride = stride_at(launch, IDS);
    for (unsigned pair = threadIdx.x; pair < pairs; pair += THREADS)
        atomicAdd(counts + ids[pair / USED * stride + pair % USED], 1);
    __syncthreads();
    if (threadIdx.x < WARP_LANES) {
        const int lane = threadIdx.x;
        unsigned of_lane = 0, chunks_of_lane = 0, eights_of_lane = 0;
        for (unsigned i = 0; i < EXPERTS_OF_LANE; i++) {
            const unsigned expert = lane * EXPERTS_OF_LANE + i;
            if (expert >= EXPERTS) break;
            of_lane += counts[expert], chunks_of_lane += chunks_of(counts[expert]);
            eights_of_lane += (counts[expert] + 7) / 8;
        }
        unsigned first = before_lane(of_lane, lane), chunk = before_lane(chunks_of_lane, lane);
        unsigned eight = before_lane(eights_of_lane, lane);
        for (unsigned i = 0; i < EXPERTS_OF_LANE; i++) {
            const unsigned expert = lane * EXPERTS_OF_LANE + i;
            if (expert >= EXPERTS) break;
            starts[expert] = first, chunks[expert] = chunk, eights[expert] = eight;
            first += counts[expert], chunk += chunks_of(counts[expert]);
            eight += (counts[expert] + 7) / 8;
        }
        if (lane == WARP_LANES - 1) *routed = chunk;
    }
    __syncthreads();
    unsigned *table = (unsigned *)workspace + TABLE_AT, *records = table + TABLE_CHUNKS;
    const unsigned shared_chunks = HAS_SHARED ? chunks_of(tokens) : 0;
    if (threadIdx.x == 0) *table = *routed + shared_chunks;
    for (unsigned expert = threadIdx.x; expert < EXPERTS; expert += THREADS)
        for (unsigned at = 0; at < counts[expert]; at += CHUNK_ROWS_MAX) {
            unsigned *record = records + (chunks[expert] + at / CHUNK_ROWS_MAX) * CHUNK_WORDS;
            record[0] = expert, record[1] = starts[expert] + at;
            record[2] = min(counts[expert] - at, (unsigned)CHUNK_ROWS_MAX);
            record[3] = eights[expert] + at / 8;
        }
    for (unsigned i = threadIdx.x; i < shared_chunks; i += THREADS) {
        unsigned *record = records + (*routed + i) * CHUNK_WORDS;
        record[0] = EXPERTS, record[1] = i * CHUNK_ROWS_MAX;
        record[2] = min(tokens - i * CHUNK_ROWS_MAX, (unsigned)CHUNK_ROWS_MAX);
    }
    __syncthreads();
    unsigned *order = records + MAX_CHUNKS * CHUNK_WORDS;
    for (unsigned pair = threadIdx.x; pair < pairs; pair += THREADS)
        order[atomicAdd(starts + ids[pair / USED * stride + pair % USED], 1)] = pair;
}
