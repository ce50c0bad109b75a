// A phase of products of a step kernel: every block repeats norm and quantization.

#ifndef STEP_PRODUCT_H
#define STEP_PRODUCT_H

#include "gate.h"
#include "step_table.h"

// One warp's ring over all phases: what is fetched runs ahead of what is computed, whatever the blocks
// wait for.
template <class S> struct STEP_RING {
    const PHASE_WORK *works;
    unsigned phases, phase, filled, taken;
    PLACE<MOST_PHASE_MATRICES> fetched;

    __device__ __forceinline__ void begin(const PHASE_WORK *works_, unsigned phases_,
                                          const STREAM_MEMORY<S> &memory, unsigned warp) {
        works = works_, phases = phases_, phase = filled = taken = 0;
        open_copies(memory.barriers + warp * S::slots, S::slots);
        enter(warp);
        for (int i = 0; i < S::slots; i++) fetch(memory, warp);
    }
    // The next phase, from the present one on, that has something for this warp.
    __device__ __forceinline__ void enter(unsigned warp) {
        for (; phase < phases; phase++) {
            if (works[phase].tiles == 0) continue;
            fetched.begin(works[phase], warp);
            if (fetched.tile < works[phase].tiles) return;
        }
    }
    __device__ __forceinline__ void fetch(const STREAM_MEMORY<S> &memory, unsigned warp) {
        if (phase == phases) {
            no_copy();
            return;
        }
        const PHASE_WORK &work = works[phase];
        copy_chunk<S>(work, fetched, memory, warp * S::slots + filled % S::slots);
        filled++;
        fetched.next(work);
        if (fetched.tile < work.tiles) return;
        phase++;
        enter(warp);
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

template <bool norm, int units, class S>
DEVICE void quantize_rows(const STREAM_MEMORY<S> &memory, const FLOAT_ROWS<INCOMING> &rows) {
    ROW_QUANTIZER<S::warps, norm, S::most_tokens == 1, INCOMING, units> quantizer(memory.x, rows);
    quantizer.load_weights(threadIdx.x / WARP_LANES);
    quantizer.run(memory.squares);
}

// NORM_UNITS and PLAIN_UNITS are how many units a warp holds with and without a norm.
template <class S>
DEVICE void product_phase(const PRODUCT_PHASE &phase, const PHASE_WORK &work,
                          const STEP_MEMORY &step, STEP_RING<S> &ring, unsigned char *shared) {
    STREAM_MEMORY<S> memory(shared, work, phase.slot_bits);
    memory.begin();
    const int tokens = (int)min(work.tokens, S::most_tokens);
    FLOAT_ROWS<INCOMING> rows = {
        step.floats(phase.x), phase.x_stride,   step.floats(phase.norm_weight), phase.eps,
        phase.columns,        (unsigned)tokens, step.incoming(phase.x),
    };
    rows.source.picked = (const unsigned *)step.at(phase.picked);
    if (phase.norm)
        quantize_rows<true, NORM_UNITS>(memory, rows);
    else
        quantize_rows<false, PLAIN_UNITS>(memory, rows);
    const PHASE_OUTPUTS outputs = {phase, step, tokens};
    // Chunks that were asked for have to be taken in a step without rows, too.
    stream_product<S>(work, ring, memory, max(tokens, 1), outputs);
}

#endif
