// The second launch for rows that are sampled at a temperature, see sample_row.h. A block computes
// one part of the vocabulary of one row. The operands ids and weights of SAMPLE are memory for the
// row's list.
//
// If RING_AT is not -1, this is the last launch of a step of one row, and the kernel also writes
// the row's event and slot; the packets of these ops follow SAMPLE's packet.

#include "sample_row.h"
#if RING_AT >= 0
#include "row_end.h"
#endif

#define LISTED_NEAR 4096u  // of the list in shared memory
#define INSIDE 0x80000000u    // of a listed token's id: between the first and the last bin
#define AT_COUNT 0x40000000u  // in the bin where top-k ends
#define ID_BITS 0x3FFFFFFFu

// A listed token. It precedes tokens with a smaller key, or with the same key and a larger id.
struct LISTED {
    unsigned key, id, weight;
};

// The end of a prefix of the order: tokens with a larger key, and those with the same key up to an
// id.
struct PREFIX_END {
    unsigned key, last_id;
    __device__ __forceinline__ bool holds(unsigned of_key, unsigned id) const {
        return of_key > key || (of_key == key && id <= last_id);
    }
};

// The range that contains the end of a prefix, divided into as many pieces as there are threads,
// with the number of their tokens and their weight in two halves; the piece that contains the end,
// its tokens, and everything before it.
struct PIECES {
    unsigned low[THREADS], high[THREADS], count[THREADS];
    U64 before;
    unsigned found, tokens;
};

// The list of a row, in shared memory if it fits; keys are between `least` and `most`.
struct LIST {
    const SAMPLED &row;
    LISTED *near;
    SUMS *room;
    PIECES &pieces;
    unsigned count, least, most;

    __device__ __forceinline__ LISTED load(unsigned i) const {
        const unsigned id = load_shared_word(row.ids + i);
        return {order_key(row.value(id & ID_BITS)), id, load_shared_word(row.weights + i)};
    }
    __device__ __forceinline__ LISTED at(unsigned i) const {
        return i < LISTED_NEAR ? near[i] : load(i);
    }
    __device__ __forceinline__ void fill() {
        unsigned above = 0, below = 0;
        for (unsigned i = threadIdx.x; i < count; i += THREADS) {
            const LISTED one = load(i);
            if (i < LISTED_NEAR) near[i] = one;
            above = max(above, one.key), below = max(below, ~one.key);
        }
        above = largest_of_warp(above), below = largest_of_warp(below);
        if (threadIdx.x % WARP_LANES == 0) room[threadIdx.x / WARP_LANES] = {0, above, below};
        __syncthreads();
        most = least = 0;
#pragma unroll 1
        for (unsigned i = 0; i < WARPS; i++)
            most = max(most, room[i].count), least = max(least, room[i].enough);
        least = ~least;
        __syncthreads();
    }
    // Sums over the tokens of a set in a prefix; every thread gets them.
    __device__ __forceinline__ SUMS within(unsigned set, const PREFIX_END &end) const {
        SUMS mine = {0, 0, 0}, all;
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < count; i += THREADS) {
            const LISTED one = at(i);
            if (one.id & set && end.holds(one.key, one.id & ID_BITS))
                mine = plus(mine, {one.weight, 1u, row.is_enough(one.weight)});
        }
        sums_before(mine, room, all);
        return all;
    }
    // The prefix of a set's tokens that have less than `bound` before them, in weight or in number,
    // where `base` is outside of the set. The first token belongs to it. It is found by keys, from
    // the largest on, then by ids of the last key.
    __device__ __forceinline__ PREFIX_END end(unsigned set, bool by_weight, U64 base, U64 bound) {
        unsigned key = 0, first = ~most, last = ~least;
#pragma unroll 1
        for (int by_id = 0; by_id < 2; by_id++) {
#pragma unroll 1
            while (true) {
                const unsigned shift = 32 - __clz((int)((last - first) / THREADS));
                if (!is_narrowed(set, by_weight, by_id, key, first, last, shift, base, bound))
                    return {least, ID_BITS};
                last -= first;
                first += pieces.found << shift;
                last = first + min(last - (pieces.found << shift), (1u << shift) - 1u);
                base = pieces.before;
                if (shift == 0) break;
            }
            if (by_id) break;
            if (pieces.tokens == 1) return {~first, ID_BITS};
            key = ~first, first = 0, last = row.vocab - 1;
        }
        return {key, first};
    }
    // Which of the pieces, 2^shift keys or ids of one key each, contains the end; false if none
    // does.
    __device__ __forceinline__ bool is_narrowed(unsigned set, bool by_weight, bool by_id, unsigned key,
                                                unsigned first, unsigned last, unsigned shift,
                                                U64 base, U64 bound) {
        __syncthreads();
        pieces.low[threadIdx.x] = pieces.high[threadIdx.x] = pieces.count[threadIdx.x] = 0;
        if (threadIdx.x == 0) pieces.found = THREADS;
        __syncthreads();
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < count; i += THREADS) {
            const LISTED one = at(i);
            const unsigned offset = (by_id ? one.id & ID_BITS : ~one.key) - first;
            if (!(one.id & set) || (by_id && one.key != key) || offset > last - first) continue;
            const unsigned own = by_weight ? one.weight : 1u;
            atomicAdd(pieces.count + (offset >> shift), 1u);
            atomicAdd(pieces.low + (offset >> shift), own & HALF_WEIGHT);
            if (by_weight) atomicAdd(pieces.high + (offset >> shift), own >> HALF_WEIGHT_BITS);
        }
        __syncthreads();
        const U64 own = ((U64)pieces.high[threadIdx.x] << HALF_WEIGHT_BITS) + pieces.low[threadIdx.x];
        SUMS all;
        const U64 before = base + sums_before({own, 0, 0}, room, all).weight;
        if (before < bound && bound <= before + own)
            pieces.found = threadIdx.x, pieces.tokens = pieces.count[threadIdx.x], pieces.before = before;
        __syncthreads();
        return pieces.found < THREADS;
    }
};

