// SSM_CONV1D of many tokens (rule R8). A block computes CONV_TOKENS tokens and THREADS channels. It
// first finds the input values of each token: those of earlier tokens of the same slot in the step,
// then those stored for the slot. A second launch, with STORES equal to 1, stores the values that
// slots need in later steps: those after each of the latest STATES positions, in the row of its
// remainder.
//
// Compiled with HISTORY, THREADS, CONV_TOKENS, STATES (1 or at least HISTORY), STORES, these operand numbers (see packets.h), -1 if
// absent: X, WEIGHT, QUERY, STATE, Y, BIAS, INPUT_GATE, OUTPUT_GATE, and the packet number CONV.

#include "queries.h"
#include "warp.h"

#define WARPS (THREADS / WARP_LANES)
#define KEPT 0x80000000u  // in an index: a row of the slot's stored values, not a token
#define ZERO 0xFFFFFFFFu
#define SKIPPED 0xFFFFFFFEu

// Finds the HISTORY values before those of `token`, oldest first, by one warp.
DEVICE void find_past(const QUERIES &queries, unsigned token, unsigned *place, int lane) {
    const unsigned slot = queries.slot(token);
    int found = 0;
    bool ended = queries.starts(token);
    for (int end = (int)token; end > 0 && found < HISTORY && !ended; end -= WARP_LANES) {
        const int at = end - 1 - lane;  // the nearest first
        const bool own = at >= 0 && queries.slot(at) == slot;
        unsigned same = __ballot_sync(ALL_LANES, own);
        const unsigned begins = __ballot_sync(ALL_LANES, own && queries.starts(at));
        while (same && found < HISTORY && !ended) {
            const int nearest = __popc((same & (0u - same)) - 1);
            if (lane == 0) place[HISTORY - 1 - found] = (unsigned)(end - 1 - nearest);
            found++;
            ended = begins >> nearest & 1;
            same &= same - 1;
        }
    }
    // Before the first of them come the latest stored values, in this row of the slot's.
    const unsigned row = (queries.position(token) - 1 - found) % STATES;
    if (lane == 0)
        for (int i = found; i < HISTORY; i++)
            place[HISTORY - 1 - i] = ended ? ZERO : KEPT | (row * HISTORY + HISTORY - 1 - (i - found));
    __syncwarp();
}

// Whether a token behind this one stores its values in the same row.
DEVICE bool has_later(const QUERIES &queries, unsigned token, unsigned tokens, int lane) {
    const unsigned row = queries.row_after(token, STATES);
    for (unsigned first = token + 1; first < tokens; first += WARP_LANES) {
        const unsigned at = first + lane;
        if (__ballot_sync(ALL_LANES, at < tokens && queries.row_after(at, STATES) == row))
            return true;
    }
    return false;
}

// The input value of a token and channel: x, times its gate if there is one.
DEVICE float gated_input(const LAUNCH &launch, unsigned token, unsigned channel) {
    const float x = ((const float *)operand_at(launch, X))[token * stride_at(launch, X) + channel];
    if (INPUT_GATE < 0) return x;
    const float *gate = (const float *)operand_at(launch, INPUT_GATE);
    return gate[token * stride_at(launch, INPUT_GATE) + channel] * x;
}

// What the convolution's sum becomes: + bias, then times its gate or through silu.
DEVICE float gated_output(const LAUNCH &launch, unsigned token, unsigned channel, float total) {
    if (BIAS >= 0) total = total + ((const float *)operand_at(launch, BIAS))[channel];
    if (OUTPUT_GATE < 0) return silu_of(total);
    const float *gate = (const float *)operand_at(launch, OUTPUT_GATE);
    return gate[token * stride_at(launch, OUTPUT_GATE) + channel] * total;
}

// Computes tokens `first` to `end` - 1 of a channel, or stores the values behind them.
DEVICE void convolve(const LAUNCH &launch, const QUERIES &queries, const unsigned *places,
                     const float (&tap)[HISTORY + 1], unsigned first, unsigned end,
                     unsigned channel, unsigned channels) {
#pragma unroll 4
    for (unsigned token = first; token < end; token++) {
        const unsigned *place = places + (token - first) * HISTORY;
        if (STORES && place[0] == SKIPPED) continue;
        float *kept = (float *)operand_at(launch, STATE) +
                      (size_t)queries.slot(token) * STATES * HISTORY * channels + channel;
        float past[HISTORY];
#pragma unroll
        for (int i = 0; i < HISTORY; i++)
            past[i] = place[i] == ZERO   ? 0.0f
                      : place[i] & KEPT ? kept[(size_t)(place[i] & ~KEPT) * channels]
                                        : gated_input(launch, place[i], channel);
        const float now = gated_input(launch, token, channel);
        if (STORES) {
            float *after = kept + (size_t)(queries.position(token) % STATES) * HISTORY * channels;
#pragma unroll
            for (int i = 0; i < HISTORY; i++)
                after[(size_t)i * channels] = i + 1 < HISTORY ? past[i + 1] : now;
            continue;
        }
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < HISTORY; i++) total = total + tap[i] * past[i];
        total = total + tap[HISTORY] * now;
        ((float *)operand_at(launch, Y))[token * stride_at(launch, Y) + channel] =
            gated_output(launch, token, channel, total);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_conv(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned *places = (unsigned *)shared;  // [CONV_TOKENS][HISTORY]
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *conv = packet_of(launch, CONV);
    const unsigned channels = conv->size[SSM_CONV1D_CHANNELS], tokens = count_of(launch, conv);
    const unsigned channel = blockIdx.x * THREADS + threadIdx.x;
    const int lane = threadIdx.x % WARP_LANES;
    FOLLOWING_MAY_START;
    float tap[HISTORY + 1];
#pragma unroll
    for (int i = 0; i <= HISTORY; i++)
        tap[i] = channel < channels
                     ? ((const float *)operand_at(launch, WEIGHT))[channel * (HISTORY + 1) + i]
                     : 0.0f;
    PRECEDING_DONE;
    const QUERIES queries = {(const unsigned *)operand_at(launch, QUERY), stride_at(launch, QUERY)};
    // One row of blocks stores several states of a slot, since a token's row may be another's past.
    for (unsigned first = blockIdx.y * CONV_TOKENS; first < tokens;
         first += gridDim.y * CONV_TOKENS) {
        const unsigned end = min(tokens, first + CONV_TOKENS);
        for (unsigned token = first + threadIdx.x / WARP_LANES; token < end; token += WARPS) {
            unsigned *place = places + (token - first) * HISTORY;
            if (STORES && has_later(queries, token, tokens, lane)) {
                if (lane == 0) place[0] = SKIPPED;
                __syncwarp();
            } else {
                find_past(queries, token, place, lane);
            }
        }
        __syncthreads();
        if (channel < channels)
            convolve(launch, queries, places, tap, first, end, channel, channels);
        __syncthreads();
    }
}
