// Packs rows of activations of many tokens as unit_pack.cu does. A warp computes one unit of four
// tokens with eight lanes for each, so that it loads whole cache lines and stores contiguous bytes.
// Lane j of the eight holds columns 32 k + 4 j .. 32 k + 4 j + 3 of the unit, for k from 0 to 7.
//
// Compiled with these operand numbers (see packets.h): X, NORM_WEIGHT, M, SCALE, SUMS. NORM and
// QUANTIZE are packet numbers, NORM -1 without a norm. A block computes WARPS units: all of a row
// if there is a norm; otherwise PIECES blocks share a row. If HALF_TOKENS is not 0, integers are
// binary16 by blocks of so many tokens, as half_planes.h has them.
//
// Around experts: with a norm, its factors go to the byte FACTORS_AT of the workspace if that is
// not negative, and a token's product with the float row GATE_ROW to GATE_LOGIT. If EXPERT_PAIRS is
// 1, rows are those of a table's pairs (expert_table.h, with MAX_CHUNKS, TABLE_AT and CHUNK_PAIRS),
// and packed ones go to the bytes PLANES_AT, SUMS_AT and SCALES_AT of the workspace.

#include "activations.h"
#include "expert_table.h"
#include "half_planes.h"
#include "packets.h"

#define TOKENS 4
#define TOKEN_LANES (WARP_LANES / TOKENS)
#define STEPS (UNIT_COLUMNS / (4 * TOKEN_LANES))

// A lane's part of a unit.
struct LANE_COLUMNS {
    float of[STEPS][4];
};

DEVICE LANE_COLUMNS load_columns(const float *row, unsigned unit, unsigned columns, int lane) {
    LANE_COLUMNS v = {};
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const unsigned column = unit * UNIT_COLUMNS + 4 * (k * TOKEN_LANES + lane % TOKEN_LANES);
        if (column >= columns) continue;
        const float4 x = *(const float4 *)(row + column);
        v.of[k][0] = x.x, v.of[k][1] = x.y, v.of[k][2] = x.z, v.of[k][3] = x.w;
    }
    return v;
}

// Rule R4 over the products of a token's units, for all its lanes. Of four sums over the lanes each
// lane continues with two, then with one; the order of two operands does not change their sum.
DEVICE float sum_of_products(const LANE_COLUMNS &v, const LANE_COLUMNS &w, int lane) {
    float four[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float sum[STEPS];
#pragma unroll
        for (int k = 0; k < STEPS; k++) sum[k] = v.of[k][e] * w.of[k][e];
#pragma unroll
        for (int half = STEPS / 2; half; half /= 2)
#pragma unroll
            for (int k = 0; k < STEPS / 2; k++)
                if (k < half) sum[k] = sum[k] + sum[k + half];
        four[e] = sum[0];
    }
    const bool upper = lane & 4, odd = lane & 2;
    const float a = (upper ? four[2] : four[0]) +
                    __shfl_xor_sync(ALL_LANES, upper ? four[0] : four[2], 4);
    const float b = (upper ? four[3] : four[1]) +
                    __shfl_xor_sync(ALL_LANES, upper ? four[1] : four[3], 4);
    float sum = (odd ? b : a) + __shfl_xor_sync(ALL_LANES, odd ? a : b, 2);
    sum = sum + __shfl_xor_sync(ALL_LANES, sum, 1);
    sum = sum + __shfl_xor_sync(ALL_LANES, sum, 4);
    return sum + __shfl_xor_sync(ALL_LANES, sum, 2);
}

// The largest magnitude of a token's unit, as bits; all its lanes get it.
DEVICE unsigned largest_of_token(const LANE_COLUMNS &v) {
    float most[STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        most[k] = larger_magnitude(larger_magnitude(v.of[k][0], v.of[k][1]),
                                   larger_magnitude(v.of[k][2], v.of[k][3]));
#pragma unroll
    for (int half = STEPS / 2; half; half /= 2)
#pragma unroll
        for (int k = 0; k < STEPS / 2; k++)
            if (k < half) most[k] = larger_magnitude(most[k], most[k + half]);
    unsigned largest = __float_as_uint(most[0]);
#pragma unroll
    for (int lanes = TOKEN_LANES / 2; lanes; lanes /= 2)
        largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, lanes));
    return largest;
}

