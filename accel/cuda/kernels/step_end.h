// The end of a step of one row whose token is that of its largest logit (rule R9): the results of
// SAMPLE, STREAM_OUT and STORE_REQUEST_STATE for such a row. Every block offers the largest of the
// logits it computed, or of its part of those that come from all devices; the last block to end
// does the rest. A row whose token is drawn is ended by later launches, which read the record of the
// largest logit.

#ifndef STEP_END_H
#define STEP_END_H

#include "row_end.h"
#include "step_table.h"

GROUP_MEMORY(1)
#include "argmax.k"

#define BROKEN_LOGIT 0xFFFFFFFFu  // above the key of every finite value

// The data of the row that is known before its token.
struct ENDED_ROW {
    bool exists, drawn;
    ROW_END last;

    __device__ __forceinline__ void open(const END_PHASE &phase, const STEP_MEMORY &step,
                                         unsigned rows) {
        exists = rows != 0;
        if (!exists) return;
        const ADDRESS how = (ADDRESS)step.at(phase.sampling);
        const unsigned row = U32_AT((ADDRESS)step.at(phase.output_rows), 0);
        const ADDRESS query = ROW((ADDRESS)step.at(phase.query), row, phase.query_stride);
        drawn = F32_AT(how, SAMPLING_TEMPERATURE) > 0.0f;
        last.open(query, (ADDRESS)step.at(phase.step));
    }
    __device__ __forceinline__ void end(const END_PHASE &phase, const STEP_MEMORY &step,
                                        U64 best) const {
        const bool broken = best >> 32 == BROKEN_LOGIT;
        const unsigned id = ~(unsigned)best, token = broken ? (unsigned)NO_TOKEN : id;
        if (drawn) {
            const unsigned *logits = (const unsigned *)step.at(phase.logits);
            const float value = broken ? 0.0f : __uint_as_float(load_shared_word(logits + id));
            store_best((ADDRESS)step.at(phase.best), 0, best_record(value, (int)token, !broken));
            return;
        }
        last.store((ADDRESS)step.at(phase.slots), phase.slots_stride, (ADDRESS)step.at(phase.ring),
                   phase.ring_events, token);
    }
};

// The larger value, of equal ones the lower id: the key of the value above the inverted id.
DEVICE U64 ranked(unsigned id, float value) {
    return (U64)(is_finite(value) ? order_key(value) : BROKEN_LOGIT) << 32 | ~id;
}

#if SHARED_STEP
#define LOGITS_AHEAD 8  // of a thread, requested at once

// Waits for this thread's part of the logits of all devices, writes them to the memory of the step,
// and returns the largest.
template <int warps> DEVICE U64 largest_arriving(const END_PHASE &phase, const STEP_MEMORY &step) {
    const float *arriving = step.floats(phase.arriving);
    float *logits = (float *)step.at(phase.logits);
    const INCOMING source = step.incoming(phase.arriving);
    const unsigned together = gridDim.x * warps * WARP_LANES;
    U64 best = 0;
#pragma unroll 1
    for (unsigned first = blockIdx.x * warps * WARP_LANES + threadIdx.x; first < phase.vocab;
         first += LOGITS_AHEAD * together) {
        unsigned word[LOGITS_AHEAD];
#pragma unroll
        for (int i = 0; i < LOGITS_AHEAD; i++)
            if (first + i * together < phase.vocab)
                word[i] = load_shared_word((const unsigned *)arriving + first + i * together);
#pragma unroll
        for (int i = 0; i < LOGITS_AHEAD; i++) {
            const unsigned id = first + i * together;
            if (id >= phase.vocab) break;
            const float value = source.one_of(word[i], arriving + id);
            logits[id] = value;
            best = max(best, ranked(id, value));
        }
    }
    return best;
}
#endif

// The largest of the logits of this thread's tiles.
template <int warps> DEVICE U64 largest_computed(const END_PHASE &phase, const STEP_MEMORY &step) {
    const float *logits = step.floats(phase.logits);
    const unsigned row = threadIdx.x % UNIT_ROWS, together = warps * WARP_LANES / UNIT_ROWS;
    U64 best = 0;
    for (unsigned i = threadIdx.x / UNIT_ROWS;; i += together) {
        const unsigned id = (blockIdx.x + i * gridDim.x) * UNIT_ROWS + row;
        if (id >= phase.vocab) break;
        best = max(best, ranked(id, logits[id]));
    }
    return best;
}

// The block's largest logit; `exists` is whether the step has a row.
template <int warps> DEVICE U64 largest_of_block(const END_PHASE &phase, const STEP_MEMORY &step,
                                                 bool exists, unsigned *room) {
    const unsigned lane = threadIdx.x % WARP_LANES;
    U64 best = 0;
#if SHARED_STEP
    if (phase.arriving) {
        if (exists) best = largest_arriving<warps>(phase, step);
    } else
#endif
        best = largest_computed<warps>(phase, step);
    __syncwarp();
    const unsigned key = largest_of_warp((unsigned)(best >> 32));
    const unsigned id = largest_of_warp(best >> 32 == key ? (unsigned)best : 0u);
    if (lane == 0) room[2 * (threadIdx.x / WARP_LANES)] = key;
    if (lane == 0) room[2 * (threadIdx.x / WARP_LANES) + 1] = id;
    __syncthreads();
    best = 0;
#pragma unroll 1
    for (int i = 0; i < warps; i++) best = max(best, (U64)room[2 * i] << 32 | room[2 * i + 1]);
    return best;
}

#endif
