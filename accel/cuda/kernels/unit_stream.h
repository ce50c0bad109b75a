// The main loop of a product with few tokens: weights stream through a ring of shared memory, a
// slot of CHUNK_UNITS units of which a warp fills for itself; what it computes of a tile meets the
// other values of the tile in shared memory, where one warp folds them (rule R3).

#ifndef UNIT_STREAM_H
#define UNIT_STREAM_H

#include "activations.h"
#include "four_sums.h"

#define MOST_TILE_SLOTS 8

// The formats a kernel is made for. A matrix has the number of one of them.
template <int... dtypes> struct FORMATS;
template <int dtype_> struct FORMATS<dtype_> {
    static constexpr int dtype = dtype_;
    static constexpr bool last = true;
    static constexpr bool any_quick = SINGLE_TOKEN<dtype_>::quick, all_quick = any_quick;
    static constexpr unsigned most_bytes = UNIT_FORMAT<dtype_>::unit_bytes;
    static __device__ __forceinline__ unsigned unit_bytes(unsigned) { return most_bytes; }
};
template <int dtype_, int... others> struct FORMATS<dtype_, others...> {
    typedef FORMATS<others...> rest;
    static constexpr int dtype = dtype_;
    static constexpr bool last = false;
    static constexpr bool any_quick = SINGLE_TOKEN<dtype_>::quick || rest::any_quick;
    static constexpr bool all_quick = SINGLE_TOKEN<dtype_>::quick && rest::all_quick;
    static constexpr unsigned own_bytes = UNIT_FORMAT<dtype_>::unit_bytes;
    static constexpr unsigned most_bytes =
        own_bytes > rest::most_bytes ? own_bytes : rest::most_bytes;
    static __device__ __forceinline__ unsigned unit_bytes(unsigned number) {
        return number == 0 ? own_bytes : rest::unit_bytes(number - 1);
    }
};

// What one launch multiplies: matrices of units, `tiles` of 16 rows each, one after the other or,
// `paired`, two of equal shape whose tiles belong together. A tile is `steps` chunks, of a pair first
// all of one and then of the other; `own` tiles are the block's. `formats` has four bits a matrix.
template <int most> struct UNIT_WORK {
    const unsigned char *matrix[most];
    unsigned tiles[most];
    unsigned units, steps, own, formats;
    bool paired;
    __device__ __forceinline__ unsigned format_of(unsigned number) const {
        return formats >> 4 * number & 15;
    }
    __device__ __forceinline__ void prepare(unsigned columns, bool paired_) {
        units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
        paired = paired_;
        const unsigned chunks = (units + CHUNK_UNITS - 1) / CHUNK_UNITS;
        steps = paired ? 2 * chunks : chunks;
        unsigned all = tiles[0];
#pragma unroll
        for (int i = 1; i < most; i++)
            if (!paired) all += tiles[i];
        own = all > blockIdx.x ? (all - blockIdx.x - 1) / gridDim.x + 1 : 0;
    }
    // Chunks of the block that a warp computes, every `warps`-th.
    __device__ __forceinline__ unsigned chunks_of(unsigned warp, unsigned warps) const {
        return (own * steps + warps - 1 - warp) / warps;
    }
};

// A chunk of a block's work: which of its tiles, matrix, tile of the matrix, step and first unit.
template <int most> struct PLACE {
    unsigned local, matrix, in_matrix, step, unit;

    __device__ __forceinline__ PLACE(const UNIT_WORK<most> &work, unsigned chunk)
        : PLACE(work, chunk / work.steps, chunk % work.steps) {}
    __device__ __forceinline__ PLACE(const UNIT_WORK<most> &work, unsigned local_, unsigned step_) {
        local = local_, step = step_;
        in_matrix = blockIdx.x + local * gridDim.x, matrix = 0, unit = step * CHUNK_UNITS;
        if (work.paired) {
            const unsigned chunks = work.steps / 2;
            if (step >= chunks) matrix = 1, unit -= chunks * CHUNK_UNITS;
            return;
        }
#pragma unroll
        for (int i = 0; i + 1 < most; i++)
            if (matrix == i && in_matrix >= work.tiles[i]) in_matrix -= work.tiles[i], matrix++;
    }
    __device__ __forceinline__ unsigned units(const UNIT_WORK<most> &work) const {
        return min((unsigned)CHUNK_UNITS, work.units - unit);
    }
};