// Sums of 16 columns, of which a lane has parts for steps q and q + 4 in both halves of part[q]. It
// stores two neighbours at `sums`, which belong to its token, as high and as low bytes.
DEVICE void store_sums(short *sums, const int (&part)[STEPS / 2], int lane, bool exists) {
    const int q = lane % 4, upper = lane / 4 % 2;
    const int a = (q & 2 ? part[2] : part[0]) +
                  __shfl_xor_sync(ALL_LANES, q & 2 ? part[0] : part[2], 2);
    const int b = (q & 2 ? part[3] : part[1]) +
                  __shfl_xor_sync(ALL_LANES, q & 2 ? part[1] : part[3], 2);
    const int own = (q & 1 ? b : a) + __shfl_xor_sync(ALL_LANES, q & 1 ? a : b, 1);
    // The upper sum lent the lower one the amount by which that is below zero.
    const unsigned apart = (unsigned)own + ((unsigned)own & 0x8000u) * 2;
    const unsigned other = __shfl_xor_sync(ALL_LANES, apart, 4);
    const unsigned pair =
        upper ? __byte_perm(other, apart, 0x7632) : __byte_perm(apart, other, 0x5410);
    if (!exists) return;
    unsigned short *bytes = (unsigned short *)sums + q * 2 + upper;
    bytes[0] = (unsigned short)__byte_perm(pair, 0, 0x4431);
    bytes[EIGHT_HALF / 2] = (unsigned short)__byte_perm(pair, 0, 0x4420);
}

// Rule R5's first half for a unit of four tokens, each of which is stored if it `exists`. Planes,
// sums and scales belong to the lane's token.
DEVICE void quantize_columns(const ACTIVATIONS &x, unsigned unit, int lane,
                             const LANE_COLUMNS &v, bool exists) {
    const SEGMENT_SCALE segment(largest_of_token(v));
    unsigned char *planes = x.planes + (size_t)unit * EIGHT_BYTES + lane / 4 % 2 * 128 + lane % 4 * 4;
    int part[STEPS / 2] = {};
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        unsigned bits[4];
#pragma unroll
        for (int e = 0; e < 4; e++) bits[e] = segment.integer(v.of[k][e]);
        const unsigned first = __byte_perm(bits[0], bits[1], 0x5410);
        const unsigned second = __byte_perm(bits[2], bits[3], 0x5410);
        part[k % 4] += add_pairs(first, second, 0x01010101u) * (k < 4 ? 1 : 65536);
        if (!exists) continue;
        *(unsigned *)(planes + k * 512) = high_bytes(first, second);
        *(unsigned *)(planes + k * 512 + 256) = low_bytes(first, second);
    }
    store_sums(x.sums + (size_t)unit * 8 * UNIT_SUMS, part, lane, exists);
    if (exists && lane % TOKEN_LANES == 0) x.scales[(size_t)unit * 8] = segment.scale();
}

// Of eight sums of which eight lanes have parts, the one with the lane's number.
DEVICE int own_sum(const int (&part)[STEPS], int lane) {
    int four[4], two[2];
    const int j = lane % TOKEN_LANES;
#pragma unroll
    for (int i = 0; i < 4; i++)
        four[i] = (j & 4 ? part[4 + i] : part[i]) +
                  __shfl_xor_sync(ALL_LANES, j & 4 ? part[i] : part[4 + i], 4);
#pragma unroll
    for (int i = 0; i < 2; i++)
        two[i] = (j & 2 ? four[2 + i] : four[i]) +
                 __shfl_xor_sync(ALL_LANES, j & 2 ? four[i] : four[2 + i], 2);
    return (j & 1 ? two[1] : two[0]) + __shfl_xor_sync(ALL_LANES, j & 1 ? two[0] : two[1], 1);
}

// The same as binary16.
DEVICE void quantize_to_halves(unsigned char *planes, unsigned char *sums, float *scales,
                               unsigned token, unsigned tokens, unsigned unit, unsigned units,
                               int lane, const LANE_COLUMNS &v, bool exists) {
    const SEGMENT_SCALE segment(largest_of_token(v));
    const unsigned j = lane % TOKEN_LANES, of_block = token % HALF_TOKENS;
    const unsigned first = token - of_block;
    const unsigned eights = min((tokens - first + 7) / 8, (unsigned)HALF_TOKENS / 8);
    const size_t unit_eight = (size_t)first / 8 * units + (size_t)unit * eights;
    planes += unit_eight * EIGHT_BYTES + of_block / 8 * QUARTER_BYTES + j / 4 * HALF_STEP_BYTES +
              of_block % 8 * 16 + j % 4 * 4;
    int part[STEPS];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        unsigned bits[4];
#pragma unroll
        for (int e = 0; e < 4; e++) bits[e] = segment.integer(v.of[k][e]);
        part[k] = (short)bits[0] + (short)bits[1] + (short)bits[2] + (short)bits[3];
        if (!exists) continue;
        unsigned char *step = planes + k / 2 * eights * QUARTER_BYTES + k % 2 * 2 * HALF_STEP_BYTES;
        *(unsigned *)step = half_pair((short)bits[0], (short)bits[2]);
        *(unsigned *)(step + HALF_STEP_BYTES / 2) = half_pair((short)bits[1], (short)bits[3]);
    }
    const int own = own_sum(part, lane);
    int all = own;
