// h = activation(gate x) * (up x) of up to four tokens that share an expert (rules R2 to R5). Each
// warp of a block computes a tile of 16 rows, of the gate and then of up, for one chunk of
// expert_rows.h after the other. Tokens of the next chunk are copied meanwhile.
//
// Compiled with WARPS, SLOTS and SLOT_BYTES (of a warp), UNITS (of a row of x), CHUNK_ROWS_MAX,
// BLOCKS_AT_ONCE (blocks of a multiprocessor), CHUNKS (of a block), MAX_CHUNKS, TABLE_AT, EXPERTS,
// FORMAT_ID and SHARED_FORMAT; with these operand numbers (see packets.h): M, SCALE, SUMS, which
// expert_router.cu writes; GATES and UPS; H; and of the shared expert SHARED_GATE, SHARED_UP and
// SHARED_H, each -1 if absent. PRODUCT, ACTIVATION and SHARED_ACTIVATION are packet numbers, USED is
// the number of experts of a token.

#include "expert_passing.h"
#include "gate.h"
#include "stack_matrices.h"

#define ROWS CHUNK_ROWS_MAX

// Of each chunk a tile of the gate, then one of up.
struct GATE_UNITS {
    const LAUNCH &launch;
    const CHUNK *chunks;
    unsigned tile, tiles;

    __device__ __forceinline__ bool chosen(unsigned item) const {
        return chunks[item / 2].expert < EXPERTS;
    }
    __device__ __forceinline__ unsigned unit_bytes(unsigned item) const {
        return chosen(item) ? UNIT_FORMAT<FORMAT_ID>::unit_bytes
                            : UNIT_FORMAT<SHARED_FORMAT>::unit_bytes;
    }
    __device__ __forceinline__ const unsigned char *first_unit(unsigned item) const {
        const size_t tile_bytes = UNITS * unit_bytes(item);
        const int of_gate = chosen(item) ? GATES : SHARED_GATE;
        const int of_up = chosen(item) ? UPS : SHARED_UP;
        return matrix_of(launch, item % 2 ? of_up : of_gate,
                         chosen(item) ? chunks[item / 2].expert : 0, tiles * tile_bytes) +
               tile * tile_bytes;
    }
};

typedef UNIT_STREAM<GATE_UNITS, SLOTS, SLOT_BYTES> STREAM;

// Copies a chunk's tokens, each unit by one warp.
DEVICE void begin_rows(const LAUNCH &launch, const CHUNK &chunk, const unsigned *pairs,
                       const CHUNK_ROWS<ROWS> &x, unsigned warp, int lane) {
    const unsigned each = chunk.expert < EXPERTS ? USED : 1;
    for (unsigned i = warp; i < chunk.count * UNITS; i += WARPS) {
        const unsigned row = i / UNITS, unit = i % UNITS;
        const size_t index = (size_t)(pairs[row] / each) * UNITS + unit;
        const ACTIVATIONS to = x.of(unit, row);
        begin_part(to.planes + lane * 16, operand_at(launch, M) + index * UNIT_PLANES + lane * 16);
        if (lane < 2)
            begin_part((unsigned char *)to.sums + lane * 16,
                       operand_at(launch, SUMS) + index * (2 * UNIT_SUMS) + lane * 16);
        if (lane == 2) begin_word(to.scales, (const float *)operand_at(launch, SCALE) + index);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, BLOCKS_AT_ONCE)
    expert_few_gates(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                     U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    unsigned char *const rings = shared + 2 * ROWS_BYTES(ROWS, UNITS);
    COPY_BARRIER *const barriers = (COPY_BARRIER *)(rings + WARPS * SLOTS * SLOT_BYTES);
    const BLOCK_CHUNKS<ROWS> chunks((unsigned char *)(barriers + WARPS * SLOTS));
    const unsigned rows = packet_of(launch, PRODUCT)->size[MATMUL_ROWS];
    const unsigned tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES, tile = blockIdx.x * WARPS + warp;
    PRECEDING_DONE;
    FOLLOWING_MAY_START;
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MAX_CHUNKS};
    const unsigned count = chunks.load(table, WARPS * WARP_LANES);
    STREAM stream = {
        rings + warp * SLOTS * SLOT_BYTES,
        barriers + warp * SLOTS,
        {launch, chunks.of, tile, tiles},
        2 * count,
        tile < tiles ? UNITS : 0,
        0, 0, 0, 0, 0, 0,
    };
    stream.begin();
    chunks.load_pairs(table, count, WARPS * WARP_LANES);
    if (count) begin_rows(launch, chunks.of[0], chunks.pairs, {shared, UNITS}, warp, lane);
    end_parts();
#pragma unroll 1
    for (unsigned item = 0; item < count; item++) {
        const CHUNK chunk = chunks.of[item];
        const unsigned *const pairs = chunks.pairs + item * ROWS;
        const bool chosen = chunk.expert < EXPERTS;
        const CHUNK_ROWS<ROWS> x(shared + item % 2 * ROWS_BYTES(ROWS, UNITS), UNITS);
        await_parts<0>();
        // Behind it all have the chunk's tokens, and none reads those of the chunk before.
        __syncthreads();
        if (item + 1 < count)
            begin_rows(launch, chunks.of[item + 1], pairs + ROWS,
                       {shared + (item + 1) % 2 * ROWS_BYTES(ROWS, UNITS), UNITS}, warp, lane);
        end_parts();
        if (chosen && blockIdx.x == 0 && threadIdx.x == 0)
            count_uses(launch, GATES, chunk.expert, chunk.count);
        float total[2][ROWS / 2] = {};
#pragma unroll 1
        for (int matrix = 0; matrix < 2; matrix++) {
            float own[ROWS / 2] = {};
            if (SHARED_FORMAT == FORMAT_ID || chosen)
                total_of_stream<FORMAT_ID, ROWS>(stream, x, CHUNK_ROWS<ROWS>::extent(chunk.count),
                                                 lane, own);
            else
                total_of_stream<SHARED_FORMAT, ROWS>(
                    stream, x, CHUNK_ROWS<ROWS>::extent(chunk.count), lane, own);
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                if (!matrix) total[0][i] = own[i];
                total[1][i] = own[i];
            }
        }
        const uint activation =
            packet_of(launch, chosen ? ACTIVATION : SHARED_ACTIVATION)->size[SWIGLU_ACTIVATION];
        const int h_at = chosen ? H : SHARED_H;
        float *h = (float *)operand_at(launch, h_at);
        const size_t stride = stride_at(launch, h_at);
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            const unsigned row = tile * UNIT_ROWS + CHUNK_ROWS<ROWS>::row_of(i, lane);
            const unsigned token = CHUNK_ROWS<ROWS>::token_of(i, lane);
            if (token < chunk.count && row < rows)
                h[pairs[token] * stride + row] = gated(activation, total[0][i], total[1][i]);
        }
    }
}
