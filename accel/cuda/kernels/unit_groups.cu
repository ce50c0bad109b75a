// y = x weight^T for many tokens and one to four matrices of one format by products of warp groups
// (sm_90a). A group computes 64 rows, each of its warps one tile of 16, with BLOCK_TOKENS tokens in
// shared memory. x is the result of unit_pack.cu, in groups of eight tokens (rules R2, R3 and R5).
//
// If PARTS is not 1, that many blocks share rows and compute whole spans of the columns each. The
// values of spans are written to the workspace, for unit_pack.cu or head_rows.cu to fold with what
// follows the product: all spans of a matrix come after those of the matrix before it and after
// those of the ROWS_IN_FRONT rows of other launches.
//
// The tiles of all matrices are numbered consecutively, so a block may have tiles of two matrices.
// If SPLIT is 0, the WARP_GROUPS of a block have rows of their own and share the tokens. If it is
// 1, they share 64 rows and compute spans of the columns in turn, which are folded in order. If
// there is a GATE, two warps of a group compute rows of the first matrix and two the same rows of
// the second, and y is the gated activation of both. If FOLLOWED, the next launch reads the same
// tokens and runs BESIDE this one, on multiprocessors that this one leaves idle: it may begin when
// the data that both read is complete, and ends after this one. FORMAT_ID is Q4_K, Q5_K or Q6_K; a
// share has STAGES units in shared memory. If WARP_PRODUCTS, each warp multiplies by itself, since
// with 16 tokens a product of a group takes as long as with 64.
//
// Compiled with these operand numbers (see packets.h): M, SCALE, SUMS; of each of MATRICES W0 to
// W3, B0 to B3 (biases) and Y0 to Y3; RESIDUAL, -1 if absent. PRODUCT is the packet number of the
// first product, GATE that of the gated activation or -1.

#include "packets.h"
#include "group_rows.h"
#include "group_stages.h"
#include "group_sums.h"
#include "warp_sums.h"

// Adds the values of a unit to those of the span, with independent work in between.
template <class WORK = NOTHING>
DEVICE void add_unit(const unsigned char *stage, unsigned tile, int lane, float (&span)[VALUES],
                     const WORK &meanwhile = WORK()) {
    const unsigned char *unit = stage + AT_UNITS + tile * FORMAT::unit_bytes;
    SCALES scales;
    scales.load(unit, lane);
    int j[VALUES] = {}, p[VALUES] = {};
    const unsigned char *sums = stage + AT_TOKEN_SUMS, *of_tokens = stage + AT_SCALES;
    if (WARP_PRODUCTS) {
        meanwhile();
        sum_by_warps<FORMAT_ID>(scales, unit, stage, lane, j);
    } else {
        sum_by_groups<FORMAT_ID, AHEAD>(scales, unit, stage, sums, lane, j, p, meanwhile);
    }
    if (!WARP_PRODUCTS && all_summed<FORMAT_ID, AHEAD>)
        add_values(scales, of_tokens, lane, j, p, span);
    else
        add_values(scales, sums, of_tokens, lane, j, span);
}

// The units of a share, in order: steps_of() of them, of which step n is unit_of(n).
DEVICE unsigned unit_of(const GROUP_WORK &work, unsigned group, unsigned step) {
    if (!SPLIT) return work.first_unit + step;
    return work.first_unit + (step / SPAN_UNITS * WARP_GROUPS + group) * SPAN_UNITS +
           step % SPAN_UNITS;
}

DEVICE unsigned steps_of(const GROUP_WORK &work, unsigned group) {
    const unsigned units = work.end_unit - work.first_unit;
    if (!SPLIT) return units;
    const unsigned round = WARP_GROUPS * SPAN_UNITS, rest = units % round;
    const unsigned first = group * SPAN_UNITS, own = rest > first ? rest - first : 0;
    return units / round * SPAN_UNITS + min(own, (unsigned)SPAN_UNITS);
}

// Requests the first `ahead` units, weights first, since those may be read while the previous
// kernels still run.
DEVICE void begin_units(LANE_COPY &copy, const STAGE_RING &ring, unsigned ahead) {
    if (threadIdx.x == 0) open_stages(ring.barriers, STAGES);
    __syncthreads();
    if (copy.of_weights())
        for (unsigned step = 0; step < ahead; step++) copy.fetch(ring, step);
    if (!BESIDE) PRECEDING_DONE;
    if (FOLLOWED) FOLLOWING_MAY_START;
    if (!copy.of_weights())
        for (unsigned step = 0; step < ahead; step++) copy.fetch(ring, step);
    __syncwarp();
}

