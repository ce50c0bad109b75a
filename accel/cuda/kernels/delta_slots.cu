// SSM_CONV1D, SSM_DELTA_NET and SSM_GATED_NORM of several slots (rules R2, R4 and R8). A block
// computes one key head and the value heads that share it. It takes one slot after the other, with
// all tokens of the slot, GROUP_TOKENS at a time. Every warp has its own rows of every state. The
// rows pass through the warp's slots of shared memory in chunks. Copies run ahead of the
// computation and begin before the previous kernel has ended, since only this kernel writes states.
//
// Compiled with STATE_SIZE, HISTORY, WARPS, BLOCKS_AT_ONCE (blocks of a multiprocessor), SHARERS,
// MAX_TOKENS, GROUP_TOKENS, SLOTS and CHUNK_SETS (sets of four rows) of a warp; with these operand
// numbers (see packets.h): X, CONV_WEIGHT, QUERY, CONV_STATE, ALPHA, BETA, DECAY, DT_BIAS, STATE,
// GATE, NORM_WEIGHT, Y; with the packet numbers INPUTS_OP, NET and NORM. A slot has STATES rows of
// states; what follows a position is in the row of its remainder. With several GROUP_TOKENS is 1.

#include "delta_token.h"
#include "queries.h"

#define THREADS (WARPS * WARP_LANES)
#define CHUNK_ROWS (CHUNK_SETS * ROWS_AT_ONCE)
#define CHUNK_BYTES (CHUNK_ROWS * STATE_SIZE * 4)
#define WARP_ROWS (STATE_SIZE / WARPS)
#define HEAD_CHUNKS (WARP_ROWS / CHUNK_ROWS)
#define GROUP_CHANNELS ((2 + SHARERS) * STATE_SIZE)  // a token's query, key and values
#define PER_THREAD ((GROUP_CHANNELS + THREADS - 1) / THREADS)
#define NO_TOKEN 0xFFFFFFFFu

// The tokens of a step by slots, in shared memory.
struct SLOT_ORDER {
    unsigned before[MAX_TOKENS];  // the row of the state before the token
    unsigned next[MAX_TOKENS];    // the next token of the same slot, or NO_TOKEN
    unsigned first[MAX_TOKENS];   // the first tokens of the slots
    unsigned slots;

    // By one warp.
    __device__ __forceinline__ void find(const QUERIES &queries, unsigned tokens, int lane) {
        unsigned found = 0;
        for (unsigned base = 0; base < tokens; base += WARP_LANES) {
            const unsigned token = base + lane;
            const unsigned own = token < tokens ? queries.slot(token) : 0;
            bool is_first = token < tokens;
            unsigned behind = NO_TOKEN;
#pragma unroll 8
            for (unsigned i = tokens; i-- > 0;) {
                const bool same = queries.slot(i) == own;
                if (same && i > token) behind = i;
                if (same && i < token) is_first = false;
            }
            const unsigned firsts = __ballot_sync(ALL_LANES, is_first);
            if (is_first) first[found + __popc(firsts & ((1u << lane) - 1))] = token;
            if (token < tokens)
                before[token] = queries.row_before(token, STATES), next[token] = behind;
            found += __popc(firsts);
        }
        if (lane == 0) slots = found;
    }

    __device__ __forceinline__ unsigned behind_group(unsigned token) const {
        for (int i = 0; i < GROUP_TOKENS && token != NO_TOKEN; i++) token = next[token];
        return token;
    }
};

struct HEADS {
    unsigned keys, values, own;  // of the model; the block's key head
    bool grouped;

    __device__ __forceinline__ unsigned value_head(unsigned sharer) const {
        return grouped ? own * SHARERS + sharer : own + sharer * keys;
    }
    __device__ __forceinline__ unsigned channel(unsigned at) const {
        const unsigned part = at / STATE_SIZE;
        const unsigned head = part == 0   ? own
                              : part == 1 ? keys + own
                                          : 2 * keys + value_head(part - 2);
        return head * STATE_SIZE + at % STATE_SIZE;
    }
};

