// y = x weight^T for many tokens by products of warp groups (sm_90a): a group takes 64 rows, a warp
// of it one tile of 16, with BLOCK_TOKENS tokens in shared memory. x is what unit_pack.cu made, in
// the order of columns (rules R3 and R5).
//
// Where SPLIT is 0 the WARP_GROUPS of a block take rows of their own and share the tokens; where it is 1
// they share 64 rows and take spans of the columns in turn, which are folded in order.
//
// FORMAT_ID is Q4_K, Q5_K or Q6_K. Compiled with the places of operands as packets.h has them: M,
// SCALE, SUMS, W, Y, B (a bias) and RESIDUAL, -1 where absent; PRODUCT is the number of the
// product's packet.

#include "packets.h"
#include "groups.h"
#include "unit_scales.h"

typedef UNIT_FORMAT<FORMAT_ID> FORMAT;
typedef UNIT_SCALES<FORMAT_ID> SCALES;

#define THREADS (WARP_GROUPS * GROUP_WARPS * WARP_LANES)
#define GROUP_THREADS (GROUP_WARPS * WARP_LANES)
#define EIGHTS (BLOCK_TOKENS / 8)
#define VALUES (4 * EIGHTS)  // of a thread
// Tokens whose sums of both parts have room in registers at once.
#define PART_TOKENS (BLOCK_TOKENS < 64 ? BLOCK_TOKENS : 32)
#define STAGES 2
// What is loaded together: of a group or, where tokens are shared, of a block.
#define SHARE_GROUPS (SPLIT ? 1 : WARP_GROUPS)
#define SHARE_TILES (SHARE_GROUPS * GROUP_WARPS)
#define SHARE_THREADS (SHARE_GROUPS * GROUP_THREADS)
#define EIGHT_BYTES (8 * UNIT_PLANES)
#define AT_TOKEN_SUMS (BLOCK_TOKENS * UNIT_PLANES)
#define AT_SCALES (AT_TOKEN_SUMS + BLOCK_TOKENS * UNIT_SUMS * 2)
#define AT_UNITS (AT_SCALES + BLOCK_TOKENS * 4)
#define STAGE_BYTES (AT_UNITS + SHARE_TILES * FORMAT::unit_bytes)
#define AT_TOTALS (STAGES * (SPLIT ? WARP_GROUPS : 1) * STAGE_BYTES)  // [VALUES][thread]

struct GROUP_WORK {
    const unsigned char *planes, *weights, *sums;
    const float *scales;
    unsigned units, tiles, first_tile, first_token, tokens;
};

// Begins to copy unit `unit` of all the share reads into a stage: of tokens pieces of 16 columns.
DEVICE void begin_stage(const GROUP_WORK &work, unsigned char *stage, unsigned unit) {
    const unsigned thread = threadIdx.x % SHARE_THREADS;
    for (unsigned i = thread; i < BLOCK_TOKENS * 34; i += SHARE_THREADS) {
        const unsigned row = i / 34, piece = i % 34;
        const unsigned token = min(work.first_token + row, work.tokens - 1);
        const size_t index = (size_t)token * work.units + unit;
        if (piece < 32)
            begin_part(stage + row / 8 * EIGHT_BYTES +
                           (piece % 16 / 2 * 4 + piece / 16 * 2 + piece % 2) * 128 + row % 8 * 16,
                       work.planes + index * UNIT_PLANES + piece * 16);
        else
            begin_part(stage + AT_TOKEN_SUMS + row * 32 + (piece - 32) * 16,
                       work.sums + index * 32 + (piece - 32) * 16);
    }
    if (thread < BLOCK_TOKENS) {
        const unsigned token = min(work.first_token + thread, work.tokens - 1);
        begin_word(stage + AT_SCALES + thread * 4,
                   work.scales + (size_t)token * work.units + unit);
    }
    const unsigned tile_of = thread / WARP_LANES;
    const unsigned tile = min(work.first_tile + tile_of, work.tiles - 1);
    const unsigned char *source =
        work.weights + ((size_t)tile * work.units + unit) * FORMAT::unit_bytes;
    for (unsigned at = thread % WARP_LANES * 16; at < FORMAT::unit_bytes; at += WARP_LANES * 16)
        begin_part(stage + AT_UNITS + tile_of * FORMAT::unit_bytes + at, source + at);
}

// Sub-block b of part `low` of m, from token 8 `eight` on.
DEVICE U64 tokens_operand(const unsigned char *stage, int b, int low, int eight) {
    return group_operand(stage + eight * EIGHT_BYTES + b * 512 + low * 256, 128, EIGHT_BYTES);
}

DEVICE int factor_of(const SCALES &scales, int e, int s) { return scales.factor(e / 2 % 2, s); }