// The row's token is known.
DEVICE void end_row(const LAUNCH &launch, const SAMPLED &row, int token) {
    *row.token = token;
#if RING_AT >= 0
    const LAUNCH first = {launch.scratch, launch.inputs, launch.packets, 0u};
    const unsigned number = U32_AT((ADDRESS)operand_at(first, OUTPUT_ROWS_AT), 0);
    ROW_END last;
    last.open(ROW((ADDRESS)operand_at(first, QUERY_AT), number, stride_at(first, QUERY_AT)),
              (ADDRESS)operand_at(first, STEP_AT));
    last.store((ADDRESS)operand_at(first, SLOTS_AT), stride_at(first, SLOTS_AT),
               (ADDRESS)operand_at(first, RING_AT), RING_EVENTS, (unsigned)token);
#endif
}

DEVICE PREFIX_END shorter(const PREFIX_END &a, const PREFIX_END &b) {
    if (a.key != b.key) return a.key > b.key ? a : b;
    return {a.key, min(a.last_id, b.last_id)};
}

// The end of what a row keeps, among the tokens inside its bins: the shortest of the prefixes of
// top-k, top-p and min-p, in this order, since the others consider only what top-k keeps.
DEVICE PREFIX_END end_of_kept(const SAMPLED &row, LIST &list, const BOUNDS &bounds) {
    PREFIX_END end = {0u, ID_BITS};
    SUMS of_count = bounds.all;
#pragma unroll 1
    for (int rule = 0; rule < 3; rule++) {
        if (rule == 0 ? bounds.cut == NO_BIN
                      : rule == 1 ? F32_AT(row.how, SAMPLING_TOP_P) >= 1.0f : row.least == 0)
            continue;
        const unsigned set = rule == 0 ? AT_COUNT : INSIDE;
        const U64 base = rule == 0   ? bounds.above_cut.count
                         : rule == 1 ? bounds.above_first.weight
                                     : bounds.above_first.count;
        const U64 bound = rule == 0   ? bounds.kept
                          : rule == 1 ? limit_of(row, of_count.weight)
                                      : max(of_count.enough, 1u);
        const PREFIX_END found = list.end(set, rule == 1, base, bound);
        if (rule == 0)
            of_count = plus(bounds.above_cut, list.within(set, found));
        end = shorter(end, found);
    }
    return end;
}

