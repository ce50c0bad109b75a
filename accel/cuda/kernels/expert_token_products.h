// Gates and downs of expert_token.cu: a warp computes chunks of gates for all tokens of an expert, then
// one expert's and token's part of a tile of downs.

#ifndef EXPERT_TOKEN_PRODUCTS_H
#define EXPERT_TOKEN_PRODUCTS_H

#include "expert_token.h"
#include "gate.h"
#include "stack_matrices.h"

#define SHARED_EXPERT PAIRS  // the number of the shared expert among the distinct ones

// The values of a chunk's units of a tile of 16 rows, in the order of fold_units, of each of `tokens`,
// which are bits. `values` are those of the first token.
template <int dtype>
DEVICE void chunk_to(const unsigned char *stored, unsigned char (&rows)[TOKENS][ROW_BYTES(UNITS)],
                     unsigned tokens, unsigned first, int lane, float *values) {
    CHUNK_NIBBLES nibbles;
    nibbles.load(stored, UNIT_FORMAT<dtype>::unit_bytes, lane);
#pragma unroll 1
    for (int token = 0; token < TOKENS; token++) {
        if (TOKENS > 1 && !(tokens >> token & 1)) continue;
        const ACTIVATIONS x = activations_at(rows[token], UNITS);
        LANE_CHUNK own;
        own.load(x, first, UNITS - 1, lane);
        CHUNK_SUMS sums;
        multiply_chunk<dtype>(stored, nibbles, own, lane, sums);
        const float value = value_of_chunk<dtype>(sums, own, lane);
        if (first + lane % 2 < UNITS)
            values[token * TILE_VALUES + lane % 2 * UNIT_ROWS + lane / 4 + lane / 2 % 2 * 8] = value;
    }
}

// A warp's copies of gates: chunks of the block's tiles, which are those of all experts one after
// the other, the shared one first; of a tile first chunks of the gate, then of up.
struct GATES_COPIES {
    const LAUNCH &launch;
    TOKEN_MEMORY &memory;
    unsigned chunks, fetched;  // of the block; of the warp

    __device__ __forceinline__ GATES_COPIES(const LAUNCH &launch_, TOKEN_MEMORY &memory_)
        : launch(launch_), memory(memory_), fetched(0) {
        limit(USED);
    }
    // The number of experts that are not shared.
    __device__ __forceinline__ void limit(unsigned experts) {
        const unsigned tiles = (experts + HAS_SHARED) * TILES_EACH;
        const unsigned own = tiles > blockIdx.x ? (tiles - blockIdx.x - 1) / gridDim.x + 1 : 0;
        chunks = own * 2 * UNIT_CHUNKS;
    }
    // The number of a tile's expert among the distinct ones.
    static __device__ __forceinline__ unsigned expert(unsigned tile) {
        return !HAS_SHARED         ? tile / TILES_EACH
               : tile < TILES_EACH ? SHARED_EXPERT
                                   : tile / TILES_EACH - 1;
    }
    // Whether the warp's next chunk is one of the shared expert.
    __device__ __forceinline__ bool is_known() const {
        const unsigned chunk = threadIdx.x / WARP_LANES + fetched * WARPS;
        return HAS_SHARED && chunk < chunks && tile(chunk) < TILES_EACH;
    }

