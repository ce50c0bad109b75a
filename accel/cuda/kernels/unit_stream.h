// The main loop of a product with few tokens. Weights stream through a ring in shared memory, of
// which each warp fills its own slots of CHUNK_UNITS units. A warp writes the values it computes of
// a tile to shared memory, where one warp folds all values of the tile (rule R3).

#ifndef UNIT_STREAM_H
#define UNIT_STREAM_H

#include "four_sums.h"
#include "unit_ring.h"

// A warp's part of the activations of one token: those of the units of its last chunk, which are
// mostly also those of the next one.
template <class S> struct HELD_ACTIVATIONS {
    static constexpr bool used = S::max_tokens == 1 && S::formats::any_quick;
    LANE_CHUNK of;
    unsigned first;

    __device__ __forceinline__ void take(const ACTIVATIONS &x, unsigned first_, unsigned units,
                                         int lane) {
        if (!used || first == first_) return;
        first = first_;
        of.load(x, first, units - 1, lane);
    }
};

// Writes the values of a chunk's units to the address from which the folding warp reads them.
template <class S>
DEVICE void store_value(float value, unsigned units, int lane, float *values) {
    const unsigned t = lane % 4;
    if (t % 2 < units) values[t % 2 * UNIT_ROWS + lane / 4 + t / 2 * 8] = value;
}

// The destination of a chunk's values: this block or, counted, the block of the cluster that folds
// the tile.
template <class S> struct VALUES {
    float *of;
    COPY_BARRIER *counted;
    unsigned block;
    bool away;

    __device__ __forceinline__ VALUES(const typename S::WORK &work, const STREAM_MEMORY<S> &memory,
                                      unsigned local, unsigned index)
        : of(memory.values + index * (S::max_tokens * UNIT_ROWS)),
          counted(memory.values_of_peers + memory.slot_of(local)),
          block(work.folds_at(local)),
          away(S::blocks > 1 && block != work.rank()) {}
    __device__ __forceinline__ void put(unsigned at, float value) const {
        if constexpr (S::blocks > 1) {
            if (away) {
                word_at_peer(counted, (unsigned *)of + at, __float_as_uint(value), block);
                return;
            }
        }
        of[at] = value;
    }
};
template <class S, int dtype>
DEVICE void chunk_values(const unsigned char *chunk, const ACTIVATIONS &x,
                         const HELD_ACTIVATIONS<S> &held, unsigned first, unsigned units,
                         int tokens, int lane, const VALUES<S> &values) {
    const int g = lane / 4, t = lane % 4;
    constexpr unsigned unit_bytes = UNIT_FORMAT<dtype>::unit_bytes;
    if constexpr (S::max_tokens == 1 && SINGLE_TOKEN<dtype>::quick) {
        // The rest of a chunk that is not full has old contents and is not used.
        CHUNK_NIBBLES nibbles;
        nibbles.load(chunk, unit_bytes, lane);
        CHUNK_SUMS sums;
        multiply_chunk<dtype>(chunk, nibbles, held.of, lane, sums);
        store_value<S>(value_of_chunk<dtype>(sums, held.of, lane), units, lane, values.of);
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
            const unsigned at = (n * S::max_tokens + t) * UNIT_ROWS + g;
            if (t < tokens) values.put(at, value[0]), values.put(at + 8, value[1]);
        }
    }
}

