// y = residual + the chosen experts' products, each times its weight, in order; then the shared
// expert's product (rule R7). A thread computes a column of a token.
//
// Compiled with THREADS, USED and these operand numbers (see packets.h): PRODUCTS, IDS, WEIGHTS,
// EXPERT_SCALE, RESIDUAL, Y, and of the shared expert SHARED_Y and GATE_LOGIT, each -1 if absent.
// TOTAL is a packet number.

#include "packets.h"
#include "warp.h"

extern "C" __global__ void __launch_bounds__(THREADS)
    expert_total(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *op = packet_of(launch, TOTAL);
    const unsigned width = op->size[EXPERT_SUM_WIDTH], tokens = count_of(launch, op);
    const unsigned token = blockIdx.y, column = blockIdx.x * THREADS + threadIdx.x;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (token >= tokens || column >= width) return;
    const float *products = (const float *)operand_at(launch, PRODUCTS) + column;
    const size_t stride = stride_at(launch, PRODUCTS);
    const int *ids = (const int *)operand_at(launch, IDS) + token * stride_at(launch, IDS);
    const float *weights =
        (const float *)operand_at(launch, WEIGHTS) + token * stride_at(launch, WEIGHTS);
    const float *expert_scale = (const float *)operand_at(launch, EXPERT_SCALE);
    float product[USED], sum = 0.0f;
#pragma unroll
    for (int choice = 0; choice < USED; choice++)
        product[choice] = products[(size_t)(token * USED + choice) * stride];
    if (RESIDUAL >= 0)
        sum = ((const float *)
                   operand_at(launch, RESIDUAL))[token * stride_at(launch, RESIDUAL) + column];
#pragma unroll
    for (int choice = 0; choice < USED; choice++) {
        if (expert_scale) product[choice] = product[choice] * expert_scale[ids[choice]];
        sum = sum + weights[choice] * product[choice];
    }
    if (SHARED_Y >= 0) {
        const float value = ((const float *)operand_at(
            launch, SHARED_Y))[token * stride_at(launch, SHARED_Y) + column];
        if (GATE_LOGIT >= 0)
            sum = sum + sigmoid_of(((const float *)operand_at(
                            launch, GATE_LOGIT))[token * stride_at(launch, GATE_LOGIT)]) * value;
        else
            sum = sum + value;
    }
    ((float *)operand_at(launch, Y))[token * stride_at(launch, Y) + column] = sum;
}