    __device__ __forceinline__ int id_of(unsigned expert) const {
        return TOKENS == 1 ? memory.choice[0].ids[expert] : memory.distinct.ids[expert];
    }
    // Bits of the tokens of an expert, of all that there are.
    __device__ __forceinline__ unsigned tokens_of(unsigned expert, unsigned tokens) const {
        if (TOKENS == 1) return 1;
        return expert < SHARED_EXPERT ? memory.distinct.tokens[expert] : (1u << tokens) - 1;
    }
    // Which of the token's choices it is.
    __device__ __forceinline__ unsigned choice_of(unsigned expert, unsigned token) const {
        if (expert == SHARED_EXPERT) return USED;
        if (TOKENS == 1) return expert;
        const unsigned own = memory.distinct.pairs[expert] >> token * USED & ((1u << USED) - 1);
        return __popc((own & -own) - 1);
    }
    __device__ __forceinline__ unsigned tile(unsigned chunk) const {
        return blockIdx.x + chunk / (2 * UNIT_CHUNKS) * gridDim.x;
    }
    __device__ __forceinline__ void fetch() {
        const unsigned warp = threadIdx.x / WARP_LANES, chunk = warp + fetched * WARPS;
        const unsigned slot = fetched % SLOTS;
        if (chunk >= chunks) return;
        const unsigned index = tile(chunk), expert = this->expert(index);
        const unsigned in_tile = chunk % (2 * UNIT_CHUNKS), matrix = in_tile / UNIT_CHUNKS;
        const unsigned first = in_tile % UNIT_CHUNKS * CHUNK_UNITS;
        const bool chosen = expert < SHARED_EXPERT;
        const unsigned unit_bytes = chosen ? UNIT_FORMAT<GATES_FORMAT>::unit_bytes
                                           : UNIT_FORMAT<SHARED_GATES_FORMAT>::unit_bytes;
        const int stack = chosen ? (matrix ? UPS : GATES) : (matrix ? SHARED_UP : SHARED_GATE);
        const size_t tile_bytes = (size_t)UNITS * unit_bytes;
        const unsigned char *units =
            matrix_of(launch, stack, chosen ? id_of(expert) : 0, TILES_EACH * tile_bytes);
        begin_copy(memory.gates[warp].barriers + slot, memory.region[warp] + slot * GATES_SLOT,
                   units + index % TILES_EACH * tile_bytes + first * unit_bytes,
                   min((unsigned)CHUNK_UNITS, UNITS - first) * unit_bytes);
        fetched++;
    }
};

// The first chunk of downs of a pair, for a tile: of a token and its choice, USED for the shared expert.
DEVICE const unsigned char *downs_at(const LAUNCH &launch, const TOKEN_MEMORY &memory, unsigned pair,
                                     unsigned tile) {
    const unsigned choice = pair % CHOICES;
    const bool chosen = choice < USED;
    const unsigned rows = packet_of(launch, DOWNS_PRODUCT)->size[MATMUL_ROWS];
    const size_t tile_bytes = HIDDEN_UNITS * (chosen ? UNIT_FORMAT<DOWNS_FORMAT>::unit_bytes
                                                     : UNIT_FORMAT<SHARED_DOWNS_FORMAT>::unit_bytes);
    return matrix_of(launch, chosen ? DOWNS : SHARED_DOWN,
                     chosen ? memory.choice[pair / CHOICES].ids[choice] : 0,
                     (rows + UNIT_ROWS - 1) / UNIT_ROWS * tile_bytes) +
           tile * tile_bytes;
}

DEVICE unsigned downs_unit_bytes(unsigned pair) {
    return pair % CHOICES < USED ? UNIT_FORMAT<DOWNS_FORMAT>::unit_bytes
                                 : UNIT_FORMAT<SHARED_DOWNS_FORMAT>::unit_bytes;
}

// Asks for the first chunk of a warp's pair. Its gates have been computed.
DEVICE void begin_downs(const LAUNCH &launch, TOKEN_MEMORY &memory, unsigned pair, unsigned tile) {
    const unsigned warp = threadIdx.x / WARP_LANES;
    begin_copy(memory.downs_barriers + warp, memory.region[warp],
               downs_at(launch, memory, pair, tile),
               min(CHUNK_UNITS, HIDDEN_UNITS) * downs_unit_bytes(pair));
}

// Has what the warp multiplies behind its first pair brought near, for which it has no room yet.
// Matrices of a list may be in memory of the host, which the device does not keep.
DEVICE void prefetch_downs(const LAUNCH &launch, const TOKEN_MEMORY &memory, unsigned pairs,
                           unsigned tile) {
    if (!stride_at(launch, DOWNS)) return;
    constexpr unsigned line = 128;
    const unsigned lane = threadIdx.x % WARP_LANES;
#pragma unroll 1
    for (unsigned pair = threadIdx.x / WARP_LANES + WARPS; pair < pairs; pair += WARPS) {
        const unsigned char *units = downs_at(launch, memory, pair, tile);
        const unsigned bytes = HIDDEN_UNITS * downs_unit_bytes(pair);
#pragma unroll 1
        for (unsigned at = lane * line; at < bytes; at += WARP_LANES * line) call_near(units + at);
    }
}