// In chunks of four rows, lane (r, l) holds keys l + 8 (i ^ r) of row r, so that no two lanes read
// the same bank. Rule R4 adds pairs whose indices differ in one bit, which this order keeps
// together.
DEVICE unsigned key_index(int i, int lane) {
    return lane % ROW_LANES + ROW_LANES * (i ^ lane / ROW_LANES);
}

DEVICE void take_keys(float (&m)[LANE_KEYS], const float *row, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) m[i] = row[key_index(i, lane)];
}

DEVICE void put_keys(const float (&m)[LANE_KEYS], float *row, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) row[key_index(i, lane)] = m[i];
}

// A warp's rows of the states of a block's slots, in the order in which they are computed. The
// tokens of one pass over a state are a group; the next group of a slot begins when the stores of
// this one have ended.
struct STATE_ROWS {
    float *ring;
    COPY_BARRIER *barriers;
    float *states;  // of the warp's first row of head 0 of the first state
    HEADS heads;
    const SLOT_ORDER *order;
    unsigned fetched, taken;      // chunks
    unsigned item, token, chunk;  // to be fetched next
    bool waits;

    __device__ __forceinline__ float *ring_slot(unsigned number) const {
        return ring + number % SLOTS * (CHUNK_BYTES / 4);
    }
    __device__ __forceinline__ float *chunk_of(unsigned row, unsigned number) const {
        const unsigned head = heads.value_head(number / HEAD_CHUNKS);
        return states + (((size_t)row * heads.values + head) * STATE_SIZE +
                         number % HEAD_CHUNKS * CHUNK_ROWS) * STATE_SIZE;
    }
    __device__ __forceinline__ void begin() {
        for (int i = 1; i < SLOTS; i++) fetch();
    }
    __device__ __forceinline__ void resume() {
        await_stores();
        waits = false;
        begin();
    }
    __device__ __forceinline__ void fetch() {
        if (waits || item >= order->slots) return no_copy();
        if (chunk == 0 && token == NO_TOKEN) token = order->first[item];
        begin_copy(barriers + fetched % SLOTS, ring_slot(fetched),
                   chunk_of(order->before[token], chunk), CHUNK_BYTES);
        fetched++;
        if (++chunk < SHARERS * HEAD_CHUNKS) return;
        chunk = 0;
        token = order->behind_group(token);
        waits = token != NO_TOKEN;
        if (!waits) item += gridDim.y;
    }
    __device__ __forceinline__ float *take() {
        await_copy<SLOTS - 1>(barriers + taken % SLOTS, taken / SLOTS);
        return ring_slot(taken);
    }
    // Stores the current chunk, and requests a new one for the slot of the chunk before it.
    __device__ __forceinline__ void give(unsigned row, unsigned number) {
        begin_store(chunk_of(row, number), ring_slot(taken), CHUNK_BYTES);
        taken++;
        await_slots<1>();
        fetch();
    }
};

// A block's data for the tokens of a pass, and the computations for all of them at a time, with
// barriers between.
struct TOKEN_GROUP {
    const LAUNCH &launch;
    HEADS heads;
    QUERIES queries;
    const SLOT_ORDER *order;
    float *mixed;      // of tokens: query, key, values
    float *read;       // M q of tokens and value heads
    FACTORS *factors;  // of them
    unsigned first, count;

    __device__ __forceinline__ void open(unsigned token) {
        first = token;
        for (count = 0; count < GROUP_TOKENS && token != NO_TOKEN; count++) token = order->next[token];
    }
    __device__ __forceinline__ const float *row(int operand, unsigned token) const {
        return (const float *)operand_at(launch, operand) + token * stride_at(launch, operand);
    }

