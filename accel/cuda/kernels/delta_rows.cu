// SSM_DELTA_NET of many tokens after its inputs were computed (rule R8). A block applies all tokens
// in order to WARPS * ROW_SETS * ROWS_AT_ONCE rows of one value head's state. Groups of GROUP_TOKENS
// tokens have a stage of shared memory each, with keys and queries in the order in which lanes hold
// them. While a group is computed, the one behind it is there and parts of the next are on their way
// to registers.
//
// What waits is the chain from a token's product with its keys to that of the next token. So a
// token's change, the decay of the next token and its product with the keys come first, and the
// product with this token's queries stands where lanes exchange their sums. Outputs of a whole group
// are folded together.
//
// A slot has STATES rows of states; what follows a position is in the row of its remainder.
//
// Slots are in PARTS parts by the remainder of their number, of which a block takes one.
//
// Compiled with STATE_SIZE, ROW_LANES, WARPS, ROW_SETS, GROUP_TOKENS, STAGES (three), STATES, PARTS,
// MAX_TOKENS, STEPS (see queries.h), these operand numbers (see packets.h): X, QK, GATES, QUERY,
// STATE, Y, and the packet number NET.

#include "delta.h"
#include "queries.h"

#define THREADS (WARPS * WARP_LANES)
#define BLOCK_ROWS (WARPS * ROW_SETS * ROWS_AT_ONCE)
// Four lanes' keys apart, so that lanes read from different banks.
#define LANE_STRIDE (LANE_KEYS > 4 ? LANE_KEYS + 4 : LANE_KEYS)
#define AT_KEYS (ROW_LANES * LANE_STRIDE)  // behind the queries
#define AT_VALUES (2 * AT_KEYS)
#define AT_FACTORS (AT_VALUES + BLOCK_ROWS)  // g and b, slot and position
#define TOKEN_FLOATS (AT_FACTORS + 4)
#define STAGE_FLOATS (GROUP_TOKENS * TOKEN_FLOATS)
// Of 16 bytes: parts of a token's queries and keys, those of its values, and what a thread copies.
#define KEY_PARTS (STATE_SIZE / 4)
#define VALUE_PARTS (BLOCK_ROWS / 4)
#define GROUP_PARTS (2 * GROUP_TOKENS * KEY_PARTS)
#define THREAD_PARTS ((GROUP_PARTS + THREADS - 1) / THREADS)
#define OUTPUTS (GROUP_TOKENS / ROW_LANES)  // of a group and row that a lane has in the end
#define NO_ROW 0xFFFFFFFFu
static_assert(ROW_LANES % 4 == 0 && GROUP_TOKENS % ROW_LANES == 0, "lanes share a group's outputs");
static_assert(GROUP_TOKENS * VALUE_PARTS <= THREADS && 4 * GROUP_TOKENS <= THREADS,
              "a thread has at most one part of the values and one of the factors");

// A thread's parts of a group, on their way to a stage.
struct GROUP_PARTS_OF_THREAD {
    float4 keys[THREAD_PARTS], values;
    float factor;
};

struct DELTA_SOURCE {
    const float *qk, *v, *gates;
    const unsigned *query;
    size_t qk_stride, x_stride, gates_stride, query_stride;
    const unsigned *own;  // the block's tokens, if there are several PARTS
    unsigned tokens, key_heads, value_heads, head;

