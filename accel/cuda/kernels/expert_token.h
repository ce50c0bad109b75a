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
#define PAIRS (TOKENS * USED)  // of a token and an expert chosen for it, at most 32
#define ROUTER_ROWS 2  // that a block multiplies at once
#define EXPERTS (EXPERT_SEGMENTS * UNIT_COLUMNS)
#define TEAM (WARPS / TOKENS)                // warps that have a token of the router
#define HELD ((UNITS + TEAM - 1) / TEAM)     // of a row of x by a warp
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
constexpr unsigned TILE_VALUES = 2 * UNIT_CHUNKS * CHUNK_UNITS * UNIT_ROWS;
constexpr unsigned REGION = LARGER_OF(SLOTS * GATES_SLOT, DOWNS_SLOT);
// Of a bank: each token's logits, behind them that of the shared expert's gate; h of its experts.
constexpr unsigned LOGIT_FLOATS = EXPERTS + 4;
constexpr unsigned BANKS_AT = 256, BANK_BYTES = 4 * TOKENS * (LOGIT_FLOATS + CHOICES * WIDTH);

struct TOKEN_CHOICE {
    float largest[TEAM], exponential[EXPERTS];
    unsigned key[EXPERTS];
    int ids[USED];
    float weights[USED], shared_weight;
};
// Experts of all tokens, each once, with the pairs that are of it and their tokens, a bit for each.
struct DISTINCT_EXPERTS {
    unsigned count, pairs[PAIRS], tokens[PAIRS];
    int ids[PAIRS];
};
struct GATES_BARRIERS {
    COPY_BARRIER barriers[SLOTS];
};

struct TOKEN_MEMORY {
    alignas(128) unsigned char region[WARPS][REGION];
    alignas(16) unsigned char x[TOKENS][ROW_BYTES(UNITS)];
    alignas(16) unsigned char h[WARPS][ROW_BYTES(HIDDEN_UNITS)];
    GATES_BARRIERS gates[WARPS];
    COPY_BARRIER downs_barriers[WARPS];
    float squares[TOKENS][UNITS], partial[TOKENS][ROUTER_ROWS][UNITS];
    float values[TILES_AT_ONCE][TOKENS][TILE_VALUES];  // of gates
    float totals[TOKENS][CHOICES][UNIT_ROWS];  // of downs
    TOKEN_CHOICE choice[TOKENS];
    DISTINCT_EXPERTS distinct;
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

// A block's rows of the router, of which a warp has the units that it has of its token's x.
struct ROUTER_OF_BLOCK {
    const LAUNCH &launch;
    const PACKET *product;
    unsigned experts, rows, columns, tokens, token, warp;  // warp: of the token's
    int lane;
    EIGHT weight[ROUTER_ROWS][HELD], of_norm[HELD], held[HELD];

    __device__ __forceinline__ explicit ROUTER_OF_BLOCK(const LAUNCH &launch_) : launch(launch_) {
        product = packet_of(launch, PRODUCT);
        experts = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
        rows = experts + (GATE_ROW >= 0);
        token = threadIdx.x / WARP_LANES / TEAM, warp = threadIdx.x / WARP_LANES % TEAM;
        lane = threadIdx.x % WARP_LANES;
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
                if (of_row) weight[r][i] = load_eight(of_row, warp + i * TEAM, columns, lane);
            }
        }
    }
    __device__ __forceinline__ void load_norm() {
        const float *weights = (const float *)operand_at(launch, NORM_WEIGHT);
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (weights) of_norm[i] = load_eight(weights, warp + i * TEAM, columns, lane);
    }
    __device__ __forceinline__ void load_x(unsigned tokens_) {
        tokens = tokens_;
        // Without a token the first one is computed once more.
        const float *row = (const float *)operand_at(launch, X) +
                           (token < tokens ? token * stride_at(launch, X) : 0);
#pragma unroll
        for (int i = 0; i < HELD; i++) held[i] = load_eight(row, warp + i * TEAM, columns, lane);
    }
    // Publishes the block's logits, and converts the rows of x to activations.
    __device__ __forceinline__ void run(float *bank, TOKEN_MEMORY &memory) {
        const ACTIVATIONS x = activations_at(memory.x[token], UNITS);
        const FLOAT_ROWS<> row = {(const float *)operand_at(launch, X),
                                  0,
                                  (const float *)operand_at(launch, NORM_WEIGHT),
                                  packet_of(launch, NORM)->real[RMS_NORM_EPS],
                                  columns,
                                  1};
        normalize_units<TEAM>(held, of_norm, x, row,
                              ROW_SQUARES{memory.squares[token], UNITS, columns});
#pragma unroll 1
        for (unsigned first = blockIdx.x; first < rows;) {
#pragma unroll
            for (int r = 0; r < ROUTER_ROWS; r++)
#pragma unroll
                for (int i = 0; i < HELD; i++) {
                    const float sum = sum_of_products(weight[r][i], held[i], lane);
                    if (lane == 0 && warp + i * TEAM < UNITS)
                        memory.partial[token][r][warp + i * TEAM] = sum;
                }
            __syncthreads();
            const unsigned of = threadIdx.x / ROUTER_ROWS, r = threadIdx.x % ROUTER_ROWS;
            const unsigned own = first + r * gridDim.x;
            if (of < tokens && own < rows)
                publish(bank + of * LOGIT_FLOATS + (own < experts ? own : EXPERTS),
                        fold_units(memory.partial[of][r], UNITS, 1));
            first += ROUTER_ROWS * gridDim.x;
            if (first >= rows) break;
            load(first);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const unsigned unit = warp + i * TEAM;
            quantize_unit(x, unit, lane, held[i], unit < UNITS);
        }
    }
};