// The same by the number of the format.
template <class S, class F>
DEVICE void values_by_format(unsigned number, const unsigned char *chunk, const ACTIVATIONS &x,
                             const HELD_ACTIVATIONS<S> &held, unsigned first, unsigned units,
                             int tokens, int lane, const VALUES<S> &values) {
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

// A tile of which this warp folds a share once all of its values have arrived. `ahead` is the
// result of output.ahead for the first of them. `waited_for`: the block has more tiles than slots
// for their values, so another tile waits for this one's slot.
struct TILE_TO_FOLD {
    unsigned local, share, ahead;
    bool exists, waited_for;
};

// Whether all values of a tile that this block folds have arrived.
template <class S> DEVICE bool has_values(const STREAM_MEMORY<S> &memory, unsigned local) {
    const unsigned slot = memory.slot_of(local), turn = memory.turn_of(local);
    if constexpr (S::blocks > 1)
        if (!have_come(memory.values_of_peers + slot, turn)) return false;
    return have_arrived(memory.arrived + slot, turn);
}

// Bytes that other blocks send of a tile.
template <class S> DEVICE unsigned bytes_of_peers(const typename S::WORK &work, int tokens) {
    return (work.units - work.own_units()) * (work.paired ? 2 : 1) * tokens * UNIT_ROWS * 4;
}

// Whether the tile must be folded before a chunk of the block's tile `local` is computed: the chunk
// has no slot yet, or another tile waits and all values have arrived. Lanes may see this at
// different times, so one decides.
template <class S>
DEVICE bool is_time(const FOLDERS<S> &folders, const TILE_TO_FOLD &tile,
                    const STREAM_MEMORY<S> &memory, unsigned local) {
    const bool blocked =
        now_at(memory.folds_of(local)) != memory.turn_of(local) * folders.count;
    const bool complete = has_values(memory, tile.local);
    return __shfl_sync(ALL_LANES, blocked || (tile.waited_for && complete), 0);
}

// Waits for all values of the tile and folds the warp's share of them (rule R3).
template <class S, class OUTPUT>
DEVICE void fold_tile(const typename S::WORK &work, const FOLDERS<S> &folders,
                      const TILE_TO_FOLD &tile, const STREAM_MEMORY<S> &memory, int tokens,
                      int lane, const OUTPUT &output) {
    const unsigned stride = S::max_tokens * UNIT_ROWS;
    const int half = work.paired ? lane / UNIT_ROWS : 0;
    // One token has one share.
    const bool single = S::max_tokens == 1;
    const int items = single ? UNIT_ROWS : UNIT_ROWS * tokens;
    const int start = single ? 0 : tile.share * folders.lanes;
    const typename S::CHUNK_INDEX_OF at_tile(work, tile.local, 0);
    // A share may be empty: even then the tile's slot is not released before its values have
    // arrived.
#pragma unroll 1
    for (int first = start; first == start || first < items; first += folders.count * folders.lanes) {
        const int i = first + lane % folders.lanes, row = i % UNIT_ROWS;
        const int token = single ? 0 : i / UNIT_ROWS;
        const bool exists = i < items;
        unsigned ahead = tile.ahead;
        if (S::max_tokens > 1 && first != start && exists)
            ahead = output.ahead(at_tile.matrix, at_tile.in_matrix, row, token);
        const float added =
            exists ? output.added(ahead, at_tile.matrix, at_tile.in_matrix, row, token) : 0.0f;
        const unsigned units = work.units;
        const float *values = memory.value_of(tile.local, half * units) + (exists ? i : 0);
        while (!has_values(memory, tile.local)) spin_pause();
        __syncwarp();
        const float total = fold_units(values, units, stride);
        const float other = __shfl_xor_sync(ALL_LANES, total, UNIT_ROWS);
        if (exists && half == 0)
            output(at_tile.matrix, at_tile.in_matrix, row, token, total, other, added);
        if (single) break;
    }
    __syncwarp();
    if (lane == 0 && tile.waited_for) {
        block_fence();
        unsigned *folds = memory.folds_of(tile.local);
        if constexpr (S::blocks > 1) {
            if (tile.share == 0)
                announce(memory.values_of_peers + memory.slot_of(tile.local),
                         bytes_of_peers<S>(work, tokens));
            for (unsigned block = 0; block < S::blocks; block++)
                if (block != work.rank()) add_at_peer(folds, 1u, block);
        }
        if (S::max_tokens == 1)
            *(volatile unsigned *)folds = memory.turn_of(tile.local) + 1;
        else
            atomicAdd(folds, 1u);
    }
    __syncwarp();
}

// The part of a warp's first chunk of a product that needs no activations, computed before they
// arrive.
template <class S> struct FIRST_CHUNK {
    unsigned ahead;
    CHUNK_NIBBLES nibbles;

    template <class RING_OF, class OUTPUT>
    __device__ __forceinline__ void begin(const typename S::WORK &work, RING_OF &ring,
                                          const CHUNK_LIST<S> &list,
                                          const STREAM_MEMORY<S> &memory, const OUTPUT &output) {
        const unsigned warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
        if (!list.count) return;
        const LISTED_CHUNK at = list.at(0);
        const typename S::CHUNK_INDEX_OF at_tile(work, list.local_at(0), 0);
        ahead =
            at.folds() ? output.ahead(at_tile.matrix, at_tile.in_matrix, lane % UNIT_ROWS, 0) : 0;
        ring.prepare(warp);
        if constexpr (S::quick)
            nibbles.load(ring.await(memory, warp), S::formats::unit_bytes(at.format()), lane);
    }
};

// A warp's position in its list: the present chunk and the next one.
template <class S> struct LIST_CURSOR {
    LISTED_CHUNK now, at;
    unsigned i;

    __device__ __forceinline__ explicit LIST_CURSOR(const CHUNK_LIST<S> &list)
        : now{}, at(list.at(0)), i(0) {}
    __device__ __forceinline__ void go_on(const CHUNK_LIST<S> &list) {
        i++;
        now = at, at = list.at(i);
    }
    // Whether there is more to do than the next chunk, after the present one.
    template <class RING_OF>
    __device__ __forceinline__ bool is_seldom(const CHUNK_LIST<S> &list,
                                              const RING_OF &ring) const {
        return i >= list.count || at.folds() || (i + 1) % WARP_LANES == 0 || ring.list.is_spent();
    }
    // How many chunks follow each other from the next one on, all of format `number`, with nothing
    // else to do between them.
    template <class RING_OF>
    __device__ __forceinline__ unsigned run(const CHUNK_LIST<S> &list, const RING_OF &ring,
                                            unsigned number) const {
        const LISTED_CHUNK own = {list.packed};
        const unsigned second = (i + 1) % WARP_LANES;
        const bool ends = own.folds() || (!S::formats::last && own.format() != number);
        const unsigned ending = __ballot_sync(ALL_LANES, ends) | 0x80000000u;
        const unsigned first = ending >> second;
        return min(min((unsigned)__popc((first & (0u - first)) - 1) + 1, list.count - i),
                   ring.list.left());
    }
};

// Consecutive chunks of one format, as long as there is nothing else to do. Nibbles of a chunk are
// read while the chunk before it is summed up.
template <class S, class F, unsigned number, class RING_OF>
DEVICE void quick_chunks(LIST_CURSOR<S> &cursor, CHUNK_NIBBLES &nibbles, HELD_ACTIVATIONS<S> &held,
                         const typename S::WORK &work, RING_OF &ring, const CHUNK_LIST<S> &list,
                         const STREAM_MEMORY<S> &memory, bool crowded, unsigned warp, int lane) {
    if constexpr (!F::last)
        if (cursor.at.format() != number)
            return quick_chunks<S, typename F::rest, number + 1>(cursor, nibbles, held, work, ring,
                                                                 list, memory, crowded, warp, lane);
    unsigned left = crowded ? 1 : cursor.run(list, ring, number);
#pragma unroll 1
    do {
        cursor.go_on(list);
        const NEXT_COPY copy = ring.list.ahead();
        CHUNK_SUMS sums;
        multiply_chunk<F::dtype>(ring.chunk(memory, warp), nibbles, held.of, lane, sums);
        __syncwarp();
        ring.refill(memory, warp, copy);
        const bool more = cursor.i < list.count;
        if (more)
            nibbles.load(ring.await(memory, warp), S::formats::unit_bytes(cursor.at.format()),
                         lane);
        const float value = value_of_chunk<F::dtype>(sums, held.of, lane);
        if (more) held.take(memory.x, cursor.at.unit(), work.units, lane);
        store_value<S>(value, cursor.now.units(), lane,
                       memory.values + cursor.now.value_index() * UNIT_ROWS);
        __syncwarp();
        if (lane == 0) arrive(memory.arrived + cursor.now.slot());
    } while (--left);
}

// The whole product of a block for `tokens` tokens; `list` has the warp's chunks. output(matrix,
// tile, row, token, value, other, added) is called once for every row of a tile and token; `other`
// is the second matrix' value if paired, and `added` is output.added(ahead, matrix, tile, row,
// token) from before the values arrived, where `ahead` is what output.ahead(matrix, tile, row,
// token) read without waiting. `begun` is the first chunk of a step that is `early`.
template <class S, class RING_OF, class OUTPUT>
DEVICE void stream_product(const typename S::WORK &work, RING_OF &ring, CHUNK_LIST<S> &list,
                           const STREAM_MEMORY<S> &memory, int tokens, const OUTPUT &output,
                           const FIRST_CHUNK<S> &begun = {}) {
    typedef typename S::formats FORMATS_OF;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES;
    // Whether tiles wait for the slots of others; if not, no warp has to check.
    const unsigned slots = S::blocks << memory.slot_bits;
    const bool crowded = work.own > slots;
    HELD_ACTIVATIONS<S> held;
    held.first = ~0u;
    const FOLDERS<S> folders(work);
    TILE_TO_FOLD mine = {};
    LIST_CURSOR<S> cursor(list);
    const LISTED_CHUNK &now = cursor.now, &at = cursor.at;
    const unsigned &i = cursor.i;
    CHUNK_NIBBLES nibbles;
    if (S::quick && list.count) {
        held.take(memory.x, at.unit(), work.units, lane);
        if (S::early)
            nibbles = begun.nibbles;
        else
            nibbles.load(ring.await(memory, warp), FORMATS_OF::unit_bytes(at.format()), lane);
    }
#pragma unroll 1
    while (true) {
        // Rare work is here, so that the loop below is short and contiguous in the instructions.
        const bool more = i < list.count;
        unsigned local = list.local_at(i);
        // Tiles that no other tile waits for are folded after the last chunk.
        if (mine.exists && (!more || at.folds() ||
                            (crowded && is_time<S>(folders, mine, memory, local)))) {
            fold_tile<S>(work, folders, mine, memory, tokens, lane, output);
            mine.exists = false;
        }
        if (!more) break;
        if (at.folds()) {
            const typename S::CHUNK_INDEX_OF first(work, local, 0);
            mine = {local, 0, S::early && i == 0 ? begun.ahead : 0, true, local + slots < work.own};
            if (S::max_tokens > 1)
                mine.share = folders.share(work, local, (warp + i * S::warps) % work.steps);
            const int item = mine.share * folders.lanes + lane % folders.lanes;
            if (S::max_tokens == 1 && !(S::early && i == 0))
                mine.ahead = output.ahead(first.matrix, first.in_matrix, lane % UNIT_ROWS, 0);
            else if (S::max_tokens > 1 && item < UNIT_ROWS * tokens)
                mine.ahead = output.ahead(first.matrix, first.in_matrix, item % UNIT_ROWS,
                                          item / UNIT_ROWS);
        }
        if ((i + 1) % WARP_LANES == 0) list.look(work, memory, warp, i + 1);
        if (!(S::early && i == 0)) ring.prepare(warp);
        // Another tile may still occupy the slot.
        if (crowded)
            while (now_at(memory.folds_of(local)) != memory.turn_of(local) * folders.count)
                spin_pause();
        if constexpr (S::quick) {
            quick_chunks<S, FORMATS_OF, 0>(cursor, nibbles, held, work, ring, list, memory, crowded,
                                           warp, lane);
            continue;
        }
        bool seldom;
#pragma unroll 1
        do {
            cursor.go_on(list);
            const VALUES<S> values(work, memory, local, now.value_index());
            local = list.local_at(i);
            held.take(memory.x, now.unit(), work.units, lane);
            const unsigned char *chunk = ring.await(memory, warp);
            __syncwarp();
            values_by_format<S, FORMATS_OF>(now.format(), chunk, memory.x, held, now.unit(),
                                            now.units(), tokens, lane, values);
            __syncwarp();
            ring.refill(memory, warp, ring.list.ahead());
            if (lane == 0 && !values.away) arrive(memory.arrived + now.slot());
            seldom = crowded || cursor.is_seldom(list, ring);
        } while (!seldom);
    }
}

#endif