// Adds the scaled sums of sub-block b, codes of four bits, of all tokens: 16 times the codes
// multiply the high parts, the codes themselves the low ones, in one sum.
DEVICE void add_narrow(const SCALES &scales, const unsigned char *stage, const unsigned (&codes)[4],
                       const unsigned (&shifted_codes)[4], int b, int (&j)[VALUES]) {
    int sum[VALUES];
    begin_group_product();
    multiply_group(sum, shifted_codes, tokens_operand(stage, b, 0, 0), false);
    multiply_group(sum, codes, tokens_operand(stage, b, 1, 0), true);
    end_group_product();
    await_group_products();
#pragma unroll
    for (int e = 0; e < VALUES; e++) j[e] += factor_of(scales, e, b) * sum[e];
}

// The same of wider codes, in `a`, for sub-block s of the format's.
DEVICE void add_wide(const SCALES &scales, const unsigned char *stage, const unsigned (&a)[4],
                     int b, int s, int (&j)[VALUES]) {
#pragma unroll
    for (int first = 0; first < BLOCK_TOKENS; first += PART_TOKENS) {
        int high[PART_TOKENS / 2], low[PART_TOKENS / 2];
        begin_group_product();
        multiply_group(high, a, tokens_operand(stage, b, 0, first / 8), false);
        multiply_group(low, a, tokens_operand(stage, b, 1, first / 8), false);
        end_group_product();
        await_group_products();
#pragma unroll
        for (int e = 0; e < PART_TOKENS / 2; e++)
            j[first / 2 + e] += factor_of(scales, e, s) * (16 * high[e] + low[e]);
    }
}

// Adds the values of a unit to those of the span.
DEVICE void add_unit(const unsigned char *stage, unsigned tile, int lane, float (&span)[VALUES]) {
    const unsigned char *unit = stage + AT_UNITS + tile * FORMAT::unit_bytes;
    SCALES scales;
    scales.load(unit, lane);
    UPPER_PLANES<FORMAT_ID> upper;
    upper.load(unit, lane);
    int j[VALUES];
#pragma unroll
    for (int e = 0; e < VALUES; e++) j[e] = 0;
#pragma unroll
    for (int v = 0; v < 4; v++) {
        unsigned codes[2][4];
        unit_operands<FORMAT_ID>(unit, upper, lane, v, codes[0], codes[1]);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int b = 2 * v + odd;
            if (FORMAT::odd_shift) {
                unsigned shifted_codes[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    shifted_codes[i] = odd ? codes[1][i] : codes[0][i] << 4;
                    if (odd) codes[1][i] >>= 4;
                }
                add_narrow(scales, stage, codes[odd], shifted_codes, b, j);
            } else if (FORMAT::halves) {
                const unsigned first[4] = {codes[odd][0], codes[odd][1], 0, 0};
                const unsigned second[4] = {0, 0, codes[odd][2], codes[odd][3]};
                add_wide(scales, stage, first, b, 2 * b, j);
                add_wide(scales, stage, second, b, 2 * b + 1, j);
            } else {
                add_wide(scales, stage, codes[odd], b, b, j);
            }
        }
    }
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
        const uint2 sums = *(const uint2 *)(stage + AT_TOKEN_SUMS + (8 * n + g) * 32 + t * 8);
        const float2 of_tokens =
            *(const float2 *)((const float *)(stage + AT_SCALES) + 8 * n + 2 * t);
        const int of_eight[4] = {j[4 * n], j[4 * n + 1], j[4 * n + 2], j[4 * n + 3]};
        float value[4];
        scales.values(of_eight, sums, of_tokens, value);
#pragma unroll
        for (int e = 0; e < 4; e++) span[4 * n + e] = span[4 * n + e] + value[e];
    }
}

struct RESULT {
    float *y;
    const float *bias, *residual;
    size_t stride, residual_stride;
    unsigned rows, first_token, tokens;

    // Element i of a thread of a group whose first row is `row`.
    __device__ __forceinline__ void store(unsigned row, int i, float value) const {
        const unsigned lane = threadIdx.x % WARP_LANES;
        const unsigned warp = threadIdx.x / WARP_LANES % GROUP_WARPS;
        row += warp * UNIT_ROWS + lane / 4 + 8 * (i / 2 % 2);
        const size_t token = first_token + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row >= rows || token >= tokens) return;
        if (bias) value = value + bias[row];
        if (residual) value = residual[token * residual_stride + row] + value;
        y[token * stride + row] = value;
    }
};

#if SPLIT

