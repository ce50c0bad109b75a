// SSM_CONV1D, SSM_DELTA_NET and SSM_GATED_NORM of few tokens (rules R2, R4 and R8). A block computes
// one value head for the tokens of one slot in order: that of the slot's first token does so, those
// of its other tokens end at once. All blocks that share a key head convolve its queries and keys.
// When all of them have read the slot's stored values, the last of these blocks stores the values
// for later steps. The workspace counts them in a word for every key head and token.
//
// A slot has STATES rows of states; what follows a position is in the row of its remainder.
//
// Everything but the recurrence is computed for all tokens together. A warp has its rows of the
// state in registers, so that no other waits between two tokens.
//
// States pass through BUFFERS parts of shared memory, each of a whole state, on their way to global
// memory, or go there at once if it is 0.
//
// Compiled with STATE_SIZE, HISTORY, WARPS, STATES, MAX_TOKENS (at most 32), BUFFERS; with these operand
// numbers (see packets.h): X, CONV_WEIGHT, QUERY, CONV_STATE, ALPHA, BETA, DECAY, DT_BIAS, STATE,
// GATE, NORM_WEIGHT, Y; with the packet numbers INPUTS_OP, NET and NORM.

#include "delta_token.h"
#include "queries.h"

#define THREADS (WARPS * WARP_LANES)
#define WARP_ROWS (STATE_SIZE / WARPS)  // of the state
#define ROW_SETS (WARP_ROWS / ROWS_AT_ONCE)
#define WARP_FLOATS (WARP_ROWS * STATE_SIZE)
#define HEAD_CHANNELS (3 * STATE_SIZE)
#define PER_THREAD ((HEAD_CHANNELS + THREADS - 1) / THREADS)  // channels to convolve
#define OPENED ((MAX_TOKENS * STATE_SIZE + THREADS - 1) / THREADS)  // gates that a thread opens

// The tokens of a slot, bit n for the n-th behind the block's first one, found by a warp whose lanes
// read one token each.
struct SLOT_TOKENS {
    unsigned first, members, starting, remaining;
    unsigned row_of_lane, before;  // rows of states: behind the lane's token, in front of the first
    bool has_earlier;

