// h = activation(gate x) * (up x) of tokens that share an expert (rules R2 to R5). A block computes
// TILES tiles of 16 rows of both matrices for one chunk of expert_rows.h after the other; a warp
// computes a span of one tile of one matrix.
//
// Compiled with SPANS, TILES, SLOTS and SLOT_BYTES (of a warp), UNITS (of a row of x),
// CHUNK_ROWS_MOST, BLOCKS_AT_ONCE (blocks of a multiprocessor), CHUNKS (of a block), MOST_CHUNKS,
// TABLE_AT, EXPERTS, FORMAT_ID and SHARED_FORMAT; with these operand numbers (see packets.h): M,
// SCALE, SUMS, which expert_router.cu writes; GATES and UPS; H; and of the shared expert
// SHARED_GATE, SHARED_UP and SHARED_H, each -1 if absent. PRODUCT, ACTIVATION and
// SHARED_ACTIVATION are packet numbers, USED is the number of experts of a token.

#include "expert_rows.h"
#include "gate.h"
#include "stack_matrices.h"

#define WARPS (2 * SPANS * TILES)
#define THREADS (WARPS * WARP_LANES)
#define ROWS CHUNK_ROWS_MOST

// Values of all spans, where the tokens were.
#define VALUES_BYTES (WARPS * UNIT_ROWS * ROWS * 4)
#define X_BYTES (ROWS_BYTES(ROWS, UNITS) > VALUES_BYTES ? ROWS_BYTES(ROWS, UNITS) : VALUES_BYTES)
#define VALUE_AT(tile, matrix, span, row, token)                                                 \
    (((((tile) * 2 + (matrix)) * SPANS + (span)) * UNIT_ROWS + (row)) * ROWS + (token))

struct GATE_UNITS {
    const LAUNCH &launch;
    const CHUNK *chunks;
    unsigned matrix, tile, tiles, first;

    __device__ __forceinline__ bool chosen(unsigned item) const {
        return chunks[item].expert < EXPERTS;
    }
    __device__ __forceinline__ unsigned unit_bytes(unsigned item) const {
        return chosen(item) ? UNIT_FORMAT<FORMAT_ID>::unit_bytes
                            : UNIT_FORMAT<SHARED_FORMAT>::unit_bytes;
    }
    __device__ __forceinline__ const unsigned char *first_unit(unsigned item) const {
        const size_t bytes = unit_bytes(item), tile_bytes = UNITS * bytes;
        const int gates = chosen(item) ? GATES : SHARED_GATE, ups = chosen(item) ? UPS : SHARED_UP;
        return matrix_of(launch, matrix ? ups : gates, chosen(item) ? chunks[item].expert : 0,
                         tiles * tile_bytes) +
               tile * tile_bytes + first * bytes;
    }
};

typedef UNIT_STREAM<GATE_UNITS, SLOTS, SLOT_BYTES> STREAM;

// Copies the activations of a chunk's tokens, which are `pairs` divided by `used`.
DEVICE void take_activations(const LAUNCH &launch, const CHUNK_ROWS<ROWS> &x, const CHUNK &chunk,
                             const unsigned *pairs, unsigned used) {
    const int lane = threadIdx.x % WARP_LANES;
    for (unsigned i = threadIdx.x / WARP_LANES; i < chunk.count * UNITS; i += WARPS) {
        const unsigned row = i / UNITS, unit = i % UNITS;
        const size_t place = (size_t)(pairs[row] / used) * UNITS + unit;
        const ACTIVATIONS to = x.of(unit, row);
        begin_part(to.planes + lane * 16, operand_at(launch, M) + place * UNIT_PLANES + lane * 16);
        if (lane < 2)
            begin_part((unsigned char *)to.sums + lane * 16,
                       operand_at(launch, SUMS) + place * (2 * UNIT_SUMS) + lane * 16);
        if (lane == 2) begin_word(to.scales, (const float *)operand_at(launch, SCALE) + place);
    }
    end_parts();
    await_parts<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    expert_group_gates(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                       U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    unsigned char *const rings = shared + X_BYTES;
    COPY_BARRIER *const barriers = (COPY_BARRIER *)(rings + WARPS * SLOTS * SLOT_BYTES);
    const BLOCK_CHUNKS<ROWS> chunks((unsigned char *)(barriers + WARPS * SLOTS));
    const unsigned rows = packet_of(launch, PRODUCT)->size[MATMUL_ROWS];
    const unsigned tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES;
    const unsigned local = warp / (2 * SPANS), matrix = warp / SPANS % 2, span = warp % SPANS;
    const unsigned tile = blockIdx.x * TILES + local, first = span * SPAN_UNITS;
    PRECEDING_DONE;
    FOLLOWING_MAY_START;
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MOST_CHUNKS};
    const unsigned count = chunks.load(table, THREADS);
    STREAM stream = {
        rings + warp * SLOTS * SLOT_BYTES,
        barriers + warp * SLOTS,
        {launch, chunks.of, matrix, tile, tiles, first},
        count,
        tile < tiles ? min(UNITS - first, (unsigned)SPAN_UNITS) : 0,
        0, 0, 0, 0,
    };
    stream.begin();
    const CHUNK_ROWS<ROWS> x(shared, UNITS);
    float *const values = (float *)shared;
#pragma unroll 1
    for (unsigned item = 0; item < count; item++) {
        const CHUNK chunk = chunks.of[item];
        const unsigned *const pairs = chunks.pairs + item * ROWS;
        const bool chosen = chunk.expert < EXPERTS;
        if (chosen && blockIdx.x == 0 && threadIdx.x == 0)
            count_uses(launch, GATES, chunk.expert, chunk.count);
        take_activations(launch, x, chunk, pairs, chosen ? USED : 1);
        __syncthreads();
        float total[ROWS / 2] = {};
        const unsigned eights = (chunk.count + 7) / 8;
        if (SHARED_FORMAT == FORMAT_ID || chosen)
            total_of_rows<FORMAT_ID, ROWS>(stream, x, first, eights, lane, total);
        else
            total_of_rows<SHARED_FORMAT, ROWS>(stream, x, first, eights, lane, total);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++)
            values[VALUE_AT(local, matrix, span, lane / 4 + i / 2 % 2 * 8,
                            i / 4 * 8 + lane % 4 * 2 + i % 2)] = total[i];
        __syncthreads();
        const int op = chosen ? ACTIVATION : SHARED_ACTIVATION, to = chosen ? H : SHARED_H;
        const uint activation = packet_of(launch, op)->size[SWIGLU_ACTIVATION];
        float *h = (float *)operand_at(launch, to);
        const size_t stride = stride_at(launch, to);
        for (unsigned i = threadIdx.x; i < chunk.count * (TILES * UNIT_ROWS); i += THREADS) {
            const unsigned token = i / (TILES * UNIT_ROWS), place = i % (TILES * UNIT_ROWS);
            const unsigned row = blockIdx.x * (TILES * UNIT_ROWS) + place;
            if (row >= rows) continue;
            float value[2] = {0.0f, 0.0f};
#pragma unroll
            for (int s = 0; s < SPANS; s++)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    value[m] = value[m] + values[VALUE_AT(place / UNIT_ROWS, m, s,
                                                          place % UNIT_ROWS, token)];
            h[pairs[token] * stride + row] = gated(activation, value[0], value[1]);
        }
        __syncthreads();
    }
}