// How one kernel is built: warps of a block, ring slots of a warp, most tokens, most matrices of a
// product and its formats.
template <int warps_, int slots_, int tokens_, int matrices_, class FORMATS_> struct SHAPE {
    static constexpr int warps = warps_, slots = slots_, most_tokens = tokens_;
    static constexpr int matrices = matrices_;
    typedef FORMATS_ formats;
    static constexpr unsigned slot_bytes = CHUNK_UNITS * formats::most_bytes;
    // Whether all chunks are those of one token in formats of super-blocks.
    static constexpr bool quick = tokens_ == 1 && formats::all_quick;
};

// Shared memory of a block, in this order; each part is a multiple of 16 bytes. Values of units
// wait for those of their tile in one of 2^slot_bits places.
template <class S> struct STREAM_MEMORY {
    unsigned char *ring;
    COPY_BARRIER *barriers;
    unsigned long long *arrived;
    unsigned *folded;
    COPY_BARRIER *peers;  // where there are two, for alignment
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
        arrived = (unsigned long long *)(barriers + S::warps * S::slots);
        folded = (unsigned *)(arrived + MOST_TILE_SLOTS);
        peers = (COPY_BARRIER *)(folded + MOST_TILE_SLOTS);
        x.planes = (unsigned char *)(peers + 2);
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
    // `again`: for another product than before.
    __device__ __forceinline__ void begin(unsigned steps, bool again) const {
        if (threadIdx.x >= MOST_TILE_SLOTS) return;
        if (again) close_arrivals(arrived + threadIdx.x);
        open_arrivals(arrived + threadIdx.x, steps);
        folded[threadIdx.x] = 0;
    }
};

DEVICE unsigned now_at(const unsigned *place) { return *(const volatile unsigned *)place; }

// Warps that fold a tile: those that have its last steps take turns. Were it the warp that comes last, it
// would be late with the next tile for that and come last again. There are as many as have a value a
// lane, each with a share of them.
template <class S> struct FOLDERS {
    unsigned latest, count, lanes;

    __device__ __forceinline__ FOLDERS(const UNIT_WORK<S::matrices> &work) {
        // Of a pair the upper half of a warp folds the second matrix.
        lanes = work.paired ? UNIT_ROWS : WARP_LANES;
        latest = min(work.steps, (unsigned)S::warps);
        count = S::most_tokens == 1 ? 1 : min(latest, S::most_tokens * UNIT_ROWS / lanes);
    }
    // Which share of a tile the warp with one of its steps folds; not less than `count` where none.
    __device__ __forceinline__ unsigned share(const UNIT_WORK<S::matrices> &work, unsigned local,
                                              unsigned step) const {
        const unsigned turn = local % MOST_TILE_SLOTS, before_last = work.steps - 1 - step;
        if (S::most_tokens == 1) return before_last == min(turn, latest - 1) ? 0 : count;
        if (before_last >= latest) return count;
        return (before_last + MOST_TILE_SLOTS * latest - turn * count) % latest;
    }
};

// Chunks a warp asks for: every lane knows one of 32.
template <class S> struct COPY_LIST {
    const unsigned char *source;
    unsigned bytes, next, count;

    __device__ __forceinline__ void begin(const UNIT_WORK<S::matrices> &work, unsigned warp) {
        next = 0, count = work.chunks_of(warp, S::warps);
    }
    __device__ __forceinline__ bool is_done() const { return next == count; }
    // Fills a slot with the next of them.
    __device__ __forceinline__ void copy(const UNIT_WORK<S::matrices> &work,
                                         const STREAM_MEMORY<S> &memory, unsigned warp,
                                         unsigned slot) {
        if (next % WARP_LANES == 0) look(work, warp);
        const unsigned place = warp * S::slots + slot;
        begin_copy(memory.barriers + place, memory.ring + place * S::slot_bytes, source, bytes,
                   next % WARP_LANES);
        next++;
    }
    __device__ __forceinline__ void look(const UNIT_WORK<S::matrices> &work, unsigned warp) {
        const unsigned lane = threadIdx.x % WARP_LANES;
        const PLACE<S::matrices> at(work, warp + min(next + lane, count - 1) * S::warps);
        const unsigned unit_bytes = S::formats::unit_bytes(work.format_of(at.matrix));
        const unsigned char *units = work.matrix[0];
#pragma unroll
        for (int i = 1; i < S::matrices; i++)
            if (at.matrix == i) units = work.matrix[i];
        source = units + ((size_t)at.in_matrix * work.units + at.unit) * unit_bytes;
        bytes = at.units(work) * unit_bytes;
    }
};

