// y = x weight^T for a few tokens and one to four matrices that share x. Warps compute
// independently of each other: an item is a tile of 16 rows and a span of the columns, and the
// warps of a block take the items of its tiles in turn. x is the result of unit_pack.cu, in groups
// of eight tokens (rules R2, R3 and R5). A block has all of x in shared memory, so that only
// weights are loaded repeatedly. Weights come through a ring for each warp, which is filled before
// the previous kernel has ended. The values of spans are collected in shared memory; all warps that
// computed some of a tile fold a share of them in order, and compute what follows the product.
//
// If PARTS is not 1, that many blocks share rows and compute whole spans of the columns each; their
// values are written to the workspace, for unit_pack.cu or head_rows.cu to fold.
//
// FIRST and SECOND are formats among Q4_K, Q5_K and Q6_K; NUMBERS has four bits for every matrix, 1
// for a matrix of the second format. A block has WARPS warps, a warp SLOTS units being copied, and
// EIGHTS groups of eight tokens at most; the values of TILE_SLOTS tiles, a power of two, may wait
// to be folded.
//
// Compiled with these operand numbers (see packets.h): M, SCALE, SUMS; of each of MATRICES W0 to
// W3, B0 to B3 (biases) and Y0 to Y3; RESIDUAL, -1 if absent. PRODUCT is the packet number of the
// first product, GATE that of the gated activation of a pair or -1.

#include "packets.h"
#include "gate.h"
#include "groups.h"
#include "warp_sums.h"

#define PAIRED (GATE >= 0)
#define VALUES (4 * EIGHTS)  // of a lane
#define PIECE_VALUES (VALUES * WARP_LANES)
#define EIGHT_SCALES_BYTES (8 * 4)
#define PLANES_BYTES (EIGHTS * EIGHT_BYTES)  // of a unit, as the following
#define SUMS_BYTES (EIGHTS * EIGHT_SUMS_BYTES)
#define SCALES_BYTES (EIGHTS * EIGHT_SCALES_BYTES)
#define FIRST_BYTES UNIT_FORMAT<FIRST>::unit_bytes
#define SECOND_BYTES UNIT_FORMAT<SECOND>::unit_bytes
#define SLOT_BYTES (FIRST_BYTES > SECOND_BYTES ? FIRST_BYTES : SECOND_BYTES)

struct MATRIX {
    const unsigned char *units;
    float *y;
    const float *bias;
    size_t stride;
    unsigned rows, tiles, rows_in_front;
};

// The work of a block: of the `tiles` of all matrices, or of one of a pair, every gridDim.x-th; of
// each tile the spans of units `first_unit` to `end_unit` - 1. WARPS items later means `jump` of
// its tiles and `rest` items.
struct WORK {
    MATRIX matrix[MATRICES];
    unsigned units, first_unit, end_unit, spans, items, tiles, jump, rest;

    __device__ __forceinline__ void prepare(unsigned columns, unsigned part) {
        units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
        const unsigned all = (units + SPAN_UNITS - 1) / SPAN_UNITS;
        const unsigned first = all * part / PARTS, end = all * (part + 1) / PARTS;
        first_unit = first * SPAN_UNITS, end_unit = min(end * SPAN_UNITS, units);
        spans = end - first, items = PAIRED ? 2 * spans : spans;
        jump = WARPS / items, rest = WARPS % items;
        tiles = matrix[0].tiles, matrix[0].rows_in_front = 0;
#pragma unroll
        for (int i = 1; i < MATRICES; i++) {
            matrix[i].rows_in_front = matrix[i - 1].rows_in_front + matrix[i - 1].rows;
            if (!PAIRED) tiles += matrix[i].tiles;
        }
    }
    __device__ __forceinline__ bool is_second(unsigned number) const {
        return FIRST != SECOND && NUMBERS >> 4 * number & 1;
    }
    __device__ __forceinline__ MATRIX of(unsigned number) const {
        MATRIX found = matrix[0];
#pragma unroll
        for (int i = 1; i < MATRICES; i++)
            if (number == i) found = matrix[i];
        return found;
    }
};

