// Products of h of tokens that share an expert (rules R3 to R5). Each warp of a block computes a
// tile of 16 rows for one chunk of expert_rows.h after the other.
//
// Compiled with WARPS, SLOTS and SLOT_BYTES (of a warp), UNITS (of a row of h), CHUNK_ROWS_MAX,
// BLOCKS_AT_ONCE (blocks of a multiprocessor), CHUNKS (of a block), MAX_CHUNKS, TABLE_AT, EXPERTS,
// FORMAT_ID and SHARED_FORMAT; with these operand
// numbers (see packets.h): H, DOWNS, Y, and of the shared expert SHARED_H, SHARED_DOWN and
// SHARED_Y, each -1 if absent. PRODUCT is the packet number of the product.

#include "expert_passing.h"
#include "stack_matrices.h"

#define ROWS CHUNK_ROWS_MAX

struct DOWN_UNITS {
    const LAUNCH &launch;
    const CHUNK *chunks;
    unsigned tile, tiles;

    __device__ __forceinline__ bool chosen(unsigned item) const {
        return chunks[item].expert < EXPERTS;
    }
    __device__ __forceinline__ unsigned unit_bytes(unsigned item) const {
        return chosen(item) ? UNIT_FORMAT<FORMAT_ID>::unit_bytes
                            : UNIT_FORMAT<SHARED_FORMAT>::unit_bytes;
    }
    __device__ __forceinline__ const unsigned char *first_unit(unsigned item) const {
        const size_t tile_bytes = UNITS * unit_bytes(item);
        return matrix_of(launch, chosen(item) ? DOWNS : SHARED_DOWN,
                         chosen(item) ? chunks[item].expert : 0, tiles * tile_bytes) +
               tile * tile_bytes;
    }
};

typedef UNIT_STREAM<DOWN_UNITS, SLOTS, SLOT_BYTES> STREAM;

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, BLOCKS_AT_ONCE)
    expert_group_downs(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                       U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    unsigned char *const rings = shared + ROWS_BYTES(ROWS, UNITS);
    COPY_BARRIER *const barriers = (COPY_BARRIER *)(rings + WARPS * SLOTS * SLOT_BYTES);
    const BLOCK_CHUNKS<ROWS> chunks((unsigned char *)(barriers + WARPS * SLOTS));
    const PACKET *product = packet_of(launch, PRODUCT);
    const unsigned rows = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
    const unsigned tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES, tile = blockIdx.x * WARPS + warp;
    FOLLOWING_MAY_START;
    // The table was complete before any block of the previous launch continued.
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MAX_CHUNKS};
    const unsigned count = chunks.load(table, WARPS * WARP_LANES);
    STREAM stream = {
        rings + warp * SLOTS * SLOT_BYTES,
        barriers + warp * SLOTS,
        {launch, chunks.of, tile, tiles},
        count,
        tile < tiles ? UNITS : 0,
        0, 0, 0, 0,
    };
    stream.begin();
    PRECEDING_DONE;
    const CHUNK_ROWS<ROWS> x(shared, UNITS);
#pragma unroll 1
    for (unsigned item = 0; item < count; item++) {
        const CHUNK chunk = chunks.of[item];
        const unsigned *const pairs = chunks.pairs + item * ROWS;
        const bool chosen = chunk.expert < EXPERTS;
        const int h_at = chosen ? H : SHARED_H, y_at = chosen ? Y : SHARED_Y;
        const float *h = (const float *)operand_at(launch, h_at);
        const size_t stride = stride_at(launch, h_at), y_stride = stride_at(launch, y_at);
        for (unsigned i = warp; i < chunk.count * UNITS; i += WARPS) {
            const unsigned row = i / UNITS, unit = i % UNITS;
            quantize_unit(x.of(unit, row), 0, lane,
                          load_eight(h + pairs[row] * stride, unit, columns, lane));
        }
        __syncthreads();
        float total[ROWS / 2] = {};
        const unsigned eights = (chunk.count + 7) / 8;
        if (SHARED_FORMAT == FORMAT_ID || chosen)
            total_of_stream<FORMAT_ID, ROWS>(stream, x, eights, lane, total);
        else
            total_of_stream<SHARED_FORMAT, ROWS>(stream, x, eights, lane, total);
        float *y = (float *)operand_at(launch, y_at);
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            const unsigned row = tile * UNIT_ROWS + lane / 4 + i / 2 % 2 * 8;
            const unsigned token = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (token < chunk.count && row < rows) y[pairs[token] * y_stride + row] = total[i];
        }
        __syncthreads();
    }
}