// One warp's ring: the slot of the present chunk, and how often it came around. What is asked for, by
// `fetch` of RING_OF, runs ahead of what is computed.
template <class S, class RING_OF> struct RING_SLOTS {
    unsigned slot, rounds;

    __device__ __forceinline__ const unsigned char *chunk(const STREAM_MEMORY<S> &memory,
                                                          unsigned warp) const {
        return memory.ring + (warp * S::slots + slot) * S::slot_bytes;
    }
    // Waits for the present chunk.
    __device__ __forceinline__ const unsigned char *await(const STREAM_MEMORY<S> &memory,
                                                          unsigned warp) const {
        await_copy<S::slots>(memory.barriers + warp * S::slots + slot, rounds);
        return chunk(memory, warp);
    }
    // The present chunk has been read: another takes its place, the next one is the present.
    __device__ __forceinline__ void refill(const STREAM_MEMORY<S> &memory, unsigned warp) {
        ((RING_OF *)this)->fetch(memory, warp, slot);
        if (++slot == S::slots) slot = 0, rounds++;
    }
    __device__ __forceinline__ void open(const STREAM_MEMORY<S> &memory, unsigned warp) {
        slot = rounds = 0;
        open_copies(memory.barriers + warp * S::slots, S::slots);
    }
    __device__ __forceinline__ void fill(const STREAM_MEMORY<S> &memory, unsigned warp) {
#pragma unroll 1
        for (int i = 0; i < S::slots; i++) ((RING_OF *)this)->fetch(memory, warp, i);
    }
};

// The ring of a kernel with one product.
template <class S> struct RING : RING_SLOTS<S, RING<S>> {
    const UNIT_WORK<S::matrices> &work;
    COPY_LIST<S> list;

    __device__ __forceinline__ RING(const UNIT_WORK<S::matrices> &work_) : work(work_) {}
    __device__ __forceinline__ void begin(const STREAM_MEMORY<S> &memory, unsigned warp) {
        this->open(memory, warp);
        list.begin(work, warp);
        this->fill(memory, warp);
    }
    __device__ __forceinline__ void fetch(const STREAM_MEMORY<S> &memory, unsigned warp,
                                          unsigned slot) {
        if (list.is_done())
            no_copy();
        else
            list.copy(work, memory, warp, slot);
    }
};

// A chunk as the list has it.
struct LISTED_CHUNK {
    unsigned packed;
    __device__ __forceinline__ unsigned unit() const { return packed & 4095; }
    __device__ __forceinline__ unsigned place() const { return packed >> 12 & 4095; }
    __device__ __forceinline__ unsigned format() const { return packed >> 24 & 3; }
    __device__ __forceinline__ unsigned units() const { return (packed >> 26 & 3) + 1; }
    __device__ __forceinline__ bool folds() const { return packed >> 28 & 1; }
    __device__ __forceinline__ unsigned slot() const { return packed >> 29; }
};