// The span's values lie where its last unit's tokens were; the next unit is on its way elsewhere.
DEVICE void multiply_rows(const GROUP_WORK &work, const RESULT &result, unsigned char *memory) {
    const unsigned group = threadIdx.x / GROUP_THREADS, thread = threadIdx.x % GROUP_THREADS;
    const int lane = threadIdx.x % WARP_LANES, warp = thread / WARP_LANES;
    const unsigned spans = (work.units + SPAN_UNITS - 1) / SPAN_UNITS;
    unsigned char *own = memory + group * STAGES * STAGE_BYTES;
    unsigned step = 0;
    float total[EIGHTS] = {};
    if (group < spans) begin_stage(work, own, group * SPAN_UNITS);
    end_parts();
    for (unsigned first = 0; first < spans; first += WARP_GROUPS) {
        const unsigned begin = (first + group) * SPAN_UNITS;
        const unsigned end = min(begin + SPAN_UNITS, work.units);
        float span[VALUES] = {};
        for (unsigned unit = begin; unit < end; unit++, step++) {
            const unsigned next = unit + 1 < end ? unit + 1 : begin + WARP_GROUPS * SPAN_UNITS;
            if (next < work.units)
                begin_stage(work, own + (step + 1) % STAGES * STAGE_BYTES, next);
            end_parts();
            await_parts<STAGES - 1>();
            show_to_products();
            group_barrier(1 + group);
            add_unit(own + step % STAGES * STAGE_BYTES, warp, lane, span);
            group_barrier(1 + group);
        }
        // Groups without a span have made as many steps as those with a shorter one, or none.
        unsigned used = step + STAGES - 1;
        float *values = (float *)(own + used % STAGES * STAGE_BYTES) + thread;
        if (begin < work.units)
#pragma unroll
            for (int i = 0; i < VALUES; i++) values[i * GROUP_THREADS] = span[i];
        __syncthreads();
        for (unsigned of = 0; of < WARP_GROUPS && first + of < spans; of++) {
            // Units that group `of` has done so far.
            const unsigned left = work.units - (first + of) * SPAN_UNITS;
            const unsigned done =
                first / WARP_GROUPS * SPAN_UNITS + (left < SPAN_UNITS ? left : SPAN_UNITS);
            const float *theirs = (const float *)(memory + of * STAGES * STAGE_BYTES +
                                                  (done - 1) % STAGES * STAGE_BYTES) +
                                  thread;
#pragma unroll
            for (int i = 0; i < EIGHTS; i++)
                total[i] = total[i] + theirs[(group * EIGHTS + i) * GROUP_THREADS];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        if (i / EIGHTS == group)
            result.store(work.first_tile * UNIT_ROWS, i, total[i % EIGHTS]);
}

#else

DEVICE void multiply_rows(const GROUP_WORK &work, const RESULT &result, unsigned char *memory) {
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned tile = threadIdx.x / WARP_LANES;
    float *totals = (float *)(memory + AT_TOTALS) + threadIdx.x;
    float span[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) span[i] = totals[i * THREADS] = 0.0f;
    begin_stage(work, memory, 0);
    end_parts();
    for (unsigned unit = 0; unit < work.units; unit++) {
        unsigned char *stage = memory + unit % STAGES * STAGE_BYTES;
        await_parts<0>();
        show_to_products();
        __syncthreads();
        if (unit + 1 < work.units)
            begin_stage(work, memory + (unit + 1) % STAGES * STAGE_BYTES, unit + 1);
        end_parts();
        add_unit(stage, tile, lane, span);
        if (unit % SPAN_UNITS != SPAN_UNITS - 1 && unit + 1 != work.units) continue;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            totals[i * THREADS] = totals[i * THREADS] + span[i];
            span[i] = 0.0f;
        }
    }
    const unsigned first = work.first_tile + tile / GROUP_WARPS * GROUP_WARPS;
#pragma unroll
    for (int i = 0; i < VALUES; i++) result.store(first * UNIT_ROWS, i, totals[i * THREADS]);
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    unit_groups(U64 scratch, U64 inputs, U64 packets, uint index, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, packets, index};
    const PACKET *product = packet_of(launch, PRODUCT);
    GROUP_WORK work;
    RESULT result;
    result.rows = product->size[MATMUL_ROWS];
    result.tokens = work.tokens = count_of(launch, product);
    work.units = (product->size[MATMUL_COLUMNS] + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    work.tiles = (result.rows + UNIT_ROWS - 1) / UNIT_ROWS;
    work.first_tile = blockIdx.x * SHARE_TILES;
    result.first_token = work.first_token = blockIdx.y * BLOCK_TOKENS;
    work.planes = operand_at(launch, M);
    work.sums = operand_at(launch, SUMS);
    work.scales = (const float *)operand_at(launch, SCALE);
    work.weights = operand_at(launch, W);
    result.y = (float *)operand_at(launch, Y);
    result.stride = stride_at(launch, Y);
    result.bias = (const float *)operand_at(launch, B);
    result.residual = (const float *)operand_at(launch, RESIDUAL);
    result.residual_stride = stride_at(launch, RESIDUAL);
    PRECEDING_DONE;
    if (work.first_token < work.tokens) multiply_rows(work, result, shared);
}
