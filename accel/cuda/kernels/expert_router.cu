// Chooses the experts of each token and prepares its activations for them: the norm of x, the
// product with the router's float rows, the softmax and its largest values (rules R3 to R5 and R7),
// for few tokens or many.
//
// A block computes ROW_GROUPS times ROUTER_ROWS rows of the router, after which comes the row of the
// shared expert's gate, for ROUTER_TOKENS tokens. The last block to end of those with the same tokens
// chooses their experts. A warp holds HELD of the segments of a row; EXPERT_SEGMENTS segments of 256
// cover all experts. For each token one block writes the integers of the normalized x in the order of
// unit_product.h, token after token, or, if there is NORMED, the normalized x.
//
// Compiled with these operand numbers (see packets.h): X, NORM_WEIGHT, M, SCALE, SUMS, ROUTER,
// LOGITS, GATE_ROW and GATE_LOGIT (-1 if absent), IDS, WEIGHTS, and the packet numbers NORM,
// PRODUCT, TOPK. The workspace counts ended blocks in a word for each ROUTER_TOKENS tokens.

#include "activations.h"
#include "expert_choice.h"
#include "packets.h"

#define AT_ONCE 4  // tokens whose norms a block computes together

// The warp's segments of rows of the router.
struct ROUTER_WEIGHTS {
    float of[ROUTER_ROWS][HELD][8];

    __device__ __forceinline__ void load(const LAUNCH &launch, unsigned first_row, unsigned experts,
                                         unsigned columns, unsigned warp, int lane) {
        const float *router = (const float *)operand_at(launch, ROUTER);
        const float *gate_row = (const float *)operand_at(launch, GATE_ROW);
#pragma unroll
        for (int h = 0; h < HELD; h++)
#pragma unroll
            for (int r = 0; r < ROUTER_ROWS; r++) {
                const unsigned row = first_row + r;
                const float *of_row = row < experts                      ? router + (size_t)row * columns
                                      : row < experts + (GATE_ROW >= 0) ? gate_row
                                                                         : 0;
                load_segment(of[r][h], of_row, warp + h * WARPS, columns, lane);
            }
    }
    // The products of a token's segments, to its values of all rows.
    __device__ __forceinline__ void multiply(const float *row_of_x, float factor, const float *norm,
                                             const float (&of_norm)[HELD][8], float *partial,
                                             unsigned units, unsigned columns, unsigned warp,
                                             int lane) const {
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            const unsigned segment = warp + h * WARPS;
            float x[8], v[ROUTER_ROWS][8];
            load_segment(x, row_of_x, segment, columns, lane);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] = x[i] * factor;
                if (norm) x[i] = x[i] * of_norm[h][i];
#pragma unroll
                for (int r = 0; r < ROUTER_ROWS; r++) v[r][i] = of[r][h][i] * x[i];
            }
            const float value = fold_segments(v, lane);
            if (lane % LANES_OF(ROUTER_ROWS) == 0 && segment < units)
                partial[lane / LANES_OF(ROUTER_ROWS) * units + segment] = value;
        }
    }
};

