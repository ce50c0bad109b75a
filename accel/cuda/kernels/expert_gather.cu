// Copies packed tokens, in groups of eight as unit_pack_fours.cu has them, to the rows of their
// experts: each chunk of expert_table.h gets whole groups. The blocks of a column copy one chunk.
//
// Compiled with WARPS, UNITS (of a row), USED, MAX_CHUNKS, TABLE_AT (the word of the workspace at
// which the table begins), PLANES_AT, SUMS_AT and SCALES_AT (bytes of the workspace), and the
// operand numbers M, SCALE and SUMS (see packets.h).

#include "expert_table.h"
#include "packets.h"
#include "unit_product.h"

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    expert_gather(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const unsigned lane = threadIdx.x % WARP_LANES;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MAX_CHUNKS};
    if (blockIdx.x >= table.chunks()) return;
    const CHUNK chunk = table.chunk(blockIdx.x);
    const unsigned eights = (chunk.count + 7) / 8;
    for (unsigned i = blockIdx.y * WARPS + threadIdx.x / WARP_LANES; i < eights * UNITS;
         i += gridDim.y * WARPS) {
        const unsigned eight = i / UNITS, unit = i % UNITS;
        // Lanes of the same remainder copy one token; in front of the first missing one, the last.
        const unsigned of_chunk = min(eight * 8 + lane % 8, chunk.count - 1);
        const unsigned token = table.pairs()[chunk.first + of_chunk] / USED, of_eight = token % 8;
        const size_t from = (size_t)(token / 8) * UNITS + unit;
        const size_t to = (size_t)(chunk.eight + eight) * UNITS + unit;
        const unsigned char *planes =
            operand_at(launch, M) + from * EIGHT_BYTES + of_eight * 16 + lane / 8 * EIGHT_HALF;
        uint4 part[8];
#pragma unroll
        for (int n = 0; n < 8; n++) part[n] = *(const uint4 *)(planes + n * 4 * EIGHT_HALF);
        uint4 *copy = (uint4 *)(workspace + PLANES_AT + to * EIGHT_BYTES);
#pragma unroll
        for (int n = 0; n < 8; n++) copy[n * WARP_LANES + lane] = part[n];
        if (lane < 16)
            ((uint4 *)(workspace + SUMS_AT + to * EIGHT_SUMS_BYTES))[lane] =
                *(const uint4 *)(operand_at(launch, SUMS) + from * EIGHT_SUMS_BYTES +
                                 lane / 8 * EIGHT_HALF + of_eight * 16);
        else if (lane < 24)
            ((float *)(workspace + SCALES_AT))[to * 8 + lane % 8] =
                ((const float *)operand_at(launch, SCALE))[from * 8 + of_eight];
    }
}