// The drawn number as a weight below the total.
DEVICE U64 target_of(const SAMPLED &row, U64 total) {
    const U64 u = philox_draw(U32_AT(row.how, SAMPLING_SEED_LOW), U32_AT(row.how, SAMPLING_SEED_HIGH),
                              U32_AT(row.how, SAMPLING_POSITION));
    return u * (total >> 32) + (u * (total & 0xFFFFFFFFu) >> 32);
}

// Adds the weights of the kept tokens of the list to the parts, and draws: the part that contains
// the token, and how much of its weight comes before the token.
struct DRAWN {
    SUMS room[WARPS];
    PIECES pieces;
    unsigned low[PARTS], high[PARTS];
    U64 target;
    unsigned part;
};

DEVICE void draw_part(const SAMPLED &row, const LIST &list, const PREFIX_END &end, DRAWN &drawn) {
    for (unsigned part = threadIdx.x; part < PARTS; part += THREADS)
        drawn.low[part] = drawn.high[part] = 0;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < list.count; i += THREADS) {
        const LISTED one = list.at(i);
        const unsigned id = one.id & ID_BITS, part = id / row.part_size();
        if (!(one.id & INSIDE) || !end.holds(one.key, id)) continue;
        atomicAdd(drawn.low + part, one.weight & HALF_WEIGHT);
        atomicAdd(drawn.high + part, one.weight >> HALF_WEIGHT_BITS);
    }
    __syncthreads();
    const unsigned part = threadIdx.x;
    U64 own = 0;
    if (part < PARTS) {
        const unsigned *above = (const unsigned *)(row.state->above + part);
        own = ((U64)drawn.high[part] << HALF_WEIGHT_BITS) + drawn.low[part];
        own += wide(load_shared_word(above), load_shared_word(above + 1));
    }
    SUMS all;
    const U64 before = sums_before({own, 0, 0}, drawn.room, all).weight, total = all.weight;
    const U64 target = target_of(row, total);
    if (before <= target && target < before + own) drawn.part = part, drawn.target = target - before;
    __syncthreads();
}

// The token of a part at which the weight of kept tokens, by rising id, exceeds the target.
DEVICE void walk_part(const LAUNCH &launch, const SAMPLED &row, const BOUNDS &bounds,
                      const PREFIX_END &end, DRAWN &drawn) {
    const unsigned begin = drawn.part * row.part_size(), stop = row.part_end(drawn.part);
    const unsigned each = (row.part_size() + THREADS - 1) / THREADS;
    const unsigned first = min(begin + threadIdx.x * each, stop), last = min(first + each, stop);
    const auto kept = [&](unsigned id) {
        const float value = row.value(id);
        const unsigned weight = row.weight_at(value), bin = weight ? row.bin_of(value) : 0u;
        const bool above = bin < bounds.first;
        const bool inside = bin <= bounds.last && end.holds(order_key(value), id);
        return above || inside ? weight : 0u;
    };
    SUMS mine = {0, 0, 0}, all;
#pragma unroll 2
    for (unsigned id = first; id < last; id++) mine.weight += kept(id);
    U64 passed = sums_before(mine, drawn.room, all).weight;
    if (drawn.target < passed || drawn.target >= passed + mine.weight) return;
    unsigned id = first;
    while ((passed += kept(id)) <= drawn.target) id++;
    end_row(launch, row, id);
}