// The same of a share where groups are split, all stages.
DEVICE void begin_rows(const GROUP_WORK &work, const STAGE_RING &ring, unsigned group,
                       unsigned steps) {
    const unsigned warp = threadIdx.x / WARP_LANES % SHARE_TILES;
    if (threadIdx.x % (SHARE_TILES * WARP_LANES) == 0) open_stages(ring.barriers, STAGES);
    __syncthreads();
    const bool first = threadIdx.x % WARP_LANES == 0;
    for (unsigned step = 0; first && step < min(steps, (unsigned)STAGES); step++)
        ring.fetch_weights(work, step, unit_of(work, group, step), warp);
    if (!BESIDE) PRECEDING_DONE;
    if (FOLLOWED) FOLLOWING_MAY_START;
    for (unsigned step = 0; first && step < min(steps, (unsigned)STAGES); step++)
        ring.fetch_tokens(work, step, unit_of(work, group, step), warp);
    __syncwarp();
}

// For all threads that read the same stages.
DEVICE void share_barrier(unsigned group) {
    if (SPLIT)
        group_barrier(1 + group);
    else
        __syncthreads();
}

// Uses the values of a span and resets them to zeros: a block that has all spans of its rows adds
// them up, in order.
DEVICE void end_span(const RESULT &result, unsigned span, float *totals,
                     float (&values)[VALUES]) {
    if (PARTS > 1) result.store_span(span, values);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        if (PARTS == 1)
            totals[i * THREADS] = (span ? totals[i * THREADS] : 0.0f) + values[i];
        values[i] = 0.0f;
    }
}

#if PARTS > 1

// Units of a share, one after the other; `more(step)` requests what follows a step.
template <class MORE>
DEVICE void pass_units(const GROUP_WORK &work, const RESULT &result, const STAGE_RING &ring,
                       unsigned steps, const MORE &more) {
    const unsigned group = SPLIT ? threadIdx.x / GROUP_THREADS : 0;
    const unsigned tile = threadIdx.x / WARP_LANES % SHARE_TILES;
    const int lane = threadIdx.x % WARP_LANES;
    float span[VALUES] = {};
    for (unsigned step = 0; step < steps; step++) {
        ring.await(step);
        share_barrier(group);
        const unsigned unit = unit_of(work, group, step);
        add_unit(ring.stage(step), tile, lane, span, [&]() {
            const unsigned next = step + STAGES - 1;
            if (next < steps && next >= STAGES) more(next);
            __syncwarp();
        });
        if (unit % SPAN_UNITS == SPAN_UNITS - 1 || unit + 1 == work.units)
            end_span(result, unit / SPAN_UNITS, 0, span);
    }
}

// Blocks that share rows write the values of every span for unit_pack.cu to fold.
#if SPLIT
DEVICE void multiply_rows(const GROUP_WORK &work, const RESULT &result, unsigned char *memory) {
    const unsigned group = threadIdx.x / GROUP_THREADS;
    const unsigned warp = threadIdx.x / WARP_LANES % SHARE_TILES, steps = steps_of(work, group);
    const STAGE_RING ring = {memory + group * STAGES * STAGE_BYTES,
                             (COPY_BARRIER *)(memory + AT_BARRIERS) + group * STAGES};
    begin_rows(work, ring, group, steps);
    pass_units(work, result, ring, steps, [&](unsigned next) {
        ring.fetch(work, next, unit_of(work, group, next), warp);
    });
}
#else
DEVICE void multiply_rows(const GROUP_WORK &work, const RESULT &result, unsigned char *memory) {
    const unsigned steps = steps_of(work, 0), ahead = min(steps, (unsigned)STAGES);
    const STAGE_RING ring = {memory, (COPY_BARRIER *)(memory + AT_BARRIERS)};
    LANE_COPY copy;
    copy.open(work, threadIdx.x / WARP_LANES);
    copy.from += (size_t)work.first_unit * copy.bytes;
    begin_units(copy, ring, ahead);
    pass_units(work, result, ring, steps, [&](unsigned next) { copy.fetch(ring, next); });
}
#endif

#elif SPLIT

// A span's values replace its last unit's tokens; data that is being copied goes to another
// address.
DEVICE void multiply_rows(const GROUP_WORK &work, const RESULT &result, unsigned char *memory) {
    const unsigned group = threadIdx.x / GROUP_THREADS, thread = threadIdx.x % GROUP_THREADS;
    const int lane = threadIdx.x % WARP_LANES, warp = thread / WARP_LANES;
    const unsigned steps = steps_of(work, group);
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
            if (next < steps && next >= STAGES)
                ring.fetch(work, next, unit_of(work, group, next), warp);
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
                min(steps_of(work, of), (first / WARP_GROUPS + 1) * SPAN_UNITS);
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
    if (!PAIRED) {
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            if (i / EIGHTS == group) result.store(result.row, i, total[i % EIGHTS]);
        return;
    }
    float *totals = (float *)memory;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++)
        totals[(group * EIGHTS + i) * GROUP_THREADS + thread] = total[i];
    __syncthreads();
    result.store_gated(work.first_tile * UNIT_ROWS, totals, GROUP_THREADS, group * EIGHTS, EIGHTS);
}

