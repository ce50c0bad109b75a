// The parts of expert_token.cu.

#ifndef EXPERT_TOKEN_H
#define EXPERT_TOKEN_H

#include "expert_choice.h"
#include "expert_units.h"
#include "gate.h"
#include "one_row.h"
#include "packets.h"
#include "stack_matrices.h"

#define HAS_SHARED (SHARED_GATE >= 0)
#define CHOICES (USED + HAS_SHARED)
#define ROUTER_ROWS 2  // that a block multiplies at once
#define EXPERTS (EXPERT_SEGMENTS * UNIT_COLUMNS)
#define HELD ((UNITS + WARPS - 1) / WARPS)  // of a row of x by a warp
#define WIDTH (HIDDEN_UNITS * UNIT_COLUMNS)
#define TILES_EACH (WIDTH / UNIT_ROWS)
#define UNIT_CHUNKS ((UNITS + CHUNK_UNITS - 1) / CHUNK_UNITS)
#define MOST_SPINS (1u << 22)  // some seconds

#define LARGER_OF(a, b) ((a) > (b) ? (a) : (b))
constexpr unsigned GATES_SLOT =
    CHUNK_UNITS * LARGER_OF(UNIT_FORMAT<GATES_FORMAT>::unit_bytes,
                            UNIT_FORMAT<SHARED_GATES_FORMAT>::unit_bytes);
constexpr unsigned DOWNS_SLOT =
    CHUNK_UNITS * LARGER_OF(UNIT_FORMAT<DOWNS_FORMAT>::unit_bytes,
                            UNIT_FORMAT<SHARED_DOWNS_FORMAT>::unit_bytes);
constexpr unsigned REGION = LARGER_OF(SLOTS * GATES_SLOT, DOWNS_SLOT);
// Of a bank: logits, behind them that of the shared expert's gate, and h of all experts.
constexpr unsigned LOGIT_FLOATS = EXPERTS + 4;
constexpr unsigned BANKS_AT = 256, BANK_BYTES = 4 * (LOGIT_FLOATS + CHOICES * WIDTH);

struct TOKEN_CHOICE {
    float largest[WARPS], exponential[EXPERTS];
    unsigned key[EXPERTS];
    int ids[USED];
    float weights[USED], shared_weight;
};
struct GATES_BARRIERS {
    COPY_BARRIER barriers[SLOTS];
};

struct TOKEN_MEMORY {
    alignas(128) unsigned char region[WARPS][REGION];
    alignas(16) unsigned char x[ROW_BYTES(UNITS)];
    alignas(16) unsigned char h[WARPS][ROW_BYTES(HIDDEN_UNITS)];
    GATES_BARRIERS gates[WARPS];
    COPY_BARRIER downs_barriers[WARPS];
    float squares[UNITS], partial[ROUTER_ROWS][UNITS];
    float values[2 * WARPS * CHUNK_UNITS * UNIT_ROWS];  // of chunks of gates
    float totals[CHOICES][UNIT_ROWS];                   // of downs
    TOKEN_CHOICE choice;
};
static_assert(sizeof(TOKEN_MEMORY) <= MEMORY_BYTES && BANKS_AT + 2 * BANK_BYTES <= WORKSPACE_BYTES,
              "as experts.py has them");

// Waits for floats of other blocks. A launch in which something is missing ends with an error.
struct ARRIVING {
    static __device__ __forceinline__ void pause(unsigned &spins) {
        spin_pause();
        if (++spins == MOST_SPINS) give_up();
    }
    static __device__ __forceinline__ float one(const float *address) {
        unsigned word, spins = 0;
        while (!(word = load_shared_word((const unsigned *)address))) pause(spins);
        return __uint_as_float(~word);
    }
    template <int units>
    static __device__ __forceinline__ void row(EIGHT (&made)[units], const float *row, int lane) {
        unsigned spins = 0;
        while (true) {
            unsigned least = ~0u;
#pragma unroll
            for (int i = 0; i < 2 * units; i++) {
                const uint4 v = load_shared_words((const unsigned *)row + 4 * lane + 128 * i);
                least = min(min(least, v.x), min(min(v.y, v.z), v.w));
                float *of = made[i / 2].of + i % 2 * 4;
                of[0] = __uint_as_float(~v.x), of[1] = __uint_as_float(~v.y);
                of[2] = __uint_as_float(~v.z), of[3] = __uint_as_float(~v.w);
            }
            if (least) break;
            pause(spins);
        }
        __syncwarp();
    }
};