// Publishes h = activation(gate x) * (up x) of the block's tiles, and begins its downs.
DEVICE void make_hidden(const LAUNCH &launch, float *hidden, unsigned tokens, GATES_COPIES &copies,
                        TOKEN_MEMORY &memory) {
    const unsigned warp = threadIdx.x / WARP_LANES, pairs = tokens * CHOICES;
    const int lane = threadIdx.x % WARP_LANES;
    if (blockIdx.x == 0 && threadIdx.x < tokens * USED)
        count_uses(launch, GATES, memory.choice[threadIdx.x / USED].ids[threadIdx.x % USED], 1);
    const unsigned rows = packet_of(launch, DOWNS_PRODUCT)->size[MATMUL_ROWS];
    bool adds = warp < pairs && blockIdx.x * UNIT_ROWS < rows;
    // Whole tiles at a time, whose values have room.
    constexpr unsigned at_once = TILES_AT_ONCE * 2 * UNIT_CHUNKS;
    unsigned taken = 0;
#pragma unroll 1
    for (unsigned begin = 0; begin == 0 || begin < copies.chunks; begin += at_once) {
        const unsigned end = min(begin + at_once, copies.chunks);
#pragma unroll 1
        while (warp + taken * WARPS < end) {
            const unsigned chunk = warp + taken * WARPS, in_tile = chunk % (2 * UNIT_CHUNKS);
            const unsigned slot = taken % SLOTS, expert = copies.expert(copies.tile(chunk));
            const unsigned char *stored = memory.region[warp] + slot * GATES_SLOT;
            const unsigned first = in_tile % UNIT_CHUNKS * CHUNK_UNITS;
            const unsigned of = copies.tokens_of(expert, tokens);
            float *values = memory.values[(chunk - begin) / (2 * UNIT_CHUNKS)][0] +
                            in_tile * (CHUNK_UNITS * UNIT_ROWS);
#pragma unroll 1
            while (copies.fetched < taken + SLOTS &&
                   warp + copies.fetched * WARPS < copies.chunks)
                copies.fetch();
            await_copy<SLOTS>(memory.gates[warp].barriers + slot, taken / SLOTS);
            if (GATES_FORMAT == SHARED_GATES_FORMAT || expert < SHARED_EXPERT)
                chunk_to<GATES_FORMAT>(stored, memory.x, of, first, lane, values);
            else
                chunk_to<SHARED_GATES_FORMAT>(stored, memory.x, of, first, lane, values);
            __syncwarp();
            taken++;
        }
        if (adds && warp + taken * WARPS >= copies.chunks) {
            begin_downs(launch, memory, warp, blockIdx.x);
            prefetch_downs(launch, memory, pairs, blockIdx.x);
            adds = false;
        }
        __syncthreads();
#pragma unroll 1
        for (unsigned i = threadIdx.x;
             i < (end - begin) / (2 * UNIT_CHUNKS) * TOKENS * UNIT_ROWS; i += WARPS * WARP_LANES) {
            const unsigned number = i / UNIT_ROWS / TOKENS, token = i / UNIT_ROWS % TOKENS;
            const unsigned row = i % UNIT_ROWS;
            const unsigned tile = copies.tile(begin + number * 2 * UNIT_CHUNKS);
            const unsigned expert = copies.expert(tile);
            if (TOKENS > 1 && !(copies.tokens_of(expert, tokens) >> token & 1)) continue;
            const float *values = memory.values[number][token] + row;
            float value[2];
#pragma unroll
            for (int matrix = 0; matrix < 2; matrix++)
                value[matrix] =
                    fold_units(values + matrix * (TILE_VALUES / 2), UNITS, UNIT_ROWS);
            publish(hidden + (token * CHOICES + copies.choice_of(expert, token)) * WIDTH +
                        tile % TILES_EACH * UNIT_ROWS + row,
                    gated(ACTIVATION, value[0], value[1]));
        }
        if (end < copies.chunks) __syncthreads();
    }
}