#else

// Opens block `block` of the step. Blocks of the same rows, each with other tokens, follow each
// other, so that several multiprocessors read the same weights. False if there are none left.
DEVICE bool open_block(const LAUNCH &launch, unsigned tokens, unsigned block, GROUP_WORK &work,
                       RESULT &result) {
    const unsigned of_rows = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    open_step(launch, tokens, work, result);
    result.first_token = work.first_token = block % of_rows * BLOCK_TOKENS;
    return open_rows(launch, block / of_rows, threadIdx.x / WARP_LANES % SHARE_TILES, work, result);
}

// Stores a block's sums.
DEVICE void end_block(const LAUNCH &launch, unsigned tokens, unsigned block, const float *totals) {
    GROUP_WORK work;
    RESULT result;
    open_block(launch, tokens, block, work, result);
    const unsigned thread = threadIdx.x, group = thread / GROUP_THREADS;
    if (!PAIRED) {
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            result.store(result.row, i, totals[i * THREADS + thread]);
        return;
    }
    group_barrier(1 + group);
    result.store_gated((work.first_tile + group * (GROUP_WARPS / 2)) * UNIT_ROWS,
                       totals + group * GROUP_THREADS, THREADS, 0, VALUES);
}

// A lane's requests for block `block`; false if there is none.
DEVICE bool open_copy(const LAUNCH &launch, unsigned tokens, unsigned block, LANE_COPY &copy) {
    GROUP_WORK work;
    RESULT result;
    const bool exists = open_block(launch, tokens, block, work, result);
    if (exists) copy.open(work, threadIdx.x / WARP_LANES);
    return exists;
}

// Blocks of the step, one after the other: units of the next block are loaded while one ends.
DEVICE void multiply_blocks(const LAUNCH &launch, unsigned tokens, unsigned char *memory) {
    const unsigned warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned columns = packet_of(launch, PRODUCT)->size[MATMUL_COLUMNS];
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    // The number of units that are requested ahead.
    const unsigned ahead = min(units, (unsigned)STAGES - 1);
    const STAGE_RING ring = {memory, (COPY_BARRIER *)(memory + AT_BARRIERS)};
    float *totals = (float *)(memory + AT_TOTALS);
    LANE_COPY copy;
    bool left = open_copy(launch, tokens, blockIdx.x, copy);
    begin_units(copy, ring, ahead);
    float span[VALUES] = {};
    unsigned step = 0;
    for (unsigned block = blockIdx.x; left; block += gridDim.x) {
        for (unsigned unit = 0; unit < units; unit++, step++) {
            ring.await(step);
            __syncthreads();
            if (unit + ahead == units) left = open_copy(launch, tokens, block + gridDim.x, copy);
            add_unit(ring.stage(step), warp, lane, span, [&]() {
                if (left) copy.fetch(ring, step + ahead);
                __syncwarp();
            });
            if (unit % SPAN_UNITS == SPAN_UNITS - 1 || unit + 1 == units)
                end_span(RESULT{}, unit / SPAN_UNITS, totals + threadIdx.x, span);
        }
        end_block(launch, tokens, block, totals);
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    unit_groups(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const unsigned tokens = count_of(launch, packet_of(launch, PRODUCT));
    GROUP_WORK work;
    RESULT result;
    if (!FOLLOWED) FOLLOWING_MAY_START;
#if SPLIT || PARTS > 1
    open_step(launch, tokens, work, result);
    result.first_token = work.first_token = blockIdx.y / PARTS * BLOCK_TOKENS;
    const unsigned spans = (work.units + SPAN_UNITS - 1) / SPAN_UNITS, part = blockIdx.y % PARTS;
    work.first_unit = spans * part / PARTS * SPAN_UNITS;
    work.end_unit = min(spans * (part + 1) / PARTS * SPAN_UNITS, work.units);
    open_rows(launch, blockIdx.x, threadIdx.x / WARP_LANES % SHARE_TILES, work, result);
    if (PARTS > 1)
        result.y = (float *)workspace + (size_t)result.rows_in_front * spans * tokens;
    const bool any = work.first_token < tokens;
    if (any) multiply_rows(work, result, shared);
#else
    const bool any = open_block(launch, tokens, blockIdx.x, work, result);
    if (any) multiply_blocks(launch, tokens, shared);
#endif
    if (BESIDE || !any) PRECEDING_DONE;
}