    __device__ __forceinline__ SLOT_TOKENS(const QUERIES &queries, unsigned first_,
                                           unsigned tokens, int lane)
        : first(first_) {
        const unsigned token = min((unsigned)lane, tokens - 1), later = lane + STATES;
        const unsigned slot = queries.slot(token), position = queries.position(token);
        const unsigned later_slot = __shfl_sync(ALL_LANES, slot, later % WARP_LANES);
        const unsigned later_position = __shfl_sync(ALL_LANES, position, later % WARP_LANES);
        const unsigned of_first = __shfl_sync(ALL_LANES, slot, first);
        const unsigned all = __ballot_sync(ALL_LANES, lane < tokens && slot == of_first);
        has_earlier = all & ((1u << first) - 1);
        members = all >> first;
        starting = __ballot_sync(ALL_LANES, position == 0) >> first;
        remaining = __ballot_sync(ALL_LANES, later >= tokens || later_slot != slot ||
                                                 later_position != position + STATES) >>
                    first;
        row_of_lane = slot * STATES + position % STATES;
        before = __shfl_sync(ALL_LANES, slot * STATES + (position + STATES - 1) % STATES, first);
    }
    __device__ __forceinline__ bool has(int n) const { return members >> n & 1; }
    __device__ __forceinline__ bool starts(int n) const { return starting >> n & 1; }
    // Whether no later token of the step replaces the state behind this one.
    __device__ __forceinline__ bool remains(int n) const { return remaining >> n & 1; }
    // By whole warps.
    __device__ __forceinline__ unsigned row_after(int n) const {
        return __shfl_sync(ALL_LANES, row_of_lane, first + n);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_step(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    BLOCK_MEMORY(shared);
    float *buffers = (float *)shared;  // states to be stored
    float *mixed = buffers + BUFFERS * STATE_SIZE * STATE_SIZE;  // queries, keys, values of each token
    float *open = mixed + MAX_TOKENS * HEAD_CHANNELS;  // gates of each token
    float *read = open + MAX_TOKENS * STATE_SIZE;      // M q of each token
    FACTORS *factors = (FACTORS *)(read + MAX_TOKENS * STATE_SIZE);
    unsigned *ticket = (unsigned *)(factors + MAX_TOKENS);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *net = packet_of(launch, NET);
    const unsigned key_heads = net->size[SSM_DELTA_NET_KEY_HEADS];
    const unsigned value_heads = net->size[SSM_DELTA_NET_VALUE_HEADS];
    const unsigned sharers = value_heads / key_heads;
    const unsigned head = blockIdx.x;
    const unsigned key_head =
        net->size[SSM_DELTA_NET_GROUPED] ? head / sharers : head % key_heads;
    const unsigned tokens = count_of(launch, net), first = blockIdx.y;
    const unsigned channels = (2 * key_heads + value_heads) * STATE_SIZE;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES, thread = threadIdx.x;
    FOLLOWING_MAY_START;
    // A thread's channels of queries, keys and values.
    unsigned channel[PER_THREAD];
    float tap[PER_THREAD][HISTORY + 1];
#pragma unroll
    for (int c = 0; c < PER_THREAD; c++) {
        const unsigned at = thread + c * THREADS, part = at / STATE_SIZE;
        channel[c] = (part == 0   ? key_head
                      : part == 1 ? key_heads + key_head
                                  : 2 * key_heads + head) * STATE_SIZE +
                     at % STATE_SIZE;
        const float *taps =
            (const float *)operand_at(launch, CONV_WEIGHT) + channel[c] * (HISTORY + 1);
#pragma unroll
        for (int i = 0; i <= HISTORY; i++) tap[c][i] = at < HEAD_CHANNELS ? taps[i] : 0.0f;
    }
    const PACKET *prepared = packet_of(launch, INPUTS_OP);
    const float eps = prepared->real[SSM_DELTA_INPUTS_EPS];
    const float query_scale = prepared->real[SSM_DELTA_INPUTS_QUERY_SCALE];
    const float decay = ((const float *)operand_at(launch, DECAY))[head];
    const float dt_bias = ((const float *)operand_at(launch, DT_BIAS))[head];
    float norm_weight[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        norm_weight[i] = ((const float *)operand_at(launch, NORM_WEIGHT))[lane + WARP_LANES * i];
    if (first >= tokens) {
        PRECEDING_DONE;
        return;
    }
    // What earlier steps left is read before the previous kernel has ended, since only this one
    // writes it.
    const SLOT_TOKENS own_tokens(
        {(const unsigned *)operand_at(launch, QUERY), stride_at(launch, QUERY)}, first, tokens, lane);
    if (own_tokens.has_earlier) {
        PRECEDING_DONE;
        return;
    }
    const unsigned before = own_tokens.before;
    float *const stored = (float *)operand_at(launch, CONV_STATE);
    const float *kept = stored + (size_t)before * HISTORY * channels;
    float *const states = (float *)operand_at(launch, STATE);
    const float *state = states + ((size_t)before * value_heads + head) * STATE_SIZE * STATE_SIZE;
    float m[ROW_SETS][LANE_KEYS], past[PER_THREAD][HISTORY];
#pragma unroll
    for (int c = 0; c < PER_THREAD; c++)
#pragma unroll
        for (int i = 0; i < HISTORY; i++)
            past[c][i] = thread + c * THREADS < HEAD_CHANNELS
                             ? kept[(size_t)i * channels + channel[c]]
                             : 0.0f;
    const unsigned own_row = warp * WARP_ROWS + lane / ROW_LANES;
#pragma unroll
    for (int s = 0; s < ROW_SETS; s++)
        take_keys(m[s], state + (size_t)(own_row + s * ROWS_AT_ONCE) * STATE_SIZE, lane);
    float began[PER_THREAD][HISTORY];  // the values before the first token
#pragma unroll
    for (int c = 0; c < PER_THREAD; c++)
#pragma unroll
        for (int i = 0; i < HISTORY; i++) began[c][i] = past[c][i];
    unsigned *counter = (unsigned *)workspace + first * key_heads + key_head;
    PRECEDING_DONE;
    float now[MAX_TOKENS][PER_THREAD], closed[OPENED];
#pragma unroll
    for (int n = 0; n < MAX_TOKENS; n++) {
        const unsigned token = min(first + n, tokens - 1);
#pragma unroll
        for (int c = 0; c < PER_THREAD; c++)
            if (thread + c * THREADS < HEAD_CHANNELS)
                now[n][c] =
                    ((const float *)operand_at(launch, X))[token * stride_at(launch, X) + channel[c]];
    }
#pragma unroll
    for (int k = 0; k < OPENED; k++) {
        const unsigned i = thread + k * THREADS;
        const unsigned token = min(first + i / STATE_SIZE, tokens - 1);
        closed[k] = ((const float *)operand_at(
            launch, GATE))[token * stride_at(launch, GATE) + head * STATE_SIZE + i % STATE_SIZE];
    }
    // The last threads have a token's factors each, and the fewest channels.
    const unsigned of_factors = THREADS - 1 - thread;
    float alpha = 0.0f, beta = 0.0f;
    if (of_factors < MAX_TOKENS) {
        const unsigned token = min(first + of_factors, tokens - 1);
        alpha = ((const float *)operand_at(launch, ALPHA))[token * stride_at(launch, ALPHA) + head];
        beta = ((const float *)operand_at(launch, BETA))[token * stride_at(launch, BETA) + head];
    }
#pragma unroll
    for (int n = 0; n < MAX_TOKENS; n++) {
        if (!own_tokens.has(n)) continue;
#pragma unroll
        for (int c = 0; c < PER_THREAD; c++) {
            if (thread + c * THREADS >= HEAD_CHANNELS) break;
            mixed[n * HEAD_CHANNELS + thread + c * THREADS] =
                convolved(tap[c], past[c], now[n][c], own_tokens.starts(n));
        }
    }
    if (of_factors < MAX_TOKENS)
        factors[of_factors] =
            factors_of(alpha, beta, decay, dt_bias, own_tokens.starts(of_factors));
#pragma unroll
    for (int k = 0; k < OPENED; k++) {
        const unsigned i = thread + k * THREADS;
        if (i < MAX_TOKENS * STATE_SIZE) open[i] = silu_of(closed[k]);
    }
    __syncthreads();
    // The stored values have been read: the values to be stored now depend on them.
    if (thread == 0) *ticket = atomicAdd(counter, 1);
#pragma unroll 1
    for (unsigned part = warp; part < 2 * MAX_TOKENS; part += WARPS) {
        if (!own_tokens.has(part / 2)) continue;
        float *own = mixed + part / 2 * HEAD_CHANNELS + part % 2 * STATE_SIZE;
        norm_keys(own, own, eps, query_scale, part % 2 == 0, lane);
    }
    __syncthreads();
    [[maybe_unused]] unsigned stored_states = 0;
#pragma unroll 1
    for (int n = 0; n < MAX_TOKENS; n++) {
        if (!own_tokens.has(n)) continue;
        const float *own = mixed + n * HEAD_CHANNELS;
        float of_token[LANE_KEYS];  // keys, then queries: there are no registers for both
        take_keys(of_token, own + STATE_SIZE, lane);
        update_rows(m, of_token, own + 2 * STATE_SIZE + own_row, factors[n].g, factors[n].b,
                    factors[n].starts);
        take_keys(of_token, own, lane);
        read_rows(m, of_token, read + n * STATE_SIZE + own_row, lane);
        if (!own_tokens.remains(n)) continue;
        float *after = states + ((size_t)own_tokens.row_after(n) * value_heads + head) *
                                    STATE_SIZE * STATE_SIZE;
        float *rows = after + warp * WARP_FLOATS;
#if BUFFERS
        await_slots<BUFFERS - 1>();
        __syncwarp();
        rows = buffers + (stored_states++ % BUFFERS * WARPS + warp) * WARP_FLOATS;
#endif
#pragma unroll
        for (int s = 0; s < ROW_SETS; s++)
            put_keys(m[s], rows + (lane / ROW_LANES + s * ROWS_AT_ONCE) * STATE_SIZE, lane);
        if (BUFFERS) begin_store(after + warp * WARP_FLOATS, rows, 4 * WARP_FLOATS);
    }
    __syncthreads();
#pragma unroll 1
    for (unsigned n = warp; n < MAX_TOKENS; n += WARPS) {
        if (!own_tokens.has(n)) continue;
        float *y =
            (float *)operand_at(launch, Y) + (first + n) * stride_at(launch, Y) + head * STATE_SIZE;
        float opened[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            opened[i] = open[n * STATE_SIZE + lane + WARP_LANES * i];
        gate_values(read + n * STATE_SIZE, norm_weight, opened,
                    packet_of(launch, NORM)->real[SSM_GATED_NORM_EPS], y, lane);
    }
    const bool last = *ticket + 1 == sharers;
#pragma unroll
    for (int n = 0; n < MAX_TOKENS; n++) {
        if (!own_tokens.has(n)) continue;
        const bool remains = own_tokens.remains(n);
        // With a single state the values behind the last token are in registers already.
        if (STATES == 1 && !remains) continue;
        float *after = stored + (size_t)own_tokens.row_after(n) * HISTORY * channels;
#pragma unroll
        for (int c = 0; c < PER_THREAD; c++) {
            const unsigned at = thread + c * THREADS;
            if (at >= HEAD_CHANNELS || (at < 2 * STATE_SIZE && !last)) continue;
            if (STATES > 1) shift(began[c], now[n][c], own_tokens.starts(n));
            if (remains)
#pragma unroll
                for (int i = 0; i < HISTORY; i++)
                    after[(size_t)i * channels + channel[c]] =
                        STATES > 1 ? began[c][i] : past[c][i];
        }
    }
    if (last && thread == 0) *counter = 0;
    if (BUFFERS) await_stores();
}