// A block's rows of the router, of which a warp has the units that it has of x.
struct ROUTER_OF_BLOCK {
    const LAUNCH &launch;
    const PACKET *product;
    unsigned experts, rows, columns, warp;
    int lane;
    EIGHT weight[ROUTER_ROWS][HELD], of_norm[HELD], held[HELD];

    __device__ __forceinline__ explicit ROUTER_OF_BLOCK(const LAUNCH &launch_) : launch(launch_) {
        product = packet_of(launch, PRODUCT);
        experts = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
        rows = experts + (GATE_ROW >= 0);
        warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    }
    __device__ __forceinline__ void load(unsigned first) {
#pragma unroll
        for (int r = 0; r < ROUTER_ROWS; r++) {
            const unsigned row = first + r * gridDim.x;
            const float *of_row =
                row < experts ? (const float *)operand_at(launch, ROUTER) + (size_t)row * columns
                : row < rows  ? (const float *)operand_at(launch, GATE_ROW)
                              : 0;
#pragma unroll
            for (int i = 0; i < HELD; i++) {
                weight[r][i] = EIGHT{};
                if (of_row) weight[r][i] = load_eight(of_row, warp + i * WARPS, columns, lane);
            }
        }
    }
    __device__ __forceinline__ void load_norm() {
        const float *weights = (const float *)operand_at(launch, NORM_WEIGHT);
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (weights) of_norm[i] = load_eight(weights, warp + i * WARPS, columns, lane);
    }
    __device__ __forceinline__ void load_x() {
        const float *row = (const float *)operand_at(launch, X);
#pragma unroll
        for (int i = 0; i < HELD; i++) held[i] = load_eight(row, warp + i * WARPS, columns, lane);
    }
    // Publishes the block's logits, and converts x to activations.
    __device__ __forceinline__ void run(float *bank, TOKEN_MEMORY &memory) {
        const ACTIVATIONS x = activations_at(memory.x, UNITS);
        const FLOAT_ROWS<> row = {(const float *)operand_at(launch, X),
                                  0,
                                  (const float *)operand_at(launch, NORM_WEIGHT),
                                  packet_of(launch, NORM)->real[RMS_NORM_EPS],
                                  columns,
                                  1};
        normalize_units<WARPS>(held, of_norm, x, row, ROW_SQUARES{memory.squares, UNITS, columns});
#pragma unroll 1
        for (unsigned first = blockIdx.x; first < rows;) {
#pragma unroll
            for (int r = 0; r < ROUTER_ROWS; r++)
#pragma unroll
                for (int i = 0; i < HELD; i++) {
                    const float sum = sum_of_products(weight[r][i], held[i], lane);
                    if (lane == 0 && warp + i * WARPS < UNITS)
                        memory.partial[r][warp + i * WARPS] = sum;
                }
            __syncthreads();
            const unsigned own = first + threadIdx.x * gridDim.x;
            if (threadIdx.x < ROUTER_ROWS && own < rows)
                publish(bank + (own < experts ? own : EXPERTS),
                        fold_units(memory.partial[threadIdx.x], UNITS, 1));
            first += ROUTER_ROWS * gridDim.x;
            if (first >= rows) break;
            load(first);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const unsigned unit = warp + i * WARPS;
            quantize_unit(x, unit, lane, held[i], unit < UNITS);
        }
    }
};