// Chunks a warp computes, in the order it asks for them: every lane knows one of 32.
template <class S> struct CHUNK_LIST {
    unsigned local, packed, count;

    __device__ __forceinline__ void begin(const UNIT_WORK<S::matrices> &work,
                                          const STREAM_MEMORY<S> &memory, unsigned warp) {
        count = work.chunks_of(warp, S::warps);
        look(work, memory, warp, 0);
    }
    __device__ __forceinline__ LISTED_CHUNK at(unsigned i) const {
        return {__shfl_sync(ALL_LANES, packed, i % WARP_LANES)};
    }
    __device__ __forceinline__ unsigned local_at(unsigned i) const {
        return __shfl_sync(ALL_LANES, local, i % WARP_LANES);
    }
    // Those from number `first` on.
    __device__ __forceinline__ void look(const UNIT_WORK<S::matrices> &work,
                                         const STREAM_MEMORY<S> &memory, unsigned warp,
                                         unsigned first) {
        const unsigned lane = threadIdx.x % WARP_LANES;
        const PLACE<S::matrices> at(work, warp + (first + lane) * S::warps);
        const FOLDERS<S> folders(work);
        local = at.local;
        const unsigned place = memory.slot_of(local) * memory.tile_units + at.unit +
                               (work.paired ? at.matrix * work.units : 0);
        packed = at.unit | place << 12 | work.format_of(at.matrix) << 24 |
                 (at.units(work) - 1) << 26 | (folders.share(work, local, at.step) < folders.count) << 28 |
                 memory.slot_of(local) << 29;
    }
};

// What a warp holds of the activations of one token: those of the units of its last chunk, which are
// mostly those of the next one, too.
template <class S> struct HELD_ACTIVATIONS {
    static constexpr bool used = S::most_tokens == 1 && S::formats::any_quick;
    LANE_UNIT unit[used ? CHUNK_UNITS : 1];
    unsigned first;

    __device__ __forceinline__ void take(const ACTIVATIONS &x, unsigned first_, unsigned units,
                                         int lane) {
        if (!used || first == first_) return;
        first = first_;
#pragma unroll
        for (int n = 0; n < (used ? CHUNK_UNITS : 1); n++)
            unit[n].load(x, min(first + n, units - 1), lane);
    }
};

// Values of a chunk's units go where the warp that folds the tile finds them.
template <class S>
DEVICE void store_value(float value, unsigned units, int lane, float *values) {
    const unsigned t = lane % 4;
    if (t % 2 < units) values[t % 2 * UNIT_ROWS + lane / 4 + t / 2 * 8] = value;
}
template <class S, int dtype>
DEVICE void chunk_values(const unsigned char *chunk, const ACTIVATIONS &x,
                         const HELD_ACTIVATIONS<S> &held, unsigned first, unsigned units,
                         int tokens, int lane, float *values) {
    const int g = lane / 4, t = lane % 4;
    constexpr unsigned unit_bytes = UNIT_FORMAT<dtype>::unit_bytes;
    if constexpr (S::most_tokens == 1 && SINGLE_TOKEN<dtype>::quick) {
        // Of a chunk that is not full the rest is what was there before, and is not used.
        CHUNK_NIBBLES nibbles;
        nibbles.load(chunk, unit_bytes, lane);
        CHUNK_SUMS sums;
        multiply_chunk<dtype>(chunk, nibbles, held.unit, lane, sums);
        store_value<S>(value_of_chunk<dtype>(sums, held.unit, lane), units, lane, values);
    } else {
#pragma unroll
        for (int n = 0; n < CHUNK_UNITS; n++) {
            if (n >= units) break;
            float value[2];
            const unsigned char *unit = chunk + n * unit_bytes;
            if constexpr (SINGLE_TOKEN<dtype>::quick)
                scaled_values_of_tokens<dtype>(unit, x, first + n, tokens, lane, value);
            else
                unit_values_of_tokens<dtype>(unit, x, first + n, tokens, lane, value);
            float *of_unit = values + (n * S::most_tokens + t) * UNIT_ROWS + g;
            if (t < tokens) of_unit[0] = value[0], of_unit[8] = value[1];
        }
    }
}

// The same by the number of the format.
template <class S, class F>
DEVICE void values_by_format(unsigned number, const unsigned char *chunk, const ACTIVATIONS &x,
                             const HELD_ACTIVATIONS<S> &held, unsigned first, unsigned units,
                             int tokens, int lane, float *values) {
    if constexpr (F::last) {
        chunk_values<S, F::dtype>(chunk, x, held, first, units, tokens, lane, values);
    } else {
        if (number == 0)
            chunk_values<S, F::dtype>(chunk, x, held, first, units, tokens, lane, values);
        else
            values_by_format<S, typename F::rest>(number - 1, chunk, x, held, first, units, tokens,
                                                  lane, values);
    }
}

