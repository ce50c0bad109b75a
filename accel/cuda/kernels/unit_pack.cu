// Rows of activations, normalized first or not, as the integers unit_matrix.cu and unit_groups.cu
// read: a block takes one token at a time or, where nothing needs the whole row, WARPS units of one,
// the first ones those of blockIdx.y = 0. They go where quantize_activation's would, in eights of
// tokens (unit_product.h).
//
// Compiled with WARPS, HELD_UNITS (activations.h) and the places of operands as packets.h has them: X, NORM_WEIGHT, M, SCALE,
// SUMS. NORM and QUANTIZE are numbers of packets, NORM -1 where there is none. FOLDED is the packet of a
// product of whose columns unit_groups.cu left SPANS in the workspace, or -1: x is then made first, of their sum, BIAS and
// RESIDUAL.

#include "activations.h"
#include "packets.h"
#include "span_fold.h"

#define WHOLE_ROWS (NORM >= 0 || FOLDED >= 0)

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    unit_pack(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *quantize = packet_of(launch, QUANTIZE);
    const unsigned tokens = count_of(launch, quantize);
    const unsigned columns = quantize->size[QUANTIZE_ACTIVATION_COLUMNS];
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const unsigned first_unit = blockIdx.y * WARPS;
    const unsigned own_units = WHOLE_ROWS ? units : min(units - first_unit, WARPS);
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    for (unsigned token = blockIdx.x; token < tokens; token += gridDim.x) {
        const size_t first = (size_t)(token / 8 * 8) * units + first_unit * 8;
        const unsigned place = token % 8;
        const ACTIVATIONS x = {
            operand_at(launch, M) + first * UNIT_PLANES + place * 16,
            (short *)operand_at(launch, SUMS) + first * UNIT_SUMS + place * UNIT_SUMS,
            (float *)operand_at(launch, SCALE) + first + place,
            own_units,
            true,
        };
        const size_t stride = stride_at(launch, X);
        const FLOAT_ROWS<> rows = {
            (const float *)operand_at(launch, X) + token * stride + first_unit * UNIT_COLUMNS,
            stride,
            (const float *)operand_at(launch, NORM_WEIGHT),
            NORM >= 0 ? packet_of(launch, NORM)->real[RMS_NORM_EPS] : 0.0f,
            columns - first_unit * UNIT_COLUMNS,
            1,
        };
        ROW_QUANTIZER<WARPS, (NORM >= 0)> quantizer(x, rows);
        quantizer.load_weights(threadIdx.x / WARP_LANES);
#if FOLDED >= 0
        fold_row(launch, token, tokens, columns, (const float *)workspace, (float *)rows.x);
#endif
        quantizer.run((float *)shared);
    }
}
