// The work of warps in a product with few tokens: its matrices, tiles and chunks, the shared memory
// of a block, the lists of chunks, and the ring to which chunks are copied.

#ifndef UNIT_RING_H
#define UNIT_RING_H

#include "activations.h"
#include "chunk_product.h"

#define MAX_TILE_SLOTS 8

// The formats a kernel is built for. A matrix has the number of one of them.
template <int... dtypes> struct FORMATS;
template <int dtype_> struct FORMATS<dtype_> {
    static constexpr int dtype = dtype_;
    static constexpr bool last = true;
    static constexpr bool any_quick = SINGLE_TOKEN<dtype_>::quick, all_quick = any_quick;
    static constexpr unsigned max_bytes = UNIT_FORMAT<dtype_>::unit_bytes;
    static __device__ __forceinline__ unsigned unit_bytes(unsigned) { return max_bytes; }
};
template <int dtype_, int... others> struct FORMATS<dtype_, others...> {
    typedef FORMATS<others...> rest;
    static constexpr int dtype = dtype_;
    static constexpr bool last = false;
    static constexpr bool any_quick = SINGLE_TOKEN<dtype_>::quick || rest::any_quick;
    static constexpr bool all_quick = SINGLE_TOKEN<dtype_>::quick && rest::all_quick;
    static constexpr unsigned own_bytes = UNIT_FORMAT<dtype_>::unit_bytes;
    static constexpr unsigned max_bytes =
        own_bytes > rest::max_bytes ? own_bytes : rest::max_bytes;
    static __device__ __forceinline__ unsigned unit_bytes(unsigned number) {
        return number == 0 ? own_bytes : rest::unit_bytes(number - 1);
    }
};

// What one launch multiplies: matrices of units, `tiles` of 16 rows each, one after the other or,
// `paired`, two of equal shape whose tiles belong together. A tile is `steps` chunks, of a pair first
// all of one and then of the other; `own` tiles are the block's. `formats` has four bits a matrix.
// Where several `blocks` of a cluster share the columns tiles are those of the cluster, and chunks are the
// block's: of the first units the first block's, and so on.
template <int most, int blocks = 1> struct UNIT_WORK {
    const unsigned char *matrix[most];
    unsigned tiles[most];
    unsigned units, steps, own, inverse;  // 2^32 / steps, rounded down
    unsigned short formats;
    bool paired;
    __device__ __forceinline__ unsigned format_of(unsigned number) const {
        return formats >> 4 * number & 15;
    }
    __device__ __forceinline__ unsigned rank() const { return blocks == 1 ? 0 : blockIdx.x % blocks; }
    // The units of each block; the last block may have fewer. This block's units begin at
    // `first_unit`.
    __device__ __forceinline__ unsigned share_units() const {
        constexpr unsigned all = blocks * CHUNK_UNITS;
        return blocks == 1 ? units : (units + all - 1) / all * CHUNK_UNITS;
    }
    __device__ __forceinline__ unsigned first_unit() const { return rank() * share_units(); }
    __device__ __forceinline__ unsigned own_units() const {
        if (units % (blocks * CHUNK_UNITS) == 0) return units / blocks;
        return blocks == 1 ? units : min(share_units(), units - first_unit());
    }
    __device__ __forceinline__ unsigned min_steps() const {
        const unsigned last = (units - (blocks - 1) * share_units() + CHUNK_UNITS - 1) / CHUNK_UNITS;
        return blocks == 1 ? steps : paired ? 2 * last : last;
    }
    // The block of the cluster that folds a tile.
    __device__ __forceinline__ unsigned folds_at(unsigned local) const {
        return blocks == 1 ? 0 : local % blocks;
    }
    __device__ __forceinline__ void prepare(unsigned columns, bool paired_) {
        units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
        paired = paired_;
        const unsigned chunks = (own_units() + CHUNK_UNITS - 1) / CHUNK_UNITS;
        steps = paired ? 2 * chunks : chunks;
        unsigned all = tiles[0];
#pragma unroll
        for (int i = 1; i < most; i++)
            if (!paired) all += tiles[i];
        const unsigned first = blockIdx.x / blocks;
        own = all > first ? (all - first - 1) / (gridDim.x / blocks) + 1 : 0;
        inverse = 0xFFFFFFFFu / steps;
    }
    // The block's tile to which a chunk of the block belongs, and in `step` which chunk of the tile
    // it is.
    __device__ __forceinline__ unsigned tile_of(unsigned chunk, unsigned &step) const {
        unsigned local = __umulhi(chunk, inverse);
        step = chunk - local * steps;
        if (step >= steps) local++, step -= steps;
        return local;
    }
    // Chunks of the block that a warp computes, every `warps`-th.
    __device__ __forceinline__ unsigned chunks_of(unsigned warp, unsigned warps) const {
        return (own * steps + warps - 1 - warp) / warps;
    }
};

