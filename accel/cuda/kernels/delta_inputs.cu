// SSM_DELTA_INPUTS of many tokens (rules R2 and R4): a block takes a token, a warp a query or key at a time.
//
// Compiled with STATE_SIZE, WARPS and the places of operands as packets.h has them: X, ALPHA, BETA, DECAY, DT_BIAS, QK,
// GATES, and the number of the packet INPUTS_OP.

#include "delta_token.h"

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    delta_inputs(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *op = packet_of(launch, INPUTS_OP);
    const unsigned key_heads = op->size[SSM_DELTA_INPUTS_KEY_HEADS];
    const unsigned value_heads = op->size[SSM_DELTA_INPUTS_VALUE_HEADS];
    const unsigned token = blockIdx.x;
    const int lane = threadIdx.x % WARP_LANES;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (token >= count_of(launch, op)) return;
    const float *x = (const float *)operand_at(launch, X) + token * stride_at(launch, X);
    float *qk = (float *)operand_at(launch, QK) + token * stride_at(launch, QK);
    float *gates = (float *)operand_at(launch, GATES) + token * stride_at(launch, GATES);
    for (unsigned head = threadIdx.x / WARP_LANES; head < 2 * key_heads; head += WARPS)
        norm_keys(x + head * STATE_SIZE, qk + head * STATE_SIZE, op->real[SSM_DELTA_INPUTS_EPS],
                  op->real[SSM_DELTA_INPUTS_QUERY_SCALE], head < key_heads, lane);
    for (unsigned head = threadIdx.x; head < value_heads; head += WARPS * WARP_LANES) {
        const FACTORS factors = factors_of(
            ((const float *)operand_at(launch, ALPHA))[token * stride_at(launch, ALPHA) + head],
            ((const float *)operand_at(launch, BETA))[token * stride_at(launch, BETA) + head],
            ((const float *)operand_at(launch, DECAY))[head],
            ((const float *)operand_at(launch, DT_BIAS))[head], false);
        gates[head] = factors.g;
        gates[value_heads + head] = factors.b;
    }
}
