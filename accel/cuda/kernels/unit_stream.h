// The main loop of a product with few tokens: weights stream through a ring of shared memory, a
// slot of CHUNK_UNITS units of which a warp fills for itself; what it computes of a tile meets the
// other values of the tile in shared memory, where one warp folds them (rule R3).

#ifndef UNIT_STREAM_H
#define UNIT_STREAM_H

#include "activations.h"

#define MOST_TILE_SLOTS 8

// The formats a kernel is made for. A matrix has the number of one of them.
template <int... dtypes> struct FORMATS;
template <int dtype_> struct FORMATS<dtype_> {
    static constexpr int dtype = dtype_;
    static constexpr bool last = true;
    static constexpr unsigned most_bytes = UNIT_FORMAT<dtype_>::unit_bytes;
    static __device__ __forceinline__ unsigned unit_bytes(unsigned) { return most_bytes; }
};
template <int dtype_, int... others> struct FORMATS<dtype_, others...> {
    typedef FORMATS<others...> rest;
    static constexpr int dtype = dtype_;
    static constexpr bool last = false;
    static constexpr unsigned own_bytes = UNIT_FORMAT<dtype_>::unit_bytes;
    static constexpr unsigned most_bytes =
        own_bytes > rest::most_bytes ? own_bytes : rest::most_bytes;
    static __device__ __forceinline__ unsigned unit_bytes(unsigned number) {
        return number == 0 ? own_bytes : rest::unit_bytes(number - 1);
    }
};

// One matrix of units; `tiles` of 16 rows.
struct UNIT_MATRIX {
    const unsigned char *units;
    unsigned tiles;
};

// What one launch multiplies: `matrices` one after the other or, `paired`, two of equal shape
// whose tiles belong together. A tile is `steps` chunks, of a pair first all of one and then of the
// other; `warps` steps on are `jump` of a block's tiles and `rest` steps. `formats` has four bits a matrix.
template <int most> struct UNIT_WORK {
    UNIT_MATRIX matrix[most];
    unsigned units, tiles, chunks, steps, jump, rest, formats;
    bool paired;
    __device__ __forceinline__ unsigned format_of(unsigned number) const {
        return formats >> 4 * number & 15;
    }
    __device__ __forceinline__ void prepare(unsigned columns, bool paired_, unsigned warps) {
        units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
        paired = paired_;
        chunks = (units + CHUNK_UNITS - 1) / CHUNK_UNITS;
        steps = paired ? 2 * chunks : chunks;
        jump = warps / steps, rest = warps % steps;
        tiles = matrix[0].tiles;
#pragma unroll
        for (int i = 1; i < most; i++)
            if (!paired) tiles += matrix[i].tiles;
    }
};

// A place in a block's work: tile (of all matrices), matrix, tile of the matrix, step and unit.
template <int most> struct PLACE {
    unsigned tile, local, matrix, in_matrix, step, unit;

    __device__ __forceinline__ void begin(const UNIT_WORK<most> &work, unsigned warp) {
        local = warp / work.steps, step = warp % work.steps;
        tile = blockIdx.x + local * gridDim.x;
        settle(work);
    }
    __device__ __forceinline__ void settle(const UNIT_WORK<most> &work) {
        in_matrix = tile, matrix = 0, unit = step * CHUNK_UNITS;
        if (work.paired) {
            if (step >= work.chunks) matrix = 1, unit -= work.chunks * CHUNK_UNITS;
            return;
        }
#pragma unroll
        for (int i = 0; i + 1 < most; i++)
            if (matrix == i && in_matrix >= work.matrix[i].tiles)
                in_matrix -= work.matrix[i].tiles, matrix++;
    }
    __device__ __forceinline__ unsigned units(const UNIT_WORK<most> &work) const {
        return min((unsigned)CHUNK_UNITS, work.units - unit);
    }
    __device__ __forceinline__ void next(const UNIT_WORK<most> &work) {
        step += work.rest, local += work.jump, tile += work.jump * gridDim.x;
        if (step >= work.steps) step -= work.steps, local++, tile += gridDim.x;
        settle(work);
    }
};

