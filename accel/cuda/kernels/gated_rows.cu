// SWIGLU (rule R2); a thread computes an element. Compiled with THREADS and these operand numbers
// (see packets.h): GATE_AT, UP_AT, Y_AT. The packet is the first one.

#include "gate.h"
#include "packets.h"

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_rows(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *op = packet_of(launch, 0);
    const unsigned tokens = count_of(launch, op), width = op->size[SWIGLU_WIDTH];
    const unsigned column = blockIdx.x * THREADS + threadIdx.x;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    const unsigned token = blockIdx.y;
    if (column >= width || token >= tokens) return;
    const float *gate = (const float *)operand_at(launch, GATE_AT) + column;
    const float *up = (const float *)operand_at(launch, UP_AT) + column;
    float *y = (float *)operand_at(launch, Y_AT) + column;
    y[token * stride_at(launch, Y_AT)] =
        gated(op->size[SWIGLU_ACTIVATION], gate[token * stride_at(launch, GATE_AT)],
              up[token * stride_at(launch, UP_AT)]);
}
