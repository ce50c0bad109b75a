// SSM_CONV1D of many tokens (rule R8). A block computes CONV_TOKENS tokens and THREADS channels. It
// first finds the input values of each token: those of earlier tokens of the same slot in the step,
// then those stored for the slot. A second launch, with STORES equal to 1, stores the values that
// slots need in later steps: those after each of the latest STATES positions, in the row of its
// remainder.
//
// Compiled with HISTORY, THREADS, CONV_TOKENS, STATES (1 or at least HISTORY), STORES, STEPS (see
// queries.h), these operand numbers (see packets.h), -1 if absent: X, WEIGHT, QUERY, STATE, Y, BIAS,
// INPUT_GATE, OUTPUT_GATE, and the packet number CONV.

#include "queries.h"

#define WARPS (THREADS / WARP_LANES)
#define KEPT 0x80000000u  // in an index: a row of the slot's stored values, not a token
#define ZERO 0xFFFFFFFFu
#define SKIPPED 0xFFFFFFFEu
#define AT_ONCE 4  // tokens whose inputs a thread loads together

// Finds the HISTORY values before those of `token`, oldest first, by one warp.
DEVICE void find_past(const QUERIES &queries, unsigned token, unsigned *indices, int lane) {
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
            if (lane == 0) indices[HISTORY - 1 - found] = (unsigned)(end - 1 - nearest);
            found++;
            ended = begins >> nearest & 1;
            same &= same - 1;
        }
    }
    // Before the first of them come the latest stored values, in this row of the slot's.
    const unsigned row = (queries.position(token) - 1 - found) % STATES;
    if (lane == 0)
        for (int i = found; i < HISTORY; i++)
            indices[HISTORY - 1 - i] = ended ? ZERO : KEPT | (row * HISTORY + HISTORY - 1 - (i - found));
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

// A channel's inputs and outputs. The input value of a token is x, times its gate if there is one.
struct CHANNEL {
    const float *x, *input_gate, *output_gate;
    size_t x_stride, input_stride, output_stride;
    float bias;

    __device__ __forceinline__ CHANNEL(const LAUNCH &launch, unsigned channel)
        : x((const float *)operand_at(launch, X) + channel),
          input_gate((const float *)operand_at(launch, INPUT_GATE) + channel),
          output_gate((const float *)operand_at(launch, OUTPUT_GATE) + channel),
          x_stride(stride_at(launch, X)),
          input_stride(stride_at(launch, INPUT_GATE)),
          output_stride(stride_at(launch, OUTPUT_GATE)),
          bias(BIAS < 0 ? 0.0f : ((const float *)operand_at(launch, BIAS))[channel]) {}
    __device__ __forceinline__ float input(unsigned token) const {
        const float value = x[token * x_stride];
        return INPUT_GATE < 0 ? value : input_gate[token * input_stride] * value;
    }
    // What the convolution's sum becomes: + bias, then times its gate or through silu.
    __device__ __forceinline__ float output(unsigned token, float total) const {
        if (BIAS >= 0) total = total + bias;
        if (OUTPUT_GATE < 0) return silu_of(total);
        return output_gate[token * output_stride] * total;
    }
};

// The values before a token, of which `indices` says where each is.
DEVICE void load_past(float (&past)[HISTORY], const unsigned *indices, const CHANNEL &of,
                      const float *kept, unsigned channels) {
#pragma unroll
    for (int i = 0; i < HISTORY; i++)
        past[i] = indices[i] == ZERO  ? 0.0f
                  : indices[i] & KEPT ? kept[(size_t)(indices[i] & ~KEPT) * channels]
                                    : of.input(indices[i]);
}

// Computes tokens `first` to `end` - 1 of a channel. What is before a token stays in registers for
// the next one if that follows it.
DEVICE void convolve(const LAUNCH &launch, const QUERIES &queries, const unsigned *all_indices,
                     const float (&tap)[HISTORY + 1], unsigned first, unsigned end,
                     unsigned channel, unsigned channels) {
    const CHANNEL of(launch, channel);
    float *y = (float *)operand_at(launch, Y) + first * stride_at(launch, Y) + channel;
    const size_t y_stride = stride_at(launch, Y);
    float past[HISTORY + 1];  // and the token's own value
#pragma unroll 1
    for (unsigned begin = first; begin < end; begin += AT_ONCE) {
        float now[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) now[i] = of.input(min(begin + i, end - 1));
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const unsigned token = begin + n;
            if (token >= end) break;
            const unsigned *indices = all_indices + (token - first) * HISTORY;
            if (token > first && indices[HISTORY - 1] == token - 1) {
#pragma unroll
                for (int i = 0; i < HISTORY; i++) past[i] = past[i + 1];
            } else {
                const float *kept =
                    (const float *)operand_at(launch, STATE) +
                    (size_t)queries.slot(token) * STATES * HISTORY * channels + channel;
                float loaded[HISTORY];
                load_past(loaded, indices, of, kept, channels);
#pragma unroll
                for (int i = 0; i < HISTORY; i++) past[i] = loaded[i];
            }
            past[HISTORY] = now[n];
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i <= HISTORY; i++) total = total + tap[i] * past[i];
            *y = of.output(token, total);
            y += y_stride;
        }
    }
}

// Stores the values behind tokens `first` to `end` - 1 of a channel.
DEVICE void store_past(const LAUNCH &launch, const QUERIES &queries, const unsigned *all_indices,
                       unsigned first, unsigned end, unsigned channel, unsigned channels) {
    const CHANNEL of(launch, channel);
#pragma unroll 4
    for (unsigned token = first; token < end; token++) {
        const unsigned *indices = all_indices + (token - first) * HISTORY;
        if (indices[0] == SKIPPED) continue;
        float *kept = (float *)operand_at(launch, STATE) +
                      (size_t)queries.slot(token) * STATES * HISTORY * channels + channel;
        float past[HISTORY];
        load_past(past, indices, of, kept, channels);
        const float now = of.input(token);
        float *after = kept + (size_t)(queries.position(token) % STATES) * HISTORY * channels;
#pragma unroll
        for (int i = 0; i < HISTORY; i++)
            after[(size_t)i * channels] = i + 1 < HISTORY ? past[i + 1] : now;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    delta_conv(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned *all_indices = (unsigned *)shared;  // [CONV_TOKENS][HISTORY]
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
    if (leaves_out(launch, STEPS)) return;
    const QUERIES queries = {(const unsigned *)operand_at(launch, QUERY), stride_at(launch, QUERY)};
    // One row of blocks stores several states of a slot, since a token's row may be another's past.
    for (unsigned first = blockIdx.y * CONV_TOKENS; first < tokens;
         first += gridDim.y * CONV_TOKENS) {
        const unsigned end = min(tokens, first + CONV_TOKENS);
        for (unsigned token = first + threadIdx.x / WARP_LANES; token < end; token += WARPS) {
            unsigned *indices = all_indices + (token - first) * HISTORY;
            if (STORES && has_later(queries, token, tokens, lane)) {
                if (lane == 0) indices[0] = SKIPPED;
                __syncwarp();
            } else {
                find_past(queries, token, indices, lane);
            }
        }
        __syncthreads();
        if (channel < channels && STORES)
            store_past(launch, queries, all_indices, first, end, channel, channels);
        else if (channel < channels)
            convolve(launch, queries, all_indices, tap, first, end, channel, channels);
        __syncthreads();
    }
}
