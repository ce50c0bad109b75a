// h = activation(gate x) * (up x) of tokens that share an expert (rules R2 to R5). A block computes
// TILES tiles of 16 rows of both matrices for one chunk of expert_rows.h; a warp computes a span of
// one tile of one matrix.
//
// Compiled with SPANS, TILES, SLOTS, UNITS (of a row of x), CHUNK_ROWS_MAX, MAX_CHUNKS, TABLE_AT,
// EXPERTS, FORMAT_ID and SHARED_FORMAT; with these operand numbers (see packets.h): M, SCALE, SUMS,
// which expert_router.cu writes; GATES and UPS; H; and of the shared expert SHARED_GATE, SHARED_UP and
// SHARED_H, each -1 if absent. PRODUCT, ACTIVATION and SHARED_ACTIVATION are packet numbers, USED is
// the number of experts of a token.

#include "expert_rows.h"
#include "gate.h"
#include "stack_matrices.h"

#define WARPS (2 * SPANS * TILES)
#define THREADS (WARPS * WARP_LANES)
#define ROWS CHUNK_ROWS_MAX

// Values of all spans, where the tokens were.
#define VALUE_AT(tile, matrix, span, row, token)                                                 \
    (((((tile) * 2 + (matrix)) * SPANS + (span)) * UNIT_ROWS + (row)) * ROWS + (token))

template <int dtype>
DEVICE void gate_rows(const LAUNCH &launch, const EXPERT_TABLE &table, const CHUNK &chunk,
                      unsigned char *shared, bool chosen, unsigned tiles, int gates, int ups) {
    typedef UNIT_RUN<dtype, SLOTS> RUN;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES;
    const unsigned local = warp / (2 * SPANS), matrix = warp / SPANS % 2, span = warp % SPANS;
    const unsigned tile = blockIdx.x * TILES + local, first = span * SPAN_UNITS;
    unsigned char *rings = shared + ROWS_BYTES(ROWS, UNITS);
    COPY_BARRIER *barriers = (COPY_BARRIER *)(rings + WARPS * SLOTS * RUN::slot_bytes);
    RUN run;
    run.open(rings + warp * SLOTS * RUN::slot_bytes, barriers + warp * SLOTS);
    constexpr size_t tile_bytes = UNITS * RUN::unit_bytes;
    run.begin(matrix_of(launch, matrix ? ups : gates, chosen ? chunk.expert : 0,
                        tiles * tile_bytes) +
                  tile * tile_bytes + first * RUN::unit_bytes,
              tile < tiles ? min(UNITS - first, (unsigned)SPAN_UNITS) : 0);
    if (chosen && blockIdx.x == 0 && threadIdx.x == 0)
        count_uses(launch, gates, chunk.expert, chunk.count);
    const CHUNK_ROWS<ROWS> x(shared, UNITS);
    for (unsigned i = warp; i < chunk.count * UNITS; i += WARPS) {
        const unsigned row = i / UNITS, unit = i % UNITS;
        const unsigned token = chosen ? table.pair(chunk.first + row) / USED : chunk.first + row;
        const size_t unit_index = (size_t)token * UNITS + unit;
        const ACTIVATIONS to = x.of(unit, row);
        begin_part(to.planes + lane * 16,
                   operand_at(launch, M) + unit_index * UNIT_PLANES + lane * 16);
        if (lane < 2)
            begin_part((unsigned char *)to.sums + lane * 16,
                       operand_at(launch, SUMS) + unit_index * (2 * UNIT_SUMS) + lane * 16);
        if (lane == 2) begin_word(to.scales, (const float *)operand_at(launch, SCALE) + unit_index);
    }
    end_parts();
    await_parts<0>();
    __syncthreads();
    float total[ROWS / 2] = {};
    total_of_rows<dtype, SLOTS, ROWS>(run, x, first, CHUNK_ROWS<ROWS>::extent(chunk.count), lane, total);
    __syncthreads();
    float *values = (float *)shared;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
        values[VALUE_AT(local, matrix, span, CHUNK_ROWS<ROWS>::row_of(i, lane),
                        CHUNK_ROWS<ROWS>::token_of(i, lane))] = total[i];
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    expert_group_gates(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                       U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    PRECEDING_DONE;
    FOLLOWING_MAY_START;
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MAX_CHUNKS};
    if (blockIdx.y >= table.chunks()) return;
    const CHUNK chunk = table.chunk(blockIdx.y);
    const unsigned rows = packet_of(launch, PRODUCT)->size[MATMUL_ROWS];
    const unsigned tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const bool chosen = chunk.expert < EXPERTS;
    if (chosen)
        gate_rows<FORMAT_ID>(launch, table, chunk, shared, true, tiles, GATES, UPS);
#if SHARED_GATE >= 0
    else
        gate_rows<SHARED_FORMAT>(launch, table, chunk, shared, false, tiles, SHARED_GATE,
                                 SHARED_UP);
#endif
    const float *values = (const float *)shared;
    const int op = chosen ? ACTIVATION : SHARED_ACTIVATION, to = chosen ? H : SHARED_H;
    const uint activation = packet_of(launch, op)->size[SWIGLU_ACTIVATION];
    float *h = (float *)operand_at(launch, to);
    const size_t stride = stride_at(launch, to);
    for (unsigned i = threadIdx.x; i < chunk.count * (TILES * UNIT_ROWS); i += THREADS) {
        const unsigned token = i / (TILES * UNIT_ROWS), local = i % (TILES * UNIT_ROWS);
        const unsigned row = blockIdx.x * (TILES * UNIT_ROWS) + local;
        if (row >= rows) continue;
        float value[2] = {0.0f, 0.0f};
#pragma unroll
        for (int span = 0; span < SPANS; span++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                value[m] = value[m] + values[VALUE_AT(local / UNIT_ROWS, m, span, local % UNIT_ROWS,
                                                      token)];
        const unsigned index = chunk.first + token;
        h[(chosen ? table.pair(index) : index) * stride + row] =
            gated(activation, value[0], value[1]);
    }
}
