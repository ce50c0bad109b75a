// Prepares tiles of keys and values for products of warp groups. Hardware copies the page records
// as stored, and four warps convert each to planes of bytes in the operand order of the products.
//
// Keys and values are 16 high + low. The low parts are stored twice next to the high parts: times
// 16, so that both mixed products share one sum, and unchanged.

#ifndef ATTENTION_SUPPLY_H
#define ATTENTION_SUPPLY_H

#include "attention_runs.h"
#include "groups.h"

#define SUPPLY_WARPS TILE_PAGES
// Of a wide head a block computes some channels of the outputs, from scores of the whole head.
#define BLOCK_CHANNELS (HEAD_DIM < 256 ? HEAD_DIM : 128)
#define HEAD_PARTS (HEAD_DIM / BLOCK_CHANNELS)
// Its keys and values take turns: the planes of keys are made while values are multiplied, those of
// values while keys are. Other heads have planes of two tiles.
#define IN_TURNS (HEAD_PARTS > 1)
#define STORED_STAGES (IN_TURNS ? 2 : 3)
#define PLANE_STAGES (IN_TURNS ? 1 : 2)
// Records begin where rows of keys lie in the same banks.
#define RECORD_STRIDE ((RECORD + 127) / 128 * 128)
#define STORED_BYTES (TILE_PAGES * RECORD_STRIDE)

// The layout of a tile's planes, in bytes. Keys are in groups of eight columns of a product: 16
// channels of each, then the next 16 channels. Values are in stored order, 16 positions of a
// channel.
#define KEYS_APART 128  // 16 channels
#define KEY_EIGHT (8 * HEAD_DIM)
#define KEY_PLANE (KV_TILE * HEAD_DIM)
#define VALUE_PAGE (PAGE_TOKENS * BLOCK_CHANNELS)
#define VALUE_PLANE (TILE_PAGES * VALUE_PAGE)
#define HIGH_KEYS 0
#define LARGE_LOW_KEYS KEY_PLANE
#define LOW_KEYS (2 * KEY_PLANE)
#define LARGE_LOW_VALUES (3 * KEY_PLANE)
#define LOW_VALUES (LARGE_LOW_VALUES + VALUE_PLANE)
#define POSITION_FLOATS (LOW_VALUES + VALUE_PLANE)
#define TILE_FLOATS (3 * KV_TILE)  // three of every position; of two tiles where there is one plane
#define PLANES_BYTES (POSITION_FLOATS + (IN_TURNS ? 2 : 1) * TILE_FLOATS * 4)

// Shared memory, in bytes.
#define AT_STORED 0
#define AT_PLANES (AT_STORED + STORED_STAGES * STORED_BYTES)
#define AT_RING_END (AT_PLANES + PLANE_STAGES * PLANES_BYTES)

// Tiles are numbered over all work of a block. Barriers: `stored` for copies, `spread` for the
// warps that make planes, `used` for the warps that multiply. The latter two are for the planes of
// two tiles, or for those of keys and those of values.
struct TILE_RING {
    unsigned char *memory;
    COPY_BARRIER *stored;
    unsigned long long *spread, *used;