// The token's experts, by all warps, each of which has some, once the logits have arrived. The
// caller has a barrier behind it.
DEVICE void choose_together(const LAUNCH &launch, const float *bank, TOKEN_CHOICE &choice) {
    constexpr int each = (EXPERTS_OF_LANE + WARPS - 1) / WARPS;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned experts = packet_of(launch, PRODUCT)->size[MATMUL_ROWS];
    float value[each], largest = __uint_as_float(0xFF800000u);
#pragma unroll
    for (int i = 0; i < each; i++) {
        const unsigned expert = lane + WARP_LANES * (warp + i * WARPS);
        value[i] = expert < experts ? ARRIVING::one(bank + expert) : __uint_as_float(0xFF800000u);
        largest = larger(largest, value[i]);
    }
    __syncwarp();
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
        largest = larger(largest, __shfl_xor_sync(ALL_LANES, largest, lanes));
    if (lane == 0) choice.largest[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < min(WARPS, EXPERTS_OF_LANE); i++) largest = larger(largest, choice.largest[i]);
#pragma unroll
    for (int i = 0; i < each; i++) {
        const unsigned expert = lane + WARP_LANES * (warp + i * WARPS);
        if (expert < EXPERTS)
            choice.exponential[expert] = expert < experts ? exp_of(value[i] - largest) : 0.0f;
    }
    __syncthreads();
    float total = 0.0f, span = 0.0f;
#pragma unroll
    for (int s = 0; s < EXPERT_SEGMENTS; s++) {
        float v[1][8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[0][i] = choice.exponential[lane + WARP_LANES * (8 * s + i)];
        if ((unsigned)s * UNIT_COLUMNS < experts) span = span + fold_segments(v, lane);
    }
    total = total + span;  // of a span at most
#pragma unroll
    for (int i = 0; i < each; i++) {
        const unsigned expert = lane + WARP_LANES * (warp + i * WARPS);
        if (expert < EXPERTS)
            choice.key[expert] =
                expert < experts ? expert_key(choice.exponential[expert], total) : 0u;
    }
    if (GATE_ROW >= 0 && threadIdx.x == 0)
        choice.shared_weight = sigmoid_of(ARRIVING::one(bank + EXPERTS));
    __syncthreads();
    if (warp != WARPS - 1) return;
    if (is_nan(total)) {
        if (lane < USED) choice.ids[lane] = lane, choice.weights[lane] = nan_value();
        return;
    }
    unsigned key[EXPERTS_OF_LANE];
#pragma unroll
    for (int i = 0; i < EXPERTS_OF_LANE; i++) key[i] = choice.key[lane + WARP_LANES * i];
    take_largest(key, USED, packet_of(launch, TOPK)->size[EXPERT_TOPK_RENORMALIZE] != 0, choice.ids,
                 choice.weights, lane);
}

// The values of a chunk's units of a tile of 16 rows, in the order of fold_units.
template <int dtype> DEVICE void chunk_to(const unsigned char *stored, const ACTIVATIONS &x,
                                          unsigned first, int lane, float *values) {
    LANE_CHUNK own;
    own.load(x, first, UNITS - 1, lane);
    CHUNK_NIBBLES nibbles;
    nibbles.load(stored, UNIT_FORMAT<dtype>::unit_bytes, lane);
    CHUNK_SUMS sums;
    multiply_chunk<dtype>(stored, nibbles, own, lane, sums);
    const float value = value_of_chunk<dtype>(sums, own, lane);
    if (first + lane % 2 < UNITS) values[lane % 2 * UNIT_ROWS + lane / 4 + lane / 2 % 2 * 8] = value;
}

// A warp's copies of gates: chunks of the block's tiles, which are those of all experts one after
// the other, the shared one first; of a tile first chunks of the gate, then of up.
struct GATES_COPIES {
    const LAUNCH &launch;
    TOKEN_MEMORY &memory;
    unsigned chunks, fetched;  // of the block; of the warp

    __device__ __forceinline__ GATES_COPIES(const LAUNCH &launch_, TOKEN_MEMORY &memory_)
        : launch(launch_), memory(memory_), fetched(0) {
        const unsigned tiles = CHOICES * TILES_EACH;
        const unsigned own = tiles > blockIdx.x ? (tiles - blockIdx.x - 1) / gridDim.x + 1 : 0;
        chunks = own * 2 * UNIT_CHUNKS;
    }
    // The number of a tile's expert among all, USED of the shared one.
    static __device__ __forceinline__ unsigned expert(unsigned tile) {
        return HAS_SHARED ? (tile < TILES_EACH ? USED : tile / TILES_EACH - 1) : tile / TILES_EACH;
    }
    // Whether the warp's next chunk is one of the shared expert.
    __device__ __forceinline__ bool is_known() const {
        const unsigned chunk = threadIdx.x / WARP_LANES + fetched * WARPS;
        return HAS_SHARED && chunk < chunks && tile(chunk) < TILES_EACH;
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
        const bool chosen = expert < USED;
        const unsigned unit_bytes = chosen ? UNIT_FORMAT<GATES_FORMAT>::unit_bytes
                                           : UNIT_FORMAT<SHARED_GATES_FORMAT>::unit_bytes;
        const int stack = chosen ? (matrix ? UPS : GATES) : (matrix ? SHARED_UP : SHARED_GATE);
        const size_t tile_bytes = (size_t)UNITS * unit_bytes;
        const unsigned char *units = matrix_of(launch, stack, chosen ? memory.choice.ids[expert] : 0,
                                               TILES_EACH * tile_bytes);
        begin_copy(memory.gates[warp].barriers + slot, memory.region[warp] + slot * GATES_SLOT,
                   units + index % TILES_EACH * tile_bytes + first * unit_bytes,
                   min((unsigned)CHUNK_UNITS, UNITS - first) * unit_bytes);
        fetched++;
    }
};

// The first chunk of a warp's expert of downs, for a tile.
DEVICE const unsigned char *downs_at(const LAUNCH &launch, const TOKEN_CHOICE &choice,
                                     unsigned expert, unsigned tile) {
    const bool chosen = expert < USED;
    const unsigned rows = packet_of(launch, DOWNS_PRODUCT)->size[MATMUL_ROWS];
    const size_t tile_bytes = HIDDEN_UNITS * (chosen ? UNIT_FORMAT<DOWNS_FORMAT>::unit_bytes
                                                     : UNIT_FORMAT<SHARED_DOWNS_FORMAT>::unit_bytes);
    return matrix_of(launch, chosen ? DOWNS : SHARED_DOWN, chosen ? choice.ids[expert] : 0,
                     (rows + UNIT_ROWS - 1) / UNIT_ROWS * tile_bytes) +
           tile * tile_bytes;
}

// Asks for the first chunk of a warp's expert of downs. Its gates have been computed.
DEVICE void begin_downs(const LAUNCH &launch, TOKEN_MEMORY &memory, unsigned expert, unsigned tile) {
    const unsigned warp = threadIdx.x / WARP_LANES;
    const unsigned unit_bytes = expert < USED ? UNIT_FORMAT<DOWNS_FORMAT>::unit_bytes
                                              : UNIT_FORMAT<SHARED_DOWNS_FORMAT>::unit_bytes;
    begin_copy(memory.downs_barriers + warp, memory.region[warp],
               downs_at(launch, memory.choice, expert, tile),
               min(CHUNK_UNITS, HIDDEN_UNITS) * unit_bytes);
}

// Publishes h = activation(gate x) * (up x) of the block's tiles, and begins its downs.
DEVICE void make_hidden(const LAUNCH &launch, float *hidden, GATES_COPIES &copies,
                        TOKEN_MEMORY &memory) {
    const unsigned warp = threadIdx.x / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES;
    const ACTIVATIONS x = activations_at(memory.x, UNITS);
    if (blockIdx.x == 0 && threadIdx.x < USED)
        count_uses(launch, GATES, memory.choice.ids[threadIdx.x], 1);
    const unsigned rows = packet_of(launch, DOWNS_PRODUCT)->size[MATMUL_ROWS];
    bool adds = warp < CHOICES && blockIdx.x * UNIT_ROWS < rows;
    // Whole tiles at a time, whose values have room.
    constexpr unsigned at_once = LARGER_OF(WARPS / (2 * UNIT_CHUNKS), 1) * 2 * UNIT_CHUNKS;
    unsigned taken = 0;
#pragma unroll 1
    for (unsigned begin = 0; begin == 0 || begin < copies.chunks; begin += at_once) {
        const unsigned end = min(begin + at_once, copies.chunks);
#pragma unroll 1
        while (warp + taken * WARPS < end) {
            const unsigned chunk = warp + taken * WARPS, in_tile = chunk % (2 * UNIT_CHUNKS);
            const unsigned slot = taken % SLOTS;
            const unsigned char *stored = memory.region[warp] + slot * GATES_SLOT;
            const unsigned first = in_tile % UNIT_CHUNKS * CHUNK_UNITS;
            float *values = memory.values + (chunk - begin) * (CHUNK_UNITS * UNIT_ROWS);
#pragma unroll 1
            while (copies.fetched < taken + SLOTS &&
                   warp + copies.fetched * WARPS < copies.chunks)
                copies.fetch();
            await_copy<SLOTS>(memory.gates[warp].barriers + slot, taken / SLOTS);
            if (GATES_FORMAT == SHARED_GATES_FORMAT || copies.expert(copies.tile(chunk)) < USED)
                chunk_to<GATES_FORMAT>(stored, x, first, lane, values);
            else
                chunk_to<SHARED_GATES_FORMAT>(stored, x, first, lane, values);
            __syncwarp();
            taken++;
        }
        if (adds && warp + taken * WARPS >= copies.chunks) {
            begin_downs(launch, memory, warp, blockIdx.x);
            adds = false;
        }
        __syncthreads();
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < (end - begin) / (2 * UNIT_CHUNKS) * UNIT_ROWS;
             i += WARPS * WARP_LANES) {
            const unsigned number = i / UNIT_ROWS, row = i % UNIT_ROWS;
            const float *values =
                memory.values + number * (2 * UNIT_CHUNKS * CHUNK_UNITS * UNIT_ROWS) + row;
            float value[2];
#pragma unroll
            for (int matrix = 0; matrix < 2; matrix++)
                value[matrix] = fold_units(values + matrix * UNIT_CHUNKS * CHUNK_UNITS * UNIT_ROWS,
                                           UNITS, UNIT_ROWS);
            const unsigned tile = copies.tile(begin + number * 2 * UNIT_CHUNKS);
            publish(hidden + copies.expert(tile) * WIDTH + tile % TILES_EACH * UNIT_ROWS + row,
                    gated(ACTIVATION, value[0], value[1]));
        }
        if (end < copies.chunks) __syncthreads();
    }
}