// How one kernel is built: warps of a block, ring slots of a warp, most tokens, most matrices of a
// product and its formats.
template <int warps_, int slots_, int tokens_, int matrices_, class FORMATS_> struct SHAPE {
    static constexpr int warps = warps_, slots = slots_, most_tokens = tokens_;
    static constexpr int matrices = matrices_;
    typedef FORMATS_ formats;
    static constexpr unsigned slot_bytes = CHUNK_UNITS * formats::most_bytes;
};

// Shared memory of a block, in this order; each part is a multiple of 16 bytes. Values of units
// wait for those of their tile in one of 2^slot_bits places.
template <class S> struct STREAM_MEMORY {
    unsigned char *ring;
    COPY_BARRIER *barriers;
    unsigned *arrived, *folded;
    float *values, *squares;
    ACTIVATIONS x;
    unsigned tile_units, slot_bits;

    __device__ __forceinline__ STREAM_MEMORY(unsigned char *shared,
                                             const UNIT_WORK<S::matrices> &work,
                                             unsigned slot_bits_) {
        const unsigned units = work.units, matrices = work.paired ? 2 : 1;
        slot_bits = slot_bits_;
        tile_units = units * matrices;
        ring = shared;
        barriers = (COPY_BARRIER *)(ring + S::warps * S::slots * S::slot_bytes);
        arrived = (unsigned *)(barriers + S::warps * S::slots);
        folded = arrived + MOST_TILE_SLOTS;
        x.planes = (unsigned char *)(folded + MOST_TILE_SLOTS);
        x.sums = (short *)(x.planes + (size_t)S::most_tokens * units * UNIT_PLANES);
        values = (float *)(x.sums + S::most_tokens * units * UNIT_SUMS);
        x.scales = values + (tile_units << slot_bits) * S::most_tokens * UNIT_ROWS;
        squares = x.scales + S::most_tokens * units;
        x.units = units;
        x.in_eights = false;
    }
    // Where values of a tile are, and how many tiles were there before.
    __device__ __forceinline__ unsigned slot_of(unsigned local) const {
        return local & ((1u << slot_bits) - 1);
    }
    __device__ __forceinline__ unsigned turn_of(unsigned local) const {
        return local >> slot_bits;
    }
    // Of one unit: most_tokens rows of UNIT_ROWS.
    __device__ __forceinline__ float *value_of(unsigned local, unsigned unit) const {
        return values + (slot_of(local) * tile_units + unit) * (S::most_tokens * UNIT_ROWS);
    }
    __device__ __forceinline__ void begin() {
        if (threadIdx.x < 2 * MOST_TILE_SLOTS) arrived[threadIdx.x] = 0;
    }
};

DEVICE unsigned now_at(const unsigned *place) { return *(const volatile unsigned *)place; }

// Asks for the chunk at a place of the work.
template <class S>
DEVICE void copy_chunk(const UNIT_WORK<S::matrices> &work, const PLACE<S::matrices> &at,
                       const STREAM_MEMORY<S> &memory, unsigned slot) {
    const unsigned bytes = S::formats::unit_bytes(work.format_of(at.matrix));
    const unsigned char *units = work.matrix[0].units;
#pragma unroll
    for (int i = 1; i < S::matrices; i++)
        if (at.matrix == i) units = work.matrix[i].units;
    const size_t unit = (size_t)at.in_matrix * work.units + at.unit;
    begin_copy(memory.barriers + slot, memory.ring + slot * S::slot_bytes, units + unit * bytes,
               at.units(work) * bytes);
}