// The value of an order_key.
DEVICE float value_of(unsigned key) {
    return __uint_as_float(key & SIGN_BIT ? key ^ SIGN_BIT : ~key);
}

// The key that the largest values of as many parts reach as top-k keeps tokens.
DEVICE unsigned min_key(const OP &op, const SAMPLED &row, PIECES &pieces) {
    const ADDRESS records = ROW(op.best, blockIdx.y * op.parts, BEST_WORDS);
    unsigned key = 0, rank = 0;
    if (threadIdx.x < op.parts) {
        const BEST best = load_best(records, threadIdx.x);
        if (best.id != NO_TOKEN) key = order_key(best.value);
        pieces.low[threadIdx.x] = key;
    }
    __syncthreads();
    for (unsigned i = 0; i < op.parts; i++)
        rank += pieces.low[i] > key || (pieces.low[i] == key && i < threadIdx.x);
    if (threadIdx.x < op.parts && rank == row.few - 1) pieces.found = key;
    __syncthreads();
    return pieces.found;
}

// Lists the tokens of this block's part that top-k may keep, without weights.
DEVICE void list_part(const OP &op, const SAMPLED &row, PIECES &pieces) {
    const unsigned least = TEMPERED ? 0 : min_key(op, row, pieces), cut = row.state->bounds.cut;
    const unsigned lane = threadIdx.x % WARP_LANES, end = row.part_end(blockIdx.x);
    for (unsigned base = blockIdx.x * row.part_size(); base < end; base += LOADED * THREADS) {
        float value[LOADED];
        load_values(row, base, end, value);
#pragma unroll
        for (int i = 0; i < LOADED; i++) {
            const unsigned id = base + i * THREADS + threadIdx.x;
            const bool above = TEMPERED ? row.bin_of(value[i]) <= cut : order_key(value[i]) >= least;
            const bool is_listed = id < end && above && row.is_near(value[i]);
            const unsigned listed = __ballot_sync(ALL_LANES, is_listed);
            if (listed == 0) continue;
            unsigned index = 0;
            if (lane == 0) index = atomicAdd(&row.state->listed, (unsigned)__popc(listed));
            index = __shfl_sync(ALL_LANES, index, 0) + __popc(listed & ((1u << lane) - 1));
            if (is_listed) row.ids[index] = id | INSIDE;
        }
    }
}

