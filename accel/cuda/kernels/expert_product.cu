// y = x weight[ids]^T for a stack of matrices stored in units (units.h), from the integers of
// quantize_activation (rules R3 and R5); each row of y is computed separately. A block computes a
// tile of 16 rows of one matrix for one row of y; a warp computes a span of its columns.
//
// Compiled with SPANS, SLOTS, FORMAT_ID and these operand numbers (see packets.h): M, SCALE, SUMS,
// IDS, W, Y.

#include "expert_units.h"
#include "stack_matrices.h"

#define WARPS SPANS

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    expert_product(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    typedef UNIT_RUN<FORMAT_ID, SLOTS> RUN;
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *product = packet_of(launch, W / 16);
    const unsigned rows = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
    const unsigned used = product->size[MATMUL_USED], row_pairs = product->size[MATMUL_ROW_PAIRS];
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const unsigned tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES, first = warp * SPAN_UNITS;
    const unsigned count = min(units - first, (unsigned)SPAN_UNITS);
    unsigned char *rings = shared + WARPS * ROW_BYTES(SPAN_UNITS);
    COPY_BARRIER *barriers = (COPY_BARRIER *)(rings + WARPS * SLOTS * RUN::slot_bytes);
    float *totals = (float *)(barriers + WARPS * SLOTS);  // [span][row]
    RUN run;
    run.open(rings + warp * SLOTS * RUN::slot_bytes, barriers + warp * SLOTS);
    PRECEDING_DONE;
    const unsigned pair = blockIdx.x, tile = blockIdx.y;
    if (pair >= count_of(launch, product)) return;
    const unsigned id = ((const unsigned *)operand_at(
        launch, IDS))[(pair / used) * stride_at(launch, IDS) + pair % used];
    const size_t tile_bytes = (size_t)units * RUN::unit_bytes;
    run.begin(matrix_of(launch, W, id, tiles * tile_bytes) + tile * tile_bytes +
                  first * RUN::unit_bytes,
              count);
    if (tile == 0 && threadIdx.x == 0) count_uses(launch, W, id, 1);
    const unsigned source = pair / row_pairs;
    const ACTIVATIONS x = activations_at(shared + warp * ROW_BYTES(SPAN_UNITS), SPAN_UNITS);
    const unsigned *m = (const unsigned *)operand_at(launch, M) +
                        source * (stride_at(launch, M) / 2);
    const unsigned *sums =
        (const unsigned *)operand_at(launch, SUMS) + source * stride_at(launch, SUMS);
    const float *scale =
        (const float *)operand_at(launch, SCALE) + source * stride_at(launch, SCALE);
    for (unsigned unit = 0; unit < count; unit++)
        take_unit(x, unit, m, sums, scale, first + unit, lane);
    __syncwarp();
    const float total = run.total(x, 0, lane);
    if (lane % 2 == 0) totals[warp * UNIT_ROWS + lane / 4 + (lane % 4 ? 8 : 0)] = total;
    __syncthreads();
    const unsigned row = tile * UNIT_ROWS + threadIdx.x;
    if (threadIdx.x >= UNIT_ROWS || row >= rows) return;
    float sum = 0.0f;
    for (int span = 0; span < SPANS; span++) sum = sum + totals[span * UNIT_ROWS + threadIdx.x];
    ((float *)operand_at(launch, Y))[(size_t)pair * stride_at(launch, Y) + row] = sum;
}
