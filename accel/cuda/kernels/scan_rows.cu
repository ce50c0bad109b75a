// SSM_SCAN (rule R8): M = g M + (s v) b^T; y = M c + skip v, a row of M being a value. A block
// computes WARPS times four rows of a head, for the slots of one remainder modulo gridDim.y, token
// after token. A row is in the registers of eight lanes. What tokens bring passes through two stages
// of shared memory.
//
// Compiled with STATE_SIZE, WARPS, STATES (rows of states of a slot; what follows a position is in
// the row of its remainder), these operand numbers (see packets.h): X, GATES, SKIP, QUERY, STATE, Y,
// and the packet number SCAN.

#include "delta.h"
#include "queries.h"

#define THREADS (WARPS * WARP_LANES)
#define ROWS (WARPS * ROWS_AT_ONCE)
#define GROUP_TOKENS 8
#define LANE_STRIDE (LANE_KEYS + 4)  // of a lane's keys in shared memory, for 16-byte loads
#define KEY_FLOATS (ROW_LANES * LANE_STRIDE)
#define AT_VALUES (2 * KEY_FLOATS)
#define AT_GATES (AT_VALUES + ROWS)
#define TOKEN_FLOATS (AT_GATES + 4)  // b, c, the block's values, g and s
#define KEY_FOURS (STATE_SIZE / 4)
#define FOURS (2 * GROUP_TOKENS * KEY_FOURS)
#define THREAD_FOURS ((FOURS + THREADS - 1) / THREADS)
#define NO_ROW 0xFFFFFFFFu

// Tokens of the block's slots, THREADS at a time.
struct OWN_TOKENS {
    unsigned number[THREADS], before[THREADS], after[THREADS];  // rows of states
    unsigned counts[WARPS];

    // Those of tokens `first` to `first` + THREADS - 1, by the whole block; returns how many.
    __device__ __forceinline__ unsigned find(const QUERIES &queries, unsigned first, unsigned tokens) {
        const unsigned count =
            find_own(queries, first, tokens, gridDim.y, blockIdx.y, number, 0, counts);
        if (threadIdx.x < count) {
            const unsigned token = number[threadIdx.x];
            before[threadIdx.x] = queries.starts(token) ? NO_ROW : queries.row_before(token, STATES);
            after[threadIdx.x] = queries.row_after(token, STATES);
        }
        return count;
    }
};

// What a thread copies of a group of tokens.
struct GROUP_PARTS {
    float4 keys[THREAD_FOURS];
    float value, gate;
};

struct TOKEN_SOURCE {
    const float *values, *keys, *gates;  // of the block's first row; b of its group of heads; g
    size_t stride, c_apart, gates_stride;
    unsigned heads;

    __device__ __forceinline__ void load(GROUP_PARTS &parts, const unsigned *number,
                                         unsigned count) const {
#pragma unroll
        for (int n = 0; n < THREAD_FOURS; n++) {
            const unsigned item = n * THREADS + threadIdx.x, token = item / (2 * KEY_FOURS);
            if (token >= GROUP_TOKENS || token >= count) continue;
            const unsigned of_c = item / KEY_FOURS % 2;
            parts.keys[n] = *(const float4 *)(keys + number[token] * stride + of_c * c_apart +
                                              item % KEY_FOURS * 4);
        }
        const unsigned token = threadIdx.x / ROWS;
        static_assert(THREADS == GROUP_TOKENS * ROWS, "a thread for each value");
        if (token < count) parts.value = values[number[token] * stride + threadIdx.x % ROWS];
        if (threadIdx.x < 2 * GROUP_TOKENS && threadIdx.x / 2 < count)
            parts.gate = gates[number[threadIdx.x / 2] * gates_stride + threadIdx.x % 2 * heads];
    }
    __device__ __forceinline__ void store(float *stage, const GROUP_PARTS &parts) const {
#pragma unroll
        for (int n = 0; n < THREAD_FOURS; n++) {
            const unsigned item = n * THREADS + threadIdx.x, token = item / (2 * KEY_FOURS);
            if (token >= GROUP_TOKENS) continue;
            const unsigned key = item % KEY_FOURS * 4;
            float *to = stage + token * TOKEN_FLOATS + item / KEY_FOURS % 2 * KEY_FLOATS +
                        key % ROW_LANES * LANE_STRIDE + key / ROW_LANES;
            to[0] = parts.keys[n].x, to[LANE_STRIDE] = parts.keys[n].y;
            to[2 * LANE_STRIDE] = parts.keys[n].z, to[3 * LANE_STRIDE] = parts.keys[n].w;
        }
        stage[threadIdx.x / ROWS * TOKEN_FLOATS + AT_VALUES + threadIdx.x % ROWS] = parts.value;
        if (threadIdx.x < 2 * GROUP_TOKENS)
            stage[threadIdx.x / 2 * TOKEN_FLOATS + AT_GATES + threadIdx.x % 2] = parts.gate;
    }
};