// A position in a block's work: item `number` of its tile `local`, which is tile `tile` of all.
struct PIECE {
    unsigned tile, local, number, matrix, in_matrix, first_unit, units;

    __device__ __forceinline__ void begin(const WORK &work, unsigned warp) {
        local = warp / work.items, number = warp % work.items;
        tile = blockIdx.x + local * gridDim.x;
        settle(work);
    }
    __device__ __forceinline__ void settle(const WORK &work) {
        matrix = 0, in_matrix = tile;
        unsigned span = number;
        if (PAIRED) {
            if (span >= work.spans) matrix = 1, span -= work.spans;
        } else {
#pragma unroll
            for (int i = 0; i + 1 < MATRICES; i++)
                if (matrix == i && in_matrix >= work.matrix[i].tiles)
                    in_matrix -= work.matrix[i].tiles, matrix++;
        }
        first_unit = work.first_unit + span * SPAN_UNITS;
        units = min((unsigned)SPAN_UNITS, work.end_unit - first_unit);
    }
    __device__ __forceinline__ void next(const WORK &work) {
        number += work.rest, local += work.jump, tile += work.jump * gridDim.x;
        if (number >= work.items) number -= work.items, local++, tile += gridDim.x;
        settle(work);
    }
};

// Shared memory of a block, in this order.
struct SPAN_MEMORY {
    unsigned char *planes, *sums, *scales, *ring;
    float *values;
    COPY_BARRIER *barriers, *tokens;
    unsigned *arrived, *folded;

    __device__ __forceinline__ SPAN_MEMORY(unsigned char *memory, unsigned units, unsigned spans,
                                           unsigned items) {
        planes = memory;
        sums = planes + units * PLANES_BYTES;
        scales = sums + units * SUMS_BYTES;
        ring = scales + units * SCALES_BYTES;
        values = (float *)(ring + WARPS * SLOTS * SLOT_BYTES);
        barriers = (COPY_BARRIER *)(values + (PARTS > 1 ? 0 : TILE_SLOTS * items * PIECE_VALUES));
        tokens = barriers + WARPS * SLOTS;
        arrived = (unsigned *)(tokens + spans);
        folded = arrived + TILE_SLOTS;
    }
    __device__ __forceinline__ float *values_of(unsigned local, unsigned items) const {
        return values + local % TILE_SLOTS * items * PIECE_VALUES;
    }
};

// One warp's units; `fetched` and `unit` run ahead of the computation.
struct RING {
    PIECE fetched;
    unsigned unit, filled, taken;

    __device__ __forceinline__ void begin(const WORK &work, const SPAN_MEMORY &memory, unsigned warp) {
        unit = filled = taken = 0;
        open_copies(memory.barriers + warp * SLOTS, SLOTS);
        fetched.begin(work, warp);
        for (int i = 0; i < SLOTS; i++) fetch(work, memory, warp);
    }
    __device__ __forceinline__ void fetch(const WORK &work, const SPAN_MEMORY &memory, unsigned warp) {
        if (fetched.tile >= work.tiles) return;
        const unsigned bytes = work.is_second(fetched.matrix) ? SECOND_BYTES : FIRST_BYTES;
        const size_t at = (size_t)fetched.in_matrix * work.units + fetched.first_unit + unit;
        const unsigned slot = warp * SLOTS + filled % SLOTS;
        begin_copy(memory.barriers + slot, memory.ring + slot * SLOT_BYTES,
                   work.of(fetched.matrix).units + at * bytes, bytes);
        filled++;
        if (++unit == fetched.units) unit = 0, fetched.next(work);
    }
    __device__ __forceinline__ const unsigned char *await(const SPAN_MEMORY &memory, unsigned warp) {
        const unsigned slot = warp * SLOTS + taken % SLOTS;
        await_copy<SLOTS>(memory.barriers + slot, taken / SLOTS);
        taken++;
        return memory.ring + slot * SLOT_BYTES;
    }
};