    __device__ __forceinline__ void lay_out(unsigned char *shared, unsigned barriers) {
        memory = shared;
        stored = (COPY_BARRIER *)(shared + barriers);
        spread = stored + STORED_STAGES, used = spread + 2;
    }
    __device__ __forceinline__ void open(unsigned users) const {
        open_stages(stored, STORED_STAGES);
        for (int i = 0; i < 2; i++)
            open_arrivals(spread + i, SUPPLY_WARPS), open_arrivals(used + i, users);
    }
    __device__ __forceinline__ unsigned char *records(unsigned number) const {
        return memory + AT_STORED + number % STORED_STAGES * STORED_BYTES;
    }
    __device__ __forceinline__ unsigned char *planes(unsigned number) const {
        return memory + AT_PLANES + number % PLANE_STAGES * PLANES_BYTES;
    }
    __device__ __forceinline__ void await_stored(unsigned number) const {
        await_stage(stored + number % STORED_STAGES, number / STORED_STAGES);
    }
    __device__ __forceinline__ float *floats(unsigned number) const {
        return (float *)(planes(number) + POSITION_FLOATS) + (IN_TURNS ? number % 2 * TILE_FLOATS : 0);
    }
    static __device__ __forceinline__ unsigned barrier_of(unsigned number, bool of_values) {
        return IN_TURNS ? of_values : number % 2;
    }
    // Records and planes: all of them, or those of keys.
    __device__ __forceinline__ void await(unsigned number) const {
        await_arrivals(spread + barrier_of(number, false), number / PLANE_STAGES);
        if (!IN_TURNS) await_stored(number);
    }
    __device__ __forceinline__ void await_values(unsigned number) const {
        if (!IN_TURNS) return;
        await_arrivals(spread + barrier_of(number, true), number);
        await_stored(number);
    }
    // Returns when planes of this number may be made.
    __device__ __forceinline__ void await_room(unsigned number, bool of_values = false) const {
        if (number < PLANE_STAGES) return;
        const unsigned before = number - PLANE_STAGES;
        await_arrivals(used + barrier_of(before, of_values), before / PLANE_STAGES);
    }
    // The warp is done with it.
    __device__ __forceinline__ void end_spread(unsigned number, bool of_values = false) const {
        show_to_products();
        arrive_as_warp(spread + barrier_of(number, of_values));
    }
    __device__ __forceinline__ void end_scores(unsigned number) const {
        if (IN_TURNS) arrive_as_warp(used + barrier_of(number, false));
    }
    __device__ __forceinline__ void end_use(unsigned number) const {
        arrive_as_warp(used + barrier_of(number, true));
    }
    static __device__ __forceinline__ void arrive_as_warp(unsigned long long *barrier) {
        __syncwarp();
        if (threadIdx.x % WARP_LANES == 0) arrive(barrier);
    }
};
#define RING_BARRIERS (STORED_STAGES + 2 * 2)

// The page of a tile that a lane copies; after the last page of all, the last one again.
DEVICE unsigned page_of_lane(const BLOCK_WORK &work, unsigned tile, int lane) {
    const unsigned page = tile * TILE_PAGES + lane % TILE_PAGES;
    return work.pages[min(page, work.last / PAGE_TOKENS)];
}

// By one warp, a lane a page.
DEVICE void copy_tile(const BLOCK_WORK &work, const TILE_RING &ring, unsigned number,
                      unsigned page, int lane) {
    COPY_BARRIER *barrier = ring.stored + number % STORED_STAGES;
    if (lane == 0) announce(barrier, TILE_PAGES * RECORD);
    __syncwarp();
    if (lane < TILE_PAGES)
        copy_to_stage(barrier, ring.records(number) + lane * RECORD_STRIDE,
                      (const unsigned char *)i12_record(work.kv, page, work.kv_heads,
                                                        work.kv_head, HEAD_DIM),
                      RECORD);
    __syncwarp();
}

// Both low planes of a word as stored, from its low or its high nibbles: unchanged, and times 16.
DEVICE void spread_word(unsigned both, bool upper, unsigned &small, unsigned &large) {
    const unsigned low = both & 0x0F0F0F0Fu, high = both & 0xF0F0F0F0u;
    small = upper ? high >> 4 : low;
    large = upper ? high : low << 4;
}

DEVICE void spread_half(const uint4 &both, bool upper, unsigned char *small,
                        unsigned char *large) {
    uint4 low, high;
    spread_word(both.x, upper, low.x, high.x), spread_word(both.y, upper, low.y, high.y);
    spread_word(both.z, upper, low.z, high.z), spread_word(both.w, upper, low.w, high.w);
    *(uint4 *)small = low;
    *(uint4 *)large = high;
}

// Of 16 bytes as stored; the second half of a row begins `apart` bytes after the first.
DEVICE void spread_nibbles(const unsigned char *from, unsigned char *small, unsigned char *large,
                           unsigned apart) {
    const uint4 both = *(const uint4 *)from;
#pragma unroll
    for (int upper = 0; upper < 2; upper++)
        spread_half(both, upper, small + upper * apart, large + upper * apart);
}

