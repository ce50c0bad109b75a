// SSM_CONV1D, SSM_DELTA_NET and SSM_GATED_NORM of several slots (rules R2, R4 and R8). A block
// computes one key head and the value heads that share it. It takes one slot after the other, with
// all tokens of the slot, GROUP_TOKENS at a time. WARPS warps have their own rows of every state. The
// rows pass through the warp's slots of shared memory in chunks. Copies run ahead of the computation
// and begin before the previous kernel has ended: who writes the states ended long before. Four more
// warps meanwhile prepare the tokens of the next pass and gate those of the one before.
//
// Compiled with STATE_SIZE, HISTORY, WARPS, BLOCKS_AT_ONCE (blocks of a multiprocessor), SHARERS,
// MAX_TOKENS, GROUP_TOKENS, SLOTS and CHUNK_SETS (sets of four rows) of a warp, STEPS (queries.h);
// with these operand numbers (see packets.h): X, CONV_WEIGHT, QUERY, CONV_STATE, ALPHA, BETA, DECAY,
// DT_BIAS, STATE, GATE, NORM_WEIGHT, Y; with the packet numbers INPUTS_OP, NET and NORM. A slot has
// STATES rows; what follows a position is in that of its remainder. With several GROUP_TOKENS is 1.

#include "delta_token.h"
#include "queries.h"

#define AROUND_WARPS 4
#define AROUND_THREADS (AROUND_WARPS * WARP_LANES)
#define AROUND_BARRIER 1
#define THREADS (WARPS * WARP_LANES + AROUND_THREADS)
#define CHUNK_ROWS (CHUNK_SETS * ROWS_AT_ONCE)
#define CHUNK_BYTES (CHUNK_ROWS * STATE_SIZE * 4)
#define WARP_ROWS (STATE_SIZE / WARPS)
#define HEAD_CHUNKS (WARP_ROWS / CHUNK_ROWS)
#define GROUP_CHANNELS ((2 + SHARERS) * STATE_SIZE)  // a token's query, key and values
#define MIXED 2  // channels that a thread convolves at once
#define NO_TOKEN 0xFFFFFFFFu
#define TOKEN_WORDS ((MAX_TOKENS + WARP_LANES - 1) / WARP_LANES)  // of a bit for each token

// The tokens of a step by slots, in shared memory.
struct SLOT_ORDER {
    unsigned before[MAX_TOKENS];  // the row of the state before the token
    unsigned next[MAX_TOKENS];    // the next token of the same slot, or NO_TOKEN
    unsigned first[MAX_TOKENS];   // the first tokens of the slots
    unsigned firsts[TOKEN_WORDS]; // a bit for each token that is the first of its slot
    unsigned slots;