struct TOKENS {
    const unsigned char *planes, *sums, *scales;
    unsigned count;
};

// Copies the block's part of the tokens, span after span, each with its own barrier, so that a warp
// with a unit of the first span need not wait for the last. One warp announces the bytes; each warp
// requests some units of some groups of eight tokens.
DEVICE void fetch_tokens(const WORK &work, const TOKENS &x, const SPAN_MEMORY &memory,
                         unsigned warp) {
    const unsigned eights = min((x.count + 7) / 8, (unsigned)EIGHTS);
    const unsigned units = work.end_unit - work.first_unit;
    if (threadIdx.x % WARP_LANES == 0) {
        for (unsigned span = 0; warp == 0 && span < work.spans; span++)
            announce(memory.tokens + span,
                     eights * min(units - span * SPAN_UNITS, (unsigned)SPAN_UNITS) *
                         (EIGHT_BYTES + EIGHT_SUMS_BYTES + EIGHT_SCALES_BYTES));
        for (unsigned i = warp; i < eights * units; i += WARPS) {
            const unsigned unit = i / eights, eight = i - unit * eights;
            COPY_BARRIER *barrier = memory.tokens + unit / SPAN_UNITS;
            const size_t unit_eight = (size_t)eight * work.units + work.first_unit + unit;
            copy_to_stage(barrier, memory.planes + unit * PLANES_BYTES + eight * EIGHT_BYTES,
                          x.planes + unit_eight * EIGHT_BYTES, EIGHT_BYTES);
            copy_to_stage(barrier, memory.sums + unit * SUMS_BYTES + eight * EIGHT_SUMS_BYTES,
                          x.sums + unit_eight * EIGHT_SUMS_BYTES, EIGHT_SUMS_BYTES);
            copy_to_stage(barrier,
                          memory.scales + unit * SCALES_BYTES + eight * EIGHT_SCALES_BYTES,
                          x.scales + unit_eight * EIGHT_SCALES_BYTES, EIGHT_SCALES_BYTES);
        }
    }
    __syncwarp();
}

template <int dtype>
DEVICE void add_unit(const unsigned char *weights, const SPAN_MEMORY &memory, unsigned unit, int lane,
                     float (&span)[VALUES]) {
    UNIT_SCALES<dtype> scales;
    scales.load(weights, lane);
    int j[VALUES] = {};
    sum_by_warps<dtype>(scales, weights, memory.planes + unit * PLANES_BYTES, lane, j);
    add_values(scales, memory.sums + unit * SUMS_BYTES, memory.scales + unit * SCALES_BYTES, lane, j,
               span);
}

// Values of an item, whose units are consecutive.
template <int dtype>
DEVICE void pass_span(const WORK &work, const PIECE &item, const SPAN_MEMORY &memory, RING &ring,
                      unsigned warp, int lane, float (&span)[VALUES]) {
    const unsigned first = item.first_unit - work.first_unit;
    await_stage(memory.tokens + first / SPAN_UNITS, 0);
#pragma unroll 1
    for (unsigned n = 0; n < item.units; n++) {
        const unsigned char *weights = ring.await(memory, warp);
        add_unit<dtype>(weights, memory, first + n, lane, span);
        __syncwarp();
        ring.fetch(work, memory, warp);
    }
}

struct END {
    const float *residual;
    size_t residual_stride;
    uint activation;
    unsigned tokens;
};

// Row and token of value i of a lane, of tile `tile`.
DEVICE unsigned row_of(unsigned tile, unsigned i, int lane) {
    return tile * UNIT_ROWS + lane / 4 + 8 * (i / 2 % 2);
}
DEVICE unsigned token_of(unsigned i, int lane) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

DEVICE unsigned now_at(const unsigned *address) { return *(const volatile unsigned *)address; }