DEVICE void load_lane(float (&keys)[LANE_KEYS], const float *of_token, int lane) {
    const float4 *from = (const float4 *)(of_token + lane % ROW_LANES * LANE_STRIDE);
#pragma unroll
    for (int i = 0; i < LANE_KEYS / 4; i++) {
        const float4 v = from[i];
        keys[4 * i] = v.x, keys[4 * i + 1] = v.y, keys[4 * i + 2] = v.z, keys[4 * i + 3] = v.w;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scan_rows(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    BLOCK_MEMORY(shared);
    float *const stages = (float *)shared;
    OWN_TOKENS *const own = (OWN_TOKENS *)(stages + 2 * GROUP_TOKENS * TOKEN_FLOATS);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *scan = packet_of(launch, SCAN);
    const unsigned heads = scan->size[SSM_SCAN_HEADS], groups = scan->size[SSM_SCAN_GROUPS];
    const unsigned head_dim = scan->size[SSM_SCAN_HEAD_DIM], blocks = head_dim / ROWS;
    const unsigned head = blockIdx.x / blocks, first_row = blockIdx.x % blocks * ROWS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned own_row = threadIdx.x / ROW_LANES;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    const unsigned tokens = count_of(launch, scan);
    const QUERIES queries = {(const unsigned *)operand_at(launch, QUERY), stride_at(launch, QUERY)};
    const float *const x = (const float *)operand_at(launch, X);
    const size_t y_stride = stride_at(launch, Y);
    const TOKEN_SOURCE source = {
        x + head * head_dim + first_row,
        x + heads * head_dim + head / (heads / groups) * STATE_SIZE,
        (const float *)operand_at(launch, GATES) + head,
        stride_at(launch, X),
        groups * STATE_SIZE,
        stride_at(launch, GATES),
        heads,
    };
    float *const states = (float *)operand_at(launch, STATE);
    float *const y = (float *)operand_at(launch, Y) + head * head_dim + first_row + own_row;
    const float skip = ((const float *)operand_at(launch, SKIP))[head];
    auto state_of = [&](unsigned row) {
        return states + (((size_t)row * heads + head) * head_dim + first_row + own_row) * STATE_SIZE;
    };
    float m[1][LANE_KEYS] = {};
    unsigned held = NO_ROW;  // the row that the state in registers belongs to
    for (unsigned first = 0; first < tokens; first += THREADS) {
        const unsigned count = own->find(queries, first, tokens);
        GROUP_PARTS parts = {};
        source.load(parts, own->number, count);
        source.store(stages, parts);
        __syncthreads();
#pragma unroll 1
        for (unsigned group = 0, turn = 0; group < count; group += GROUP_TOKENS, turn++) {
            const unsigned behind = group + GROUP_TOKENS;
            if (behind < count) source.load(parts, own->number + behind, count - behind);
            const float *of_token = stages + turn % 2 * (GROUP_TOKENS * TOKEN_FLOATS);
#pragma unroll 1
            for (unsigned at = group; at < min(behind, count); at++, of_token += TOKEN_FLOATS) {
                const unsigned token = own->number[at], before = own->before[at];
                const float g = of_token[AT_GATES], step = of_token[AT_GATES + 1];
                if (before != held || before == NO_ROW) {
                    if (STATES == 1 && held != NO_ROW) store_keys(m[0], state_of(held), lane);
                    if (before != NO_ROW) load_keys(m[0], state_of(before), lane);
                }
                held = own->after[at];
                float keys[LANE_KEYS], sum[1];
                load_lane(keys, of_token, lane);
                const float v = of_token[AT_VALUES + own_row], change = step * v;
#pragma unroll
                for (int i = 0; i < LANE_KEYS; i++)
                    m[0][i] = (before == NO_ROW ? 0.0f : m[0][i]) * g + change * keys[i];
                if (STATES > 1 && queries.remains(token, tokens, STATES))
                    store_keys(m[0], state_of(held), lane);
                load_lane(keys, of_token + KEY_FLOATS, lane);
                sum[0] = product_in_lane(m[0], keys);
                fold_of_rows(sum);
                if (lane % ROW_LANES == 0) y[token * y_stride] = sum[0] + skip * v;
            }
            if (behind < count)
                source.store(stages + (turn + 1) % 2 * (GROUP_TOKENS * TOKEN_FLOATS), parts);
            __syncthreads();
        }
    }
    if (STATES == 1 && held != NO_ROW) store_keys(m[0], state_of(held), lane);
}