// A chunk of a block's work: its tile among the block's, its matrix, the tile in the matrix, the
// step and the first unit.
template <int most, int blocks = 1> struct CHUNK_INDEX {
    typedef UNIT_WORK<most, blocks> WORK;
    unsigned local, matrix, in_matrix, step, unit;

    __device__ __forceinline__ CHUNK_INDEX(const WORK &work, unsigned chunk) {
        local = work.tile_of(chunk, step);
        find(work);
    }
    __device__ __forceinline__ CHUNK_INDEX(const WORK &work, unsigned local_, unsigned step_)
        : local(local_), step(step_) {
        find(work);
    }
    __device__ __forceinline__ void find(const WORK &work) {
        in_matrix = blockIdx.x / blocks + local * (gridDim.x / blocks), matrix = 0;
        unit = work.first_unit() + step * CHUNK_UNITS;
        if (work.paired) {
            const unsigned chunks = work.steps / 2;
            if (step >= chunks) matrix = 1, unit -= chunks * CHUNK_UNITS;
            return;
        }
#pragma unroll
        for (int i = 0; i + 1 < most; i++)
            if (matrix == i && in_matrix >= work.tiles[i]) in_matrix -= work.tiles[i], matrix++;
    }
    __device__ __forceinline__ unsigned units(const WORK &work) const {
        return min((unsigned)CHUNK_UNITS, work.units - unit);
    }
};

// How one kernel is built: warps of a block, ring slots of a warp, most tokens, most matrices of a
// product and its formats, and blocks that share columns. If a step is `early`, work that a
// finished product permits is done before the row arrives where possible: the first chunk is begun.
template <int warps_, int slots_, int tokens_, int matrices_, class FORMATS_, int blocks_ = 1,
          bool early_ = false>
struct SHAPE {
    static constexpr int warps = warps_, slots = slots_, max_tokens = tokens_;
    static constexpr int matrices = matrices_, blocks = blocks_;
    static constexpr bool early = early_;
    typedef FORMATS_ formats;
    typedef UNIT_WORK<matrices_, blocks_> WORK;
    typedef CHUNK_INDEX<matrices_, blocks_> CHUNK_INDEX_OF;
    static constexpr unsigned slot_bytes = CHUNK_UNITS * formats::max_bytes;
    // Whether all chunks belong to one token in formats of super-blocks.
    static constexpr bool quick = tokens_ == 1 && formats::all_quick;
};

// Shared memory of a block, in this order; each part is a multiple of 16 bytes. Values of units
// wait for those of their tile in one of 2^slot_bits slots of the block that folds it.
template <class S> struct STREAM_MEMORY {
    unsigned char *ring;
    COPY_BARRIER *barriers;
    unsigned long long *arrived;
    unsigned *folded;
    COPY_BARRIER *peers;   // where there are two, for alignment: of squares that others send
    COPY_BARRIER *values_of_peers;  // where blocks share columns: of the values of tiles
    float *values, *squares;
    ACTIVATIONS x;
    unsigned tile_units, slot_bits;

    __device__ __forceinline__ STREAM_MEMORY(unsigned char *shared,
                                             const typename S::WORK &work,
                                             unsigned slot_bits_) {
        const unsigned units = work.share_units(), matrices = work.paired ? 2 : 1;
        slot_bits = slot_bits_;
        tile_units = work.units * matrices;
        ring = shared;
        barriers = (COPY_BARRIER *)(ring + S::warps * S::slots * S::slot_bytes);
        arrived = (unsigned long long *)(barriers + S::warps * S::slots);
        folded = (unsigned *)(arrived + MAX_TILE_SLOTS);
        peers = (COPY_BARRIER *)(folded + S::blocks * MAX_TILE_SLOTS);
        values_of_peers = peers + 2;
        x.planes = (unsigned char *)(values_of_peers + (S::blocks > 1 ? MAX_TILE_SLOTS : 0));
        x.sums = (short *)(x.planes + (size_t)S::max_tokens * units * UNIT_PLANES);
        values = (float *)(x.sums + S::max_tokens * units * UNIT_SUMS);
        x.scales = values + (tile_units << slot_bits) * S::max_tokens * UNIT_ROWS;
        squares = x.scales + S::max_tokens * units;
        x.units = work.own_units();
        x.in_eights = false;
    }
    // The address of a tile's values, and the number of earlier tiles.
    __device__ __forceinline__ unsigned slot_of(unsigned local) const {
        return local / S::blocks & ((1u << slot_bits) - 1);
    }
    __device__ __forceinline__ unsigned turn_of(unsigned local) const {
        return local / S::blocks >> slot_bits;
    }
    // How often the contents of a tile's slot have been folded, by the block that does so.
    __device__ __forceinline__ unsigned *folds_of(unsigned local) const {
        return folded + local % S::blocks * MAX_TILE_SLOTS + slot_of(local);
    }
    // Of one unit: max_tokens rows of UNIT_ROWS.
    __device__ __forceinline__ float *value_of(unsigned local, unsigned unit) const {
        return values + (slot_of(local) * tile_units + unit) * (S::max_tokens * UNIT_ROWS);
    }
    // `again`: for another product than before.
    __device__ __forceinline__ void begin(unsigned steps, bool again) const {
        // One for each warp, since the threads of a warp arrive at a barrier one after the other.
        if (threadIdx.x % WARP_LANES) return;
        for (unsigned i = threadIdx.x / WARP_LANES; i < MAX_TILE_SLOTS; i += S::warps) {
            if (again) close_arrivals(arrived + i);
            open_arrivals(arrived + i, steps);
            for (int block = 0; block < S::blocks; block++) folded[block * MAX_TILE_SLOTS + i] = 0;
        }
    }
};