    // The convolution and g and b. `kept` are the stored values of the slot's channels, replaced in
    // `after`.
    __device__ __forceinline__ void mix(const float *kept, float *after, unsigned channels) const {
        const unsigned thread = threadIdx.x;
        float past[PER_THREAD][HISTORY], tap[PER_THREAD][HISTORY + 1];
#pragma unroll
        for (int c = 0; c < PER_THREAD; c++) {
            if (thread + c * THREADS >= GROUP_CHANNELS) break;
            const unsigned channel = heads.channel(thread + c * THREADS);
            const float *taps = (const float *)operand_at(launch, CONV_WEIGHT) +
                                (size_t)channel * (HISTORY + 1);
#pragma unroll
            for (int i = 0; i < HISTORY; i++) past[c][i] = kept[(size_t)i * channels + channel];
#pragma unroll
            for (int i = 0; i <= HISTORY; i++) tap[c][i] = taps[i];
        }
        unsigned token = first;
#pragma unroll 1
        for (unsigned i = 0; i < count; i++, token = order->next[token]) {
            const bool starts = queries.starts(token);
            float now[PER_THREAD];
#pragma unroll
            for (int c = 0; c < PER_THREAD; c++)
                if (thread + c * THREADS < GROUP_CHANNELS)
                    now[c] = row(X, token)[heads.channel(thread + c * THREADS)];
#pragma unroll
            for (int c = 0; c < PER_THREAD; c++) {
                if (thread + c * THREADS >= GROUP_CHANNELS) break;
                mixed[i * GROUP_CHANNELS + thread + c * THREADS] =
                    convolved(tap[c], past[c], now[c], starts);
            }
            if (thread < THREADS - SHARERS) continue;
            const unsigned sharer = THREADS - 1 - thread, head = heads.value_head(sharer);
            factors[i * SHARERS + sharer] =
                factors_of(row(ALPHA, token)[head], row(BETA, token)[head],
                           ((const float *)operand_at(launch, DECAY))[head],
                           ((const float *)operand_at(launch, DT_BIAS))[head], starts);
        }
#pragma unroll
        for (int c = 0; c < PER_THREAD; c++) {
            if (thread + c * THREADS >= GROUP_CHANNELS) break;
#pragma unroll
            for (int i = 0; i < HISTORY; i++)
                after[(size_t)i * channels + heads.channel(thread + c * THREADS)] = past[c][i];
        }
    }

    __device__ __forceinline__ void norm(unsigned warp, int lane) const {
        const PACKET *prepared = packet_of(launch, INPUTS_OP);
        for (unsigned i = warp; i < 2 * count; i += WARPS) {
            float *own = mixed + i / 2 * GROUP_CHANNELS + i % 2 * STATE_SIZE;
            norm_keys(own, own, prepared->real[SSM_DELTA_INPUTS_EPS],
                      prepared->real[SSM_DELTA_INPUTS_QUERY_SCALE], i % 2 == 0, lane);
        }
    }

    // The recurrence of a warp's rows.
    __device__ __forceinline__ void pass(STATE_ROWS &rows, unsigned after, unsigned warp,
                                         int lane) const {
#pragma unroll 1
        for (unsigned number = 0; number < SHARERS * HEAD_CHUNKS; number++) {
            const unsigned sharer = number / HEAD_CHUNKS;
            const unsigned first_row =
                warp * WARP_ROWS + number % HEAD_CHUNKS * CHUNK_ROWS + lane / ROW_LANES;
            float *chunk = rows.take() + lane / ROW_LANES * STATE_SIZE;
            float m[CHUNK_SETS][LANE_KEYS];
#pragma unroll
            for (int s = 0; s < CHUNK_SETS; s++)
                take_keys(m[s], chunk + s * ROWS_AT_ONCE * STATE_SIZE, lane);
#pragma unroll 1
            for (unsigned i = 0; i < count; i++) {
                const float *of_token = mixed + i * GROUP_CHANNELS;
                const FACTORS of_head = factors[i * SHARERS + sharer];
                float keys[LANE_KEYS];  // then queries
                take_keys(keys, of_token + STATE_SIZE, lane);
                update_rows(m, keys, of_token + (2 + sharer) * STATE_SIZE + first_row, of_head.g,
                            of_head.b, of_head.starts);
                take_keys(keys, of_token, lane);
                read_rows(m, keys, read + (i * SHARERS + sharer) * STATE_SIZE + first_row, lane);
            }
#pragma unroll
            for (int s = 0; s < CHUNK_SETS; s++)
                put_keys(m[s], chunk + s * ROWS_AT_ONCE * STATE_SIZE, lane);
            rows.give(after, number);
        }
    }

