// y = x weight^T for many tokens by products of warp groups (sm_90a): a group takes 64 rows, a warp
// of it one tile of 16, with BLOCK_TOKENS tokens in shared memory. x is what unit_pack.cu made, in
// eights of tokens (rules R3 and R5).
//
// Where SPLIT is 0 the WARP_GROUPS of a block take rows of their own and share the tokens; where it is 1
// they share 64 rows and take spans of the columns in turn, which are folded in order.
//
// FORMAT_ID is Q4_K, Q5_K or Q6_K; a share has STAGES units in shared memory. Compiled with the places of operands as packets.h has them: M,
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
// What is loaded together: of a group or, where tokens are shared, of a block.
#define SHARE_GROUPS (SPLIT ? 1 : WARP_GROUPS)
#define SHARES (WARP_GROUPS / SHARE_GROUPS)
#define SHARE_TILES (SHARE_GROUPS * GROUP_WARPS)
#define AT_TOKEN_SUMS (BLOCK_TOKENS * UNIT_PLANES)
#define AT_SCALES (AT_TOKEN_SUMS + BLOCK_TOKENS * UNIT_SUMS * 2)
#define AT_UNITS (AT_SCALES + BLOCK_TOKENS * 4)
#define STAGE_BYTES (AT_UNITS + SHARE_TILES * FORMAT::unit_bytes)
#define AT_BARRIERS (SHARES * STAGES * STAGE_BYTES)
#define AT_TOTALS (AT_BARRIERS + SHARES * STAGES * 8)  // [VALUES][thread]

struct GROUP_WORK {
    const unsigned char *planes, *weights, *sums;
    const float *scales;
    unsigned units, tiles, first_tile, first_token, tokens;

    __device__ __forceinline__ unsigned own_tiles() const {
        return min(tiles - first_tile, (unsigned)SHARE_TILES);
    }
    // Eights of tokens that exist.
    __device__ __forceinline__ unsigned eights() const {
        return min((tokens - first_token + 7) / 8, (unsigned)EIGHTS);
    }
};

// Stages of a share, filled by its first warp.
struct STAGE_RING {
    unsigned char *stages;
    COPY_BARRIER *barriers;

    __device__ __forceinline__ unsigned char *stage(unsigned step) const {
        return stages + step % STAGES * STAGE_BYTES;
    }
    // Weights of `unit`, which do not change while a step runs. All lanes of the warp call.
    __device__ __forceinline__ void fetch_weights(const GROUP_WORK &work, unsigned step,
                                                  unsigned unit) const {
        const unsigned lane = threadIdx.x % WARP_LANES;
        const unsigned of_eight = EIGHT_BYTES + 8 * UNIT_SUMS * 2 + 8 * 4;
        COPY_BARRIER *barrier = barriers + step % STAGES;
        if (lane == 0)
            announce(barrier, work.own_tiles() * FORMAT::unit_bytes + work.eights() * of_eight);
        __syncwarp();
        if (lane >= work.own_tiles()) return;
        const size_t place = (size_t)(work.first_tile + lane) * work.units + unit;
        copy_to_stage(barrier, stage(step) + AT_UNITS + lane * FORMAT::unit_bytes,
                      work.weights + place * FORMAT::unit_bytes, FORMAT::unit_bytes);
    }
    __device__ __forceinline__ void fetch_tokens(const GROUP_WORK &work, unsigned step,
                                                 unsigned unit) const {
        const unsigned eight = threadIdx.x % WARP_LANES;
        if (eight >= work.eights()) return;
        const size_t place = (size_t)(work.first_token / 8 + eight) * work.units + unit;
        COPY_BARRIER *barrier = barriers + step % STAGES;
        unsigned char *to = stage(step);
        copy_to_stage(barrier, to + eight * EIGHT_BYTES, work.planes + place * EIGHT_BYTES,
                      EIGHT_BYTES);
        copy_to_stage(barrier, to + AT_TOKEN_SUMS + eight * 256, work.sums + place * 256, 256);
        copy_to_stage(barrier, to + AT_SCALES + eight * 32, work.scales + place * 8, 32);
    }
    __device__ __forceinline__ void await(unsigned step) const {
        await_stage(barriers + step % STAGES, step / STAGES);
    }
};

// Sub-block b of part `low` of m, from token 8 `eight` on.
DEVICE U64 tokens_operand(const unsigned char *stage, int b, int low, int eight) {
    return group_operand(stage + eight * EIGHT_BYTES + b * 512 + low * 256, 128, EIGHT_BYTES);
}

DEVICE int factor_of(const SCALES &scales, int e, int s) { return scales.factor(e / 2 % 2, s); }