// The left fold of spans, whose values are PIECE_VALUES apart.
DEVICE float folded_spans(const float *values, unsigned spans) {
    float total = 0.0f;
#pragma unroll 4
    for (unsigned span = 0; span < spans; span++) total = total + values[span * PIECE_VALUES];
    return total;
}

// The operand that is added to value i of a lane, if there is such a value and such an operand.
DEVICE float residual_of(const PIECE &item, unsigned rows, const END &end, unsigned i, int lane) {
    const unsigned row = row_of(item.in_matrix, i, lane);
    const size_t token = token_of(i, lane);
    const bool exists = end.residual && i < VALUES && row < rows && token < end.tokens;
    return exists ? end.residual[token * end.residual_stride + row] : 0.0f;
}

// One of as many shares as a tile has items: values of a lane from `number` on at that distance.
// Returns when all values of the tile have arrived and this share is stored.
DEVICE void end_share(const WORK &work, const PIECE &item, unsigned number, const SPAN_MEMORY &memory,
                      const END &end, int lane) {
    const MATRIX matrix = work.of(PAIRED ? 0 : item.matrix);
    const float *values = memory.values_of(item.local, work.items) + lane;
    float residual = residual_of(item, matrix.rows, end, number, lane);
    float next = residual_of(item, matrix.rows, end, number + work.items, lane);
    const unsigned slot = item.local % TILE_SLOTS;
    while (now_at(memory.arrived + slot) != (item.local / TILE_SLOTS + 1) * work.items) spin_pause();
    block_fence();
    __syncwarp();
    // A loop, for the text is long.
#pragma unroll 1
    for (unsigned i = number; i < VALUES; i += work.items) {
        const float *own = values + i * WARP_LANES;
        float value = folded_spans(own, work.spans);
        if (PAIRED)
            value = gated(end.activation, value,
                          folded_spans(own + work.spans * PIECE_VALUES, work.spans));
        const unsigned row = row_of(item.in_matrix, i, lane);
        const size_t token = token_of(i, lane);
        if (row < matrix.rows && token < end.tokens) {
            if (matrix.bias) value = value + matrix.bias[row];
            if (end.residual) value = residual + value;
            matrix.y[token * matrix.stride + row] = value;
        }
        residual = next;
        next = residual_of(item, matrix.rows, end, i + 2 * work.items, lane);
    }
    block_fence();
    __syncwarp();
    if (lane == 0) atomicAdd(memory.folded + slot, 1u);
}

// The shares of a warp in a tile of which `first` was its first item. Each warp that computed
// values of a tile ends a share of it for each item after its products for the next item, when the
// values of the others have arrived.
DEVICE void end_tile(const WORK &work, const PIECE &first, const SPAN_MEMORY &memory, const END &end,
                     int lane) {
#pragma unroll 1
    for (unsigned number = first.number; number < work.items; number += WARPS)
        end_share(work, first, number, memory, end, lane);
}

// Writes an item's values for all warps that computed some of the same tile.
DEVICE void leave_item(const WORK &work, const PIECE &item, const SPAN_MEMORY &memory, int lane,
                       const float (&span)[VALUES]) {
    const unsigned slot = item.local % TILE_SLOTS;
    while (now_at(memory.folded + slot) != item.local / TILE_SLOTS * work.items) spin_pause();
    __syncwarp();
    float *own = memory.values_of(item.local, work.items) + item.number * PIECE_VALUES + lane;
#pragma unroll
    for (int i = 0; i < VALUES; i++) own[i * WARP_LANES] = span[i];
    block_fence();
    __syncwarp();
    if (lane == 0) atomicAdd(memory.arrived + slot, 1u);
}