    __device__ __forceinline__ unsigned number(unsigned at) const { return PARTS > 1 ? own[at] : at; }
    // Reads tokens `first` to `first` + GROUP_TOKENS - 1. Behind the last token it reads that again.
    __device__ __forceinline__ void load(GROUP_PARTS_OF_THREAD &parts, unsigned first) const {
#pragma unroll
        for (unsigned n = 0; n < THREAD_PARTS; n++) {
            const unsigned item = n * THREADS + threadIdx.x, part = item % (2 * KEY_PARTS);
            if (GROUP_PARTS % THREADS && item >= GROUP_PARTS) break;
            const unsigned token = number(min(first + item / (2 * KEY_PARTS), tokens - 1));
            const unsigned heads = part < KEY_PARTS ? 0 : key_heads;
            parts.keys[n] = *(const float4 *)(qk + token * qk_stride + heads * STATE_SIZE +
                                              part % KEY_PARTS * 4);
        }
        if (threadIdx.x < GROUP_TOKENS * VALUE_PARTS) {
            const unsigned token = number(min(first + threadIdx.x / VALUE_PARTS, tokens - 1));
            parts.values =
                *(const float4 *)(v + token * x_stride + threadIdx.x % VALUE_PARTS * 4);
        }
        if (threadIdx.x < 4 * GROUP_TOKENS) {
            const unsigned token = number(min(first + threadIdx.x / 4, tokens - 1));
            const unsigned what = threadIdx.x % 4;
            const float *of_gates = gates + token * gates_stride + what * value_heads + head;
            const unsigned *of_query = query + token * query_stride +
                                       (what == 2 ? QUERY_SLOT : QUERY_POSITION);
            parts.factor = what < 2 ? *of_gates : *(const float *)of_query;
        }
    }
    __device__ __forceinline__ void store(float *stage, const GROUP_PARTS_OF_THREAD &parts) const {
#pragma unroll
        for (unsigned n = 0; n < THREAD_PARTS; n++) {
            const unsigned item = n * THREADS + threadIdx.x, part = item % (2 * KEY_PARTS);
            if (GROUP_PARTS % THREADS && item >= GROUP_PARTS) break;
            // Four keys are those of four lanes.
            float *to = stage + item / (2 * KEY_PARTS) * TOKEN_FLOATS +
                        (part < KEY_PARTS ? 0 : AT_KEYS) +
                        part % (ROW_LANES / 4) * 4 * LANE_STRIDE + part % KEY_PARTS * 4 / ROW_LANES;
            const float4 four = parts.keys[n];
            to[0] = four.x, to[LANE_STRIDE] = four.y;
            to[2 * LANE_STRIDE] = four.z, to[3 * LANE_STRIDE] = four.w;
        }
        if (threadIdx.x < GROUP_TOKENS * VALUE_PARTS)
            *(float4 *)(stage + threadIdx.x / VALUE_PARTS * TOKEN_FLOATS + AT_VALUES +
                        threadIdx.x % VALUE_PARTS * 4) = parts.values;
        if (threadIdx.x < 4 * GROUP_TOKENS)
            stage[threadIdx.x / 4 * TOKEN_FLOATS + AT_FACTORS + threadIdx.x % 4] = parts.factor;
    }
};

// A lane's keys or queries of a stage, whose part of the lane begins at `own`.
DEVICE void load_lane(float (&keys)[LANE_KEYS], const float *own) {
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i += 4) {
        const float4 four = *(const float4 *)(own + i);
        keys[i] = four.x, keys[i + 1] = four.y, keys[i + 2] = four.z, keys[i + 3] = four.w;
    }
}

// A token's place in a stage, as a lane sees it.
struct AT_TOKEN {
    const float *token;
    unsigned lane_at, row;
    __device__ __forceinline__ AT_TOKEN behind(unsigned tokens) const {
        return {token + tokens * TOKEN_FLOATS, lane_at, row};
    }
    __device__ __forceinline__ unsigned slot() const {
        return __float_as_uint(token[AT_FACTORS + 2]);
    }
    __device__ __forceinline__ unsigned position() const {
        return __float_as_uint(token[AT_FACTORS + 3]);
    }
};

// What changes a state, of one token.
struct OF_TOKEN {
    float k[LANE_KEYS], v[ROW_SETS], g, b;

    __device__ __forceinline__ void load(const AT_TOKEN &at) {
        load_lane(k, at.token + AT_KEYS + at.lane_at);
#pragma unroll
        for (int s = 0; s < ROW_SETS; s++) v[s] = at.token[AT_VALUES + at.row + s * ROWS_AT_ONCE];
        const float2 factors = *(const float2 *)(at.token + AT_FACTORS);
        g = factors.x, b = factors.y;
    }
};

