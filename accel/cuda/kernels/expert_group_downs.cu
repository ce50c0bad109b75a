// Products of h of tokens that share an expert (rules R3 to R5). Each warp of a block computes a
// tile of 16 rows for one chunk of expert_rows.h.
//
// Compiled with WARPS, SLOTS, UNITS (of a row of h), CHUNK_ROWS_MOST, BLOCKS_AT_ONCE (blocks of a
// multiprocessor), MOST_CHUNKS, TABLE_AT, EXPERTS, FORMAT_ID and SHARED_FORMAT; with these operand
// numbers (see packets.h): H, DOWNS, Y, and of the shared expert SHARED_H, SHARED_DOWN and
// SHARED_Y, each -1 if absent. PRODUCT is the packet number of the product.

#include "expert_rows.h"
#include "stack_matrices.h"

#define ROWS CHUNK_ROWS_MOST

template <int dtype>
DEVICE void down_rows(const LAUNCH &launch, const EXPERT_TABLE &table, const CHUNK &chunk,
                      unsigned char *shared, bool chosen, int h_at, int weights, int y_at) {
    typedef UNIT_RUN<dtype, SLOTS> RUN;
    const PACKET *product = packet_of(launch, PRODUCT);
    const unsigned rows = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
    const unsigned tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES, tile = blockIdx.x * WARPS + warp;
    unsigned char *rings = shared + ROWS_BYTES(ROWS, UNITS);
    COPY_BARRIER *barriers = (COPY_BARRIER *)(rings + WARPS * SLOTS * RUN::slot_bytes);
    RUN run;
    run.open(rings + warp * SLOTS * RUN::slot_bytes, barriers + warp * SLOTS);
    constexpr size_t tile_bytes = UNITS * RUN::unit_bytes;
    run.begin(matrix_of(launch, weights, chosen ? chunk.expert : 0, tiles * tile_bytes) +
                  tile * tile_bytes,
              tile < tiles ? UNITS : 0);
    PRECEDING_DONE;
    const CHUNK_ROWS<ROWS> x(shared, UNITS);
    const size_t stride = stride_at(launch, h_at);
    for (unsigned i = warp; i < chunk.count * UNITS; i += WARPS) {
        const unsigned row = i / UNITS, unit = i % UNITS, place = chunk.first + row;
        const float *h = (const float *)operand_at(launch, h_at) +
                         (chosen ? table.pair(place) : place) * stride;
        quantize_unit(x.of(unit, row), 0, lane, load_eight(h, unit, columns, lane));
    }
    __syncthreads();
    float total[ROWS / 2] = {};
    total_of_rows<dtype, SLOTS, ROWS>(run, x, 0, (chunk.count + 7) / 8, lane, total);
    float *y = (float *)operand_at(launch, y_at);
    const size_t y_stride = stride_at(launch, y_at);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const unsigned row = tile * UNIT_ROWS + lane / 4 + i / 2 % 2 * 8;
        const unsigned token = i / 4 * 8 + lane % 4 * 2 + i % 2, place = chunk.first + token;
        if (token < chunk.count && row < rows)
            y[(chosen ? table.pair(place) : place) * y_stride + row] = total[i];
    }
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, BLOCKS_AT_ONCE)
    expert_group_downs(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                       U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    // The table was complete before any block of the previous launch continued.
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MOST_CHUNKS};
    if (blockIdx.y >= table.chunks()) {
        PRECEDING_DONE;
        return;
    }
    const CHUNK chunk = table.chunk(blockIdx.y);
    if (chunk.expert < EXPERTS)
        down_rows<FORMAT_ID>(launch, table, chunk, shared, true, H, DOWNS, Y);
#if SHARED_DOWN >= 0
    else
        down_rows<SHARED_FORMAT>(launch, table, chunk, shared, false, SHARED_H, SHARED_DOWN,
                                 SHARED_Y);
#endif
}
