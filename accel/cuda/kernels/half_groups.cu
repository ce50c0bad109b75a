// y = x weight^T for prompts and one to four matrices of Q5_K by products of warp groups in binary16
// (sm_90a). x is the result of unit_pack_fours.cu with HALF_TOKENS (rules R2, R3 and R5).
//
// Two groups of a block compute 64 rows each with BLOCK_TOKENS tokens in common. A group begins a
// unit of columns when the other one has half of it, so that the tensor cores have its products
// while the other makes values of its sums. One warp of a third group requests the units of
// weights with the sums and scales of their tokens, another one quarters of units of the tokens.
// A multiprocessor takes blocks one after the other; blocks of the same rows are neighbours.
//
// The tiles of all matrices are numbered consecutively, so a block may have tiles of two matrices.
// If there is a GATE, two warps of a group compute rows of the first matrix and two the same rows
// of the second, and y is the gated activation of both. Compiled with the operand numbers and the
// macros MATRICES, GATE, PRODUCT, WARP_GROUPS and BLOCK_TOKENS of unit_groups.cu, and with the
// stages of QUARTER_STAGES and STAGES.

#include "packets.h"
#include "group_rows.h"
#include "half_sums.h"

#define USER_REGISTERS 240
#define SUPPLY_REGISTERS 24
#define SUPPLY_WARPS 2
#define ALL_THREADS (THREADS + GROUP_THREADS)
#define USER_WARPS (WARP_GROUPS * GROUP_WARPS)
#define QUARTERS 4
#define QUARTER_STAGE_BYTES (EIGHTS * QUARTER_BYTES)
#define AT_UNIT_SUMS (SHARE_TILES * FORMAT::unit_bytes)
#define AT_UNIT_SCALES (AT_UNIT_SUMS + EIGHTS * HALF_EIGHT_SUMS)
#define UNIT_STAGE_BYTES (AT_UNIT_SCALES + EIGHTS * SCALES_BYTES)
#define AT_UNIT_STAGES (QUARTER_STAGES * QUARTER_STAGE_BYTES)
#define AT_SPANS (AT_UNIT_STAGES + STAGES * UNIT_STAGE_BYTES)  // [EIGHTS][thread][4]
#define AT_FILLED (AT_SPANS + VALUES * THREADS * 4)
#define AT_USED (AT_FILLED + (QUARTER_STAGES + STAGES) * 8)
#define AT_HALFWAY (AT_USED + (QUARTER_STAGES + STAGES) * 8)

// A ring of stages. Step n has stage n % count: `filled` counts its bytes, `used` the warps that
// need it no more.
template <unsigned count, unsigned bytes> struct HALF_RING {
    unsigned char *stages;
    COPY_BARRIER *filled;
    unsigned long long *used;

    __device__ __forceinline__ void open() const {
        open_stages(filled, count);
        for (unsigned i = 0; i < count; i++) open_arrivals(used + i, USER_WARPS);
    }
    __device__ __forceinline__ unsigned char *stage(unsigned step) const {
        return stages + step % count * bytes;
    }
    __device__ __forceinline__ COPY_BARRIER *barrier(unsigned step) const {
        return filled + step % count;
    }
    // Returns when the stage of `step` may be filled.
    __device__ __forceinline__ void await_use(unsigned step) const {
        if (step >= count) await_arrivals(used + step % count, step / count - 1);
    }
    __device__ __forceinline__ void await(unsigned step) const {
        await_stage(barrier(step), step / count);
    }
    __device__ __forceinline__ void end_use(unsigned step) const {
        if (threadIdx.x % WARP_LANES == 0) arrive(used + step % count);
    }
};
typedef HALF_RING<QUARTER_STAGES, QUARTER_STAGE_BYTES> TOKEN_RING;
typedef HALF_RING<STAGES, UNIT_STAGE_BYTES> UNIT_RING;

struct RINGS {
    TOKEN_RING tokens;
    UNIT_RING units;
    unsigned long long *halfway;  // counts the warps of each group that have half of a unit

    __device__ __forceinline__ explicit RINGS(unsigned char *memory) {
        tokens.stages = memory;
        tokens.filled = (COPY_BARRIER *)(memory + AT_FILLED);
        tokens.used = (unsigned long long *)(memory + AT_USED);
        units.stages = memory + AT_UNIT_STAGES;
        units.filled = tokens.filled + QUARTER_STAGES;
        units.used = tokens.used + QUARTER_STAGES;
        halfway = (unsigned long long *)(memory + AT_HALFWAY);
    }
    __device__ __forceinline__ void open() const {
        tokens.open();
        units.open();
        for (int group = 0; group < WARP_GROUPS; group++)
            open_arrivals(halfway + group, GROUP_WARPS);
    }
};

