// y = residual + the chosen experts' outputs, each times its weight, in order; then the shared
// expert's output (rules R2 to R5 and R7). A block computes a tile of 16 rows of one token, and
// each of its warps one expert.
//
// Compiled with WARPS, SLOTS, UNITS (of a row of h), FORMAT_ID and SHARED_FORMAT; with these
// operand numbers (see packets.h): H, IDS, WEIGHTS, DOWNS (the stack), EXPERT_SCALE, RESIDUAL, Y,
// and of the shared expert SHARED_H, SHARED_DOWN and GATE_LOGIT, each -1 if absent. PRODUCT is the
// packet number of the product, USED the number of experts of a token.

#include "expert_units.h"
#include "sending.h"
#include "stack_matrices.h"

#define HAS_SHARED (SHARED_DOWN >= 0)

// One expert's 16 values, which are written to `values`. If the experts of the step are known, they
// are known before the previous kernel has ended, since that kernel waited for the one that wrote
// them.
template <int dtype>
DEVICE void down_tile(const LAUNCH &launch, unsigned char *row_memory, unsigned char *ring,
                      COPY_BARRIER *barriers, unsigned token, unsigned choice, unsigned tiles,
                      unsigned columns, float *values) {
    typedef UNIT_RUN<dtype, SLOTS> RUN;
    const int lane = threadIdx.x % WARP_LANES;
    const bool chosen = choice < USED;
    unsigned matrix = 0;
    if (chosen)
        matrix = load_shared_word((const unsigned *)operand_at(launch, IDS) +
                                  token * stride_at(launch, IDS) + choice);
    RUN run;
    run.open(ring, barriers);
    constexpr size_t tile_bytes = UNITS * RUN::unit_bytes;
    run.begin(matrix_of(launch, chosen ? DOWNS : SHARED_DOWN, matrix, tiles * tile_bytes) +
                  blockIdx.x * tile_bytes,
              UNITS);
    PRECEDING_DONE;
    const ACTIVATIONS x = activations_at(row_memory, UNITS);
    const int h = chosen ? H : SHARED_H;
    const float *row = (const float *)operand_at(launch, h) +
                       (size_t)(chosen ? token * USED + choice : token) * stride_at(launch, h);
    EIGHT held[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; i++) held[i] = load_eight(row, i, columns, lane);
#pragma unroll
    for (int i = 0; i < UNITS; i++) quantize_unit(x, i, lane, held[i]);
    __syncwarp();
    const float total = run.total(x, 0, lane);
    if (lane % 2 == 0) values[lane / 4 + (lane % 4 ? 8 : 0)] = total;
}

// The block's rows of its token.
DEVICE void add_experts(const LAUNCH &launch, unsigned char *shared) {
    const PACKET *product = packet_of(launch, PRODUCT);
    const unsigned rows = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
    const unsigned tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS, token = blockIdx.y;
    if (token * USED >= count_of(launch, product)) {
        PRECEDING_DONE;
        return;
    }
    FOLLOWING_MAY_START;
    constexpr unsigned slot_bytes =
        CHUNK_UNITS * (UNIT_FORMAT<FORMAT_ID>::unit_bytes > UNIT_FORMAT<SHARED_FORMAT>::unit_bytes
                           ? UNIT_FORMAT<FORMAT_ID>::unit_bytes
                           : UNIT_FORMAT<SHARED_FORMAT>::unit_bytes);
    const unsigned warp = threadIdx.x / WARP_LANES;
    unsigned char *rings = shared + WARPS * ROW_BYTES(UNITS);
    COPY_BARRIER *barriers = (COPY_BARRIER *)(rings + WARPS * SLOTS * slot_bytes);
    float *values = (float *)(barriers + WARPS * SLOTS);  // [choice][row]
    unsigned char *row_memory = shared + warp * ROW_BYTES(UNITS);
    unsigned char *ring = rings + warp * SLOTS * slot_bytes;
    if (warp < USED)
        down_tile<FORMAT_ID>(launch, row_memory, ring, barriers + warp * SLOTS, token, warp, tiles,
                             columns, values + warp * UNIT_ROWS);
#if HAS_SHARED
    else
        down_tile<SHARED_FORMAT>(launch, row_memory, ring, barriers + warp * SLOTS, token, warp,
                                 tiles, columns, values + warp * UNIT_ROWS);
#endif
    const unsigned row = blockIdx.x * UNIT_ROWS + threadIdx.x;
    const bool writes = threadIdx.x < UNIT_ROWS && row < rows;
    const float *residual = (const float *)operand_at(launch, RESIDUAL);
    const float *expert_scale = (const float *)operand_at(launch, EXPERT_SCALE);
    const int *ids = (const int *)operand_at(launch, IDS) + token * stride_at(launch, IDS);
    const float *weights =
        (const float *)operand_at(launch, WEIGHTS) + token * stride_at(launch, WEIGHTS);
    float weight[USED], scale[USED], sum = 0.0f, gate = 0.0f;
    if (writes) {
        if (residual) sum = residual[token * stride_at(launch, RESIDUAL) + row];
#pragma unroll
        for (int choice = 0; choice < USED; choice++) {
            weight[choice] = weights[choice];
            scale[choice] = expert_scale ? expert_scale[ids[choice]] : 1.0f;
        }
        if (GATE_LOGIT >= 0)
            gate = ((const float *)operand_at(launch,
                                              GATE_LOGIT))[token * stride_at(launch, GATE_LOGIT)];
    }
    __syncthreads();
    if (!writes) return;
#pragma unroll
    for (int choice = 0; choice < USED; choice++) {
        float value = values[choice * UNIT_ROWS + threadIdx.x];
        if (expert_scale) value = value * scale[choice];
        sum = sum + weight[choice] * value;
    }
    if (HAS_SHARED) {
        const float value = values[USED * UNIT_ROWS + threadIdx.x];
        sum = sum + (GATE_LOGIT >= 0 ? sigmoid_of(gate) * value : value);
    }
    SENT sent;
    sent.open(launch, TO_Y);
    sent.store((float *)operand_at(launch, Y) + token * stride_at(launch, Y) + row, sum);
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    expert_down(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    add_experts(launch, shared);
    meet_others(launch);
}