DEVICE unsigned now_at(const unsigned *address) { return *(const volatile unsigned *)address; }

// The warps that fold a tile: those that have its last steps, in turn. If the last warp to end
// folded it, that warp would be late with the next tile and end last again. There are as many as
// have a value for each lane, and each folds a share of them.
template <class S> struct FOLDERS {
    unsigned latest, count, lanes;

    __device__ __forceinline__ FOLDERS(const typename S::WORK &work) {
        // Of a pair the upper half of a warp folds the second matrix.
        lanes = work.paired ? UNIT_ROWS : WARP_LANES;
        latest = min(work.steps, (unsigned)S::warps);
        // As many in every block, of which the last has the fewest steps.
        const unsigned most = min(work.min_steps(), latest);
        count = S::max_tokens == 1 ? 1 : min(most, S::max_tokens * UNIT_ROWS / lanes);
    }
    // The share of a tile that a warp with one of its steps folds; at least `count` if it folds
    // none.
    __device__ __forceinline__ unsigned share(const typename S::WORK &work, unsigned local,
                                              unsigned step) const {
        const unsigned turn = local / S::blocks % MAX_TILE_SLOTS;
        const unsigned before_last = work.steps - 1 - step;
        if (S::blocks > 1 && work.folds_at(local) != work.rank()) return count;
        if (S::max_tokens == 1) {
            // If there are few steps, tiles with the same warps alternate between them; otherwise
            // some warps would fold nothing.
            const bool few = S::early && work.steps < S::warps;
            const unsigned round = few ? turn * work.steps / S::warps : turn;
            return before_last == min(round, latest - 1) ? 0 : count;
        }
        if (before_last >= latest) return count;
        return (before_last + MAX_TILE_SLOTS * latest - turn * count) % latest;
    }
};

struct NEXT_COPY {
    const unsigned char *source;
    unsigned bytes;
    bool exists;
};

// Chunks that a warp requests: every lane knows one of 32.
template <class S> struct COPY_LIST {
    const unsigned char *source;
    unsigned bytes, next, count;

    __device__ __forceinline__ void begin(const typename S::WORK &work, unsigned warp) {
        next = 0, count = work.chunks_of(warp, S::warps);
    }
    __device__ __forceinline__ bool is_done() const { return next == count; }
    // Whether lanes know no further chunk.
    __device__ __forceinline__ bool is_spent() const {
        return next == count || next % WARP_LANES == 0;
    }
    // How many copies there are until lanes know no further chunk, at least 1.
    __device__ __forceinline__ unsigned left() const {
        return is_done() ? 1 : min(count - next, WARP_LANES - next % WARP_LANES);
    }
    // The next of the chunks; it does not exist if no lane knows one.
    __device__ __forceinline__ NEXT_COPY ahead() const {
        const unsigned long long from = (unsigned long long)source;
        const unsigned lane = next % WARP_LANES;
        return {(const unsigned char *)__shfl_sync(ALL_LANES, from, lane),
                __shfl_sync(ALL_LANES, bytes, lane), !is_done()};
    }
    // Fills a slot with that chunk.
    __device__ __forceinline__ void copy(const STREAM_MEMORY<S> &memory, unsigned warp,
                                         unsigned slot, const NEXT_COPY &chunk) {
        const unsigned ring_slot = warp * S::slots + slot;
        if (!chunk.exists) return no_copy();
        begin_copy(memory.barriers + ring_slot, memory.ring + ring_slot * S::slot_bytes,
                   chunk.source, chunk.bytes);
        next++;
    }
    // Before a copy where they are spent.
    __device__ __forceinline__ void look(const typename S::WORK &work, unsigned warp) {
        if (is_done() || next % WARP_LANES) return;
        const unsigned lane = threadIdx.x % WARP_LANES;
        const typename S::CHUNK_INDEX_OF at(work, warp + min(next + lane, count - 1) * S::warps);
        const unsigned unit_bytes = S::formats::unit_bytes(work.format_of(at.matrix));
        const unsigned char *units = work.matrix[0];
#pragma unroll
        for (int i = 1; i < S::matrices; i++)
            if (at.matrix == i) units = work.matrix[i];
        source = units + ((size_t)at.in_matrix * work.units + at.unit) * unit_bytes;
        bytes = at.units(work) * unit_bytes;
    }
};

