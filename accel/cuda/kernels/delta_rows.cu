// SSM_DELTA_NET of many tokens after its inputs were computed (rule R8). A block applies all tokens
// in order to WARPS * ROW_SETS * ROWS_AT_ONCE rows of one value head's state. It copies the inputs
// of STAGE_TOKENS tokens at a time ahead of their use, into one of two stages, keys and queries in
// the order in which lanes hold them.
//
// A slot has STATES rows of states; what follows a position is in the row of its remainder.
//
// Compiled with STATE_SIZE, ROW_LANES, WARPS, ROW_SETS, STAGE_TOKENS, STATES, these operand numbers (see
// packets.h): X, QK, GATES, QUERY, STATE, Y, and the packet number NET.

#include "delta.h"
#include "queries.h"

#define THREADS (WARPS * WARP_LANES)
#define BLOCK_ROWS (WARPS * ROW_SETS * ROWS_AT_ONCE)
#define ROW_PARTS (BLOCK_ROWS / 4)  // of 16 bytes
// Four lanes' keys apart, so that lanes read from different banks.
#define LANE_STRIDE (LANE_KEYS > 4 ? LANE_KEYS + 4 : LANE_KEYS)
#define AT_KEYS (ROW_LANES * LANE_STRIDE)  // behind the queries
#define AT_VALUES (2 * AT_KEYS)
#define AT_FACTORS (AT_VALUES + BLOCK_ROWS)  // g and b, slot and position
#define TOKEN_FLOATS (AT_FACTORS + 4)
#define STAGE_FLOATS (STAGE_TOKENS * TOKEN_FLOATS)

struct DELTA_SOURCE {
    const float *q, *k, *v, *gates;
    const unsigned *query;
    size_t qk_stride, x_stride, gates_stride, query_stride;
    unsigned tokens, value_heads, head;

    // Requests tokens `first` to `first` + STAGE_TOKENS - 1.
    __device__ __forceinline__ void fetch(float *stage, unsigned first) const {
        for (unsigned i = threadIdx.x; i < STAGE_TOKENS * 2 * STATE_SIZE; i += THREADS) {
            const unsigned at = i / (2 * STATE_SIZE), key = i % STATE_SIZE, token = first + at;
            if (token >= tokens) break;
            const bool of_keys = i / STATE_SIZE % 2;
            begin_word(stage + at * TOKEN_FLOATS + (of_keys ? AT_KEYS : 0) +
                           key % ROW_LANES * LANE_STRIDE + key / ROW_LANES,
                       (of_keys ? k : q) + token * qk_stride + key);
        }
        for (unsigned i = threadIdx.x; i < STAGE_TOKENS * ROW_PARTS; i += THREADS) {
            const unsigned at = i / ROW_PARTS, part = i % ROW_PARTS, token = first + at;
            if (token >= tokens) break;
            begin_part(stage + at * TOKEN_FLOATS + AT_VALUES + 4 * part,
                       v + token * x_stride + 4 * part);
        }
        for (unsigned i = threadIdx.x; i < 4 * STAGE_TOKENS; i += THREADS) {
            const unsigned at = i / 4, what = i % 4, token = first + at;
            if (token >= tokens) break;
            const void *from = what < 2 ? (const void *)(gates + token * gates_stride +
                                                         what * value_heads + head)
                                        : (const void *)(query + token * query_stride +
                                                         (what == 2 ? QUERY_SLOT : QUERY_POSITION));
            begin_word(stage + at * TOKEN_FLOATS + AT_FACTORS + what, from);
        }
        end_parts();
    }
};