// Folds a row's outputs of a group, of which the lanes have folded their own keys. A lane gets
// OUTPUTS of them, from number OUTPUTS * (its number of the row) on.
DEVICE void fold_outputs(float (&sum)[GROUP_TOKENS], int lane) {
    unsigned runs = GROUP_TOKENS;
#pragma unroll
    for (int lanes = ROW_LANES / 2; lanes; lanes /= 2) {
        runs /= 2;
        const bool upper = lane & lanes;
#pragma unroll
        for (int n = 0; n < GROUP_TOKENS / 2; n++) {
            if (n >= runs) break;
            const float other = upper ? sum[n] : sum[n + runs];
            const float own = upper ? sum[n + runs] : sum[n];
            sum[n] = own + __shfl_xor_sync(ALL_LANES, other, lanes);
        }
    }
#pragma unroll
    for (int n = 0; n < OUTPUTS; n++) sum[n] = sum[n] + 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_rows(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *net = packet_of(launch, NET);
    const unsigned key_heads = net->size[SSM_DELTA_NET_KEY_HEADS];
    const unsigned value_heads = net->size[SSM_DELTA_NET_VALUE_HEADS];
    const unsigned head = blockIdx.x, first_row = blockIdx.y / PARTS * BLOCK_ROWS;
    const unsigned key_head = net->size[SSM_DELTA_NET_GROUPED]
                                  ? head / (value_heads / key_heads)
                                  : head % key_heads;
    const unsigned all = count_of(launch, net);
    const QUERIES queries = {(const unsigned *)operand_at(launch, QUERY), stride_at(launch, QUERY)};
    unsigned *const own = (unsigned *)shared + STAGES * STAGE_FLOATS;
    unsigned *const counts = own + MAX_TOKENS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned own_row =
        threadIdx.x / WARP_LANES * (ROW_SETS * ROWS_AT_ONCE) + lane / ROW_LANES;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (leaves_out(launch, STEPS)) return;
    unsigned tokens = PARTS > 1 ? 0 : all;
    for (unsigned first = 0; PARTS > 1 && first < all; first += THREADS)
        tokens = find_own(queries, first, all, PARTS, blockIdx.y % PARTS, own, tokens, counts);
    if (!tokens) return;
    const DELTA_SOURCE source = {
        (const float *)operand_at(launch, QK) + key_head * STATE_SIZE,
        (const float *)operand_at(launch, X) + (2 * key_heads + head) * STATE_SIZE + first_row,
        (const float *)operand_at(launch, GATES),
        (const unsigned *)operand_at(launch, QUERY),
        stride_at(launch, QK),
        stride_at(launch, X),
        stride_at(launch, GATES),
        stride_at(launch, QUERY),
        own,
        tokens,
        key_heads,
        value_heads,
        head,
    };
    float *const stages = (float *)shared;
    float *const states = (float *)operand_at(launch, STATE);
    float *const y = (float *)operand_at(launch, Y) + head * STATE_SIZE + first_row + own_row;
    const size_t y_stride = stride_at(launch, Y);
    float m[ROW_SETS][LANE_KEYS] = {};
    float sum[ROW_SETS] = {};  // M k of the next token
    unsigned held = NO_ROW;  // the row that the state in registers belongs to
    auto state_of = [&](unsigned row, int set) {
        return states + (((size_t)row * value_heads + head) * STATE_SIZE + first_row + own_row +
                         set * ROWS_AT_ONCE) * STATE_SIZE;
    };
    auto store = [&]() {
#pragma unroll
        for (int s = 0; s < ROW_SETS; s++) store_keys(m[s], state_of(held, s), lane);
    };
    // Loads the state of a token's slot into registers, unless it is there.
    auto hold = [&](const AT_TOKEN &at) {
        const unsigned first = at.slot() * STATES, position = at.position();
        const unsigned row = first + (position + STATES - 1) % STATES;
        if (row != held || position == 0) {
            if (STATES == 1 && row != held && held != NO_ROW) store();
#pragma unroll
            for (int s = 0; s < ROW_SETS; s++)
                if (position)
                    load_keys(m[s], state_of(row, s), lane);
                else
#pragma unroll
                    for (int i = 0; i < LANE_KEYS; i++) m[s][i] = 0.0f;
        }
        held = first + position % STATES;
    };
    GROUP_PARTS_OF_THREAD parts;
    source.load(parts, 0);
    source.store(stages, parts);
    source.load(parts, GROUP_TOKENS);
    source.store(stages + STAGE_FLOATS, parts);
    __syncthreads();
    const unsigned lane_at = lane % ROW_LANES * LANE_STRIDE;
    unsigned stage = 0;
    AT_TOKEN at = {stages, lane_at, own_row};
    // Of tokens in turn; what belongs to a token is read while the one before it is computed.
    OF_TOKEN even, odd;
    even.load(at);
    odd.load(at.behind(1));
    hold(at);
    decay_rows(m, even.k, even.g, false, sum);
    fold_of_rows(sum);
#pragma unroll 1
    for (unsigned group = 0; group < tokens; group += GROUP_TOKENS) {
        const unsigned ahead_stage = stage + 1 == STAGES ? 0 : stage + 1;
        const unsigned free_stage = ahead_stage + 1 == STAGES ? 0 : ahead_stage + 1;
        const AT_TOKEN ahead = {stages + ahead_stage * STAGE_FLOATS, lane_at, own_row};
        auto token_at = [&](unsigned n) {
            return n < GROUP_TOKENS ? at.behind(n) : ahead.behind(n - GROUP_TOKENS);
        };
        source.load(parts, group + 2 * GROUP_TOKENS);
        // Whether all tokens of the group are there and all states but the first are held already,
        // also that of the token behind the group; of several states, that none of these remains.
        const unsigned number = lane % GROUP_TOKENS;
        const AT_TOKEN behind = token_at(number + 1);
        bool plain = group + GROUP_TOKENS < tokens && behind.slot() == at.slot() &&
                     (STATES == 1 ? behind.position() != 0
                                  : behind.position() == at.position() + number + 1);
        const unsigned own_token = source.number(min(group + number, tokens - 1));
        if (STATES > 1) plain = plain && !queries.remains(own_token, all, STATES);
        if (__ballot_sync(ALL_LANES, plain) == ALL_LANES) {
            float output[ROW_SETS][GROUP_TOKENS];
#pragma unroll
            for (int n = 0; n < GROUP_TOKENS; n++) {
                OF_TOKEN &now = n % 2 ? odd : even, &then = n % 2 ? even : odd;
                float q[LANE_KEYS], changed[ROW_SETS][LANE_KEYS];
                load_lane(q, at.token + n * TOKEN_FLOATS + lane_at);
                change_rows<ROW_SETS, 1>(m, now.k, now.v, now.b, sum);
                now.load(token_at(n + 2));
#pragma unroll
                for (int s = 0; s < ROW_SETS; s++)
#pragma unroll
                    for (int i = 0; i < LANE_KEYS; i++) changed[s][i] = m[s][i];
                decay_rows(m, then.k, then.g, false, sum);
                fold_of_rows(sum);
#pragma unroll
                for (int s = 0; s < ROW_SETS; s++) output[s][n] = product_in_lane(changed[s], q);
            }
            if (STATES > 1) held = token_at(GROUP_TOKENS).slot() * STATES +
                                   token_at(GROUP_TOKENS).position() % STATES;
#pragma unroll
            for (int s = 0; s < ROW_SETS; s++) {
                fold_outputs(output[s], lane);
#pragma unroll
                for (int n = 0; n < OUTPUTS; n++)
                    y[source.number(group + lane % ROW_LANES * OUTPUTS + n) * y_stride +
                      s * ROWS_AT_ONCE] = output[s][n];
            }
        } else {
#pragma unroll 1
            for (unsigned n = 0; n < GROUP_TOKENS && group + n < tokens; n++) {
                float q[LANE_KEYS], output[ROW_SETS];
                load_lane(q, at.token + n * TOKEN_FLOATS + lane_at);
                change_rows<ROW_SETS, 1>(m, even.k, even.v, even.b, sum);
                if (STATES > 1 && queries.remains(source.number(group + n), all, STATES)) store();
#pragma unroll
                for (int s = 0; s < ROW_SETS; s++) output[s] = product_in_lane(m[s], q);
                fold_of_rows(output);
                if (lane % ROW_LANES == 0)
#pragma unroll
                    for (int s = 0; s < ROW_SETS; s++)
                        y[source.number(group + n) * y_stride + s * ROWS_AT_ONCE] = output[s];
                if (group + n + 1 == tokens) break;
                even = odd;
                odd.load(token_at(n + 2));
                hold(token_at(n + 1));
                decay_rows(m, even.k, even.g, false, sum);
                fold_of_rows(sum);
            }
        }
        source.store(stages + free_stage * STAGE_FLOATS, parts);
        __syncthreads();
        at = ahead, stage = ahead_stage;
    }
    if (STATES == 1) store();
}
