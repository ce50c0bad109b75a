// Adds up the spans of two products that unit_groups.cu wrote to the workspace, those of gates before
// those of ups, and packs the gated activations as unit_pack.cu does, on every device that shares
// the step (sending.h). A device computes its own columns, which are whole units; a block packs one
// unit of eight tokens (rules R2, R3 and R5).
//
// Compiled with these operand numbers (see packets.h): M, SCALE and SUMS. PRODUCT, GATE, GATHER and
// QUANTIZE are the packet numbers of the first product, of the activation, of what would gather it
// and of its quantization; SPANS is the number of spans.

#include "activations.h"
#include "gate.h"
#include "sending.h"

#define EIGHT_TOKENS 8
#define THREADS (EIGHT_TOKENS * WARP_LANES)
#define AT_SUMS EIGHT_BYTES
#define AT_SCALES (AT_SUMS + EIGHT_SUMS_BYTES)

// The left fold over spans of four values, the first of which are at `value`.
DEVICE float4 sum_of_spans(const float *value, size_t apart) {
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int span = 0; span < SPANS; span++) {
        const float4 next = *(const float4 *)(value + span * apart);
        total = {total.x + next.x, total.y + next.y, total.z + next.z, total.w + next.w};
    }
    return total;
}

// A lane's columns of a unit of one token.
DEVICE EIGHT gated_columns(const float *gates, const float *ups, size_t apart, uint activation) {
    EIGHT v;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 g = sum_of_spans(gates + 128 * half, apart);
        const float4 u = sum_of_spans(ups + 128 * half, apart);
        const float gate[4] = {g.x, g.y, g.z, g.w}, up[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int i = 0; i < 4; i++) v.of[4 * half + i] = gated(activation, gate[i], up[i]);
    }
    return v;
}

// Copies a unit of eight tokens, `packed` in shared memory, to slot `index` of all devices.
DEVICE void send_unit(const LAUNCH &launch, const unsigned char *packed, size_t index) {
    SENT planes, sums, scales;
    planes.open(launch, TO_M), sums.open(launch, TO_SUMS), scales.open(launch, TO_SCALE);
    const unsigned thread = threadIdx.x;
    uint4 *to = (uint4 *)(operand_at(launch, M) + index * EIGHT_BYTES);
    for (unsigned i = thread; i < EIGHT_BYTES / 16; i += THREADS)
        planes.store(to + i, ((const uint4 *)packed)[i]);
    if (thread < EIGHT_SUMS_BYTES / 16)
        sums.store((uint4 *)(operand_at(launch, SUMS) + index * EIGHT_SUMS_BYTES) + thread,
                   ((const uint4 *)(packed + AT_SUMS))[thread]);
    if (thread < EIGHT_TOKENS)
        scales.store((float *)operand_at(launch, SCALE) + index * EIGHT_TOKENS + thread,
                     ((const float *)(packed + AT_SCALES))[thread]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_pack(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    BLOCK_MEMORY(shared);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *product = packet_of(launch, PRODUCT), *quantize = packet_of(launch, QUANTIZE);
    const unsigned tokens = count_of(launch, quantize), rows = product->size[MATMUL_ROWS];
    const unsigned first = packet_of(launch, GATHER)->size[GATHER_FIRST] / UNIT_COLUMNS;
    const unsigned own = rows / UNIT_COLUMNS, unit = blockIdx.x % own, eight = blockIdx.x / own;
    const unsigned lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    const unsigned token = eight * EIGHT_TOKENS + warp;
    FOLLOWING_MAY_START;
    PRECEDING_DONE;
    if (eight * EIGHT_TOKENS < tokens) {
        const ACTIVATIONS x = among_eights(shared, (short *)(shared + AT_SUMS),
                                           (float *)(shared + AT_SCALES), warp, 1);
        const size_t apart = (size_t)tokens * rows;
        const float *gates = (const float *)workspace + (size_t)min(token, tokens - 1) * rows +
                             unit * UNIT_COLUMNS + 4 * lane;
        const uint activation = packet_of(launch, GATE)->size[SWIGLU_ACTIVATION];
        quantize_unit(x, 0, lane, gated_columns(gates, gates + SPANS * apart, apart, activation));
        __syncthreads();
        send_unit(launch, shared, (size_t)eight * ROW_UNITS + first + unit);
    }
    meet_others(launch);
}
