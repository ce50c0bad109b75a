// Many phases of a step in one launch whose blocks all run at the same time: products with few
// tokens and attention, as in unit_product.cu, head_rows.cu and attention_spans.cu. Weights stream
// through a ring in shared memory that covers all phases and waits for none. Results that a phase
// computes for another pass through exchange.h.
//
// Compiled with WARPS, SLOTS and TOKENS as in unit_ring.h; with FORMAT0 to FORMAT3, -1 for unused
// ones; with HEAD_DIM and DTYPE of the attention, HEAD_DIM 0 without attention; with TILE_GROUPS
// and WHOLE_TURN as in step_attention.h and step_rows.h; with ACTIVATION of all gates, -1 where
// they differ; with BIASED, whether any product has a bias, and READ_OUTSIDE, whether another
// launch reads any result; with NORM_UNITS and HELD_UNITS as `normal` and `most` in row_quantizer.h
// and one_row.h; with WHOLE_ROWS if rows are computed by ONE_ROW; with ENDS if the last phase is
// one of END_KIND; with SHARED_STEP if several devices execute the launch together.
//
// The workspace begins with a count of steps, which selects the bank, a count of ended blocks and
// the largest logit in 64 bits, the last two 0 between steps. From word BEGUN_AT on it has for each
// device the latest step it began. Then come the parts of attention, 0 between steps, and the banks.

#include "step_product.h"
#if HEAD_DIM
#include "step_attention.h"
#endif
#if ENDS
#include "step_end.h"
#endif

#if FORMAT3 >= 0
typedef FORMATS<FORMAT0, FORMAT1, FORMAT2, FORMAT3> STEP_FORMATS;
#elif FORMAT2 >= 0
typedef FORMATS<FORMAT0, FORMAT1, FORMAT2> STEP_FORMATS;
#elif FORMAT1 >= 0
typedef FORMATS<FORMAT0, FORMAT1> STEP_FORMATS;
#else
typedef FORMATS<FORMAT0> STEP_FORMATS;
#endif
#define EARLY_UNITS 2  // of a row with a norm in each warp; of more it has not been measured
typedef SHAPE<WARPS, SLOTS, TOKENS, MAX_PHASE_MATRICES, STEP_FORMATS, 1,
              (WHOLE_ROWS && NORM_UNITS <= EARLY_UNITS)>
    STEP_SHAPE;

#define BEGUN_AT 8

// Of products and numbers of tokens of all phases.
#define TABLE_BYTES(count) (((count) * (sizeof(PHASE_WORK) + 4) + 15) / 16 * 16)

// The data of a phase that the ring needs; a block has no tiles if the phase has no products.
DEVICE void prepare_work(const PHASE &record, PHASE_WORK &work) {
    const PRODUCT_PHASE &phase = record.product;
    if (phase.kind != PRODUCT_KIND) {
        work.own = 0;
        return;
    }
    for (int i = 0; i < MAX_PHASE_MATRICES; i++) {
        work.matrix[i] = (const unsigned char *)phase.units[i];
        work.tiles[i] = (phase.rows[i] + UNIT_ROWS - 1) / UNIT_ROWS;
    }
    work.formats = phase.formats;
    work.prepare(phase.columns, phase.paired != 0);
}