// One expert's 16 values of a tile, of which the first chunk has been asked for.
template <int dtype>
DEVICE void down_of(const LAUNCH &launch, const float *hidden, unsigned expert, unsigned tile,
                    unsigned &round, TOKEN_MEMORY &memory) {
    constexpr unsigned unit_bytes = UNIT_FORMAT<dtype>::unit_bytes;
    const unsigned warp = threadIdx.x / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES;
    unsigned char *ring = memory.region[warp];
    COPY_BARRIER *barrier = memory.downs_barriers + warp;
    const ACTIVATIONS x = activations_at(memory.h[warp], HIDDEN_UNITS);
    EIGHT held[HIDDEN_UNITS];
    ARRIVING::row(held, hidden + expert * WIDTH, lane);
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
            begin_copy(barrier, ring,
                       downs_at(launch, memory.choice, expert, tile) + next * unit_bytes,
                       min((unsigned)CHUNK_UNITS, HIDDEN_UNITS - next) * unit_bytes);
#pragma unroll
        for (int n = 0; n < CHUNK_UNITS; n++) {
            if (first + n >= HIDDEN_UNITS) break;
            span = span + value[n];
            if (++in_span == SPAN_UNITS) all = all + span, span = 0.0f, in_span = 0;
        }
    }
    const float total = in_span ? all + span : all;
    if (lane % 2 == 0) memory.totals[expert][lane / 4 + (lane % 4 ? 8 : 0)] = total;
}

