// y = x weight^T for many tokens. A block computes 128 rows and 64 tokens, a warp 16 of the rows,
// and passes over the units of the rows. x is the result of unit_pack.cu (rules R3 and R5).
// FORMAT_ID is Q4_K, Q5_K or Q6_K.
//
// Compiled with these operand numbers (see packets.h): M, SCALE, SUMS, W, Y, B (a bias) and
// RESIDUAL, -1 if absent; PRODUCT is the packet number of the product.

#include "packets.h"
#include "warp_sums.h"

typedef UNIT_FORMAT<FORMAT_ID> FORMAT;

#define WARPS 8
#define BLOCK_TOKENS 64
#define GROUPS_OF_TOKENS (BLOCK_TOKENS / 8)
#define VALUES (4 * GROUPS_OF_TOKENS)  // of a thread
#define EIGHT_PIECES (EIGHT_BYTES / 16)
#define STAGES 2
#define AT_PLANES 0
#define AT_TOKEN_SUMS (BLOCK_TOKENS * UNIT_PLANES)
#define AT_SCALES (AT_TOKEN_SUMS + BLOCK_TOKENS * UNIT_SUMS * 2)
#define AT_UNITS (AT_SCALES + BLOCK_TOKENS * 4)
#define STAGE_BYTES (AT_UNITS + WARPS * FORMAT::unit_bytes)

struct MATRIX_WORK {
    const unsigned char *planes, *weights;
    const unsigned char *sums;
    const float *scales;
    unsigned units, tiles, first_token, tokens;
};

// Begins to copy unit `unit` of everything the block reads into a stage.
DEVICE void begin_stage(const MATRIX_WORK &work, unsigned char *stage, unsigned unit) {
    const unsigned eights = (work.tokens + 7) / 8;
    for (unsigned i = threadIdx.x; i < GROUPS_OF_TOKENS * EIGHT_PIECES; i += blockDim.x) {
        const unsigned group = i / EIGHT_PIECES, piece = i % EIGHT_PIECES;
        const size_t eight = min(work.first_token / 8 + group, eights - 1);
        begin_part(stage + AT_PLANES + i * 16,
                   work.planes + (eight * work.units + unit) * EIGHT_BYTES + piece * 16);
    }
    for (unsigned i = threadIdx.x; i < GROUPS_OF_TOKENS * 18; i += blockDim.x) {
        const unsigned group = i / 18, piece = i % 18;
        const size_t eight = min(work.first_token / 8 + group, eights - 1);
        const size_t unit_eight = eight * work.units + unit;
        if (piece < 16)
            begin_part(stage + AT_TOKEN_SUMS + group * 256 + piece * 16,
                       work.sums + unit_eight * 256 + piece * 16);
        else
            begin_part(stage + AT_SCALES + group * 32 + (piece - 16) * 16,
                       work.scales + unit_eight * 8 + (piece - 16) * 4);
    }
    const unsigned warp = threadIdx.x / WARP_LANES;
    const unsigned tile = min(blockIdx.x * WARPS + warp, work.tiles - 1);
    const unsigned char *source =
        work.weights + ((size_t)tile * work.units + unit) * FORMAT::unit_bytes;
    for (unsigned at = threadIdx.x % WARP_LANES * 16; at < FORMAT::unit_bytes;
         at += WARP_LANES * 16)
        begin_part(stage + AT_UNITS + warp * FORMAT::unit_bytes + at, source + at);
    end_parts();
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, 1)
    unit_matrix(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *product = packet_of(launch, PRODUCT);
    const unsigned rows = product->size[MATMUL_ROWS];
    MATRIX_WORK work;
    work.tokens = count_of(launch, product);
    work.units = (product->size[MATMUL_COLUMNS] + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    work.tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    work.first_token = blockIdx.y * BLOCK_TOKENS;
    work.planes = operand_at(launch, M);
    work.sums = operand_at(launch, SUMS);
    work.scales = (const float *)operand_at(launch, SCALE);
    work.weights = operand_at(launch, W);
    PRECEDING_DONE;
    if (work.first_token >= work.tokens) return;
    const int lane = threadIdx.x % WARP_LANES, g = lane / 4, t = lane % 4;
    const unsigned warp = threadIdx.x / WARP_LANES;
    float total[VALUES] = {}, span[VALUES] = {};
    begin_stage(work, shared, 0);
    for (unsigned unit = 0; unit < work.units; unit++) {
        unsigned char *stage = shared + unit % STAGES * STAGE_BYTES;
        if (unit + 1 < work.units)
            begin_stage(work, shared + (unit + 1) % STAGES * STAGE_BYTES, unit + 1);
        else
            end_parts();
        await_parts<STAGES - 1>();
        __syncthreads();
        const unsigned char *own = stage + AT_UNITS + warp * FORMAT::unit_bytes;
        UNIT_SCALES<FORMAT_ID> scales;
        scales.load(own, lane);
        int j[VALUES] = {};
        sum_by_warps<FORMAT_ID>(scales, own, stage + AT_PLANES, lane, j);
        add_values(scales, stage + AT_TOKEN_SUMS, stage + AT_SCALES, lane, j, span);
        if (unit % SPAN_UNITS == SPAN_UNITS - 1 || unit + 1 == work.units)
#pragma unroll
            for (int i = 0; i < VALUES; i++) total[i] = total[i] + span[i], span[i] = 0.0f;
        __syncthreads();
    }
    const float *bias = (const float *)operand_at(launch, B);
    const float *residual = (const float *)operand_at(launch, RESIDUAL);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const unsigned row = (blockIdx.x * WARPS + warp) * UNIT_ROWS + g + 8 * (i / 2 % 2);
        const size_t token = work.first_token + i / 4 * 8 + 2 * t + i % 2;
        if (row >= rows || token >= work.tokens) continue;
        float value = total[i];
        if (bias) value = value + bias[row];
        if (residual) value = residual[token * stride_at(launch, RESIDUAL) + row] + value;
        ((float *)operand_at(launch, Y))[token * stride_at(launch, Y) + row] = value;
    }
}
