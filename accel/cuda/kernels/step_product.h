// A product phase of a step kernel. Every block repeats the norm and the quantization.

#ifndef STEP_PRODUCT_H
#define STEP_PRODUCT_H

#include "gate.h"
#include "step_activations.h"
#include "step_table.h"

// One warp's ring over all phases: copies run ahead of the computation, whatever the blocks wait
// for.
template <class S> struct STEP_RING : RING_SLOTS<S, STEP_RING<S>> {
    const PHASE_WORK *works;
    unsigned phases, phase;
    COPY_LIST<S> list;

    __device__ __forceinline__ void begin(const PHASE_WORK *works_, unsigned phases_,
                                          const STREAM_MEMORY<S> &memory, unsigned warp) {
        works = works_, phases = phases_, phase = 0;
        this->open(memory, warp);
        list.begin(works[0], warp);
        this->fill(memory, warp);
    }
    // Continues with the next phase that has work for this warp if the present one has no more.
    __device__ __forceinline__ void prepare(unsigned warp) {
        while (list.is_done() && phase + 1 < phases) list.begin(works[++phase], warp);
        list.look(works[phase], warp);
    }
};

struct PHASE_OUTPUTS {
    const PRODUCT_PHASE &phase;
    const STEP_MEMORY &step;
    int tokens;

    // The address of the operand that is added to a row, 0 without one.
    __device__ __forceinline__ const float *addend(unsigned tile, int row, int token) const {
        const unsigned at = tile * UNIT_ROWS + row;
        if (!phase.residual || token >= tokens || at >= phase.rows[0]) return 0;
        return step.floats(phase.residual) + token * phase.residual_stride + at;
    }
    __device__ __forceinline__ unsigned ahead(unsigned, unsigned tile, int row, int token) const {
        const float *address = addend(tile, row, token);
        return address ? load_shared_word((const unsigned *)address) : 0;
    }
    __device__ __forceinline__ float added(unsigned ahead, unsigned, unsigned tile, int row,
                                           int token) const {
        const float *address = addend(tile, row, token);
        return address ? step.incoming(phase.residual).one_of(ahead, address) : 0.0f;
    }
    __device__ __forceinline__ void operator()(unsigned matrix, unsigned tile, int row, int token,
                                               float value, float other, float added) const {
        const unsigned at = tile * UNIT_ROWS + row;
        // All that the record says is read at once, since other blocks wait for this result.
        const unsigned rows = phase.rows[matrix], paired = phase.paired, stride = phase.y_stride[matrix];
        const unsigned everywhere = phase.everywhere;
        const U64 residual = phase.residual, y = phase.y[matrix];
        if (token >= tokens || at >= rows) return;
        if (paired) value = gated(ACTIVATION < 0 ? phase.activation : ACTIVATION, value, other);
        if (BIASED && phase.bias[matrix]) value = value + step.floats(phase.bias[matrix])[at];
        if (residual) value = added + value;
        step.store(y, (size_t)token * stride + at, value, everywhere >> matrix & 1);
        if (READ_OUTSIDE)
            step.store(phase.also[matrix], (size_t)token * phase.also_stride[matrix] + at, value);
    }
};

template <class S>
DEVICE void product_phase(const PRODUCT_PHASE &phase, const PHASE_WORK &work, unsigned counted,
                          const STEP_MEMORY &step, STEP_RING<S> &ring, unsigned char *shared) {
    STREAM_MEMORY<S> memory(shared, work, phase.slot_bits);
    const int tokens = (int)min(counted, (unsigned)S::max_tokens);
    FLOAT_ROWS<INCOMING> rows = {
        step.floats(phase.x), phase.x_stride,   step.floats(phase.norm_weight), phase.eps,
        phase.columns,        (unsigned)tokens, step.incoming(phase.x),
    };
    rows.source.picked = (const unsigned *)step.at(phase.picked);
#if WHOLE_ROWS
    AWAITED_ROW<S::warps, NORM_UNITS> quantizer(memory.x, rows, phase.norm != 0,
                                                   phase.turned != 0);
    // Of a long row the first units have been there for a while.
    if (NORM_UNITS > 1 && work.units > S::warps * NORM_UNITS) quantizer.begin();
#else
    ROW_QUANTIZER<S::warps, true, S::max_tokens == 1, INCOMING, NORM_UNITS, HELD_UNITS> quantizer(
        memory.x, rows, phase.norm != 0);
#endif
    CHUNK_LIST<S> list;
    const PHASE_OUTPUTS outputs = {phase, step, tokens};
    // Chunks that were requested must also be taken in a step without rows.
    const int taken = max(tokens, 1);
#if WHOLE_ROWS
    FIRST_CHUNK<S> first;
    quantizer.run(memory.squares, [&]() {
        list.begin(work, memory, threadIdx.x / WARP_LANES);
        memory.begin(work.steps, true);
        if constexpr (S::early) first.begin(work, ring, list, memory, outputs);
    });
    stream_product<S>(work, ring, list, memory, taken, outputs, first);
#else
    list.begin(work, memory, threadIdx.x / WARP_LANES);
    memory.begin(work.steps, true);
    quantizer.load_weights();
    quantizer.run(memory.squares);
    stream_product<S>(work, ring, list, memory, taken, outputs);
#endif
}

#endif