// Writes the values for another kernel to fold: all rows of a token together, all tokens of a span,
// all spans of a matrix.
DEVICE void leave_span(const WORK &work, const PIECE &item, unsigned tokens, float *spans, int lane,
                       const float (&span)[VALUES]) {
    const MATRIX matrix = work.of(item.matrix);
    const unsigned row = row_of(item.in_matrix, 0, lane), token = token_of(0, lane);
    const unsigned all = (work.units + SPAN_UNITS - 1) / SPAN_UNITS;
    float *own = spans + (size_t)matrix.rows_in_front * all * tokens +
                 ((size_t)(item.first_unit / SPAN_UNITS) * tokens + token) * matrix.rows + row;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        const unsigned behind = token_of(i, 0), below = row_of(0, i, 0);
        if (row + below < matrix.rows && token + behind < tokens)
            own[(size_t)behind * matrix.rows + below] = span[i];
    }
}

DEVICE void open_matrix(const LAUNCH &launch, int w, int b, int y, MATRIX &matrix) {
    matrix.rows = packet_of(launch, w / 16)->size[MATMUL_ROWS];
    matrix.tiles = (matrix.rows + UNIT_ROWS - 1) / UNIT_ROWS;
    matrix.units = operand_at(launch, w);
    matrix.y = (float *)operand_at(launch, y);
    matrix.bias = (const float *)operand_at(launch, b);
    matrix.stride = stride_at(launch, y);
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, 1)
    unit_spans(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const unsigned warp = threadIdx.x / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES;
    FOLLOWING_MAY_START;
    const PACKET *product = packet_of(launch, PRODUCT);
    WORK work;
    open_matrix(launch, W0, B0, Y0, work.matrix[0]);
#if MATRICES > 1
    open_matrix(launch, W1, B1, Y1, work.matrix[1]);
#endif
#if MATRICES > 2
    open_matrix(launch, W2, B2, Y2, work.matrix[2]);
#endif
#if MATRICES > 3
    open_matrix(launch, W3, B3, Y3, work.matrix[3]);
#endif
    work.prepare(product->size[MATMUL_COLUMNS], blockIdx.y);
    const SPAN_MEMORY memory(shared, work.end_unit - work.first_unit, work.spans, work.items);
    if (threadIdx.x == 0) open_stages(memory.tokens, work.spans);
    if (threadIdx.x < 2 * TILE_SLOTS) memory.arrived[threadIdx.x] = 0;
    RING ring;
    ring.begin(work, memory, warp);
    const TOKENS x = {operand_at(launch, M), operand_at(launch, SUMS), operand_at(launch, SCALE),
                      count_of(launch, product)};
    const END end = {(const float *)operand_at(launch, RESIDUAL), stride_at(launch, RESIDUAL),
                     PAIRED ? packet_of(launch, GATE)->size[SWIGLU_ACTIVATION] : 0, x.count};
    __syncthreads();
    PRECEDING_DONE;
    fetch_tokens(work, x, memory, warp);
    // If there is room for the values of all tiles in progress, shares wait for the values of other
    // warps until after the products of the next item.
    const bool behind = TILE_SLOTS * work.items >= WARPS;
    PIECE item, ended;
    item.begin(work, warp), ended.tile = work.tiles;
#pragma unroll 1
    for (;; item.next(work)) {
        const bool more = item.tile < work.tiles;
        float span[VALUES] = {};
        if (more && work.is_second(item.matrix))
            pass_span<SECOND>(work, item, memory, ring, warp, lane, span);
        else if (more)
            pass_span<FIRST>(work, item, memory, ring, warp, lane, span);
        if (PARTS > 1) {
            if (!more) break;
            leave_span(work, item, x.count, (float *)workspace, lane, span);
            continue;
        }
        if (more && !behind) leave_item(work, item, memory, lane, span), ended = item;
        const bool same = ended.tile == item.tile;
        if (ended.tile < work.tiles && (!same || !behind)) end_tile(work, ended, memory, end, lane);
        if (!more) break;
        if (behind) leave_item(work, item, memory, lane, span);
        if (!same) ended = item;
        if (!behind) ended.tile = work.tiles;
    }
}