// A lane's keys or queries of a stage.
DEVICE void load_lane(float (&keys)[LANE_KEYS], const float *stage, int lane) {
    const float *own = stage + lane % ROW_LANES * LANE_STRIDE;
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i += 4) {
        const float4 four = *(const float4 *)(own + i);
        keys[i] = four.x, keys[i + 1] = four.y, keys[i + 2] = four.z, keys[i + 3] = four.w;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_rows(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *net = packet_of(launch, NET);
    const unsigned key_heads = net->size[SSM_DELTA_NET_KEY_HEADS];
    const unsigned value_heads = net->size[SSM_DELTA_NET_VALUE_HEADS];
    const unsigned head = blockIdx.x, first_row = blockIdx.y * BLOCK_ROWS;
    const unsigned key_head = net->size[SSM_DELTA_NET_GROUPED]
                                  ? head / (value_heads / key_heads)
                                  : head % key_heads;
    const unsigned tokens = count_of(launch, net);
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned own_row =
        threadIdx.x / WARP_LANES * (ROW_SETS * ROWS_AT_ONCE) + lane / ROW_LANES;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (!tokens) return;
    const float *qk = (const float *)operand_at(launch, QK) + key_head * STATE_SIZE;
    const DELTA_SOURCE source = {
        qk,
        qk + key_heads * STATE_SIZE,
        (const float *)operand_at(launch, X) + (2 * key_heads + head) * STATE_SIZE + first_row,
        (const float *)operand_at(launch, GATES),
        (const unsigned *)operand_at(launch, QUERY),
        stride_at(launch, QK),
        stride_at(launch, X),
        stride_at(launch, GATES),
        stride_at(launch, QUERY),
        tokens,
        value_heads,
        head,
    };
    float *const stages = (float *)shared;
    float *const states = (float *)operand_at(launch, STATE);
    float *y = (float *)operand_at(launch, Y) + head * STATE_SIZE + first_row;
    const size_t y_stride = stride_at(launch, Y);
    float m[ROW_SETS][LANE_KEYS] = {}, k[LANE_KEYS], q[LANE_KEYS];
    float sum[2 * ROW_SETS] = {};  // M k of the next token, then M q of this one
    const QUERIES queries = {source.query, source.query_stride};
    float *held = 0;  // where the state in registers belongs
    auto state_at = [&](unsigned row) {
        return states + (((size_t)row * value_heads + head) * STATE_SIZE + first_row) * STATE_SIZE;
    };
    auto store = [&]() {
#pragma unroll
        for (int s = 0; s < ROW_SETS; s++)
            store_keys(m[s], held + (size_t)(own_row + s * ROWS_AT_ONCE) * STATE_SIZE, lane);
    };
    // Loads the state of a token's slot into registers, decays it and multiplies it by the token's
    // keys.
    auto begin = [&](const float *of_token) {
        const float *factors = of_token + AT_FACTORS;
        const unsigned first = __float_as_uint(factors[2]) * STATES;
        const unsigned position = __float_as_uint(factors[3]);
        float *state = state_at(first + (position + STATES - 1) % STATES);
        if (state != held) {
            if (STATES == 1 && held) store();
#pragma unroll
            for (int s = 0; s < ROW_SETS; s++)
                load_keys(m[s], state + (size_t)(own_row + s * ROWS_AT_ONCE) * STATE_SIZE, lane);
        }
        held = state_at(first + position % STATES);
        decay_rows(m, k, factors[0], position == 0, sum);
    };
    source.fetch(stages, 0);
    source.fetch(stages + STAGE_FLOATS, STAGE_TOKENS);
    await_parts<1>();
    __syncthreads();
    load_lane(k, stages + AT_KEYS, lane);
    begin(stages);
    fold_of_rows(sum);
#pragma unroll 1
    for (unsigned token = 0; token < tokens; token++) {
        const unsigned stage = token / STAGE_TOKENS % 2, next = token + 1;
        const float *of_token =
            stages + stage * STAGE_FLOATS + token % STAGE_TOKENS * TOKEN_FLOATS;
        const bool remains = STATES > 1 && queries.remains(token, tokens, STATES);
        load_lane(q, of_token, lane);
        change_rows(m, k, of_token + AT_VALUES + own_row, of_token[AT_FACTORS + 1], sum);
        if (remains) store();
        if (next % STAGE_TOKENS == 0) {
            await_parts<0>();
            __syncthreads();
            source.fetch(stages + stage * STAGE_FLOATS, next + STAGE_TOKENS);
        }
#pragma unroll
        for (int s = 0; s < ROW_SETS; s++) sum[ROW_SETS + s] = product_in_lane(m[s], q);
        // The sums for the next token's product are folded together with those of this token's
        // output.
        if (next < tokens) {
            const float *of_next = stages + next / STAGE_TOKENS % 2 * STAGE_FLOATS +
                                   next % STAGE_TOKENS * TOKEN_FLOATS;
            load_lane(k, of_next + AT_KEYS, lane);
            begin(of_next);
        }
        fold_of_rows(sum);
        if (lane % ROW_LANES == 0)
#pragma unroll
            for (int s = 0; s < ROW_SETS; s++)
                y[token * y_stride + own_row + s * ROWS_AT_ONCE] = sum[ROW_SETS + s];
    }
    if (STATES == 1) store();
}