// y of the block's tiles: the residual, and the experts' values times their weights in order.
DEVICE void add_downs(const LAUNCH &launch, const float *hidden, TOKEN_MEMORY &memory) {
    const unsigned warp = threadIdx.x / WARP_LANES;
    const unsigned rows = packet_of(launch, DOWNS_PRODUCT)->size[MATMUL_ROWS];
    const TOKEN_CHOICE &choice = memory.choice;
    unsigned round = 0;
#pragma unroll 1
    for (unsigned tile = blockIdx.x; tile * UNIT_ROWS < rows; tile += gridDim.x) {
#pragma unroll 1
        for (unsigned expert = warp; expert < CHOICES; expert += WARPS) {
            if (expert != warp || tile != blockIdx.x) begin_downs(launch, memory, expert, tile);
            if (DOWNS_FORMAT == SHARED_DOWNS_FORMAT || expert < USED)
                down_of<DOWNS_FORMAT>(launch, hidden, expert, tile, round, memory);
            else
                down_of<SHARED_DOWNS_FORMAT>(launch, hidden, expert, tile, round, memory);
        }
        const unsigned row = tile * UNIT_ROWS + threadIdx.x;
        const bool writes = threadIdx.x < UNIT_ROWS && row < rows;
        const float *residual = (const float *)operand_at(launch, RESIDUAL);
        const float *expert_scale = (const float *)operand_at(launch, EXPERT_SCALE);
        float sum = writes && residual ? residual[row] : 0.0f;
        __syncthreads();
        if (writes) {
#pragma unroll
            for (int expert = 0; expert < USED; expert++) {
                float value = memory.totals[expert][threadIdx.x];
                if (expert_scale) value = value * expert_scale[choice.ids[expert]];
                sum = sum + choice.weights[expert] * value;
            }
            if (HAS_SHARED) {
                const float value = memory.totals[CHOICES - 1][threadIdx.x];
                sum = sum + (GATE_ROW >= 0 ? choice.shared_weight * value : value);
            }
            ((float *)operand_at(launch, Y))[row] = sum;
        }
        if ((tile + gridDim.x) * UNIT_ROWS < rows) __syncthreads();
    }
}

#endif
