// Products of h of tokens that share an expert (rules R3 to R5). Each warp of a block computes TILES
// tiles of 16 rows for one chunk of expert_rows.h after the other. Of chunks of four tokens the next
// one's h is read while products are computed, and has shared memory of its own.
//
// Compiled with WARPS, TILES, SLOTS and SLOT_BYTES (of a warp), UNITS (of a row of h), CHUNK_ROWS_MAX,
// BLOCKS_AT_ONCE (blocks of a multiprocessor), CHUNKS (of a block), MAX_CHUNKS, TABLE_AT, EXPERTS,
// FORMAT_ID and SHARED_FORMAT; with these operand
// numbers (see packets.h): H, DOWNS, Y, and of the shared expert SHARED_H, SHARED_DOWN and
// SHARED_Y, each -1 if absent. PRODUCT is the packet number of the product.

#include "expert_passing.h"
#include "stack_matrices.h"

#define ROWS CHUNK_ROWS_MAX

// Of each chunk the warp's tiles, WARPS apart.
struct DOWN_UNITS {
    const LAUNCH &launch;
    const CHUNK *chunks;
    unsigned tile, tiles;  // the first; of a matrix

    __device__ __forceinline__ bool chosen(unsigned item) const {
        return chunks[item / TILES].expert < EXPERTS;
    }
    __device__ __forceinline__ unsigned unit_bytes(unsigned item) const {
        return chosen(item) ? UNIT_FORMAT<FORMAT_ID>::unit_bytes
                            : UNIT_FORMAT<SHARED_FORMAT>::unit_bytes;
    }
    __device__ __forceinline__ const unsigned char *first_unit(unsigned item) const {
        const size_t tile_bytes = UNITS * unit_bytes(item);
        return matrix_of(launch, chosen(item) ? DOWNS : SHARED_DOWN,
                         chosen(item) ? chunks[item / TILES].expert : 0, tiles * tile_bytes) +
               min(tile + item % TILES * WARPS, tiles - 1) * tile_bytes;
    }
};

typedef UNIT_STREAM<DOWN_UNITS, SLOTS, SLOT_BYTES> STREAM;

#define AHEAD (ROWS == FOUR_ROWS)
#define HELD ((ROWS * UNITS + WARPS - 1) / WARPS)  // units of h of a chunk that a warp quantizes

// Rows of h of a chunk, of which a warp has every WARPS-th unit.
struct HIDDEN_ROWS {
    const float *h;
    size_t stride;
    const unsigned *pairs;
    unsigned units, columns, warp;

    __device__ __forceinline__ HIDDEN_ROWS(const LAUNCH &launch, const CHUNK &chunk,
                                           const unsigned *pairs_, unsigned columns_,
                                           unsigned warp_)
        : pairs(pairs_), units(chunk.count * UNITS), columns(columns_), warp(warp_) {
        const int h_at = chunk.expert < EXPERTS ? H : SHARED_H;
        h = (const float *)operand_at(launch, h_at), stride = stride_at(launch, h_at);
    }
    __device__ __forceinline__ EIGHT load(unsigned i, int lane) const {
        return load_eight(h + pairs[i / UNITS] * stride, i % UNITS, columns, lane);
    }
    __device__ __forceinline__ void load(EIGHT (&held)[HELD], int lane) const {
#pragma unroll
        for (int n = 0; n < HELD; n++)
            if (warp + n * WARPS < units) held[n] = load(warp + n * WARPS, lane);
    }
    __device__ __forceinline__ void quantize(const EIGHT (&held)[HELD], const CHUNK_ROWS<ROWS> &x,
                                             int lane) const {
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            const unsigned i = warp + n * WARPS;
            if (i < units) quantize_unit(x.of(i % UNITS, i / UNITS), 0, lane, held[n]);
        }
    }
    __device__ __forceinline__ void quantize(const CHUNK_ROWS<ROWS> &x, int lane) const {
        for (unsigned i = warp; i < units; i += WARPS)
            quantize_unit(x.of(i % UNITS, i / UNITS), 0, lane, load(i, lane));
    }
};

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES, BLOCKS_AT_ONCE)
    expert_group_downs(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                       U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    unsigned char *const rings = shared + (1 + AHEAD) * ROWS_BYTES(ROWS, UNITS);
    COPY_BARRIER *const barriers = (COPY_BARRIER *)(rings + WARPS * SLOTS * SLOT_BYTES);
    const BLOCK_CHUNKS<ROWS> chunks((unsigned char *)(barriers + WARPS * SLOTS));
    const PACKET *product = packet_of(launch, PRODUCT);
    const unsigned rows = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
    const unsigned tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES, tile = blockIdx.x * (WARPS * TILES) + warp;
    FOLLOWING_MAY_START;
    // The table was complete before any block of the previous launch continued.
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MAX_CHUNKS};
    const unsigned count = chunks.load(table, WARPS * WARP_LANES);
    STREAM stream = {
        rings + warp * SLOTS * SLOT_BYTES,
        barriers + warp * SLOTS,
        {launch, chunks.of, tile, tiles},
        TILES * count,
        tile < tiles ? UNITS : 0,
        0, 0, 0, 0, 0, 0,
    };
    stream.begin();
    chunks.load_pairs(table, count, WARPS * WARP_LANES);
    PRECEDING_DONE;
#pragma unroll 1
    for (unsigned item = 0; item < count; item++) {
        const CHUNK chunk = chunks.of[item];
        const unsigned *const pairs = chunks.pairs + item * ROWS;
        const bool chosen = chunk.expert < EXPERTS;
        const CHUNK_ROWS<ROWS> x(shared + (AHEAD ? item % 2 * ROWS_BYTES(ROWS, UNITS) : 0), UNITS);
        if (!AHEAD || item == 0) {
            HIDDEN_ROWS(launch, chunk, pairs, columns, warp).quantize(x, lane);
            __syncthreads();
        }
        const bool reads = AHEAD && item + 1 < count;
        const HIDDEN_ROWS hidden(launch, chunks.of[reads ? item + 1 : item],
                                 reads ? pairs + ROWS : pairs, columns, warp);
        EIGHT held[HELD];
        if (reads) hidden.load(held, lane);
        const unsigned extent = CHUNK_ROWS<ROWS>::extent(chunk.count);
        const int y_at = chosen ? Y : SHARED_Y;
        float *y = (float *)operand_at(launch, y_at);
        const size_t y_stride = stride_at(launch, y_at);
#pragma unroll 1
        for (unsigned n = 0; n < TILES; n++) {
            float total[ROWS / 2] = {};
            if (SHARED_FORMAT == FORMAT_ID || chosen)
                total_of_stream<FORMAT_ID, ROWS>(stream, x, extent, lane, total);
            else
                total_of_stream<SHARED_FORMAT, ROWS>(stream, x, extent, lane, total);
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                const unsigned of_tile = CHUNK_ROWS<ROWS>::row_of(i, lane);
                const unsigned row = (tile + n * WARPS) * UNIT_ROWS + of_tile;
                const unsigned token = CHUNK_ROWS<ROWS>::token_of(i, lane);
                if (token < chunk.count && row < rows) y[pairs[token] * y_stride + row] = total[i];
            }
        }
        if (reads)
            hidden.quantize(held, {shared + (item + 1) % 2 * ROWS_BYTES(ROWS, UNITS), UNITS}, lane);
        __syncthreads();
    }
}
