// y = x weight^T for many tokens: a block takes 128 rows and 64 tokens, a warp 16 of the rows, and
// passes over the units of the rows. x is what unit_pack.cu made (rules R3 and R5).
//
// FORMAT_ID is Q4_K, Q5_K or Q6_K. Compiled with the places of operands as packets.h has them: M,
// SCALE, SUMS, W, Y, B (a bias) and RESIDUAL, -1 where absent; PRODUCT is the number of the
// product's packet.

#include "packets.h"
#include "unit_scales.h"

typedef UNIT_FORMAT<FORMAT_ID> FORMAT;

#define WARPS 8
#define BLOCK_TOKENS 64
#define GROUPS_OF_TOKENS (BLOCK_TOKENS / 8)
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
        const size_t place = eight * work.units + unit;
        if (piece < 16)
            begin_part(stage + AT_TOKEN_SUMS + group * 256 + piece * 16,
                       work.sums + place * 256 + piece * 16);
        else
            begin_part(stage + AT_SCALES + group * 32 + (piece - 16) * 16,
                       work.scales + place * 8 + (piece - 16) * 4);
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

// Operands and scales of a warp's unit.
struct UNIT_OPERANDS {
    unsigned a[UNIT_SUB_BLOCKS][4];
    UNIT_SCALES<FORMAT_ID> scales;

    __device__ __forceinline__ void load(const unsigned char *unit, int lane) {
        UPPER_PLANES<FORMAT_ID> upper;
        upper.load(unit, lane);
#pragma unroll
        for (int v = 0; v < 4; v++) {
            unit_operands<FORMAT_ID>(unit, upper, lane, v, a[2 * v], a[2 * v + 1]);
#pragma unroll
            for (int i = 0; i < 4; i++) a[2 * v + 1][i] >>= FORMAT::odd_shift;
        }
        scales.load(unit, lane);
    }
};

// Adds sum[e] += factor (16 high + low) of one sub-block.
DEVICE void add_scaled(int (&sum)[4], const int (&high)[4], const int (&low)[4], int upper,
                       int lower) {
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] += (e / 2 ? lower : upper) * (16 * high[e] + low[e]);
}

// Values of rows g and g + 8 and tokens 2 t and 2 t + 1 of eight: elements (row, token).
DEVICE void unit_times_eight(const UNIT_OPERANDS &unit, const unsigned char *stage, unsigned group,
                             int lane, float (&value)[4]) {
    const int g = lane / 4, t = lane % 4;
    const unsigned char *planes = stage + AT_PLANES + group * EIGHT_BYTES + g * 16 + t * 4;
    int j[4] = {0, 0, 0, 0};
#pragma unroll
    for (int p = 0; p < 4; p++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int b = p + 4 * half;
            const unsigned *block = (const unsigned *)(planes + b * 512);
            const unsigned h0 = block[0], h1 = block[32], l0 = block[64], l1 = block[96];
            int sum_high[4] = {0, 0, 0, 0}, sum_low[4] = {0, 0, 0, 0};
            if (FORMAT::halves) {
                multiply_16(sum_high, unit.a[b][0], unit.a[b][1], h0);
                multiply_16(sum_low, unit.a[b][0], unit.a[b][1], l0);
                add_scaled(j, sum_high, sum_low, unit.scales.factor(0, 2 * b),
                           unit.scales.factor(1, 2 * b));
                int more_high[4] = {0, 0, 0, 0}, more_low[4] = {0, 0, 0, 0};
                multiply_16(more_high, unit.a[b][2], unit.a[b][3], h1);
                multiply_16(more_low, unit.a[b][2], unit.a[b][3], l1);
                add_scaled(j, more_high, more_low, unit.scales.factor(0, 2 * b + 1),
                           unit.scales.factor(1, 2 * b + 1));
            } else {
                multiply_32<false>(sum_high, unit.a[b], h0, h1);
                multiply_32<false>(sum_low, unit.a[b], l0, l1);
                add_scaled(j, sum_high, sum_low, unit.scales.factor(0, b), unit.scales.factor(1, b));
            }
        }
    }
    const uint2 sums = *(const uint2 *)(stage + AT_TOKEN_SUMS + (group * 8 + g) * 32 + t * 8);
    const float *of_tokens = (const float *)(stage + AT_SCALES) + group * 8 + 2 * t;
    unit.scales.values(j, sums, *(const float2 *)of_tokens, value);
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
    float total[GROUPS_OF_TOKENS][4] = {}, span[GROUPS_OF_TOKENS][4] = {};
    begin_stage(work, shared, 0);
    for (unsigned unit = 0; unit < work.units; unit++) {
        unsigned char *stage = shared + unit % STAGES * STAGE_BYTES;
        if (unit + 1 < work.units)
            begin_stage(work, shared + (unit + 1) % STAGES * STAGE_BYTES, unit + 1);
        else
            end_parts();
        await_parts<STAGES - 1>();
        __syncthreads();
        UNIT_OPERANDS operands;
        operands.load(stage + AT_UNITS + warp * FORMAT::unit_bytes, lane);
        const bool last = unit % SPAN_UNITS == SPAN_UNITS - 1 || unit + 1 == work.units;
#pragma unroll
        for (int n = 0; n < GROUPS_OF_TOKENS; n++) {
            float value[4];
            unit_times_eight(operands, stage, n, lane, value);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                span[n][e] = span[n][e] + value[e];
                if (last) total[n][e] = total[n][e] + span[n][e], span[n][e] = 0.0f;
            }
        }
        __syncthreads();
    }
    const float *bias = (const float *)operand_at(launch, B);
    const float *residual = (const float *)operand_at(launch, RESIDUAL);
#pragma unroll
    for (int n = 0; n < GROUPS_OF_TOKENS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const unsigned row = (blockIdx.x * WARPS + warp) * UNIT_ROWS + g + 8 * (e / 2);
            const size_t token = work.first_token + n * 8 + 2 * t + e % 2;
            if (row >= rows || token >= work.tokens) continue;
            float value = total[n][e];
            if (bias) value = value + bias[row];
            if (residual) value = residual[token * stride_at(launch, RESIDUAL) + row] + value;
            ((float *)operand_at(launch, Y))[token * stride_at(launch, Y) + row] = value;
        }
}