// What `quick` chunks have in two halves, by the number of the format.
template <class F>
DEVICE void multiply_by_format(unsigned number, const unsigned char *chunk,
                               const CHUNK_NIBBLES &nibbles, const LANE_UNIT (&x)[CHUNK_UNITS],
                               int lane, CHUNK_SUMS &sums) {
    if constexpr (F::last) {
        multiply_chunk<F::dtype>(chunk, nibbles, x, lane, sums);
    } else {
        if (number == 0)
            multiply_chunk<F::dtype>(chunk, nibbles, x, lane, sums);
        else
            multiply_by_format<typename F::rest>(number - 1, chunk, nibbles, x, lane, sums);
    }
}
template <class F>
DEVICE float value_by_format(unsigned number, const CHUNK_SUMS &sums,
                             const LANE_UNIT (&x)[CHUNK_UNITS], int lane) {
    if constexpr (F::last) {
        return value_of_chunk<F::dtype>(sums, x, lane);
    } else {
        if (number == 0) return value_of_chunk<F::dtype>(sums, x, lane);
        return value_by_format<typename F::rest>(number - 1, sums, x, lane);
    }
}

// A tile of which this warp is to fold a share once all of its values have come. `ahead` is what output.ahead
// read of the first of them. `waited_for`: the block's tiles are more than the slots for their values, so
// that another one waits for this one's.
struct TILE_TO_FOLD {
    unsigned local, share, ahead;
    bool exists, waited_for;
};

// Whether the tile is to be folded before a chunk of the block's tile `local` is computed: the chunk has
// no slot yet, or another tile waits and all values are there. Lanes may see this at different times:
// one decides.
template <class S>
DEVICE bool is_time(const FOLDERS<S> &folders, const TILE_TO_FOLD &tile,
                    const STREAM_MEMORY<S> &memory, unsigned local) {
    const bool blocked = now_at(memory.folded + memory.slot_of(local)) !=
                         memory.turn_of(local) * folders.count;
    const bool complete =
        have_arrived(memory.arrived + memory.slot_of(tile.local), memory.turn_of(tile.local));
    return __shfl_sync(ALL_LANES, blocked || (tile.waited_for && complete), 0);
}

// Waits for all values of the tile and folds the warp's share of them (rule R3).
template <class S, class OUTPUT>
DEVICE void fold_tile(const UNIT_WORK<S::matrices> &work, const FOLDERS<S> &folders,
                      const TILE_TO_FOLD &tile, const STREAM_MEMORY<S> &memory, int tokens,
                      int lane, const OUTPUT &output) {
    const unsigned slot = memory.slot_of(tile.local), stride = S::most_tokens * UNIT_ROWS;
    const int half = work.paired ? lane / UNIT_ROWS : 0;
    const int items = UNIT_ROWS * tokens, start = tile.share * folders.lanes;
    const PLACE<S::matrices> place(work, tile.local, 0);
#pragma unroll 1
    for (int first = start; first < items; first += folders.count * folders.lanes) {
        const int i = first + lane % folders.lanes, row = i % UNIT_ROWS, token = i / UNIT_ROWS;
        const bool exists = i < items;
        unsigned ahead = tile.ahead;
        if (S::most_tokens > 1 && first != start && exists)
            ahead = output.ahead(place.matrix, place.in_matrix, row, token);
        const float added =
            exists ? output.added(ahead, place.matrix, place.in_matrix, row, token) : 0.0f;
        while (!have_arrived(memory.arrived + slot, memory.turn_of(tile.local))) spin_pause();
        __syncwarp();
        const float *values = memory.value_of(tile.local, half * work.units) + (exists ? i : 0);
        const float total = fold_units(values, work.units, stride);
        const float other = __shfl_xor_sync(ALL_LANES, total, UNIT_ROWS);
        if (exists && half == 0)
            output(place.matrix, place.in_matrix, row, token, total, other, added);
    }
    __syncwarp();
    if (lane == 0 && tile.waited_for) {
        block_fence();
        if (S::most_tokens == 1)
            *(volatile unsigned *)(memory.folded + slot) = memory.turn_of(tile.local) + 1;
        else
            atomicAdd(memory.folded + slot, 1u);
    }
    __syncwarp();
}