    __device__ __forceinline__ void gate(unsigned warp, int lane) const {
        unsigned token = first;
#pragma unroll 1
        for (unsigned i = 0; i < count; i++, token = order->next[token])
#pragma unroll 1
            for (unsigned sharer = 0; sharer < SHARERS; sharer++) {
                const unsigned number = i * SHARERS + sharer;
                const unsigned at = heads.value_head(sharer) * STATE_SIZE;
                if (number % WARPS == warp)
                    gate_row(read + number * STATE_SIZE,
                             (const float *)operand_at(launch, NORM_WEIGHT), row(GATE, token) + at,
                             packet_of(launch, NORM)->real[SSM_GATED_NORM_EPS],
                             (float *)row(Y, token) + at, lane);
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    delta_slots(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    float *const rings = (float *)shared;
    COPY_BARRIER *const barriers = (COPY_BARRIER *)(shared + WARPS * SLOTS * CHUNK_BYTES);
    float *const mixed = (float *)(barriers + WARPS * SLOTS);
    float *const read = mixed + GROUP_TOKENS * GROUP_CHANNELS;
    FACTORS *const factors = (FACTORS *)(read + GROUP_TOKENS * SHARERS * STATE_SIZE);
    SLOT_ORDER *const order = (SLOT_ORDER *)(factors + GROUP_TOKENS * SHARERS);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *net = packet_of(launch, NET);
    const HEADS heads = {net->size[SSM_DELTA_NET_KEY_HEADS], net->size[SSM_DELTA_NET_VALUE_HEADS],
                         blockIdx.x, net->size[SSM_DELTA_NET_GROUPED] != 0};
    const unsigned channels = (2 * heads.keys + heads.values) * STATE_SIZE;
    const unsigned warp = threadIdx.x / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES;
    const QUERIES queries = {(const unsigned *)operand_at(launch, QUERY), stride_at(launch, QUERY)};
    FOLLOWING_MAY_START;
    if (warp == 0) order->find(queries, count_of(launch, net), lane);
    STATE_ROWS rows = {
        rings + warp * SLOTS * (CHUNK_BYTES / 4),
        barriers + warp * SLOTS,
        (float *)operand_at(launch, STATE) + warp * WARP_ROWS * STATE_SIZE,
        heads,
        order,
        0, 0, blockIdx.y, NO_TOKEN, 0, false,
    };
    open_copies(rows.barriers, SLOTS);
    __syncthreads();
    rows.begin();
    TOKEN_GROUP group = {launch, heads, queries, order, mixed, read, factors, 0, 0};
    PRECEDING_DONE;
#pragma unroll 1
    for (unsigned item = blockIdx.y; item < order->slots; item += gridDim.y) {
        unsigned token = order->first[item];
        float *const kept = (float *)operand_at(launch, CONV_STATE);
        const size_t each = (size_t)HISTORY * channels;
#pragma unroll 1
        for (bool again = false; token != NO_TOKEN; again = true) {
            if (again) rows.resume();
            group.open(token);
            const unsigned after = queries.row_after(token, STATES);
            group.mix(kept + order->before[token] * each, kept + after * each, channels);
            __syncthreads();
            group.norm(warp, lane);
            __syncthreads();
            group.pass(rows, after, warp, lane);
            __syncthreads();
            group.gate(warp, lane);
            token = order->behind_group(token);
        }
    }
    await_stores();
}