    // By the whole block, a thread for each token. Slots are looked up often, so `before` has them
    // first.
    __device__ __forceinline__ void find(const QUERIES &queries, unsigned tokens) {
        constexpr unsigned each = (MAX_TOKENS + THREADS - 1) / THREADS;
        unsigned own[each], row[each], behind[each];
        bool is_first[each];
#pragma unroll
        for (unsigned n = 0; n < each; n++) {
            const unsigned token = n * THREADS + threadIdx.x;
            if (token >= tokens) continue;
            before[token] = own[n] = queries.slot(token);
            row[n] = queries.row_before(token, STATES);
        }
        __syncthreads();
#pragma unroll
        for (unsigned n = 0; n < each; n++) {
            const unsigned token = n * THREADS + threadIdx.x;
            is_first[n] = token < tokens, behind[n] = NO_TOKEN;
            if (is_first[n])
#pragma unroll 8
                for (unsigned i = tokens; i-- > 0;) {
                    const bool same = before[i] == own[n];
                    if (same && i > token) behind[n] = i;
                    if (same && i < token) is_first[n] = false;
                }
            const unsigned bits = __ballot_sync(ALL_LANES, is_first[n]);
            if (token % WARP_LANES == 0 && token < MAX_TOKENS) firsts[token / WARP_LANES] = bits;
        }
        __syncthreads();
#pragma unroll
        for (unsigned n = 0; n < each; n++) {
            const unsigned token = n * THREADS + threadIdx.x;
            if (token >= tokens) continue;
            before[token] = row[n], next[token] = behind[n];
            unsigned found = __popc(firsts[token / WARP_LANES] & ((1u << token % WARP_LANES) - 1));
            for (unsigned word = 0; word < token / WARP_LANES; word++) found += __popc(firsts[word]);
            if (is_first[n]) first[found] = token;
            if (token + 1 == tokens) slots = found + is_first[n];
        }
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

// The passes of a block in order: a slot's next tokens, or the next slot's first ones.
struct PASSES {
    const SLOT_ORDER *order;
    unsigned item, token;  // NO_TOKEN behind the last
    bool again;            // the slot of the pass before

    __device__ __forceinline__ void begin(unsigned item_) {
        item = item_, again = false;
        token = item < order->slots ? order->first[item] : NO_TOKEN;
    }
    __device__ __forceinline__ void advance() {
        const unsigned behind = order->behind_group(token);
        if (behind == NO_TOKEN) return begin(item + gridDim.y);
        token = behind, again = true;
    }
};

// A block's data for the tokens of a pass, and the computations for all of them at a time. Two
// passes are in work at once, each with its own part of the data.
struct TOKEN_GROUP {
    const LAUNCH &launch;
    HEADS heads;
    QUERIES queries;
    const SLOT_ORDER *order;
    float *mixed;      // of tokens: query, key, values
    float *read;       // M q of tokens and value heads
    FACTORS *factors;  // of them
    unsigned first, count;

    __device__ __forceinline__ TOKEN_GROUP of(unsigned token, unsigned turn) const {
        TOKEN_GROUP own = *this;
        own.mixed += turn % 2 * (GROUP_TOKENS * GROUP_CHANNELS);
        own.read += turn % 2 * (GROUP_TOKENS * SHARERS * STATE_SIZE);
        own.factors += turn % 2 * (GROUP_TOKENS * SHARERS);
        own.open(token);
        return own;
    }
    __device__ __forceinline__ void open(unsigned token) {
        first = token;
        for (count = 0; count < GROUP_TOKENS && token != NO_TOKEN; count++) token = order->next[token];
    }
    __device__ __forceinline__ const float *row(int operand, unsigned token) const {
        return (const float *)operand_at(launch, operand) + token * stride_at(launch, operand);
    }

    // The convolution. `kept` are the stored values of the slot's channels, replaced in `after`.
    __device__ __forceinline__ void mix(const float *kept, float *after, unsigned channels) const {
        const unsigned thread = threadIdx.x - WARPS * WARP_LANES;
#pragma unroll 1
        for (unsigned begin = thread; begin < GROUP_CHANNELS; begin += MIXED * AROUND_THREADS) {
            float past[MIXED][HISTORY], tap[MIXED][HISTORY + 1];
            unsigned channel[MIXED];
#pragma unroll
            for (int c = 0; c < MIXED; c++) {
                // Behind the last one a thread repeats its first one.
                const unsigned at = begin + c * AROUND_THREADS;
                channel[c] = heads.channel(at < GROUP_CHANNELS ? at : begin);
                const float *taps = (const float *)operand_at(launch, CONV_WEIGHT) +
                                    (size_t)channel[c] * (HISTORY + 1);
#pragma unroll
                for (int i = 0; i < HISTORY; i++)
                    past[c][i] = kept[(size_t)i * channels + channel[c]];
#pragma unroll
                for (int i = 0; i <= HISTORY; i++) tap[c][i] = taps[i];
            }
            unsigned token = first;
#pragma unroll 1
            for (unsigned i = 0; i < count; i++, token = order->next[token]) {
                const bool starts = queries.starts(token);
                const float *values = row(X, token);
                float now[MIXED];
#pragma unroll
                for (int c = 0; c < MIXED; c++) now[c] = values[channel[c]];
#pragma unroll
                for (int c = 0; c < MIXED; c++) {
                    const float value = convolved(tap[c], past[c], now[c], starts);
                    const unsigned at = begin + c * AROUND_THREADS;
                    if (at < GROUP_CHANNELS) mixed[i * GROUP_CHANNELS + at] = value;
                }
            }
#pragma unroll
            for (int c = 0; c < MIXED; c++)
#pragma unroll
                for (int i = 0; i < HISTORY; i++)
                    after[(size_t)i * channels + channel[c]] = past[c][i];
        }
    }
    // g and b, by a thread each.
    __device__ __forceinline__ void find_factors() const {
        const unsigned thread = threadIdx.x - WARPS * WARP_LANES;
        for (unsigned number = thread; number < count * SHARERS; number += AROUND_THREADS) {
            unsigned token = first;
            for (unsigned i = 0; i < number / SHARERS; i++) token = order->next[token];
            const unsigned head = heads.value_head(number % SHARERS);
            factors[number] = factors_of(row(ALPHA, token)[head], row(BETA, token)[head],
                                         ((const float *)operand_at(launch, DECAY))[head],
                                         ((const float *)operand_at(launch, DT_BIAS))[head],
                                         queries.starts(token));
        }
    }

    __device__ __forceinline__ void norm(unsigned warp, int lane) const {
        const PACKET *prepared = packet_of(launch, INPUTS_OP);
        for (unsigned i = warp; i < 2 * count; i += AROUND_WARPS) {
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
                if (number % AROUND_WARPS == warp)
                    gate_row(read + number * STATE_SIZE,
                             (const float *)operand_at(launch, NORM_WEIGHT), row(GATE, token) + at,
                             packet_of(launch, NORM)->real[SSM_GATED_NORM_EPS],
                             (float *)row(Y, token) + at, lane);
            }
    }

    // By the warps around: mixed values and factors, keys normalized.
    __device__ __forceinline__ void prepare(unsigned channels, unsigned warp, int lane) const {
        float *const stored = (float *)operand_at(launch, CONV_STATE);
        const size_t each = (size_t)HISTORY * channels;
        mix(stored + order->before[first] * each,
            stored + queries.row_after(first, STATES) * each, channels);
        find_factors();
        group_barrier(AROUND_BARRIER);
        norm(warp, lane);
    }
};

// The warps with rows of states: of pass n behind barrier n, in front of barrier n + 1.
DEVICE void pass_over_states(const TOKEN_GROUP &group, STATE_ROWS &rows, unsigned warp, int lane) {
    PASSES now = {group.order, 0, NO_TOKEN, false};
    now.begin(blockIdx.y);
    PRECEDING_DONE;
    __syncthreads();
#pragma unroll 1
    for (unsigned turn = 0; now.token != NO_TOKEN; turn++) {
        if (now.again) rows.resume();
        group.of(now.token, turn)
            .pass(rows, group.queries.row_after(now.token, STATES), warp, lane);
        now.advance();
        __syncthreads();
    }
    await_stores();
}

// The other warps: they prepare pass n in front of barrier n, and gate it behind barrier n + 1.
DEVICE void stand_around(const TOKEN_GROUP &group, unsigned channels, unsigned warp, int lane) {
    PASSES now = {group.order, 0, NO_TOKEN, false};
    now.begin(blockIdx.y);
    PRECEDING_DONE;
    unsigned last = NO_TOKEN, before_last = NO_TOKEN;
#pragma unroll 1
    for (unsigned turn = 0;; turn++) {
        if (before_last != NO_TOKEN) group.of(before_last, turn).gate(warp, lane);
        const bool ends = now.token == NO_TOKEN;
        if (!ends) group.of(now.token, turn).prepare(channels, warp, lane);
        if (!ends || turn == 0 || last != NO_TOKEN) __syncthreads();
        if (ends && last == NO_TOKEN) return;
        before_last = last, last = now.token;
        if (!ends) now.advance();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    delta_slots(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    float *const rings = (float *)shared;
    COPY_BARRIER *const barriers = (COPY_BARRIER *)(shared + WARPS * SLOTS * CHUNK_BYTES);
    float *const mixed = (float *)(barriers + WARPS * SLOTS);
    float *const read = mixed + 2 * GROUP_TOKENS * GROUP_CHANNELS;
    FACTORS *const factors = (FACTORS *)(read + 2 * GROUP_TOKENS * SHARERS * STATE_SIZE);
    SLOT_ORDER *const order = (SLOT_ORDER *)(factors + 2 * GROUP_TOKENS * SHARERS);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *net = packet_of(launch, NET);
    const HEADS heads = {net->size[SSM_DELTA_NET_KEY_HEADS], net->size[SSM_DELTA_NET_VALUE_HEADS],
                         blockIdx.x, net->size[SSM_DELTA_NET_GROUPED] != 0};
    const unsigned channels = (2 * heads.keys + heads.values) * STATE_SIZE;
    const unsigned warp = threadIdx.x / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES;
    const QUERIES queries = {(const unsigned *)operand_at(launch, QUERY), stride_at(launch, QUERY)};
    FOLLOWING_MAY_START;
    const bool idle = leaves_out(launch, STEPS);
    if (idle) PRECEDING_DONE;
    if (idle) return;
    if (threadIdx.x == 0) order->slots = 0;
    order->find(queries, count_of(launch, net));
    const bool has_rows = warp < WARPS;
    STATE_ROWS rows = {
        rings + warp * SLOTS * (CHUNK_BYTES / 4),
        barriers + warp * SLOTS,
        (float *)operand_at(launch, STATE) + warp * WARP_ROWS * STATE_SIZE,
        heads,
        order,
        0, 0, blockIdx.y, NO_TOKEN, 0, false,
    };
    if (has_rows) open_copies(rows.barriers, SLOTS);
    __syncthreads();
    const TOKEN_GROUP group = {launch, heads, queries, order, mixed, read, factors, 0, 0};
    if (has_rows) {
        rows.begin();
        pass_over_states(group, rows, warp, lane);
    } else {
        stand_around(group, channels, warp - WARPS, lane);
    }
}
