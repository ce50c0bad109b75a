// SSM_GATED_NORM of many tokens (rules R2 and R4). The blocks of a column share the heads of a token,
// of which a warp computes one at a time. Compiled with STATE_SIZE, WARPS, these operand numbers (see
// packets.h): X, GATE, WEIGHT, Y, and the packet number NORM.

#include "delta_token.h"
#include "queries.h"

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    delta_norm(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *op = packet_of(launch, NORM);
    const unsigned token = blockIdx.x;
    const int lane = threadIdx.x % WARP_LANES;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (leaves_out(launch, STEPS)) return;
    if (token >= count_of(launch, op)) return;
    const float *x = (const float *)operand_at(launch, X) + token * stride_at(launch, X);
    const float *gate = (const float *)operand_at(launch, GATE) + token * stride_at(launch, GATE);
    float *y = (float *)operand_at(launch, Y) + token * stride_at(launch, Y);
    const float *weight = (const float *)operand_at(launch, WEIGHT);
    for (unsigned head = blockIdx.y * WARPS + threadIdx.x / WARP_LANES;
         head < op->size[SSM_GATED_NORM_HEADS]; head += gridDim.y * WARPS)
        gate_row(x + head * STATE_SIZE, weight, gate + head * STATE_SIZE,
                 op->real[SSM_GATED_NORM_EPS], y + head * STATE_SIZE, lane);
}