// Prefetches weights of norms, each block some of them, by one warp. In between, weights of products
// pass through the device's cache.
DEVICE void call_weights(const PHASE &record, const STEP_MEMORY &step) {
    const unsigned at = (blockIdx.x + gridDim.x * threadIdx.x) * 128;
    const bool multiplies = record.product.kind == PRODUCT_KIND;
    if (!multiplies && record.product.kind != ATTENTION_KIND) return;
    if (at >= (multiplies ? record.product.columns : HEAD_DIM) * sizeof(float)) return;
    const U64 first = multiplies ? record.product.norm_weight : record.attention.q_weight;
    const U64 second = multiplies ? 0 : record.attention.k_weight;
    if (first) call_near(step.at(first) + at);
    if (second) call_near(step.at(second) + at);
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, 1)
    step_phases(U64 scratch, U64 inputs, U64 table, U64 workspace) {
    BLOCK_MEMORY(shared);
    const STEP_HEAD *head = (const STEP_HEAD *)table;
    const PHASE *phases = (const PHASE *)(head + 1);
    const unsigned count = head->phases, lane_of_block = threadIdx.x;
    PHASE_WORK *works = (PHASE_WORK *)(shared + head->works_at);
    unsigned *tokens = (unsigned *)(works + count);
    PHASE *records = (PHASE *)(shared + head->works_at + TABLE_BYTES(count));
    for (unsigned i = lane_of_block; i < count; i += WARPS * WARP_LANES)
        prepare_work(phases[i], works[i]);
#if SHARED_STEP
    // Every result is stored to other devices, so their addresses are near.
    U64 *near = (U64 *)((COPY_BARRIER *)(records + MAX_RECORDS) + (HEAD_DIM ? WARPS + 2 : 0));
    if (lane_of_block < sizeof(PEER_DEVICES) / sizeof(U64))
        near[lane_of_block] = ((const U64 *)(table + head->peers_at))[lane_of_block];
#else
    const U64 *near = 0;
#endif
    const bool begins = lane_of_block < 2 * RECORD_VECTORS && lane_of_block < count * RECORD_VECTORS;
    uint4 coming;
    if (begins) coming = ((const uint4 *)phases)[lane_of_block];
    __syncthreads();
    const STREAM_MEMORY<STEP_SHAPE> memory(shared, works[0], 0);
    memory.begin(1, false);
    STEP_RING<STEP_SHAPE> ring;
    ring.begin(works, count, memory, lane_of_block / WARP_LANES);
#if HEAD_DIM
    open_records(records + MAX_RECORDS);
#endif

    PRECEDING_DONE;
    unsigned *state = (unsigned *)workspace;
    unsigned char *banks = (unsigned char *)workspace + head->exchange_at;
    const unsigned ended = load_shared_word(state), last_bank = head->banks - 1;
    const unsigned turn = ended & last_bank, cleared = (turn + head->banks / 2) & last_bank;
    const STEP_MEMORY step = {{scratch, inputs, 0, 0u},
                              banks + (size_t)turn * head->bank_bytes,
                              head->stop,
                              (const PEER_DEVICES *)near};
#if SHARED_STEP
    const PEER_DEVICES &peers = *step.peers;
    const bool meets = blockIdx.x + 1 == gridDim.x && lane_of_block / WARP_LANES == 1 &&
                       lane_of_block % WARP_LANES < peers.count;
    if (meets) tell_begun(state + BEGUN_AT, ended + 1, peers, lane_of_block % WARP_LANES);
#endif
    for (unsigned i = lane_of_block; i < count; i += WARPS * WARP_LANES)
        tokens[i] = step.count(phases[i].product.multiplier, phases[i].product.counted);
    if (begins)
        ((uint4 *)records)[lane_of_block] = step.resolved(coming, lane_of_block % RECORD_VECTORS);
    uint4 *other = (uint4 *)(banks + (size_t)cleared * head->bank_bytes);
    for (unsigned i = blockIdx.x * WARPS * WARP_LANES + lane_of_block;
         i < head->bank_bytes / sizeof(uint4); i += gridDim.x * WARPS * WARP_LANES)
        other[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();

#pragma unroll 1
    for (unsigned i = 0; i < count; i++) {
        const PHASE &phase = records[i % MAX_RECORDS];
        const bool fetches = lane_of_block < RECORD_VECTORS && i + 2 < count;
        if (fetches) coming = phases[i + 2].vector[lane_of_block];
        if (phase.product.kind == PRODUCT_KIND)
            product_phase<STEP_SHAPE>(phase.product, works[i], tokens[i], step, ring, shared);
#if HEAD_DIM
        else if (phase.product.kind == ATTENTION_KIND)
            attention_phase(phase.attention, step, tokens[i], (unsigned char *)workspace,
                            records + MAX_RECORDS, memory.x.planes);
#endif
        if (fetches)
            records[(i + 2) % MAX_RECORDS].vector[lane_of_block] =
                step.resolved(coming, lane_of_block);
        // The first warp folds most rarely, so it has the time.
        if (lane_of_block < WARP_LANES && i + 2 < count) {
            __syncwarp();
            call_weights(records[(i + 2) % MAX_RECORDS], step);
        }
        __syncthreads();
    }
#if ENDS
    const END_PHASE &end = records[(count - 1) % MAX_RECORDS].end;
    U64 *best = (U64 *)(state + 2);
    ENDED_ROW row;
    row.open(end, step, tokens[count - 1]);
    const U64 own = largest_of_block<WARPS>(end, step, row.exists, (unsigned *)shared);
    if (row.exists && lane_of_block == 0) {
        atomicMax(best, own);
        __threadfence();
    }
#endif
#if SHARED_STEP
    if (meets)
        await_begun(state + BEGUN_AT, ended + 1, peers, lane_of_block % WARP_LANES, head->stop);
#endif
    if (lane_of_block != 0 || atomicAdd(state + 1, 1) + 1 != gridDim.x) return;
#if ENDS
    __threadfence();
    if (row.exists) row.end(end, step, atomicExch(best, 0));
#endif
    state[1] = 0, state[0]++;
}
