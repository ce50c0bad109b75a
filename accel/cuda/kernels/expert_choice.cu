// Chooses the experts of many tokens from their logits (rule R7), a warp for each.
//
// Compiled with WARPS, EXPERT_SEGMENTS (segments of 256 that cover all experts), the operand numbers
// LOGITS, IDS and WEIGHTS (see packets.h), and the packet numbers PRODUCT and TOPK.

#include "expert_choice.h"
#include "packets.h"

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    expert_choice(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *product = packet_of(launch, PRODUCT);
    const size_t token = blockIdx.x * WARPS + threadIdx.x / WARP_LANES;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (token >= count_of(launch, product)) return;
    const PACKET *topk = packet_of(launch, TOPK);
    choose_experts((const float *)operand_at(launch, LOGITS) + token * stride_at(launch, LOGITS),
                   product->size[MATMUL_ROWS], topk->size[EXPERT_TOPK_USED],
                   topk->size[EXPERT_TOPK_RENORMALIZE] != 0,
                   (int *)operand_at(launch, IDS) + token * stride_at(launch, IDS),
                   (float *)operand_at(launch, WEIGHTS) + token * stride_at(launch, WEIGHTS),
                   threadIdx.x % WARP_LANES);
}
