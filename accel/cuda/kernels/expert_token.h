// What a block of expert_token.cu has in shared memory, how it waits for floats of other blocks, and
// its part of the router and the choice.

#ifndef EXPERT_TOKEN_H
#define EXPERT_TOKEN_H

#include "expert_choice.h"
#include "expert_units.h"
#include "one_row.h"
#include "packets.h"

#define HAS_SHARED (SHARED_GATE >= 0)
#define CHOICES (USED + HAS_SHARED)
#define ROUTER_ROWS 2  // that a block multiplies at once
#define EXPERTS (EXPERT_SEGMENTS * UNIT_COLUMNS)
#define HELD ((UNITS + WARPS - 1) / WARPS)  // of a row of x by a warp
#define WIDTH (HIDDEN_UNITS * UNIT_COLUMNS)
#define TILES_EACH (WIDTH / UNIT_ROWS)
#define UNIT_CHUNKS ((UNITS + CHUNK_UNITS - 1) / CHUNK_UNITS)

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

// Waits for floats of other blocks; once *stop is not 0, which means that the host wants the launch to
// end, it continues with what is there.
struct ARRIVING {
    const unsigned *stop;

    __device__ __forceinline__ bool waits(unsigned &spins) const {
        spin_pause();
        return ++spins % SPINS_BETWEEN_LOOKS || !load_host_word(stop);
    }
    __device__ __forceinline__ float one(const float *address) const {
        unsigned word, spins = 0;
        while (!(word = load_shared_word((const unsigned *)address)) && waits(spins)) {}
        return __uint_as_float(~word);
    }
    template <int units>
    __device__ __forceinline__ void row(EIGHT (&made)[units], const float *row, int lane) const {
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
            if (least || !waits(spins)) break;
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
DEVICE void choose_together(const LAUNCH &launch, const float *bank, const ARRIVING &arriving,
                            TOKEN_CHOICE &choice) {
    constexpr int each = (EXPERTS_OF_LANE + WARPS - 1) / WARPS;
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned experts = packet_of(launch, PRODUCT)->size[MATMUL_ROWS];
    float value[each], largest = __uint_as_float(0xFF800000u);
#pragma unroll
    for (int i = 0; i < each; i++) {
        const unsigned expert = lane + WARP_LANES * (warp + i * WARPS);
        value[i] = expert < experts ? arriving.one(bank + expert) : __uint_as_float(0xFF800000u);
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
        choice.shared_weight = sigmoid_of(arriving.one(bank + EXPERTS));
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

#endif
