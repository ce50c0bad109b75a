// A phase of products of a step kernel: every block repeats norm and quantization.

#ifndef STEP_PRODUCT_H
#define STEP_PRODUCT_H

#include "gate.h"
#include "step_table.h"

// One warp's ring over all phases: what is fetched runs ahead of what is computed, whatever the blocks
// wait for.
template <class S> struct STEP_RING {
    const PHASE_WORK *works;
    unsigned phases, phase;
    COPY_LIST<S> list;
    RING_PLACE<S::slots> place;

    __device__ __forceinline__ void begin(const PHASE_WORK *works_, unsigned phases_,
                                          const STREAM_MEMORY<S> &memory, unsigned warp) {
        works = works_, phases = phases_, place = {0, 0};
        open_copies(memory.barriers + warp * S::slots, S::slots);
        phase = 0, list.begin(works[0], warp);
#pragma unroll 1
        for (int i = 0; i < S::slots; i++) fetch(memory, warp, i);
    }
    // Goes on to the next phase that has something for this warp where the present one has no more.
    __device__ __forceinline__ void fetch(const STREAM_MEMORY<S> &memory, unsigned warp,
                                          unsigned slot) {
        while (list.is_done()) {
            if (phase + 1 >= phases) {
                no_copy();
                return;
            }
            list.begin(works[++phase], warp);
        }
        list.copy(works[phase], memory, warp, slot);
    }
};

struct PHASE_OUTPUTS {
    const PRODUCT_PHASE &phase;
    const STEP_MEMORY &step;
    int tokens;

    __device__ __forceinline__ float added(unsigned, unsigned tile, int row, int token) const {
        const unsigned at = tile * UNIT_ROWS + row;
        if (!phase.residual || token >= tokens || at >= phase.rows[0]) return 0.0f;
        const float *row_of = step.floats(phase.residual) + token * phase.residual_stride;
        return step.incoming(phase.residual).one(row_of + at);
    }
    __device__ __forceinline__ void operator()(unsigned matrix, unsigned tile, int row, int token,
                                               float value, float other, float added) const {
        const unsigned at = tile * UNIT_ROWS + row;
        if (token >= tokens || at >= phase.rows[matrix]) return;
        if (phase.paired) value = gated(phase.activation, value, other);
        if (phase.bias[matrix]) value = value + step.floats(phase.bias[matrix])[at];
        if (phase.residual) value = added + value;
        step.store(phase.y[matrix], (size_t)token * phase.y_stride[matrix] + at, value);
        step.store(phase.also[matrix], (size_t)token * phase.also_stride[matrix] + at, value);
    }
};

template <class S>
DEVICE void product_phase(const PRODUCT_PHASE &phase, const PHASE_WORK &work,
                          const STEP_MEMORY &step, STEP_RING<S> &ring, unsigned char *shared) {
    STREAM_MEMORY<S> memory(shared, work, phase.slot_bits);
    memory.begin();
    CHUNK_LIST<S> list;
    list.begin(work, memory, threadIdx.x / WARP_LANES);
    const int tokens = (int)min(work.tokens, S::most_tokens);
    FLOAT_ROWS<INCOMING> rows = {
        step.floats(phase.x), phase.x_stride,   step.floats(phase.norm_weight), phase.eps,
        phase.columns,        (unsigned)tokens, step.incoming(phase.x),
    };
    rows.source.picked = (const unsigned *)step.at(phase.picked);
    ROW_QUANTIZER<S::warps, true, S::most_tokens == 1, INCOMING> quantizer(memory.x, rows,
                                                                           phase.norm != 0);
    quantizer.load_weights(threadIdx.x / WARP_LANES);
    quantizer.run(memory.squares);
    const PHASE_OUTPUTS outputs = {phase, step, tokens};
    // Chunks that were asked for have to be taken in a step without rows, too.
    stream_product<S>(work, ring, list, memory, max(tokens, 1), outputs);
}

#endif
