// SCALE, ADD, or SCALE and the ADD of its result (rule R2): y = x factor, y = a + x or y = a + x factor.
// A thread computes an element. Compiled with THREADS, these operand numbers (see packets.h): X_AT,
// A_AT (-1 without ADD), Y_AT, and WIDTH_AT and FACTOR_AT, indices of the first packet's sizes and
// reals; FACTOR_AT is -1 without SCALE.

#include "packets.h"

extern "C" __global__ void __launch_bounds__(THREADS)
    scaled_rows(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *op = packet_of(launch, 0);
    const unsigned column = blockIdx.x * THREADS + threadIdx.x, token = blockIdx.y;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (column >= op->size[WIDTH_AT] || token >= count_of(launch, op)) return;
    float value = ((const float *)operand_at(launch, X_AT))[token * stride_at(launch, X_AT) + column];
    if (FACTOR_AT >= 0) value = value * op->real[FACTOR_AT < 0 ? 0 : FACTOR_AT];
    if (A_AT >= 0)
        value = ((const float *)operand_at(launch, A_AT))[token * stride_at(launch, A_AT) + column] +
                value;
    ((float *)operand_at(launch, Y_AT))[token * stride_at(launch, Y_AT) + column] = value;
}
