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
// If EXPERT_PAIRS is 1, tokens are pairs of a token and an expert: a block multiplies those of one
// chunk of expert_table.h by rows of the expert's matrices and stores row n of the result for pair
// n. Chunks of few pairs are multiplied by single warps. The table is at the word TABLE_AT of the
// workspace and has at most MAX_CHUNKS; unit_pack_fours.cu or expert_gather.cu have written x to
// the bytes PLANES_AT, SUMS_AT and SCALES_AT.
//
// Compiled with these operand numbers (see packets.h): M, SCALE, SUMS; of each of MATRICES W0 to
// W3, B0 to B3 (biases) and Y0 to Y3; RESIDUAL, -1 if absent. PRODUCT is the packet number of the
// first product, GATE that of the gated activation or -1.

#include "packets.h"
#include "group_blocks.h"
#include "group_rows.h"
#include "group_stages.h"
#include "group_sums.h"
#include "warp_sums.h"

// Most eights of tokens with EXPERT_PAIRS that single warps multiply.
#define WARP_EIGHTS 2

// Adds the values of a unit and of the first `N / 4` eights to those of the span by products of
// groups, with independent work in between.
template <int N, class WORK>
DEVICE void add_eights(const SCALES &scales, const unsigned char *unit, const unsigned char *stage,
                       int lane, float (&span)[VALUES], const WORK &meanwhile) {
    int j[N] = {}, p[N] = {};
    const unsigned char *sums = stage + AT_TOKEN_SUMS, *of_tokens = stage + AT_SCALES;
    sum_by_groups<FORMAT_ID, AHEAD(N)>(scales, unit, stage, sums, lane, j, p, meanwhile);
    if (all_summed<FORMAT_ID, AHEAD(N)>)
        add_values(scales, of_tokens, lane, j, p, span);
    else
        add_values(scales, sums, of_tokens, lane, j, span);
}

// The same of a block's tokens, or the first `eights` of those with EXPERT_PAIRS.
template <class WORK = NOTHING>
DEVICE void add_unit(const unsigned char *stage, unsigned tile, int lane, float (&span)[VALUES],
                     const WORK &meanwhile = WORK(), unsigned eights = EIGHTS) {
    const unsigned char *unit = stage + AT_UNITS + tile * FORMAT::unit_bytes;
    SCALES scales;
    scales.load(unit, lane);
    if (WARP_PRODUCTS || (EXPERT_PAIRS && eights <= WARP_EIGHTS)) {
        meanwhile();
        int j[VALUES] = {};
        sum_by_warps<FORMAT_ID>(scales, unit, stage, lane, j, eights);
        add_values(scales, stage + AT_TOKEN_SUMS, stage + AT_SCALES, lane, j, span);
        return;
    }
    if constexpr (EXPERT_PAIRS) {
        if (eights <= EIGHTS / 2) {
            add_eights<VALUES / 2>(scales, unit, stage, lane, span, meanwhile);
            return;
        }
        if (eights <= EIGHTS * 3 / 4) {
            add_eights<VALUES * 3 / 4>(scales, unit, stage, lane, span, meanwhile);
            return;
        }
    }
    add_eights<VALUES>(scales, unit, stage, lane, span, meanwhile);
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

// With EXPERT_PAIRS the loop over units needs the registers that these would take.
#if EXPERT_PAIRS
#define ONCE APART
#else
#define ONCE DEVICE
#endif

// Stores a block's sums.
ONCE void end_block(const LAUNCH &launch, U64 workspace, unsigned tokens, unsigned block,
                      const float *totals, const unsigned *pairs) {
    GROUP_WORK work;
    RESULT result;
    open_end(launch, workspace, tokens, block, pairs, work, result);
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

// A lane's requests for block `block`, which has so many eights of tokens; 0 if there is none.
ONCE unsigned open_copy(const LAUNCH &launch, U64 workspace, unsigned tokens, unsigned block,
                          LANE_COPY &copy, unsigned *pairs) {
    GROUP_WORK work;
    RESULT result;
    if (!open_block(launch, workspace, tokens, block, work, result)) return 0;
    copy.open(work, threadIdx.x / WARP_LANES);
    keep_pairs(launch, workspace, block, pairs);
    return work.eights();
}

// Blocks of the step, one after the other: units of the next block are loaded while one ends.
DEVICE void multiply_blocks(const LAUNCH &launch, U64 workspace, unsigned tokens,
                            unsigned char *memory) {
    const unsigned warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned columns = packet_of(launch, PRODUCT)->size[MATMUL_COLUMNS];
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    // The number of units that are requested ahead.
    const unsigned ahead = min(units, (unsigned)STAGES - 1);
    const STAGE_RING ring = {memory, (COPY_BARRIER *)(memory + AT_BARRIERS)};
    float *totals = (float *)(memory + AT_TOTALS);
    unsigned *pairs = (unsigned *)(memory + AT_PAIRS);
    unsigned turn = 0;
    LANE_COPY copy;
    unsigned next = open_copy(launch, workspace, tokens, blockIdx.x, copy, pairs);
    begin_units(copy, ring, ahead);
    float span[VALUES] = {};
    unsigned step = 0;
    for (unsigned block = blockIdx.x, eights = next; eights; block += gridDim.x, eights = next) {
        for (unsigned unit = 0; unit < units; unit++, step++) {
            ring.await(step);
            __syncthreads();
            if (unit + ahead == units) {
                LANE_COPY other = {};
                next = open_copy(launch, workspace, tokens, block + gridDim.x, other,
                                 pairs + (1 - turn) * BLOCK_PAIRS_WORDS);
                copy = other;
            }
            add_unit(ring.stage(step), warp, lane, span, [&]() {
                if (next) copy.fetch(ring, step + ahead);
                __syncwarp();
            }, EXPERT_PAIRS ? eights : EIGHTS);
            if (unit % SPAN_UNITS == SPAN_UNITS - 1 || unit + 1 == units)
                end_span(RESULT{}, unit / SPAN_UNITS, totals + threadIdx.x, span);
        }
        end_block(launch, workspace, tokens, block, totals, pairs + turn * BLOCK_PAIRS_WORDS);
        turn = 1 - turn;
    }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    unit_groups(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    GROUP_WORK work;
    RESULT result;
    if (!FOLLOWED) FOLLOWING_MAY_START;
#if EXPERT_PAIRS
    PRECEDING_DONE;
    const unsigned tokens = EXPERT_TABLE{(const unsigned *)workspace + TABLE_AT, 0}.chunks();
#else
    const unsigned tokens = count_of(launch, packet_of(launch, PRODUCT));
#endif
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
    const bool any = open_block(launch, workspace, tokens, blockIdx.x, work, result);
    if (any) multiply_blocks(launch, workspace, tokens, shared);
#endif
    if (BESIDE || !any) PRECEDING_DONE;
    meet_others(launch);
}