// Whole product of a block, for `tokens` tokens; `list` has the warp's chunks. output(matrix, tile,
// row, token, value, other, added) is called once for every row of a tile and token; `other` is the
// second matrix' where paired, and `added` what output.added(ahead, matrix, tile, row, token) was before
// the values were there, with `ahead` what output.ahead(matrix, tile, row, token) read without waiting.
template <class S, class RING_OF, class OUTPUT>
DEVICE void stream_product(const UNIT_WORK<S::matrices> &work, RING_OF &ring, CHUNK_LIST<S> &list,
                           const STREAM_MEMORY<S> &memory, int tokens, const OUTPUT &output) {
    typedef typename S::formats FORMATS_OF;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES;
    // Whether tiles wait for the place of others. Without it nobody has to look.
    const bool crowded = work.own > 1u << memory.slot_bits;
    HELD_ACTIVATIONS<S> held;
    held.first = ~0u;
    const FOLDERS<S> folders(work);
    TILE_TO_FOLD mine = {};
    LISTED_CHUNK at = list.at(0);
    unsigned local = list.local_at(0);
    // Nibbles of a quick chunk are read while the one before it is still being summed up.
    CHUNK_NIBBLES nibbles;
    if (S::quick && list.count) {
        held.take(memory.x, at.unit(), work.units, lane);
        nibbles.load(ring.await(memory, warp), FORMATS_OF::unit_bytes(at.format()), lane);
    }
#pragma unroll 1
    for (unsigned i = 0;; i++) {
        const bool more = i < list.count;
        // What nobody waits for is folded behind the last chunk.
        if (mine.exists && (!more || at.folds() ||
                            (crowded && is_time<S>(folders, mine, memory, local)))) {
            fold_tile<S>(work, folders, mine, memory, tokens, lane, output);
            mine.exists = false;
        }
        if (!more) break;
        const LISTED_CHUNK now = at;
        const unsigned tile = local;
        unsigned ahead = 0, share = 0;
        if (now.folds()) {
            const PLACE<S::matrices> place(work, tile, 0);
            if (S::most_tokens > 1)
                share = folders.share(work, tile, (warp + i * S::warps) % work.steps);
            const int item = share * folders.lanes + lane % folders.lanes;
            if (S::most_tokens == 1)
                ahead = output.ahead(place.matrix, place.in_matrix, lane % UNIT_ROWS, 0);
            else if (item < UNIT_ROWS * tokens)
                ahead = output.ahead(place.matrix, place.in_matrix, item % UNIT_ROWS,
                                     item / UNIT_ROWS);
        }
        if ((i + 1) % WARP_LANES == 0) list.look(work, memory, warp, i + 1);
        at = list.at(i + 1), local = list.local_at(i + 1);
        float *values = memory.values + now.place() * (S::most_tokens * UNIT_ROWS);
        if constexpr (S::quick) {
            CHUNK_SUMS sums;
            multiply_by_format<FORMATS_OF>(now.format(), ring.chunk(memory, warp), nibbles,
                                           held.unit, lane, sums);
            __syncwarp();
            ring.refill(memory, warp);
            if (i + 1 < list.count)
                nibbles.load(ring.await(memory, warp), FORMATS_OF::unit_bytes(at.format()), lane);
            const float value = value_by_format<FORMATS_OF>(now.format(), sums, held.unit, lane);
            if (crowded)
                while (now_at(memory.folded + now.slot()) != memory.turn_of(tile) * folders.count)
                    spin_pause();
            store_value<S>(value, now.units(), lane, values);
            __syncwarp();
            if (i + 1 < list.count) held.take(memory.x, at.unit(), work.units, lane);
        } else {
            held.take(memory.x, now.unit(), work.units, lane);
            const unsigned char *chunk = ring.await(memory, warp);
            __syncwarp();
            if (crowded)
                while (now_at(memory.folded + now.slot()) != memory.turn_of(tile) * folders.count)
                    spin_pause();
            values_by_format<S, FORMATS_OF>(now.format(), chunk, memory.x, held, now.unit(),
                                            now.units(), tokens, lane, values);
            __syncwarp();
            ring.refill(memory, warp);
        }
        if (lane == 0) arrive(memory.arrived + now.slot());
        if (now.folds()) mine = {tile, share, ahead, true, tile + (1u << memory.slot_bits) < work.own};
    }
}

#endif
