// Divides runs of consecutive tokens of one slot into the work of blocks: the rows of one KV head,
// where a row is one head of one token. MAX_TOKENS is the number of tokens of the shape bucket.

#ifndef ATTENTION_RUNS_H
#define ATTENTION_RUNS_H

#include "attention_tiles.h"

#define START_WORDS ((MAX_TOKENS + 31) / 32)

// The work of a block: consecutive tokens of one slot. `first` and `last` are the positions that
// any of them sees; of a wide head the block computes part `part`.
struct BLOCK_WORK {
    const unsigned *pages, *query;
    size_t query_stride;
    U64 kv;
    unsigned begin, count, first, last, sharing, kv_heads, kv_head, part;

    __device__ __forceinline__ unsigned rows() const { return count * sharing; }
    __device__ __forceinline__ unsigned position(unsigned token) const {
        return query[token * query_stride + QUERY_POSITION];
    }
};

struct HEAD_ROWS {
    const float *q;
    float *y;
    size_t q_stride, y_stride;
    unsigned window;
    float scale;

    __device__ __forceinline__ const float *q_of(const BLOCK_WORK &work, unsigned row) const {
        return q + (work.begin + row / work.sharing) * q_stride + head_of(work, row) * HEAD_DIM;
    }
    __device__ __forceinline__ float *y_of(const BLOCK_WORK &work, unsigned row) const {
        return y + (work.begin + row / work.sharing) * y_stride + head_of(work, row) * HEAD_DIM;
    }
    static __device__ __forceinline__ unsigned head_of(const BLOCK_WORK &work, unsigned row) {
        return work.kv_head * work.sharing + row % work.sharing;
    }
};

DEVICE unsigned smallest_of_warp(unsigned value) { return ~largest_of_warp(~value); }

// A part of a query, word by word in the order of `x`, as integers in two parts, the low one with
// SHIFT bits; four lanes share the row. Returns the factor of the scores, 0 for a broken row.
template <int SHIFT, int WORDS>
DEVICE float split_row(const float (&x)[4 * WORDS], float scale, unsigned (&high)[WORDS],
                       unsigned (&low)[WORDS], bool &broken) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i++) most = max(most, __float_as_uint(x[i]) & MAGNITUDE);
    most = max(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = max(most, __shfl_xor_sync(ALL_LANES, most, 2));
    const int bits = query_bits(HEAD_DIM), exponent = row_exponent(most);
    const float factor = row_factor(most, bits);
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        high[word] = 0, low[word] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float value = x[4 * word + i];
            const int m = factor != 0.0f ? row_integer(value, factor, (2 << bits) - 1) : 0;
            high[word] |= (unsigned)(m >> SHIFT & 255) << 8 * i;
            low[word] |= (unsigned)(m & ((1 << SHIFT) - 1)) << 8 * i;
        }
    }
    broken = exponent == BROKEN_ROW;
    return broken ? 0.0f : scale * LOG2E * two_to(exponent - bits - KV_BITS);
}

// Bit i: token i begins a new unit of work, because of its slot or its index among the tokens.
DEVICE void find_starts(unsigned *starts, const unsigned *query, size_t stride, unsigned tokens,
                        unsigned block_tokens, unsigned threads) {
    for (unsigned i = threadIdx.x; i < START_WORDS * 32; i += threads) {
        bool start = false;
        if (i < tokens) {
            const unsigned slot = query[i * stride + QUERY_SLOT];
            const unsigned before = i ? query[(i - 1) * stride + QUERY_SLOT] : ~slot;
            start = i % block_tokens == 0 || slot != before;
        }
        const unsigned word = __ballot_sync(ALL_LANES, start);
        if (threadIdx.x % WARP_LANES == 0) starts[i / 32] = word;
    }
    __syncthreads();
}

DEVICE unsigned count_starts(const unsigned *starts) {
    unsigned count = 0;
    for (unsigned i = 0; i < START_WORDS; i++) count += __popc(starts[i]);
    return count;
}

