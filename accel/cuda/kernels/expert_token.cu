// All of a block of experts for one to four tokens: norm, router, choice, gates, downs and their weighted sum
// (rules R2 to R5 and R7), as expert_router.cu, expert_gates.cu and expert_down.cu do in three
// launches. The blocks, one a multiprocessor at most, exchange floats as in exchange.h: each
// publishes the logits of some rows of the router, then rows of the results of gates.
//
// The launch is cooperative: no block runs unless all do, whatever else the device executes. A block
// that waits ends, with any results, once the host sets *stop.
//
// The workspace begins with counts of launches and of the blocks that know it. Then come two banks,
// of which launch n uses bank n modulo 2 and clears the other one, last used by launch n - 1, which
// has ended by then; its words are 0 when launch n + 1 begins. The last block to know the count adds
// this launch.
//
// Compiled with WARPS; TOKENS, 1, 2 or 4; TILES_AT_ONCE, of gates, whose values have room; SLOTS,
// chunks of gates that a warp copies ahead; EXPERT_SEGMENTS; UNITS of a
// row of x and HIDDEN_UNITS of one of h; GATES_FORMAT, SHARED_GATES_FORMAT, DOWNS_FORMAT and
// SHARED_DOWNS_FORMAT; USED; these operand numbers (see packets.h), -1 if absent: X, NORM_WEIGHT,
// ROUTER, GATE_ROW, GATES, UPS, SHARED_GATE, SHARED_UP, DOWNS, SHARED_DOWN, EXPERT_SCALE, RESIDUAL,
// Y; ACTIVATION, that of all experts; and packet numbers NORM, PRODUCT (of the router), TOPK and
// DOWNS_PRODUCT.

#include "expert_token_products.h"

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, 1)
    expert_token(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace,
                 U64 stop) {
    BLOCK_MEMORY(shared);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    TOKEN_MEMORY &memory = *(TOKEN_MEMORY *)shared;
    const unsigned warp = threadIdx.x / WARP_LANES;
    FOLLOWING_MAY_START;
    open_copies(memory.gates[warp].barriers, SLOTS);
    open_copies(memory.downs_barriers + warp, 1);
    ROUTER_OF_BLOCK router(launch);
    router.load(blockIdx.x);
    router.load_norm();
    GATES_COPIES copies(launch, memory);
    if (copies.is_known()) copies.fetch();
    PRECEDING_DONE;
    const unsigned tokens = count_of(launch, packet_of(launch, PRODUCT));
    if (!tokens) return;
    router.load_x(tokens);
    unsigned *state = (unsigned *)workspace;
    const unsigned launches = load_shared_word(state), turn = launches & 1;
    float *bank = (float *)(workspace + BANKS_AT + turn * BANK_BYTES);
    router.run(bank, memory);
    // All threads of the block know the count, since they have met.
    if (threadIdx.x == WARPS * WARP_LANES - 1 && atomicAdd(state + 1, 1u) + 1 == gridDim.x)
        state[1] = 0, state[0] = launches + 1;
    uint4 *other = (uint4 *)(workspace + BANKS_AT + (1 - turn) * BANK_BYTES);
    for (unsigned i = blockIdx.x * WARPS * WARP_LANES + threadIdx.x; i < BANK_BYTES / sizeof(uint4);
         i += gridDim.x * WARPS * WARP_LANES)
        other[i] = make_uint4(0, 0, 0, 0);
    const ARRIVING arriving = {(const unsigned *)stop};
    choose_together(launch, bank, arriving, tokens, memory.choice);
    __syncthreads();
    if (TOKENS > 1) {
        if (threadIdx.x < WARP_LANES) find_distinct(memory.choice, tokens, memory.distinct);
        __syncthreads();
        copies.limit(memory.distinct.count);
    }
    float *hidden = bank + TOKENS * LOGIT_FLOATS;
    make_hidden(launch, hidden, tokens, copies, memory);
    add_downs(launch, hidden, arriving, tokens, memory);
}