// One warp's ring. `fetched` runs ahead of what is computed.
template <class S> struct RING {
    const UNIT_WORK<S::matrices> &work;
    PLACE<S::matrices> fetched;
    unsigned filled, taken;

    __device__ __forceinline__ RING(const UNIT_WORK<S::matrices> &work_) : work(work_) {}
    __device__ __forceinline__ void begin(const STREAM_MEMORY<S> &memory, unsigned warp) {
        filled = taken = 0;
        open_copies(memory.barriers + warp * S::slots, S::slots);
        fetched.begin(work, warp);
        for (int i = 0; i < S::slots; i++) fetch(memory, warp);
    }
    __device__ __forceinline__ void fetch(const STREAM_MEMORY<S> &memory, unsigned warp) {
        if (fetched.tile >= work.tiles) {
            no_copy();
            return;
        }
        copy_chunk<S>(work, fetched, memory, warp * S::slots + filled % S::slots);
        filled++;
        fetched.next(work);
    }
};

// Values of a chunk's units go where the warp that folds the tile finds them.
template <class S, int dtype>
DEVICE void chunk_values(const unsigned char *chunk, const ACTIVATIONS &x, unsigned first,
                         unsigned units, int tokens, int lane, float *values) {
    const int g = lane / 4, t = lane % 4;
    constexpr unsigned unit_bytes = UNIT_FORMAT<dtype>::unit_bytes;
    if constexpr (S::most_tokens == 1 && SINGLE_TOKEN<dtype>::quick) {
        float value[CHUNK_UNITS];
        if (CHUNK_UNITS > 1 && units == CHUNK_UNITS)
            unit_values_of_one<dtype, CHUNK_UNITS>(chunk, x, first, lane, value);
        else
            unit_values_of_one<dtype, 1>(chunk, x, first, lane, *(float (*)[1])value);
        if (t % 2 == 0)
#pragma unroll
            for (int n = 0; n < CHUNK_UNITS; n++)
                if (n < units) values[n * UNIT_ROWS + g + 4 * t] = value[n];
    } else {
#pragma unroll
        for (int n = 0; n < CHUNK_UNITS; n++) {
            if (n >= units) break;
            float value[2];
            unit_values_of_tokens<dtype>(chunk + n * unit_bytes, x, first + n, tokens, lane, value);
            float *of_unit = values + (n * S::most_tokens + t) * UNIT_ROWS + g;
            if (t < tokens) of_unit[0] = value[0], of_unit[8] = value[1];
        }
    }
}

// The same by the number of the format.
template <class S, class F>
DEVICE void values_by_format(unsigned number, const unsigned char *chunk, const ACTIVATIONS &x,
                             unsigned first, unsigned units, int tokens, int lane,
                             float *values) {
    if constexpr (F::last) {
        chunk_values<S, F::dtype>(chunk, x, first, units, tokens, lane, values);
    } else {
        if (number == 0)
            chunk_values<S, F::dtype>(chunk, x, first, units, tokens, lane, values);
        else
            values_by_format<S, typename F::rest>(number - 1, chunk, x, first, units, tokens, lane,
                                                  values);
    }
}

// A tile that this warp is to fold once all of its values have come. `waited_for`: the block's tiles
// are more than the slots for their values, so that another one waits for this one's.
struct TILE_TO_FOLD {
    unsigned local, matrix, in_matrix;
    bool exists, waited_for;
};

// Whether the warp is the one that folds the tile: warps that have one of its last steps take turns.
// Were it the warp that comes last, it would be late with the next tile for that and come last again.
template <class S>
DEVICE bool folds_tile(const UNIT_WORK<S::matrices> &work, const PLACE<S::matrices> &at) {
    const unsigned turn = at.local % MOST_TILE_SLOTS, latest = min(work.steps, (unsigned)S::warps);
    return at.step + 1 + min(turn, latest - 1) == work.steps;
}

// Whether the tile is to be folded before the chunk at a place is computed: the chunk has no slot yet,
// or another tile waits and all values are there. Lanes may see this at different times: one decides.
template <class S>
DEVICE bool is_time(const UNIT_WORK<S::matrices> &work, const TILE_TO_FOLD &tile,
                    const STREAM_MEMORY<S> &memory, const PLACE<S::matrices> &at) {
    const bool blocked = now_at(memory.folded + memory.slot_of(at.local)) != memory.turn_of(at.local);
    const bool complete = now_at(memory.arrived + memory.slot_of(tile.local)) == work.steps;
    return __shfl_sync(ALL_LANES, blocked || (tile.waited_for && complete), 0);
}