// Opens block `block` of the step for warp `warp`; false if there are none left.
DEVICE bool open_block(const LAUNCH &launch, unsigned tokens, unsigned block, unsigned warp,
                       GROUP_WORK &work, RESULT &result) {
    const unsigned of_rows = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    open_step(launch, tokens, work, result);
    result.first_token = work.first_token = block % of_rows * BLOCK_TOKENS;
    return open_rows(launch, block / of_rows, warp, work, result);
}

// Requests the weights of a unit, a tile a lane, and the sums and scales of its tokens.
DEVICE void supply_weights(const GROUP_WORK &work, const UNIT_RING &ring, unsigned unit,
                           unsigned step) {
    const unsigned lane = threadIdx.x % WARP_LANES, eights = work.eights();
    const size_t unit_eight = (size_t)work.first_token / 8 * work.units + (size_t)unit * eights;
    const unsigned sums = eights * HALF_EIGHT_SUMS, scales = eights * SCALES_BYTES;
    ring.await_use(step);
    COPY_BARRIER *filled = ring.barrier(step);
    unsigned char *to = ring.stage(step);
    if (lane == 0) announce(filled, work.own_tiles() * FORMAT::unit_bytes + sums + scales);
    __syncwarp();
    if (lane < SHARE_TILES && work.own)
        copy_to_stage(filled, to + lane * FORMAT::unit_bytes,
                      work.own + (size_t)unit * FORMAT::unit_bytes, FORMAT::unit_bytes);
    if (lane == WARP_LANES - 1)
        copy_to_stage(filled, to + AT_UNIT_SUMS, work.sums + unit_eight * HALF_EIGHT_SUMS, sums);
    if (lane == WARP_LANES - 2)
        copy_to_stage(filled, to + AT_UNIT_SCALES,
                      (const unsigned char *)work.scales + unit_eight * SCALES_BYTES, scales);
}

// Requests the four quarters of a unit of the tokens.
DEVICE void supply_tokens(const GROUP_WORK &work, const TOKEN_RING &ring, unsigned unit,
                          unsigned step) {
    const unsigned bytes = work.eights() * QUARTER_BYTES;
    const unsigned char *from = work.planes +
                                (size_t)work.first_token / 8 * work.units * EIGHT_BYTES +
                                (size_t)unit * QUARTERS * bytes;
    for (unsigned v = 0; v < QUARTERS; v++, from += bytes) {
        const unsigned number = QUARTERS * step + v;
        ring.await_use(number);
        announce(ring.barrier(number), bytes);
        copy_to_stage(ring.barrier(number), ring.stage(number), from, bytes);
    }
}

DEVICE void supply_blocks(const LAUNCH &launch, unsigned tokens, const RINGS &rings) {
    const unsigned lane = threadIdx.x % WARP_LANES;
    const bool of_weights = threadIdx.x < THREADS + WARP_LANES;
    if (!of_weights && lane > 0) return;
    GROUP_WORK work;
    RESULT result;
    unsigned step = 0;
    for (unsigned block = blockIdx.x;
         open_block(launch, tokens, block, lane % SHARE_TILES, work, result); block += gridDim.x)
        for (unsigned unit = 0; unit < work.units; unit++, step++) {
            if (of_weights)
                supply_weights(work, rings.units, unit, step);
            else
                supply_tokens(work, rings.tokens, unit, step);
        }
}

// The products of unit number `step`: `high` and `low` are the sums of both parts of codes times
// scales.
DEVICE void multiply_unit(const RINGS &rings, unsigned step, const unsigned char *unit,
                          unsigned group, int lane, float (&high)[VALUES],
                          float (&low)[VALUES]) {
    unsigned operand[2][2][4];  // of two products in turn, [high, low]
    UPPER_PLANES<FORMAT_ID> upper;
    upper.load(unit, lane);
    HALF_SCALES scales;
    scales.load(unit, lane);
    if (step + group > 0) await_arrivals(rings.halfway + 1 - group, step + group - 1);
#pragma unroll
    for (int v = 0; v < QUARTERS; v++) {
        const unsigned number = QUARTERS * step + v;
        rings.tokens.await(number);
        const U64 tokens =
            group_operand(rings.tokens.stage(number), HALF_STEP_BYTES / 2, QUARTER_BYTES);
        const uint4 codes = vector_at(unit + v * 512 + lane * 16);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int b = 2 * v + part / 2;
            const unsigned factor[2] = {scales.factor(0, b), scales.factor(1, b)};
            unsigned(&a)[2][4] = operand[part % 2];
            if (v > 0 || part > 1) await_operands<1>();
            if (v > 0 && part == 1) rings.tokens.end_use(number - 1);
            scaled_operands(codes, upper.bits, b, part % 2, factor, a[0], a[1]);
            const U64 columns = operand_behind(tokens, part * HALF_STEP_BYTES);
            begin_group_product();
            if (v + part == 0) {
                set_halves(high, a[0], columns);
                set_halves(low, a[1], columns);
            } else {
                add_halves(high, a[0], columns);
                add_halves(low, a[1], columns);
            }
            end_group_product();
        }
        if (v == 1 && lane == 0) arrive(rings.halfway + group);
    }
    await_operands<0>();
    rings.tokens.end_use(QUARTERS * step + QUARTERS - 1);
    take_sums(high);
    take_sums(low);
}

