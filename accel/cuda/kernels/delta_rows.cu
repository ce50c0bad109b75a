// SSM_DELTA_NET of many tokens after its inputs were computed (rule R8). A block applies all tokens
// in order to WARPS * ROW_SETS * ROWS_AT_ONCE rows of one value head's state. It copies the inputs
// of STAGE_TOKENS tokens at a time ahead of their use, into one of STAGES stages, keys and queries
// in the order in which lanes hold them. One stage may be read while the one behind it is waited for
// and the one before it is filled.
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
#define STAGES 3
#define QK_FLOATS (2 * STATE_SIZE)  // a token's queries and keys
#define NO_ROW 0xFFFFFFFFu

struct DELTA_SOURCE {
    const float *q, *k, *v, *gates;
    const unsigned *query;
    size_t qk_stride, x_stride, gates_stride, query_stride;
    unsigned tokens, value_heads, head;

    // Requests tokens `first` to `first` + STAGE_TOKENS - 1.
    __device__ __forceinline__ void fetch(float *stage, unsigned first) const {
#pragma unroll
        for (unsigned n = 0; n < STAGE_TOKENS * QK_FLOATS / THREADS; n++) {
            // A thread copies the same word of some tokens, or some words of every token.
            const unsigned at = n * THREADS / QK_FLOATS + threadIdx.x / QK_FLOATS;
            const unsigned word = THREADS < QK_FLOATS ? n * THREADS % QK_FLOATS + threadIdx.x
                                                      : threadIdx.x % QK_FLOATS;
            const unsigned key = word % STATE_SIZE, token = first + at;
            const bool of_keys = word >= STATE_SIZE;
            if (token >= tokens) break;
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

DEVICE void clear_keys(float (&keys)[LANE_KEYS]) {
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) keys[i] = 0.0f;
}

// What a lane needs of a token, read from a stage.
struct OF_TOKEN {
    float q[LANE_KEYS], k[LANE_KEYS], v[ROW_SETS], g, b;
    unsigned slot, position;

    __device__ __forceinline__ void load(const float *stage, unsigned row, int lane) {
        load_lane(k, stage + AT_KEYS, lane);
        load_lane(q, stage, lane);
#pragma unroll
        for (int s = 0; s < ROW_SETS; s++) v[s] = stage[AT_VALUES + row + s * ROWS_AT_ONCE];
        const float4 of_all = *(const float4 *)(stage + AT_FACTORS);
        g = of_all.x, b = of_all.y;
        slot = __float_as_uint(of_all.z), position = __float_as_uint(of_all.w);
    }
};

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
    float m[ROW_SETS][LANE_KEYS] = {};
    float sum[2 * ROW_SETS] = {};  // M k of the next token, then M q of this one
    const QUERIES queries = {source.query, source.query_stride};
    unsigned held = NO_ROW;  // the row that the state in registers belongs to
    auto state_of = [&](unsigned row, int set) {
        return states + (((size_t)row * value_heads + head) * STATE_SIZE + first_row + own_row +
                         set * ROWS_AT_ONCE) * STATE_SIZE;
    };
    auto store = [&]() {
#pragma unroll
        for (int s = 0; s < ROW_SETS; s++) store_keys(m[s], state_of(held, s), lane);
    };
    // Loads the state of a token's slot into registers, decays it and multiplies it by the token's
    // keys.
    auto begin = [&](const OF_TOKEN &token) {
        const unsigned first = token.slot * STATES;
        const unsigned row = first + (token.position + STATES - 1) % STATES;
        if (row != held || token.position == 0) {
            if (STATES == 1 && row != held && held != NO_ROW) store();
#pragma unroll
            for (int s = 0; s < ROW_SETS; s++)
                if (token.position)
                    load_keys(m[s], state_of(row, s), lane);
                else
                    clear_keys(m[s]);
        }
        held = first + token.position % STATES;
        decay_rows(m, token.k, token.g, false, sum);
    };
    source.fetch(stages, 0);
    source.fetch(stages + STAGE_FLOATS, STAGE_TOKENS);
    await_parts<1>();
    __syncthreads();
    const float *own = stages, *const stages_end = stages + STAGES * STAGE_FLOATS;
    float *filled = stages + 2 * STAGE_FLOATS;
    // One is computed while the other is read from shared memory.
    OF_TOKEN even, odd;
    even.load(own, own_row, lane);
    begin(even);
    fold_of_rows(sum);
    auto apply = [&](unsigned token, const OF_TOKEN &now, OF_TOKEN &then) {
        const unsigned next = token + 1;
        own = own + TOKEN_FLOATS == stages_end ? stages : own + TOKEN_FLOATS;
        if (next % STAGE_TOKENS == 0) {
            await_parts<0>();
            __syncthreads();
            source.fetch(filled, next + STAGE_TOKENS);
            filled = filled + STAGE_FLOATS == stages_end ? stages : filled + STAGE_FLOATS;
        }
        then.load(own, own_row, lane);
        change_rows<ROW_SETS, 1>(m, now.k, now.v, now.b, sum);
        if (STATES > 1 && queries.remains(token, tokens, STATES)) store();
#pragma unroll
        for (int s = 0; s < ROW_SETS; s++) sum[ROW_SETS + s] = product_in_lane(m[s], now.q);
        // The sums for the next token's product are folded together with those of this token's
        // output.
        if (next < tokens) begin(then);
        fold_of_rows(sum);
        if (lane % ROW_LANES == 0)
#pragma unroll
            for (int s = 0; s < ROW_SETS; s++)
                y[own_row + s * ROWS_AT_ONCE] = sum[ROW_SETS + s];
        y += y_stride;
    };
#pragma unroll 1
    for (unsigned token = 0; token < tokens; token += 2) {
        apply(token, even, odd);
        if (token + 1 < tokens) apply(token + 1, odd, even);
    }
    if (STATES == 1) store();
}