// Folds the values of all rows of a group and stores the logits of `count` tokens.
DEVICE void store_logits(const LAUNCH &launch, const float *partial, unsigned first_row,
                         unsigned experts, unsigned first_token, unsigned count, unsigned units) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i < ROUTER_ROWS * count; i += WARPS * WARP_LANES) {
        const unsigned row = first_row + i % ROUTER_ROWS, token = first_token + i / ROUTER_ROWS;
        if (row >= experts + (GATE_ROW >= 0)) continue;
        const float logit = fold_units(partial + i * units, units, 1);
        float *to = row < experts ? (float *)operand_at(launch, LOGITS) +
                                        token * stride_at(launch, LOGITS) + row
                                  : (float *)operand_at(launch, GATE_LOGIT) +
                                        token * stride_at(launch, GATE_LOGIT);
        *to = logit;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, 2)
    expert_router(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *product = packet_of(launch, PRODUCT);
    const unsigned experts = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const unsigned tokens = count_of(launch, product), first_token = blockIdx.y * ROUTER_TOKENS;
    const unsigned first_row = blockIdx.x * (ROW_GROUPS * ROUTER_ROWS);
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES;
    FOLLOWING_MAY_START;
    if (first_token >= tokens) {
        PRECEDING_DONE;
        return;
    }
    float *squares = (float *)shared;                   // [ROUTER_TOKENS][units]
    float *partial = squares + ROUTER_TOKENS * units;  // [ROUTER_TOKENS][ROUTER_ROWS][units]
    float *factors = partial + ROUTER_TOKENS * ROUTER_ROWS * units;  // [ROUTER_TOKENS]
    unsigned *ticket = (unsigned *)(factors + ROUTER_TOKENS);
    const float *norm = (const float *)operand_at(launch, NORM_WEIGHT);
    ROUTER_WEIGHTS weights;
    float of_norm[HELD][8];
#pragma unroll
    for (int h = 0; h < HELD; h++)
        load_segment(of_norm[h], norm, warp + h * WARPS, columns, lane);
    weights.load(launch, first_row, experts, columns, warp, lane);
    const float eps = packet_of(launch, NORM)->real[RMS_NORM_EPS];
    PRECEDING_DONE;
    const unsigned count = min(tokens - first_token, (unsigned)ROUTER_TOKENS);
    const size_t x_stride = stride_at(launch, X);
    const float *rows_of_x = (const float *)operand_at(launch, X) + first_token * x_stride;
#pragma unroll 1
    for (unsigned begin = 0; begin < count; begin += AT_ONCE) {
#pragma unroll 1
        for (unsigned segment = warp; segment < units; segment += WARPS) {
            float v[AT_ONCE][8];
#pragma unroll
            for (int t = 0; t < AT_ONCE; t++)
                load_segment(v[t], begin + t < count ? rows_of_x + (begin + t) * x_stride : 0, segment,
                             columns, lane);
#pragma unroll
            for (int t = 0; t < AT_ONCE; t++)
#pragma unroll
                for (int i = 0; i < 8; i++) v[t][i] = v[t][i] * v[t][i];
            const float square = fold_segments(v, lane);
            if (lane % LANES_OF(AT_ONCE) == 0)
                squares[(begin + lane / LANES_OF(AT_ONCE)) * units + segment] = square;
        }
        __syncthreads();
        const float *of_lane = squares + (begin + lane % AT_ONCE) * units;
        const float mean = __fdiv_rn(fold_units(of_lane, units, 1), (float)columns);
        const float factor_of_lane = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll 1
        for (unsigned t = begin; t < min(count, begin + AT_ONCE); t++) {
            const unsigned token = first_token + t;
            const float *row_of_x = rows_of_x + t * x_stride;
            const float factor = __shfl_sync(ALL_LANES, factor_of_lane, (int)(t - begin));
            weights.multiply(row_of_x, factor, norm, of_norm, partial + t * ROUTER_ROWS * units, units,
                             columns, warp, lane);
            if (blockIdx.x != t % gridDim.x) continue;
            const ACTIVATIONS made =
                from_token({operand_at(launch, M), (short *)operand_at(launch, SUMS),
                            (float *)operand_at(launch, SCALE), units, false},
                           token);
#pragma unroll 1
            for (unsigned segment = warp; segment < units; segment += WARPS) {
                EIGHT eight = load_eight(row_of_x, segment, columns, lane);
                EIGHT w = {};
                if (norm) w = load_eight(norm, segment, columns, lane);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    eight.of[i] = eight.of[i] * factor;
                    if (norm) eight.of[i] = eight.of[i] * w.of[i];
                }
                quantize_unit(made, segment, lane, eight);
            }
        }
        if (ROW_GROUPS > 1 && threadIdx.x < AT_ONCE && begin + threadIdx.x < count)
            factors[begin + threadIdx.x] = factor_of_lane;
    }
    store_logits(launch, partial, first_row, experts, first_token, count, units);
#pragma unroll 1
    for (unsigned group = 1; group < ROW_GROUPS; group++) {
        const unsigned own_row = first_row + group * ROUTER_ROWS;
        if (own_row >= experts + (GATE_ROW >= 0)) break;
        weights.load(launch, own_row, experts, columns, warp, lane);
        __syncthreads();
#pragma unroll 1
        for (unsigned t = 0; t < count; t++)
            weights.multiply(rows_of_x + t * x_stride, factors[t], norm, of_norm,
                             partial + t * ROUTER_ROWS * units, units, columns, warp, lane);
        store_logits(launch, partial, own_row, experts, first_token, count, units);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *ticket = atomicAdd((unsigned *)workspace + blockIdx.y, 1);
    __syncthreads();
    if (*ticket + 1 != gridDim.x) return;
    __threadfence();
    if (threadIdx.x == 0) ((unsigned *)workspace)[blockIdx.y] = 0;
    const PACKET *topk = packet_of(launch, TOPK);
    const unsigned used = topk->size[EXPERT_TOPK_USED];
    const bool renormalize = topk->size[EXPERT_TOPK_RENORMALIZE] != 0;
    for (unsigned t = warp; t < count; t += WARPS) {
        const unsigned chosen = first_token + t;
        choose_experts(
            (const float *)operand_at(launch, LOGITS) + chosen * stride_at(launch, LOGITS), experts,
            used, renormalize, (int *)operand_at(launch, IDS) + chosen * stride_at(launch, IDS),
            (float *)operand_at(launch, WEIGHTS) + chosen * stride_at(launch, WEIGHTS), lane);
    }
}