DEVICE unsigned start_of(const unsigned *starts, unsigned number) {
    unsigned word = 0;
    while (number >= __popc(starts[word])) number -= __popc(starts[word++]);
    unsigned bits = starts[word];
    while (number--) bits &= bits - 1;
    return 32 * word + __popc((bits & 0u - bits) - 1);
}

// The first start behind token `begin`, or `tokens`.
DEVICE unsigned start_behind(const unsigned *starts, unsigned begin, unsigned tokens) {
    unsigned word = (begin + 1) / 32;
    if (word == START_WORDS) return tokens;
    unsigned bits = starts[word] & ALL_LANES << (begin + 1) % 32;
    while (!bits && ++word < START_WORDS) bits = starts[word];
    return bits ? 32 * word + __popc((bits & 0u - bits) - 1) : tokens;
}

// The tokens of run `number`, and the first and the last position that any of them sees.
DEVICE void open_run(BLOCK_WORK &work, const unsigned *starts, unsigned number, unsigned tokens,
                     unsigned window) {
    work.begin = start_of(starts, number);
    work.count = start_behind(starts, work.begin, tokens) - work.begin;
    work.first = 0xFFFFFFFFu, work.last = 0;
    for (unsigned i = threadIdx.x % WARP_LANES; i < work.count; i += WARP_LANES) {
        const unsigned position = work.position(work.begin + i);
        work.first = min(work.first, first_visible(position, window));
        work.last = max(work.last, position);
    }
    work.first = smallest_of_warp(work.first), work.last = largest_of_warp(work.last);
}

// Calls attend(token, y) for each group of heads of a token that is alone.
template <class ATTEND>
DEVICE void for_heads_of_token(const BLOCK_WORK &work, const HEAD_ROWS &operands,
                               const ATTEND &attend) {
    SPAN_WORK token;
    token.pages = work.pages, token.kv = work.kv, token.token = work.begin;
    token.kv_heads = work.kv_heads, token.kv_head = work.kv_head;
    token.position = work.last, token.first = work.first;
    for (unsigned first = 0; first < work.sharing; first += HEADS) {
        token.head = work.kv_head * work.sharing + first;
        token.heads = min((unsigned)HEADS, work.sharing - first);
        token.q = operands.q_of(work, first);
        attend(token, operands.y_of(work, first));
    }
}

// The values that are equal in all blocks of a launch; returns the number of runs.
DEVICE unsigned open_work(const LAUNCH &launch, const PACKET *packet, unsigned block_rows,
                          unsigned *starts, unsigned threads, BLOCK_WORK &work,
                          HEAD_ROWS &operands) {
    const unsigned tokens = count_of(launch, packet);
    work.kv_heads = packet->size[FLASH_ATTN_BATCHED_KV_HEADS];
    work.sharing = packet->size[FLASH_ATTN_BATCHED_HEADS] / work.kv_heads;
    work.kv = (U64)operand_at(launch, KV_AT);
    work.query = (const unsigned *)operand_at(launch, QUERY_AT);
    work.query_stride = stride_at(launch, QUERY_AT);
    operands.q = (const float *)operand_at(launch, Q_AT);
    operands.y = (float *)operand_at(launch, Y_AT);
    operands.q_stride = stride_at(launch, Q_AT);
    operands.y_stride = stride_at(launch, Y_AT);
    operands.window = packet->size[FLASH_ATTN_BATCHED_WINDOW];
    operands.scale = packet->real[FLASH_ATTN_BATCHED_SCALE];
    PRECEDING_DONE;
    find_starts(starts, work.query, work.query_stride, tokens, block_rows / work.sharing, threads);
    return count_starts(starts);
}

// Where the pages of the work's slot are named.
DEVICE const unsigned *pages_of(const LAUNCH &launch, const BLOCK_WORK &work) {
    const unsigned slot = work.query[work.begin * work.query_stride + QUERY_SLOT];
    return (const unsigned *)operand_at(launch, PAGES_AT) + slot * stride_at(launch, PAGES_AT);
}

#endif