// One warp's ring: the slot of the present chunk, and how often it was filled. Requests, of the
// `list` of RING_OF, run ahead of the computation. When the list is used up, `prepare` is called before.
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
    // The present chunk has been read: `copy` is made to its slot, and the next one becomes the
    // present.
    __device__ __forceinline__ void refill(const STREAM_MEMORY<S> &memory, unsigned warp,
                                           const NEXT_COPY &copy) {
        ((RING_OF *)this)->list.copy(memory, warp, slot, copy);
        if (++slot == S::slots) slot = 0, rounds++;
    }
    __device__ __forceinline__ void open(const STREAM_MEMORY<S> &memory, unsigned warp) {
        slot = rounds = 0;
        open_copies(memory.barriers + warp * S::slots, S::slots);
    }
    __device__ __forceinline__ void fill(const STREAM_MEMORY<S> &memory, unsigned warp) {
#pragma unroll 1
        for (int i = 0; i < S::slots; i++) {
            RING_OF &own = *(RING_OF *)this;
            own.prepare(warp);
            own.list.copy(memory, warp, i, own.list.ahead());
        }
    }
};

// The ring of a kernel with one product.
template <class S> struct RING : RING_SLOTS<S, RING<S>> {
    const typename S::WORK &work;
    COPY_LIST<S> list;

    __device__ __forceinline__ RING(const typename S::WORK &work_) : work(work_) {}
    __device__ __forceinline__ void begin(const STREAM_MEMORY<S> &memory, unsigned warp) {
        this->open(memory, warp);
        list.begin(work, warp);
        this->fill(memory, warp);
    }
    // Waits for the requests of `begin` if no other code does.
    __device__ __forceinline__ void drain(const STREAM_MEMORY<S> &memory, unsigned warp) {
        for (unsigned i = 0; i < list.next; i++)
            await_copy<1>(memory.barriers + warp * S::slots + i, 0);
    }
    __device__ __forceinline__ void prepare(unsigned warp) { list.look(work, warp); }
};

// A chunk as in the list.
struct LISTED_CHUNK {
    unsigned packed;
    __device__ __forceinline__ unsigned unit() const { return packed & 4095; }
    __device__ __forceinline__ unsigned value_index() const { return packed >> 12 & 4095; }
    __device__ __forceinline__ unsigned format() const { return packed >> 24 & 3; }
    __device__ __forceinline__ unsigned units() const { return (packed >> 26 & 3) + 1; }
    __device__ __forceinline__ bool folds() const { return packed >> 28 & 1; }
    __device__ __forceinline__ unsigned slot() const { return packed >> 29; }
};

// Chunks that a warp computes, in the order of its requests: every lane knows one of 32.
template <class S> struct CHUNK_LIST {
    unsigned local, packed, count;

    __device__ __forceinline__ void begin(const typename S::WORK &work,
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
    // The chunks from number `first` on.
    __device__ __forceinline__ void look(const typename S::WORK &work,
                                         const STREAM_MEMORY<S> &memory, unsigned warp,
                                         unsigned first) {
        const unsigned lane = threadIdx.x % WARP_LANES;
        const typename S::CHUNK_INDEX_OF at(work, warp + (first + lane) * S::warps);
        const FOLDERS<S> folders(work);
        local = at.local;
        const unsigned value_index = memory.slot_of(local) * memory.tile_units + at.unit +
                                     (work.paired ? at.matrix * work.units : 0);
        packed = (at.unit - work.first_unit()) | value_index << 12 |
                 work.format_of(at.matrix) << 24 | (at.units(work) - 1) << 26 |
                 (folders.share(work, local, at.step) < folders.count) << 28 |
                 memory.slot_of(local) << 29;
    }
};

#endif