// The tokens' experts, each by a team of warps that have some of them, once its logits have arrived.
// The caller has a barrier behind it.
DEVICE void choose_together(const LAUNCH &launch, const float *banks, const ARRIVING &arriving,
                            unsigned tokens, TOKEN_CHOICE (&choices)[TOKENS]) {
    constexpr int each = (EXPERTS_OF_LANE + TEAM - 1) / TEAM;
    const int warp = threadIdx.x / WARP_LANES % TEAM, lane = threadIdx.x % WARP_LANES;
    const unsigned token = threadIdx.x / WARP_LANES / TEAM;
    // Without a token the first one's are chosen once more.
    const float *bank = banks + (token < tokens ? token * LOGIT_FLOATS : 0);
    TOKEN_CHOICE &choice = choices[token];
    const unsigned experts = packet_of(launch, PRODUCT)->size[MATMUL_ROWS];
    float value[each], largest = __uint_as_float(0xFF800000u);
#pragma unroll
    for (int i = 0; i < each; i++) {
        const unsigned expert = lane + WARP_LANES * (warp + i * TEAM);
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
    for (int i = 0; i < min(TEAM, EXPERTS_OF_LANE); i++) largest = larger(largest, choice.largest[i]);
#pragma unroll
    for (int i = 0; i < each; i++) {
        const unsigned expert = lane + WARP_LANES * (warp + i * TEAM);
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
        const unsigned expert = lane + WARP_LANES * (warp + i * TEAM);
        if (expert < EXPERTS)
            choice.key[expert] =
                expert < experts ? expert_key(choice.exponential[expert], total) : 0u;
    }
    if (GATE_ROW >= 0 && warp == 0 && lane == 0)
        choice.shared_weight = sigmoid_of(arriving.one(bank + EXPERTS));
    __syncthreads();
    if (warp != TEAM - 1) return;
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

// Each expert of the tokens once, by one warp.
DEVICE void find_distinct(const TOKEN_CHOICE (&choices)[TOKENS], unsigned tokens,
                          DISTINCT_EXPERTS &distinct) {
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned pairs = tokens * USED, own = (unsigned)lane < pairs ? lane : 0;
    const int id = (unsigned)lane < pairs ? choices[own / USED].ids[own % USED] : -1;
    unsigned same = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        same |= (unsigned)(__shfl_sync(ALL_LANES, id, i) == id) << i;
    const unsigned before = (1u << lane) - 1;
    const bool first = (unsigned)lane < pairs && !(same & before);
    const unsigned firsts = __ballot_sync(ALL_LANES, first);
    if (lane == 0) distinct.count = __popc(firsts);
    if (!first) return;
    const unsigned number = __popc(firsts & before);
    unsigned of_tokens = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
        of_tokens |= (same >> i * USED & ((1u << USED) - 1) ? 1u : 0u) << i;
    distinct.ids[number] = id, distinct.pairs[number] = same, distinct.tokens[number] = of_tokens;
}

#endif
