// Packs rows of activations, which may be normalized first, as the integers that unit_matrix.cu,
// unit_groups.cu and unit_spans.cu read. PIECES blocks compute a token, each with WARPS warps of
// HELD_UNITS units. The results are written to the operands of quantize_activation, in groups of
// eight tokens (unit_product.h).
//
// Compiled with these operand numbers (see packets.h): X, NORM_WEIGHT, M, SCALE, SUMS. NORM and
// QUANTIZE are packet numbers, NORM -1 without a norm; with a norm, the PIECES are a cluster of
// CLUSTER blocks, and CLUSTER is 1 otherwise. FOLDED is the packet number of a product of whose
// columns unit_groups.cu wrote SPANS spans to the workspace, or -1; with it the kernel first
// computes x from the sum of the spans, BIAS and RESIDUAL.

#include "clusters.h"
#include "activations.h"
#include "packets.h"
#include "span_fold.h"

// Eight values of a lane of a row of x.
DEVICE EIGHT row_eight(const LAUNCH &launch, U64 workspace, unsigned token, unsigned tokens,
                       unsigned columns, float *row, unsigned unit, int lane) {
#if FOLDED >= 0
    // Columns are whole units.
    if (unit * UNIT_COLUMNS >= columns) return EIGHT{};
    const unsigned column = unit * UNIT_COLUMNS + 4 * lane;
    const float *spans = (const float *)workspace;
    const float4 a = fold_four(launch, token, tokens, columns, spans, column);
    const float4 b = fold_four(launch, token, tokens, columns, spans, column + 128);
    *(float4 *)(row + column) = a, *(float4 *)(row + column + 128) = b;
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
#else
    return load_eight(row, unit, columns, lane);
#endif
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPS *WARP_LANES)
    unit_pack(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    BLOCK_MEMORY(shared);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *quantize = packet_of(launch, QUANTIZE);
    const unsigned tokens = count_of(launch, quantize);
    const unsigned columns = quantize->size[QUANTIZE_ACTIVATION_COLUMNS];
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned first = blockIdx.x % PIECES * (WARPS * HELD_UNITS) + threadIdx.x / WARP_LANES;
    const float *norm_weight = (const float *)operand_at(launch, NORM_WEIGHT);
    float *squares = (float *)shared;
    FOLLOWING_MAY_START;
    EIGHT held[HELD_UNITS], weight[HELD_UNITS];
#pragma unroll
    for (int i = 0; i < HELD_UNITS; i++)
        weight[i] = norm_weight ? load_eight(norm_weight, first + i * WARPS, columns, lane) : EIGHT{};
    if (NORM >= 0) begin_meeting();
    PRECEDING_DONE;
    for (unsigned token = blockIdx.x / PIECES; token < tokens; token += gridDim.x / PIECES) {
        const ACTIVATIONS x =
            among_eights(operand_at(launch, M), (short *)operand_at(launch, SUMS),
                         (float *)operand_at(launch, SCALE), token, units);
        float *row = (float *)operand_at(launch, X) + token * stride_at(launch, X);
#pragma unroll
        for (int i = 0; i < HELD_UNITS; i++)
            held[i] = row_eight(launch, workspace, token, tokens, columns, row, first + i * WARPS,
                                lane);
        if (NORM >= 0) {
            end_meeting();
#pragma unroll
            for (int i = 0; i < HELD_UNITS; i++) {
                const float square = sum_of_squares(held[i], lane);
                if (first + i * WARPS < units) tell_cluster(squares + first + i * WARPS, square, lane);
            }
            begin_meeting();
            end_meeting();
            const float eps = NORM >= 0 ? packet_of(launch, NORM)->real[RMS_NORM_EPS] : 0.0f;
            const float mean = __fdiv_rn(fold_units(squares, units, 1), (float)columns);
            const float r = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll
            for (int i = 0; i < HELD_UNITS; i++)
                normalize_eight(held[i], r, norm_weight != 0, weight[i]);
            begin_meeting();
        }
#pragma unroll
        for (int i = 0; i < HELD_UNITS; i++)
            quantize_unit(x, first + i * WARPS, lane, held[i], first + i * WARPS < units);
    }
    if (NORM >= 0) end_meeting();
}