#pragma unroll
    for (int lanes = TOKEN_LANES / 2; lanes; lanes /= 2)
        all += __shfl_xor_sync(ALL_LANES, all, lanes);
    if (!exists) return;
    const size_t eight = unit_eight + of_block / 8;
    unsigned short *pair =
        (unsigned short *)(sums + eight * HALF_EIGHT_SUMS + of_block % 8 * 16) + j;
    pair[0] = (unsigned short)half_pair(own / SUM_BASE, 0);
    pair[HALF_EIGHT_SUMS / 4] = (unsigned short)half_pair(own % SUM_BASE, 0);
    if (j == 0)
        ((unsigned *)scales)[eight * 8 + of_block % 8] = scale_and_sum(segment.scale(), all);
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    unit_pack_fours(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                    U64 workspace) {
    BLOCK_MEMORY(shared);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *quantize = packet_of(launch, QUANTIZE);
    const unsigned tokens = count_of(launch, quantize);
    const unsigned columns = quantize->size[QUANTIZE_ACTIVATION_COLUMNS];
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const int lane = threadIdx.x % WARP_LANES, of_four = lane / TOKEN_LANES;
    const unsigned unit = blockIdx.x % PIECES * WARPS + threadIdx.x / WARP_LANES;
    FOLLOWING_MAY_START;
#if EXPERT_PAIRS
    PRECEDING_DONE;
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MAX_CHUNKS};
    const unsigned four = blockIdx.x / PIECES, number = four / (CHUNK_PAIRS / TOKENS);
    const unsigned of_chunk = four % (CHUNK_PAIRS / TOKENS) * TOKENS + of_four;
    if (number >= table.chunks()) return;
    const CHUNK chunk = table.chunk(number);
    const unsigned token = chunk.eight * 8 + of_chunk;
    const bool exists = of_chunk < chunk.count && unit < units;
    const unsigned from = exists ? table.pairs()[chunk.first + of_chunk] : 0;
    unsigned char *planes = (unsigned char *)(workspace + PLANES_AT);
    short *sums = (short *)(workspace + SUMS_AT);
    float *scales = (float *)(workspace + SCALES_AT);
#else
    const unsigned token = blockIdx.x / PIECES * TOKENS + of_four, from = token;
    const bool exists = token < tokens && unit < units;
    unsigned char *planes = operand_at(launch, M);
    short *sums = (short *)operand_at(launch, SUMS);
    float *scales = (float *)operand_at(launch, SCALE);
#endif
#if NORM >= 0
    const float *norm_weight = (const float *)operand_at(launch, NORM_WEIGHT);
    float *squares = (float *)shared, *gates = squares + TOKENS * WARPS;  // [token][unit]
    float *weights = gates + TOKENS * WARPS + threadIdx.x / WARP_LANES * UNIT_COLUMNS;
    if (norm_weight) {
        const EIGHT own = load_eight(norm_weight, unit, columns, lane);
        *(float4 *)(weights + 4 * lane) = {own.of[0], own.of[1], own.of[2], own.of[3]};
        *(float4 *)(weights + 4 * lane + 128) = {own.of[4], own.of[5], own.of[6], own.of[7]};
    }
#endif
    PRECEDING_DONE;
    if (!EXPERT_PAIRS && blockIdx.x / PIECES * TOKENS >= tokens) return;
    const float *row = (const float *)operand_at(launch, X) + (size_t)from * stride_at(launch, X);
    LANE_COLUMNS v = load_columns(row, unit, exists ? columns : 0, lane);
#if NORM >= 0
    const float square = sum_of_products(v, v, lane);
    if (lane % TOKEN_LANES == 0 && unit < units) squares[of_four * units + unit] = square;
    __syncthreads();
    const float mean = __fdiv_rn(fold_units(squares + of_four * units, units, 1), (float)columns);
    const float eps = packet_of(launch, NORM)->real[RMS_NORM_EPS];
    const float r = __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const float4 w = *(const float4 *)(weights + 4 * (k * TOKEN_LANES + lane % TOKEN_LANES));
        const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            v.of[k][e] = v.of[k][e] * r;
            if (norm_weight) v.of[k][e] = v.of[k][e] * weight[e];
        }
    }
#if FACTORS_AT >= 0
    if (exists && unit == 0 && lane % TOKEN_LANES == 0)
        ((float *)(workspace + FACTORS_AT))[token] = r;
#endif
    if (GATE_ROW >= 0) {
        const float *gate_row = (const float *)operand_at(launch, GATE_ROW);
        const float of_unit =
            sum_of_products(v, load_columns(gate_row, unit, columns, lane), lane);
        if (lane % TOKEN_LANES == 0 && unit < units) gates[of_four * units + unit] = of_unit;
        __syncthreads();
        if (exists && unit == 0 && lane % TOKEN_LANES == 0)
            ((float *)operand_at(launch, GATE_LOGIT))[token * stride_at(launch, GATE_LOGIT)] =
                fold_units(gates + of_four * units, units, 1);
    }
#endif
#if HALF_TOKENS
    quantize_to_halves(planes, (unsigned char *)sums, scales, token, tokens, unit, units, lane, v,
                       exists);
#else
    const ACTIVATIONS x = among_eights(planes, sums, scales, token, units);
    quantize_columns(x, unit, lane, v, exists);
#endif
}