// A row of which top-k keeps at most as many tokens as a block has threads: a thread compares one
// with all others.
DEVICE void draw_of_few(const LAUNCH &launch, const OP &op, const SAMPLED &row, DRAWN &drawn,
                        LISTED *near) {
    PIECES &pieces = drawn.pieces;
    list_part(op, row, pieces);
    if (!comes_last(row.state, (unsigned *)&drawn)) return;
    LIST list = {row, near, drawn.room, pieces, load_shared_word(&row.state->listed), 0u, 0u};
    PREFIX_END first = {0u, ID_BITS};
    list.fill();
    if (list.count > THREADS) first = list.end(INSIDE, false, 0, row.few);
    if (threadIdx.x == 0) drawn.part = 0;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < list.count; i += THREADS) {
        const LISTED one = list.at(i);
        if (!first.holds(one.key, one.id & ID_BITS)) continue;
        const unsigned index = atomicAdd(&drawn.part, 1u);
        pieces.low[index] = one.key, pieces.high[index] = one.id & ID_BITS;
        pieces.count[index] = row.weight_at(value_of(one.key));
    }
    __syncthreads();
    const unsigned count = drawn.part, own = threadIdx.x;
    const bool exists = own < count;
    const unsigned key = exists ? pieces.low[own] : 0, id = exists ? pieces.high[own] : 0;
    unsigned weight = exists ? pieces.count[own] : 0, rank = 0;
    U64 before = 0;
    for (unsigned i = 0; i < count; i++) {
        if (pieces.low[i] < key || (pieces.low[i] == key && pieces.high[i] >= id)) continue;
        rank++, before += pieces.count[i];
    }
    SUMS of_count = {0, 0, 0}, all;
    if (exists && rank < row.few) of_count = {weight, 1, row.is_enough(weight)};
    sums_before(of_count, drawn.room, all);
    const bool by_weight = F32_AT(row.how, SAMPLING_TOP_P) < 1.0f;
    if (rank >= row.few || (by_weight && before >= limit_of(row, all.weight))) weight = 0;
    if (row.least > 0 && rank >= max(all.enough, 1u)) weight = 0;
    pieces.count[own] = weight;
    sums_before({weight, 0, 0}, drawn.room, all);
    const U64 target = target_of(row, all.weight);
    before = 0;
    for (unsigned i = 0; i < count; i++)
        if (pieces.high[i] < id) before += pieces.count[i];
    if (exists && before <= target && target < before + weight) end_row(launch, row, id);
    if (own == 0) row.state->bounds = BOUNDS{}, row.state->listed = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_draw(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, TEMPERED};
    const OP op = opened(launch);
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (blockIdx.y >= op.rows) return;
    DRAWN &drawn = *(DRAWN *)shared;
    const SAMPLED row = open_row(launch, op, blockIdx.y, workspace, (unsigned *)shared);
    if (!row.is_drawn()) {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            end_row(launch, row, row.is_sound() ? row.best.id : NO_TOKEN);
        return;
    }
    if (row.few) return draw_of_few(launch, op, row, drawn, (LISTED *)(shared + sizeof(DRAWN)));
    ROW_STATE *state = row.state;
    BOUNDS bounds = state->bounds;
    if (row.is_whole()) bounds.first = bounds.last = bounds.cut = NO_BIN;
    const unsigned lane = threadIdx.x % WARP_LANES, part = blockIdx.x;
    const unsigned begin = part * row.part_size(), end = row.part_end(part);
    SUMS above = {0, 0, 0}, all;
    for (unsigned base = begin; base < end; base += LOADED * THREADS) {
        float value[LOADED];
        load_values(row, base, end, value);
#pragma unroll 1
        for (int i = 0; i < LOADED && base + i * THREADS < end; i++) {
            const unsigned id = base + i * THREADS + threadIdx.x;
            const unsigned weight = id < end ? row.weight_at(value[0]) : 0u;
            const unsigned bin = weight ? row.bin_of(value[0]) : NO_BIN;
            shift_values(value);
            if (bin < bounds.first) above.weight += weight;
            unsigned sets = 0;
            if (bin >= bounds.first && bin <= bounds.last && bin < NO_BIN) sets |= INSIDE;
            if (bin == bounds.cut && bin < NO_BIN) sets |= AT_COUNT;
            const unsigned listed = __ballot_sync(ALL_LANES, sets != 0);
            if (listed == 0) continue;
            unsigned index = 0;
            if (lane == 0) index = atomicAdd(&state->listed, (unsigned)__popc(listed));
            index = __shfl_sync(ALL_LANES, index, 0) + __popc(listed & ((1u << lane) - 1));
            if (sets) row.ids[index] = id | sets, row.weights[index] = weight;
        }
    }
    sums_before(above, drawn.room, all);
    if (threadIdx.x == 0) state->above[part] = all.weight;
    if (!comes_last(state, (unsigned *)shared)) return;
    LIST list = {row, (LISTED *)(shared + sizeof(DRAWN)), drawn.room, drawn.pieces,
                 load_shared_word(&state->listed), 0u, 0u};
    list.fill();
    const PREFIX_END kept = end_of_kept(row, list, bounds);
    draw_part(row, list, kept, drawn);
    walk_part(launch, row, bounds, kept, drawn);
    if (threadIdx.x < PARTS) state->above[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        state->bounds = BOUNDS{};
        state->listed = 0;
    }
}
