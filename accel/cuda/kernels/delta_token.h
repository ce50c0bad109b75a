// Parts of a delta net's token other than its recurrence (rules R2, R4 and R8): a thread convolves
// a channel or computes g and b; a warp normalizes a query, a key or an output.

#ifndef DELTA_TOKEN_H
#define DELTA_TOKEN_H

#include "delta.h"
#include "packets.h"

#define PER_LANE (STATE_SIZE / WARP_LANES)

// Convolves a channel's new value with the values before it, oldest first, and shifts these.
template <int history>
DEVICE float convolved(const float (&tap)[history + 1], float (&past)[history], float now,
                       bool starts) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < history; i++) {
        const float value = starts ? 0.0f : past[i];
        total = total + tap[i] * value;
        if (i) past[i - 1] = value;
    }
    past[history - 1] = now;
    total = total + tap[history] * now;
    return silu_of(total);
}

// Drops the oldest of a channel's values, and appends a new one.
template <int history> DEVICE void shift(float (&past)[history], float now, bool starts) {
#pragma unroll
    for (int i = 1; i < history; i++) past[i - 1] = starts ? 0.0f : past[i];
    past[history - 1] = now;
}

// g and b of a value head's token.
struct FACTORS {
    float g, b;
    unsigned starts;
};

DEVICE FACTORS factors_of(float alpha, float beta, float decay, float dt_bias, bool starts) {
    return {exp_of(softplus_of(alpha + dt_bias) * decay), sigmoid_of(beta), starts};
}

// y = x / sqrt(sum x x + eps) * scale of STATE_SIZE values.
DEVICE void norm_keys(const float *x, float *y, float eps, float scale, bool scaled, int lane) {
    float value[PER_LANE], square[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        value[i] = x[lane + WARP_LANES * i];
        square[i] = value[i] * value[i];
    }
    const float r = __fdiv_rn(1.0f, __fsqrt_rn(fold_of_warp(square) + eps));
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        value[i] = value[i] * r;
        y[lane + WARP_LANES * i] = scaled ? value[i] * scale : value[i];
    }
}

// y = x / sqrt(mean of x x + eps) * weight * open, of whose rows a lane has its values.
DEVICE void gate_values(const float *x, const float (&weight)[PER_LANE],
                        const float (&open)[PER_LANE], float eps, float *y, int lane) {
    float value[PER_LANE], square[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        value[i] = x[lane + WARP_LANES * i];
        square[i] = value[i] * value[i];
    }
    const float mean = __fdiv_rn(fold_of_warp(square), (float)STATE_SIZE);
    const float r = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        y[lane + WARP_LANES * i] = ((value[i] * r) * weight[i]) * open[i];
}

// The same where open is silu(gate).
DEVICE void gate_row(const float *x, const float *weight, const float *gate, float eps, float *y,
                     int lane) {
    float open[PER_LANE], own[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        own[i] = weight[lane + WARP_LANES * i];
        open[i] = silu_of(gate[lane + WARP_LANES * i]);
    }
    gate_values(x, own, open, eps, y, lane);
}

#endif
