// SCALE and the ADD of its result (rule R2): y = a + x factor. A thread computes an element. Compiled
// with THREADS and these operand numbers (see packets.h): X_AT, A_AT, Y_AT. SCALE's packet is the first.

#include "packets.h"

extern "C" __global__ void __launch_bounds__(THREADS)
    scaled_rows(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *op = packet_of(launch, 0);
    const unsigned column = blockIdx.x * THREADS + threadIdx.x, token = blockIdx.y;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (column >= op->size[SCALE_WIDTH] || token >= count_of(launch, op)) return;
    const float *x = (const float *)operand_at(launch, X_AT) + token * stride_at(launch, X_AT);
    const float *a = (const float *)operand_at(launch, A_AT) + token * stride_at(launch, A_AT);
    float *y = (float *)operand_at(launch, Y_AT) + token * stride_at(launch, Y_AT);
    y[column] = a[column] + x[column] * op->real[SCALE_FACTOR];
}
