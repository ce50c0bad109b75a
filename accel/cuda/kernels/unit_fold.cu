// Adds up the spans that unit_groups.cu or unit_spans.cu wrote, then the bias and the residual, for
// results that no unit_pack.cu reads. A block computes one token at a time. Compiled as span_fold.h
// says; Y is the operand number of the result.

#include "sending.h"
#include "span_fold.h"

extern "C" __global__ void unit_fold(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *product = packet_of(launch, FOLDED);
    const unsigned tokens = count_of(launch, product), rows = product->size[MATMUL_ROWS];
    SENT sent;
    sent.open(launch, TO_Y);
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    for (unsigned token = blockIdx.x; token < tokens; token += gridDim.x)
        for (unsigned row = threadIdx.x * 4; row < rows; row += blockDim.x * 4)
            sent.store((float4 *)((float *)operand_at(launch, Y) + token * stride_at(launch, Y) + row),
                       fold_four(launch, token, tokens, rows, (const float *)workspace, row));
    meet_others(launch);
}
