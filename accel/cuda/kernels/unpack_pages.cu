// UNPACK_PAGES: the pages of rotated rows that the tokens of a step can see, as I12 pages, which the
// kernels of attention read. A warp makes a record of 16 positions at a time.
//
// Compiled with DTYPE, the storage type of the pages, HEAD_DIM and KV_HEADS; with WINDOW, 0 where
// tokens see all positions; and with these operand numbers (see packets.h): KV_AT, PAGES_AT, QUERY_AT
// and Y_AT. Packed words hold four channels or four positions, a byte each.

#include "queries.h"
#include "warp.h"
#include "attention_rows.k"
#include "pages.k"
#include "pages_coded.k"

#define HALF_DIM (HEAD_DIM / 2)
#define GROUPS (HEAD_DIM / CODED_CHANNELS)
#define PAGES_OF_TILE (KV_TILE / PAGE_TOKENS)

struct INTEGERS {
    int m[4];
    // The high and the low parts of I12 integers, which are 16 high + low.
    __device__ __forceinline__ unsigned high() const {
        unsigned word = 0;
        for (int n = 0; n < 4; n++) word |= (unsigned)(m[n] >> 4 & 255) << 8 * n;
        return word;
    }
    __device__ __forceinline__ unsigned low() const {
        unsigned word = 0;
        for (int n = 0; n < 4; n++) word |= (unsigned)(m[n] & 15) << 8 * n;
        return word;
    }
};

DEVICE unsigned stored_word(const unsigned char *record, unsigned at) {
    return *(const unsigned *)(record + at);
}

// Channels `channel` to channel + 3 of the key of position `row`.
DEVICE INTEGERS keys_of(const unsigned char *record, unsigned row, unsigned channel) {
    const unsigned g = channel / CODED_CHANNELS, k = channel % CODED_CHANNELS, at = row * GROUPS + g;
    const unsigned codes =
        stored_word(record, row * HALF_DIM + 16 * g + k % 16) >> k / 16 * 4 & 0x0F0F0F0Fu;
    const unsigned tops = DTYPE == I4R ? stored_word(record, CODED_TOPS(HEAD_DIM) + 4 * at) : 0;
    const int scale = record[CODED_SCALES(HEAD_DIM) + at], most = (1 << KEY_CODE_BITS) - 1;
    INTEGERS keys;
    for (int n = 0; n < 4; n++) {
        const int code = codes >> 8 * n & 15u | (tops >> (k + n) & 1u) << 4;
        keys.m[n] = scale * (2 * code - most);
    }
    return keys;
}

// Channel `channel` of the values of positions `row` to row + 3.
DEVICE INTEGERS values_of(const unsigned char *record, unsigned row, unsigned channel) {
    const unsigned g = channel / CODED_CHANNELS, k = channel % CODED_CHANNELS;
    const unsigned octet = VALUE_OCTETS * g + k % VALUE_OCTETS, at = g * PAGE_TOKENS + row;
    const unsigned codes = stored_word(record, CODED_VALUES(HEAD_DIM) + octet * PAGE_TOKENS + row) >>
                           k / VALUE_OCTETS * VALUE_LOW_BITS;
    const unsigned scales = stored_word(record, CODED_VALUE_SCALES(HEAD_DIM) + at);
    const int most = (1 << VALUE_CODE_BITS) - 1;
    INTEGERS values;
    for (int n = 0; n < 4; n++) {
        int code = codes >> 8 * n & (1u << VALUE_LOW_BITS) - 1u;
        if (DTYPE == I3R)
            code |= (stored_word(record, CODED_TOPS(HEAD_DIM) + 4 * (at + n)) >> k & 1u) << 2;
        values.m[n] = (int)(scales >> 8 * n & 255u) * (2 * code - most);
    }
    return values;
}

DEVICE void put_word(unsigned char *record, unsigned at, unsigned word) {
    *(unsigned *)(record + at) = word;
}

DEVICE void unpack_record(const unsigned char *coded, unsigned char *record, unsigned lane) {
    for (unsigned i = lane; i < PAGE_TOKENS * HALF_DIM / 4; i += WARP_LANES) {
        const unsigned row = i / (HALF_DIM / 4), channel = i % (HALF_DIM / 4) * 4;
        const INTEGERS first = keys_of(coded, row, channel);
        const INTEGERS second = keys_of(coded, row, channel + HALF_DIM);
        put_word(record, row * HEAD_DIM + channel, first.high());
        put_word(record, row * HEAD_DIM + HALF_DIM + channel, second.high());
        put_word(record, I12_LOW(HEAD_DIM) + row * HALF_DIM + channel,
                 first.low() | second.low() << 4);
    }
    for (unsigned i = lane; i < PAGE_TOKENS * HALF_DIM / 4; i += WARP_LANES) {
        const unsigned row = i % 4 * 4, channel = i / 4;
        const INTEGERS first = values_of(coded, row, channel);
        const INTEGERS second = values_of(coded, row, channel + HALF_DIM);
        unsigned char *high = record + I12_VALUES(HEAD_DIM);
        put_word(high, channel * PAGE_TOKENS + row, first.high());
        put_word(high, (channel + HALF_DIM) * PAGE_TOKENS + row, second.high());
        put_word(high, I12_LOW(HEAD_DIM) + channel * PAGE_TOKENS + row,
                 first.low() | second.low() << 4);
    }
    record[I12_EXPONENTS(HEAD_DIM) + lane] = coded[CODED_EXPONENTS(HEAD_DIM) + lane];
}

// The first page of the tiles that any token of a run sees, by the position of its last token.
DEVICE unsigned first_page(unsigned position, unsigned tokens) {
    if (WINDOW == 0 || position < WINDOW + tokens) return 0;
    return (position - WINDOW - tokens) / KV_TILE * PAGES_OF_TILE;
}

extern "C" __global__ void __launch_bounds__(256)
    unpack_pages(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    const unsigned tokens = count_of(launch, packet_of(launch, 0));
    const QUERIES queries = {(const unsigned *)operand_at(launch, QUERY_AT),
                             stride_at(launch, QUERY_AT)};
    const U64 kv = (U64)operand_at(launch, KV_AT), y = (U64)operand_at(launch, Y_AT);
    const unsigned lane = threadIdx.x % WARP_LANES, warps = blockDim.x / WARP_LANES;
    PRECEDING_DONE;
    unsigned unit = blockIdx.x * warps + threadIdx.x / WARP_LANES;
    for (unsigned begin = 0; begin < tokens; begin += WARP_LANES) {
        const unsigned own = begin + lane;
        const bool ends = own < tokens &&
                          (own + 1 == tokens || queries.slot(own + 1) != queries.slot(own));
        for (unsigned left = __ballot_sync(ALL_LANES, ends); left; left &= left - 1) {
            const unsigned token = begin + __popc((left & 0u - left) - 1);
            const unsigned *pages = (const unsigned *)operand_at(launch, PAGES_AT) +
                                    queries.slot(token) * stride_at(launch, PAGES_AT);
            const unsigned position = queries.position(token), first = first_page(position, tokens);
            const unsigned units = (position / PAGE_TOKENS + 1 - first) * KV_HEADS;
            for (; unit < units; unit += gridDim.x * warps) {
                const unsigned page = pages[first + unit / KV_HEADS], head = unit % KV_HEADS;
                unpack_record((const unsigned char *)coded_record(kv, page, KV_HEADS, head, HEAD_DIM),
                              (unsigned char *)i12_record(y, page, KV_HEADS, head, HEAD_DIM), lane);
            }
            unit -= units;
        }
    }
}