// Waits for all values of the tile and folds them (rule R3).
template <class S, class OUTPUT>
DEVICE void fold_tile(const UNIT_WORK<S::matrices> &work, const TILE_TO_FOLD &tile,
                      const STREAM_MEMORY<S> &memory, int tokens, int lane,
                      const OUTPUT &output) {
    const unsigned slot = memory.slot_of(tile.local), stride = S::most_tokens * UNIT_ROWS;
    // Of a pair the upper half of the warp folds the second matrix.
    const int half = work.paired ? lane / UNIT_ROWS : 0;
    const int items = UNIT_ROWS * tokens, at_once = work.paired ? UNIT_ROWS : WARP_LANES;
    const unsigned matrix = work.paired ? 0 : tile.matrix;
    for (int first = 0; first < items; first += at_once) {
        const int i = first + lane % at_once, row = i % UNIT_ROWS, token = i / UNIT_ROWS;
        const bool exists = i < items;
        const float added = exists ? output.added(matrix, tile.in_matrix, row, token) : 0.0f;
        while (now_at(memory.arrived + slot) != work.steps) spin_pause();
        block_fence();
        const float *values = memory.value_of(tile.local, half * work.units) + (exists ? i : 0);
        const float total = fold_units(values, work.units, stride);
        const float other = __shfl_xor_sync(ALL_LANES, total, UNIT_ROWS);
        if (exists && half == 0)
            output(matrix, tile.in_matrix, row, token, total, other, added);
    }
    __syncwarp();
    if (lane == 0) {
        memory.arrived[slot] = 0;
        block_fence();
        *(volatile unsigned *)(memory.folded + slot) = memory.turn_of(tile.local) + 1;
    }
    __syncwarp();
}

// Whole product of a block, for `tokens` tokens. output(matrix, tile, row, token, value, other, added)
// is called once for every row of a tile and token; `other` is the second matrix' where paired, and
// `added` what output.added(matrix, tile, row, token) was before the values were there.
template <class S, class RING_OF, class OUTPUT>
DEVICE void stream_product(const UNIT_WORK<S::matrices> &work, RING_OF &ring,
                           const STREAM_MEMORY<S> &memory, int tokens, const OUTPUT &output) {
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES, tiles = work.tiles;
    PLACE<S::matrices> at;
    at.begin(work, warp);
    TILE_TO_FOLD mine = {};
    while (true) {
        const bool more = at.tile < tiles;
        const unsigned slot = memory.slot_of(at.local), turn = memory.turn_of(at.local);
        // What nobody waits for is folded behind the last chunk.
        if (mine.exists && (!more || folds_tile<S>(work, at) || is_time<S>(work, mine, memory, at))) {
            fold_tile<S>(work, mine, memory, tokens, lane, output);
            mine.exists = false;
            continue;
        }
        if (!more) break;
        const unsigned place = warp * S::slots + ring.taken % S::slots;
        await_copy<S::slots>(memory.barriers + place, ring.taken / S::slots);
        ring.taken++;
        while (now_at(memory.folded + slot) != turn) spin_pause();
        const unsigned char *chunk = memory.ring + place * S::slot_bytes;
        float *values =
            memory.value_of(at.local, at.unit + (work.paired ? at.matrix * work.units : 0));
        values_by_format<S, typename S::formats>(work.format_of(at.matrix), chunk, memory.x,
                                                 at.unit, at.units(work), tokens, lane, values);
        __syncwarp();
        ring.fetch(memory, warp);
        block_fence();
        __syncwarp();
        if (lane == 0) atomicAdd(memory.arrived + slot, 1);
        if (folds_tile<S>(work, at)) {
            const unsigned next = at.tile + (gridDim.x << memory.slot_bits);
            mine = {at.local, at.matrix, at.in_matrix, true, next < tiles};
        }
        at.next(work);
    }
}

#endif