// The keys of a page, by a warp. Column 8 b + 2 t + i of its sixteen is position 4 t + 2 b + i, so
// that a lane has the scores of four neighbours, which are its operand of the second product. Eight
// lanes have different positions and pieces, so that they read and write all banks.
DEVICE void spread_keys(const unsigned char *record, unsigned char *planes, unsigned page,
                        int lane) {
    constexpr unsigned pieces = HEAD_DIM / 16, low_pieces = pieces / 2;
    const unsigned j = lane % 8, b = lane / 8 % 2, upper = lane / 16;
    const unsigned position = j / 2 * 4 + b * 2 + j % 2;
    unsigned char *to = planes + (2 * page + b) * KEY_EIGHT + j * 16;
    const unsigned char *high = record + position * HEAD_DIM;
    const unsigned char *low = record + I12_LOW(HEAD_DIM) + position * HALF_DIM;
    const unsigned first = upper ^ (HEAD_DIM < 128 ? j / 2 : j) % pieces;
    const unsigned first_low = (upper ^ (HEAD_DIM < 256 ? j / 2 : j)) % low_pieces;
#pragma unroll
    for (unsigned i = 0; i < pieces; i += 2) {
        const unsigned piece = first ^ i;
        *(uint4 *)(to + HIGH_KEYS + piece * KEYS_APART) = *(const uint4 *)(high + piece * 16);
    }
#pragma unroll
    for (unsigned i = 0; i < low_pieces; i += 2) {
        const unsigned piece = first_low ^ i, at = piece * KEYS_APART;
        spread_nibbles(low + piece * 16, to + LOW_KEYS + at, to + LARGE_LOW_KEYS + at,
                       low_pieces * KEYS_APART);
    }
}

// Three floats of each position of a page, by a warp.
DEVICE void spread_exponents(const unsigned char *record, float *tile, unsigned page, int lane) {
    if (lane >= (int)PAGE_TOKENS) return;
    const signed char *exponents = (const signed char *)record + I12_EXPONENTS(HEAD_DIM) + lane;
    const int key = exponents[0], value = exponents[PAGE_TOKENS];
    float *floats = tile + page * PAGE_TOKENS + lane;
    floats[0] = key_scale(key);
    floats[KV_TILE] = tile_exponent(key, value);
    floats[2 * KV_TILE] = value_scale(value);
}

// Low parts of the values of a page, by a warp: of all channels, or of one half of them.
DEVICE void spread_values(const unsigned char *record, unsigned char *planes, unsigned page,
                          unsigned part, int lane) {
    const unsigned char *low = record + I12_VALUES(HEAD_DIM) + I12_LOW(HEAD_DIM);
    unsigned char *to = planes + page * VALUE_PAGE;
#pragma unroll
    for (int channel = lane; channel < HALF_DIM; channel += WARP_LANES) {
        const unsigned at = channel * PAGE_TOKENS;
        if (IN_TURNS) {
            const uint4 both = *(const uint4 *)(low + at);
            spread_half(both, part, to + LOW_VALUES + at, to + LARGE_LOW_VALUES + at);
        } else {
            spread_nibbles(low + at, to + LOW_VALUES + at, to + LARGE_LOW_VALUES + at,
                           HALF_DIM * PAGE_TOKENS);
        }
    }
}

// All tiles of the block's work, by SUPPLY_WARPS warps; the caller is number `warp`. The records of
// a tile are requested when the planes of the tile before it are made, of keys and values in turns
// when those of its values are.
DEVICE void supply_tiles(const BLOCK_WORK &work, const TILE_RING &ring, unsigned &number,
                         unsigned warp, int lane) {
    const unsigned begin = work.first / KV_TILE, end = work.last / KV_TILE + 1;
    if (warp == 0) copy_tile(work, ring, number, page_of_lane(work, begin, lane), lane);
    for (unsigned tile = begin; tile < end; tile++, number++) {
        const unsigned next = warp == 0 ? page_of_lane(work, tile + 1, lane) : 0;
        ring.await_room(number);
        if (!IN_TURNS && warp == 0 && tile + 1 < end)
            copy_tile(work, ring, number + 1, next, lane);
        ring.await_stored(number);
        const unsigned char *record = ring.records(number) + warp * RECORD_STRIDE;
        spread_keys(record, ring.planes(number), warp, lane);
        if (IN_TURNS) {
            spread_exponents(record, ring.floats(number), warp, lane);
            ring.end_spread(number);
            ring.await_room(number, true);
            if (warp == 0 && tile + 1 < end) copy_tile(work, ring, number + 1, next, lane);
        }
        spread_values(record, ring.planes(number), warp, work.part, lane);
        if (!IN_TURNS) spread_exponents(record, ring.floats(number), warp, lane);
        ring.end_spread(number, true);
    }
}

#endif
