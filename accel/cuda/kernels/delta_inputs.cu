// SSM_DELTA_INPUTS of many tokens (rules R2, R4 and R8). The blocks of a column share a token: a warp
// normalizes one query or key at a time, and a thread of the first block computes g and b of a value
// head. Compiled with STATE_SIZE, WARPS, these operand numbers (see packets.h): X, ALPHA, BETA,
// DECAY, DT_BIAS, QK, GATES, and the packet number INPUTS_OP.

#include "delta_token.h"
#include "queries.h"

DEVICE const float *row_at(const LAUNCH &launch, int operand, unsigned token) {
    return (const float *)operand_at(launch, operand) + token * stride_at(launch, operand);
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    delta_inputs(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *op = packet_of(launch, INPUTS_OP);
    const unsigned token = blockIdx.x, key_heads = op->size[SSM_DELTA_INPUTS_KEY_HEADS];
    const unsigned value_heads = op->size[SSM_DELTA_INPUTS_VALUE_HEADS];
    const float eps = op->real[SSM_DELTA_INPUTS_EPS];
    const float scale = op->real[SSM_DELTA_INPUTS_QUERY_SCALE];
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (leaves_out(launch, STEPS)) return;
    if (token >= count_of(launch, op)) return;
    const float *x = row_at(launch, X, token);
    float *qk = (float *)row_at(launch, QK, token), *gates = (float *)row_at(launch, GATES, token);
#pragma unroll 2
    for (unsigned head = blockIdx.y * WARPS + threadIdx.x / WARP_LANES; head < 2 * key_heads;
         head += gridDim.y * WARPS)
        norm_keys(x + head * STATE_SIZE, qk + head * STATE_SIZE, eps, scale, head < key_heads,
                  threadIdx.x % WARP_LANES);
    if (blockIdx.y) return;
    for (unsigned head = threadIdx.x; head < value_heads; head += WARPS * WARP_LANES) {
        const FACTORS made =
            factors_of(row_at(launch, ALPHA, token)[head], row_at(launch, BETA, token)[head],
                       ((const float *)operand_at(launch, DECAY))[head],
                       ((const float *)operand_at(launch, DT_BIAS))[head], false);
        gates[head] = made.g, gates[value_heads + head] = made.b;
    }
}