// A pair's 16 values of a tile, of which the first chunk has been asked for.
template <int dtype>
DEVICE void down_of(const LAUNCH &launch, const float *hidden, const ARRIVING &arriving,
                    unsigned pair, unsigned tile, unsigned &round, TOKEN_MEMORY &memory) {
    constexpr unsigned unit_bytes = UNIT_FORMAT<dtype>::unit_bytes;
    const unsigned warp = threadIdx.x / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES;
    unsigned char *ring = memory.region[warp];
    COPY_BARRIER *barrier = memory.downs_barriers + warp;
    const ACTIVATIONS x = activations_at(memory.h[warp], HIDDEN_UNITS);
    EIGHT held[HIDDEN_UNITS];
    arriving.row(held, hidden + pair * WIDTH, lane);
#pragma unroll
    for (int i = 0; i < HIDDEN_UNITS; i++) quantize_unit(x, i, lane, held[i]);
    __syncwarp();
    float all = 0.0f, span = 0.0f;
    unsigned in_span = 0;
#pragma unroll 1
    for (unsigned first = 0; first < HIDDEN_UNITS; first += CHUNK_UNITS) {
        await_copy<1>(barrier, round++);
        LANE_CHUNK own;
        own.load(x, first, HIDDEN_UNITS - 1, lane);
        CHUNK_NIBBLES nibbles;
        nibbles.load(ring, unit_bytes, lane);
        CHUNK_SUMS sums;
        multiply_chunk<dtype>(ring, nibbles, own, lane, sums);
        const float mine = value_of_chunk<dtype>(sums, own, lane);
        const float value[CHUNK_UNITS] = {mine, __shfl_xor_sync(ALL_LANES, mine, 1)};
        __syncwarp();
        const unsigned next = first + CHUNK_UNITS;
        if (next < HIDDEN_UNITS)
            begin_copy(barrier, ring, downs_at(launch, memory, pair, tile) + next * unit_bytes,
                       min((unsigned)CHUNK_UNITS, HIDDEN_UNITS - next) * unit_bytes);
#pragma unroll
        for (int n = 0; n < CHUNK_UNITS; n++) {
            if (first + n >= HIDDEN_UNITS) break;
            span = span + value[n];
            if (++in_span == SPAN_UNITS) all = all + span, span = 0.0f, in_span = 0;
        }
    }
    const float total = in_span ? all + span : all;
    if (lane % 2 == 0)
        memory.totals[pair / CHOICES][pair % CHOICES][lane / 4 + (lane % 4 ? 8 : 0)] = total;
}

// y of the block's tiles: the residual, and the experts' values times their weights in order.
DEVICE void add_downs(const LAUNCH &launch, const float *hidden, const ARRIVING &arriving,
                      unsigned tokens, TOKEN_MEMORY &memory) {
    const unsigned warp = threadIdx.x / WARP_LANES, pairs = tokens * CHOICES;
    const unsigned rows = packet_of(launch, DOWNS_PRODUCT)->size[MATMUL_ROWS];
    unsigned round = 0;
#pragma unroll 1
    for (unsigned tile = blockIdx.x; tile * UNIT_ROWS < rows; tile += gridDim.x) {
#pragma unroll 1
        for (unsigned pair = warp; pair < pairs; pair += WARPS) {
            if (pair != warp || tile != blockIdx.x) begin_downs(launch, memory, pair, tile);
            if (DOWNS_FORMAT == SHARED_DOWNS_FORMAT || pair % CHOICES < USED)
                down_of<DOWNS_FORMAT>(launch, hidden, arriving, pair, tile, round, memory);
            else
                down_of<SHARED_DOWNS_FORMAT>(launch, hidden, arriving, pair, tile, round, memory);
        }
        const unsigned of_tile = threadIdx.x % UNIT_ROWS, token = threadIdx.x / UNIT_ROWS;
        const unsigned row = tile * UNIT_ROWS + of_tile;
        const bool writes = token < tokens && row < rows;
        const float *residual = (const float *)operand_at(launch, RESIDUAL);
        const float *expert_scale = (const float *)operand_at(launch, EXPERT_SCALE);
        float sum =
            writes && residual ? residual[token * stride_at(launch, RESIDUAL) + row] : 0.0f;
        __syncthreads();
        if (writes) {
            const TOKEN_CHOICE &choice = memory.choice[token];
#pragma unroll
            for (int expert = 0; expert < USED; expert++) {
                float value = memory.totals[token][expert][of_tile];
                if (expert_scale) value = value * expert_scale[choice.ids[expert]];
                sum = sum + choice.weights[expert] * value;
            }
            if (HAS_SHARED) {
                const float value = memory.totals[token][CHOICES - 1][of_tile];
                sum = sum + (GATE_ROW >= 0 ? choice.shared_weight * value : value);
            }
            ((float *)operand_at(launch, Y))[token * stride_at(launch, Y) + row] = sum;
        }
        if ((tile + gridDim.x) * UNIT_ROWS < rows) __syncthreads();
    }
}

#endif