// Adds the scaled sums of sub-block b, codes of four bits, of all tokens: 16 times the codes
// multiply the high parts, the codes themselves the low ones, in one sum.
DEVICE void add_narrow(const SCALES &scales, const unsigned char *stage, const unsigned (&codes)[4],
                       const unsigned (&shifted_codes)[4], int b, int (&sum)[VALUES],
                       int (&j)[VALUES]) {
    begin_group_product();
    multiply_group(sum, shifted_codes, tokens_operand(stage, b, 0, 0), false);
    multiply_group(sum, codes, tokens_operand(stage, b, 1, 0), true);
    end_group_product();
    await_group_products(sum);
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
        begin_sum(high, a, tokens_operand(stage, b, 0, first / 8));
        begin_sum(low, a, tokens_operand(stage, b, 1, first / 8));
        end_group_product();
        await_group_products(high);
        take_sums(low);
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
    int j[VALUES] = {}, sum[VALUES] = {};
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
                add_narrow(scales, stage, codes[odd], shifted_codes, b, sum, j);
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

// The units of a share, in order: `count` steps, of which step n is unit `unit_of(n)`.
DEVICE unsigned unit_of(unsigned group, unsigned step) {
    if (!SPLIT) return step;
    return (step / SPAN_UNITS * WARP_GROUPS + group) * SPAN_UNITS + step % SPAN_UNITS;
}

DEVICE unsigned steps_of(unsigned group, unsigned units) {
    if (!SPLIT) return units;
    const unsigned round = WARP_GROUPS * SPAN_UNITS, rest = units % round;
    const unsigned first = group * SPAN_UNITS, own = rest > first ? rest - first : 0;
    return units / round * SPAN_UNITS + min(own, (unsigned)SPAN_UNITS);
}

// Fills all stages, weights first: those may be read while the kernels in front still run.
DEVICE void begin_rows(const GROUP_WORK &work, const STAGE_RING &ring, unsigned group,
                       unsigned steps) {
    const unsigned warp = threadIdx.x / WARP_LANES % SHARE_TILES;
    if (threadIdx.x % (SHARE_TILES * WARP_LANES) == 0) open_stages(ring.barriers, STAGES);
    __syncthreads();
    for (unsigned step = 0; warp == 0 && step < min(steps, (unsigned)STAGES); step++)
        ring.fetch_weights(work, step, unit_of(group, step));
    PRECEDING_DONE;
    for (unsigned step = 0; warp == 0 && step < min(steps, (unsigned)STAGES); step++)
        ring.fetch_tokens(work, step, unit_of(group, step));
}

#if SPLIT

// A span's values lie where its last unit's tokens were; what is on its way goes elsewhere.
DEVICE void multiply_rows(const GROUP_WORK &work, const RESULT &result, unsigned char *memory) {
    const unsigned group = threadIdx.x / GROUP_THREADS, thread = threadIdx.x % GROUP_THREADS;
    const int lane = threadIdx.x % WARP_LANES, warp = thread / WARP_LANES;
    const unsigned steps = steps_of(group, work.units);
    const unsigned spans = (work.units + SPAN_UNITS - 1) / SPAN_UNITS;
    const STAGE_RING ring = {memory + group * STAGES * STAGE_BYTES,
                             (COPY_BARRIER *)(memory + AT_BARRIERS) + group * STAGES};
    begin_rows(work, ring, group, steps);
    float total[EIGHTS] = {};
    unsigned step = 0;
    for (unsigned first = 0; first < spans; first += WARP_GROUPS) {
        float span[VALUES] = {};
        for (const unsigned end = min(step + SPAN_UNITS, steps); step < end; step++) {
            ring.await(step);
            group_barrier(1 + group);
            const unsigned next = step + STAGES - 1;
            if (warp == 0 && next < steps && next >= STAGES) {
                ring.fetch_weights(work, next, unit_of(group, next));
                ring.fetch_tokens(work, next, unit_of(group, next));
            }
            add_unit(ring.stage(step), warp, lane, span);
        }
        group_barrier(1 + group);
        float *values = (float *)ring.stage(step + STAGES - 1) + thread;
        if (first + group < spans)
#pragma unroll
            for (int i = 0; i < VALUES; i++) values[i * GROUP_THREADS] = span[i];
        __syncthreads();
        for (unsigned of = 0; of < WARP_GROUPS && first + of < spans; of++) {
            const unsigned done =
                min(steps_of(of, work.units), (first / WARP_GROUPS + 1) * SPAN_UNITS);
            const float *theirs = (const float *)(memory + of * STAGES * STAGE_BYTES +
                                                  (done - 1) % STAGES * STAGE_BYTES) +
                                  thread;
#pragma unroll
            for (int i = 0; i < EIGHTS; i++)
                total[i] = total[i] + theirs[(group * EIGHTS + i) * GROUP_THREADS];
        }
        show_to_products();
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
    const unsigned tile = threadIdx.x / WARP_LANES, steps = work.units;
    float *totals = (float *)(memory + AT_TOTALS) + threadIdx.x;
    const STAGE_RING ring = {memory, (COPY_BARRIER *)(memory + AT_BARRIERS)};
    begin_rows(work, ring, 0, steps);
    float span[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) span[i] = totals[i * THREADS] = 0.0f;
    for (unsigned step = 0; step < steps; step++) {
        ring.await(step);
        __syncthreads();
        const unsigned next = step + STAGES - 1;
        if (tile == 0 && next < steps && next >= STAGES) {
            ring.fetch_weights(work, next, next);
            ring.fetch_tokens(work, next, next);
        }
        add_unit(ring.stage(step), tile, lane, span);
        if (step % SPAN_UNITS != SPAN_UNITS - 1 && step + 1 != steps) continue;
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
    unit_groups(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
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
    FOLLOWING_MAY_START;
    if (work.first_token < work.tokens)
        multiply_rows(work, result, shared);
    else
        PRECEDING_DONE;
}
