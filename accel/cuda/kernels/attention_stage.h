// Tiles of I12 pages in the shared memory of a block of attention_blocks.cu: page records as
// stored, the values then reordered; and, for one tile, eight times the low parts of keys and
// values, and the exponents as floats. WARPS is the number of warps of the including file's block,
// which computes CHANNELS of a head's outputs.

#ifndef ATTENTION_STAGE_H
#define ATTENTION_STAGE_H

#include "attention_runs.h"

#define CHANNELS (HEAD_DIM < 128 ? HEAD_DIM : 128)
#define PIECES (RECORD / 16)
#define STAGES 2
#define ALL_LOW 0x78787878u

// Shared memory, in bytes.
#define STAGE_BYTES (TILE_PAGES * RECORD)
#define AT_LOW_KEYS (STAGES * STAGE_BYTES)                   // [position][HEAD_DIM]
#define AT_LOW_VALUES (AT_LOW_KEYS + KV_TILE * HEAD_DIM)     // [page][channel][position]
#define AT_EXPONENTS (AT_LOW_VALUES + KV_TILE * CHANNELS)    // three floats of every position
#define AT_STARTS (AT_EXPONENTS + 3 * KV_TILE * 4)           // a bit of every token

// The halves of odd rows of 128 bytes or more are exchanged, so that two rows of keys are in
// different banks.
DEVICE unsigned key_piece(unsigned row, unsigned piece) {
    return HEAD_DIM < 128 ? piece : piece ^ (row & 1) << 2;
}

DEVICE void begin_tile(const BLOCK_WORK &work, unsigned char *stage, unsigned tile) {
    for (unsigned i = threadIdx.x; i < TILE_PAGES * PIECES; i += 32 * WARPS) {
        const unsigned page = i / PIECES, piece = i % PIECES, row = piece / (HEAD_DIM / 16);
        const unsigned number = work.pages[min(tile * TILE_PAGES + page, work.last / PAGE_TOKENS)];
        const unsigned char *record = (const unsigned char *)i12_record(
            work.kv, number, work.kv_heads, work.kv_head, HEAD_DIM);
        const unsigned to_piece = row < PAGE_TOKENS ? key_piece(row, piece) : piece;
        begin_part(stage + page * RECORD + to_piece * 16, record + piece * 16);
    }
    end_parts();
}

DEVICE uint4 vector_of(unsigned x, unsigned y, unsigned z, unsigned w) {
    return make_uint4(x, y, z, w);
}

// Eight times the low or the high nibbles.
DEVICE uint4 low_parts(const uint4 &v, bool upper) {
    return upper ? vector_of(v.x >> 1 & ALL_LOW, v.y >> 1 & ALL_LOW, v.z >> 1 & ALL_LOW,
                             v.w >> 1 & ALL_LOW)
                 : vector_of(v.x << 3 & ALL_LOW, v.y << 3 & ALL_LOW, v.z << 3 & ALL_LOW,
                             v.w << 3 & ALL_LOW);
}

// Index 4 t + 2 b + i of a page's sixteen positions holds position 8 b + 2 t + i: a lane has four
// neighbours of the positions whose scores it has.
DEVICE uint4 in_order_of_scores(const uint4 &v) {
    return vector_of(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                     __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
}

// The data of a tile that all warps of a block need.
DEVICE void spread_tile(unsigned char *stage, unsigned char *memory, unsigned part) {
    constexpr unsigned row_pieces = HEAD_DIM / 32, page_pieces = PAGE_TOKENS * row_pieces;
    for (unsigned i = threadIdx.x; i < TILE_PAGES * page_pieces; i += 32 * WARPS) {
        const unsigned page = i / page_pieces, row = i % page_pieces / row_pieces;
        const unsigned piece = i % row_pieces;
        const uint4 both =
            *(const uint4 *)(stage + page * RECORD + I12_LOW(HEAD_DIM) + i % page_pieces * 16);
        unsigned char *to = memory + AT_LOW_KEYS + (page * PAGE_TOKENS + row) * HEAD_DIM;
        *(uint4 *)(to + key_piece(row, piece) * 16) = low_parts(both, false);
        *(uint4 *)(to + key_piece(row, piece + row_pieces) * 16) = low_parts(both, true);
    }
    for (unsigned i = threadIdx.x; i < TILE_PAGES * CHANNELS; i += 32 * WARPS) {
        const unsigned page = i / CHANNELS, channel = i % CHANNELS + part * CHANNELS;
        unsigned char *values = stage + page * RECORD + I12_VALUES(HEAD_DIM);
        uint4 *high = (uint4 *)(values + channel * PAGE_TOKENS);
        *high = in_order_of_scores(*high);
        const uint4 both = *(const uint4 *)(values + I12_LOW(HEAD_DIM) +
                                            channel % (HEAD_DIM / 2) * PAGE_TOKENS);
        *(uint4 *)(memory + AT_LOW_VALUES + i * PAGE_TOKENS) =
            in_order_of_scores(low_parts(both, channel >= HEAD_DIM / 2));
    }
    for (unsigned i = threadIdx.x; i < KV_TILE; i += 32 * WARPS) {
        const signed char *exponents = (const signed char *)stage + i / PAGE_TOKENS * RECORD +
                                       I12_EXPONENTS(HEAD_DIM) + i % PAGE_TOKENS;
        const int key = exponents[0], value = exponents[PAGE_TOKENS];
        float *floats = (float *)(memory + AT_EXPONENTS) + i;
        floats[0] = key_scale(key);
        floats[KV_TILE] = tile_exponent(key, value);
        floats[2 * KV_TILE] = value_scale(value);
    }
}

// The offset of a lane's words in a row: `LANE_PIECE` bytes of every half and round.
#define LANE_PIECE (HEAD_DIM < 128 ? 8 : 16)
#define LANE_ROUNDS (HEAD_DIM / 2 / (4 * LANE_PIECE))
#define PIECE_WORDS (LANE_PIECE / 4)

DEVICE unsigned lane_channel(int half, int round, int t) {
    return half * (HEAD_DIM / 2) + (round * 4 + t) * LANE_PIECE;
}

DEVICE void load_piece(const unsigned char *row, unsigned number, unsigned channel,
                       unsigned (&word)[PIECE_WORDS]) {
    if (HEAD_DIM < 128) {
        const uint2 two = *(const uint2 *)(row + channel);
        word[0] = two.x, word[1] = two.y;
    } else {
        const uint4 v = *(const uint4 *)(row + key_piece(number, channel / 16) * 16);
        word[0] = v.x, word[1] = v.y;
        word[PIECE_WORDS - 2] = v.z, word[PIECE_WORDS - 1] = v.w;
    }
}

#endif
