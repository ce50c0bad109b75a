// The first half of SAMPLE: finds the largest value of every part of a row and, with a temperature,
// computes all values. A block computes a part; a thread requests LOADED values at a time. The text
// of the plain kernel computes the parts of rows that a mask, biases or penalties change.

#include "packets.h"
#include "warp.h"

// The plain kernel as a function that takes part `only`.
#undef KERNEL
#undef GROUP
#undef GROUPS
#define KERNEL(name)                                                                          \
    DEVICE void name##_plain(U64 scratch, U64 inputs, const PACKET &packet, unsigned only)
#define GROUP only
#define GROUPS 0x80000000u
#include "sample_part.k"

#define LOADED 8

DEVICE bool is_changed(const OP &op, ADDRESS how) {
    const bool masked = HAS(op.allowed) && I32_AT(how, SAMPLING_MASK) > 0;
    const bool biased = HAS(op.bias) && I32_AT(how, SAMPLING_BIAS_COUNT) > 0;
    return masked || biased || recent_of(op, how).count > 0;
}

DEVICE void take_part(const OP &op, unsigned unit, float temperature) {
    const SHARE share = share_of(op.vocab, unit % op.parts, op.parts);
    const float *logits = (const float *)ROW(op.logits, unit / op.parts, op.logits_stride);
    float *values = (float *)ROW(op.values, unit / op.parts, op.vocab);
    BEST best = nothing_seen();
    bool sound = true;
    for (unsigned base = share.begin + threadIdx.x; base < share.end; base += LOADED * GROUP_SIZE) {
        float value[LOADED];
#pragma unroll
        for (unsigned i = 0; i < LOADED; i++)
            value[i] = base + i * GROUP_SIZE < share.end ? logits[base + i * GROUP_SIZE] : 0.0f;
#pragma unroll 1
        for (unsigned id = base; id < min(base + LOADED * GROUP_SIZE, share.end); id += GROUP_SIZE) {
            float own = value[0];
#pragma unroll
            for (unsigned i = 0; i + 1 < LOADED; i++) value[i] = value[i + 1];
            sound = sound && is_finite(own);
            if (temperature > 0.0f) {
                own = quotient(own, temperature);
                sound = sound && !is_nan(own);
                values[id] = own;
            }
            best = best_of(best, best_record(own, (int)id, true));
        }
    }
    best.finite = sound;
    best = group_best(best);
    if (threadIdx.x == 0) store_best(op.best, unit, best);
}

extern "C" __global__ void __launch_bounds__(GROUP_SIZE)
    sample_part(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const OP op = opened(launch);
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    for (unsigned unit = blockIdx.x; unit < op.rows * op.parts; unit += gridDim.x) {
        const ADDRESS how = ROW(op.sampling, unit / op.parts, SAMPLING_WORDS);
        if (is_changed(op, how))
            sample_part_plain(scratch, inputs, packets.of[0], unit);
        else
            take_part(op, unit, F32_AT(how, SAMPLING_TEMPERATURE));
    }
}