// Adds the values of unit number `step` of the block to those of the span.
DEVICE void add_unit(const RINGS &rings, unsigned step, unsigned tile, int lane,
                     float (&span)[VALUES]) {
    float high[VALUES], low[VALUES];
    rings.units.await(step);
    const unsigned char *stage = rings.units.stage(step), *unit = stage + tile * FORMAT::unit_bytes;
    multiply_unit(rings, step, unit, tile / GROUP_WARPS, lane, high, low);
    add_half_values(unit, stage + AT_UNIT_SUMS, stage + AT_UNIT_SCALES, lane, high, low, span);
    rings.units.end_use(step);
}

// Stores a block's sums.
DEVICE void end_block(const LAUNCH &launch, unsigned tokens, unsigned block, const float4 *totals) {
    GROUP_WORK work;
    RESULT result;
    const unsigned thread = threadIdx.x, warp = thread / WARP_LANES, group = warp / GROUP_WARPS;
    open_block(launch, tokens, block, warp, work, result);
    if (!PAIRED) {
        for (unsigned n = 0; n < EIGHTS; n++) result.store_four(n, totals[n * THREADS + thread]);
        return;
    }
    // The first two warps of a group have gates, the others what these multiply.
    group_barrier(1 + group);
    result.row = (work.first_tile + group * (GROUP_WARPS / 2) + warp % 2) * UNIT_ROWS;
    const float4 *gates = totals + group * GROUP_THREADS + thread % (GROUP_THREADS / 2);
    const unsigned first = warp % GROUP_WARPS / 2 * (EIGHTS / 2);
    for (unsigned n = first; n < first + EIGHTS / 2; n++) {
        const float4 gate = gates[n * THREADS], up = gates[n * THREADS + GROUP_THREADS / 2];
        result.store_four(n, {gated(result.activation, gate.x, up.x),
                              gated(result.activation, gate.y, up.y),
                              gated(result.activation, gate.z, up.z),
                              gated(result.activation, gate.w, up.w)});
    }
    group_barrier(1 + group);
}

DEVICE void multiply_blocks(const LAUNCH &launch, unsigned tokens, const RINGS &rings,
                            float4 *totals) {
    const unsigned tile = threadIdx.x / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned columns = packet_of(launch, PRODUCT)->size[MATMUL_COLUMNS];
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    GROUP_WORK work;
    RESULT result;
    float span[VALUES] = {};
    float4 *own = totals + threadIdx.x;
    unsigned step = 0;
    for (unsigned block = blockIdx.x; open_block(launch, tokens, block, tile, work, result);
         block += gridDim.x) {
        for (unsigned unit = 0; unit < units; unit++, step++) {
            add_unit(rings, step, tile, lane, span);
            if (unit % SPAN_UNITS != SPAN_UNITS - 1 && unit + 1 != units) continue;
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
                const float4 total = unit < SPAN_UNITS ? float4{} : own[n * THREADS];
                own[n * THREADS] = {total.x + span[4 * n], total.y + span[4 * n + 1],
                                    total.z + span[4 * n + 2], total.w + span[4 * n + 3]};
#pragma unroll
                for (int e = 0; e < 4; e++) span[4 * n + e] = 0.0f;
            }
        }
        end_block(launch, tokens, block, totals);
    }
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
    half_groups(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const unsigned tokens = count_of(launch, packet_of(launch, PRODUCT));
    const RINGS rings(shared);
    FOLLOWING_MAY_START;
    if (threadIdx.x == 0) rings.open();
    __syncthreads();
    PRECEDING_DONE;
    if (threadIdx.x >= THREADS) {
        give_registers<SUPPLY_REGISTERS>();
        if (threadIdx.x < THREADS + SUPPLY_WARPS * WARP_LANES) supply_blocks(launch, tokens, rings);
        return;
    }
    take_registers<USER_REGISTERS>();
    multiply_blocks(launch, tokens, rings, (float4 *)(shared + AT_SPANS));
}
