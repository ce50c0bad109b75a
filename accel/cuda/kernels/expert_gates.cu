// h = activation(gate x) * (up x) of the chosen experts and of the shared one, with the experts of
// each token computed separately (rules R2 to R5). A block computes a tile of 16 rows of both
// matrices for one expert and token; a warp computes a span of the columns of one matrix.
//
// Compiled with SPANS, SLOTS, FORMAT_ID and SHARED_FORMAT; with these operand numbers (see
// packets.h): M, SCALE, SUMS, which expert_router.cu writes; IDS; GATES and UPS, stacks of
// matrices; H; and of the shared expert SHARED_GATE, SHARED_UP and SHARED_H, each -1 if absent.
// PRODUCT, ACTIVATION and SHARED_ACTIVATION are packet numbers, USED the number of experts of a
// token.

#include "expert_units.h"
#include "gate.h"
#include "sending.h"
#include "stack_matrices.h"

#define HAS_SHARED (SHARED_GATE >= 0)
#define CHOICES (USED + HAS_SHARED)
#define WARPS (2 * SPANS)

// One block's work.
template <int dtype>
DEVICE void gate_tile(const LAUNCH &launch, unsigned char *shared, unsigned token, unsigned choice,
                      unsigned rows, unsigned columns, int gates, int ups, bool chosen) {
    typedef UNIT_RUN<dtype, SLOTS> RUN;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned warp = threadIdx.x / WARP_LANES, matrix = warp / SPANS, span = warp % SPANS;
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const unsigned tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS, tile = blockIdx.x;
    const unsigned first = span * SPAN_UNITS, count = min(units - first, (unsigned)SPAN_UNITS);
    unsigned char *rings = shared;
    COPY_BARRIER *barriers = (COPY_BARRIER *)(rings + WARPS * SLOTS * RUN::slot_bytes);
    float *totals = (float *)(barriers + WARPS * SLOTS);  // [matrix][span][row]
    RUN run;
    run.open(rings + warp * SLOTS * RUN::slot_bytes, barriers + warp * SLOTS);
    const size_t tile_bytes = (size_t)units * RUN::unit_bytes;
    if (!chosen)
        run.begin(operand_at(launch, matrix ? ups : gates) + tile * tile_bytes +
                      first * RUN::unit_bytes,
                  count);
    PRECEDING_DONE;
    FOLLOWING_MAY_START;
    if (chosen) {
        const unsigned id =
            ((const unsigned *)operand_at(launch, IDS))[token * stride_at(launch, IDS) + choice];
        run.begin(matrix_of(launch, matrix ? ups : gates, id, tiles * tile_bytes) +
                      tile * tile_bytes + first * RUN::unit_bytes,
                  count);
        if (tile == 0 && threadIdx.x == 0) count_uses(launch, gates, id, 1);
    }
    const ACTIVATIONS made =
        from_token({operand_at(launch, M), (short *)operand_at(launch, SUMS),
                    (float *)operand_at(launch, SCALE), units, false},
                   token);
    const float total = run.total(made, first, lane);
    if (lane % 2 == 0)
        totals[warp * UNIT_ROWS + lane / 4 + (lane % 4 ? 8 : 0)] = total;
    __syncthreads();
}

DEVICE void make_tile(const LAUNCH &launch, unsigned char *shared) {
    const PACKET *product = packet_of(launch, PRODUCT);
    const unsigned rows = product->size[MATMUL_ROWS], columns = product->size[MATMUL_COLUMNS];
    const unsigned token = blockIdx.y / CHOICES, choice = blockIdx.y % CHOICES;
    if (token * USED >= count_of(launch, product)) {
        PRECEDING_DONE;
        return;
    }
    const bool chosen = choice < USED;
    if (chosen)
        gate_tile<FORMAT_ID>(launch, shared, token, choice, rows, columns, GATES, UPS, true);
#if HAS_SHARED
    else
        gate_tile<SHARED_FORMAT>(launch, shared, token, choice, rows, columns, SHARED_GATE,
                                 SHARED_UP, false);
#endif
    constexpr unsigned at_totals =
        WARPS * SLOTS * (CHUNK_UNITS * UNIT_FORMAT<FORMAT_ID>::unit_bytes + sizeof(COPY_BARRIER));
#if HAS_SHARED
    constexpr unsigned at_shared_totals =
        WARPS * SLOTS *
        (CHUNK_UNITS * UNIT_FORMAT<SHARED_FORMAT>::unit_bytes + sizeof(COPY_BARRIER));
    const float *totals = (const float *)(shared + (chosen ? at_totals : at_shared_totals));
#else
    const float *totals = (const float *)(shared + at_totals);
#endif
    const unsigned row = blockIdx.x * UNIT_ROWS + threadIdx.x;
    if (threadIdx.x >= UNIT_ROWS || row >= rows) return;
    float value[2];
#pragma unroll
    for (int matrix = 0; matrix < 2; matrix++) {
        value[matrix] = 0.0f;
#pragma unroll
        for (int span = 0; span < SPANS; span++)
            value[matrix] =
                value[matrix] + totals[(matrix * SPANS + span) * UNIT_ROWS + threadIdx.x];
    }
    const int op = chosen ? ACTIVATION : SHARED_ACTIVATION;
    const float h = gated(packet_of(launch, op)->size[SWIGLU_ACTIVATION], value[0], value[1]);
    SENT sent;
    sent.open(launch, chosen ? TO_H : TO_SHARED_H);
    const size_t of_row = chosen ? token * USED + choice : token;
    const int made = chosen ? H : SHARED_H;
    sent.store((float *)operand_at(launch, made) + of_row * stride_at(launch, made) + row, h);
}

extern "C" __global__ void __launch_bounds__(WARPS *WARP_LANES)
    expert_gates(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    make_tile(launch, shared);
    meet_others(launch);
}
