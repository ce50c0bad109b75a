// y = x weight^T for few tokens and one to four matrices that share x and are stored in units
// (units.h), with the ops around the products in the step: the norm and the quantization of x
// before them, and biases, a residual or a gated activation after them (rules R2 to R5).
//
// Compiled with these operand numbers (see packets.h): X or, if x was quantized before, M, SCALE
// and SUMS; NORM_WEIGHT; W0 to W3, the matrices; B0 to B3, their biases; Y0 to Y3, their results;
// RESIDUAL. NORM, PRODUCT and GATE are the packet numbers of the norm, the first product and the
// gated activation, -1 if absent. FIRST and SECOND are formats; NUMBERS has four bits for every
// matrix, 1 for a matrix of the second format; MATRICES is the number of matrices. WARPS, SLOTS,
// TOKENS and SLOT_BITS are described in unit_ring.h, HELD_UNITS in row_quantizer.h. CLUSTER blocks
// share the columns, see shared_columns.h. If WHOLE_ROWS, a team of warps computes what a block has
// of each token as ONE_ROW does, and NORM_UNITS is its `normal`. COLUMNS, and GRID, the blocks of a
// row of the grid, are constants so that no kernel divides by them. The blocks of a row of the grid
// share a product; each row of the grid computes TOKENS tokens.

#include "gate.h"
#include "clusters.h"
#include "one_row.h"
#include "packets.h"
#include "sending.h"
#if CLUSTER > 1
#include "groups.h"
#endif
#include "shared_columns.h"

#define PAIRED (GATE >= 0)
#if FIRST == SECOND
typedef FORMATS<FIRST> PRODUCT_FORMATS;
#else
typedef FORMATS<FIRST, SECOND> PRODUCT_FORMATS;
#endif
#define TEAM_WARPS (WHOLE_ROWS ? WARPS / TOKENS : WARPS)
typedef SHAPE<WARPS, SLOTS, TOKENS, MATRICES, PRODUCT_FORMATS, CLUSTER> PRODUCT_SHAPE;
typedef PRODUCT_SHAPE::WORK PRODUCT_WORK;

struct RESULT {
    float *y;
    const float *bias;
    size_t stride;
    unsigned rows;
    SENT sent;
};

struct OUTPUTS {
    RESULT result[MATRICES];
    const float *residual;
    size_t residual_stride;
    uint activation;
    unsigned first_token;

    __device__ __forceinline__ unsigned ahead(unsigned, unsigned tile, int row, int token) const {
        const unsigned at = tile * UNIT_ROWS + row;
        if (!residual || at >= result[0].rows) return 0;
        return __float_as_uint(residual[(size_t)(first_token + token) * residual_stride + at]);
    }
    __device__ __forceinline__ float added(unsigned ahead, unsigned, unsigned, int, int) const {
        return __uint_as_float(ahead);
    }
    __device__ __forceinline__ void operator()(unsigned matrix, unsigned tile, int row, int token,
                                               float value, float other, float added) const {
        RESULT r = result[0];
#pragma unroll
        for (int i = 1; i < MATRICES; i++)
            if (matrix == i) r = result[i];
        const unsigned at = tile * UNIT_ROWS + row;
        if (at >= r.rows) return;
        const size_t t = first_token + token;
        if (PAIRED) value = gated(activation, value, other);
        if (r.bias) value = value + r.bias[at];
        if (residual) value = added + value;
        r.sent.store(r.y + t * r.stride + at, value);
    }
};

// Addresses of one matrix' operands.
DEVICE void open_matrix(const LAUNCH &launch, int number, int w, int b, int y, int to,
                        PRODUCT_WORK &work, RESULT &result) {
    const PACKET *product = packet_of(launch, w / 16);
    result.rows = product->size[MATMUL_ROWS];
    result.y = (float *)operand_at(launch, y);
    result.bias = (const float *)operand_at(launch, b);
    result.stride = stride_at(launch, y);
    result.sent.open(launch, to);
    work.matrix[number] = operand_at(launch, w);
    work.tiles[number] = (result.rows + UNIT_ROWS - 1) / UNIT_ROWS;
}

// The block's rows of the products, for its tokens.
DEVICE void multiply_tokens(const LAUNCH &launch, unsigned char *shared) {
    const PACKET *product = packet_of(launch, PRODUCT);
    const unsigned counted = counted_word(launch, product);
    __builtin_assume(gridDim.x == GRID);
    constexpr unsigned columns = COLUMNS;
    OUTPUTS outputs;
    outputs.first_token = blockIdx.y * TOKENS;
    PRODUCT_WORK work;
    open_matrix(launch, 0, W0, B0, Y0, TO_Y0, work, outputs.result[0]);
#if MATRICES > 1
    open_matrix(launch, 1, W1, B1, Y1, TO_Y1, work, outputs.result[1]);
#endif
#if MATRICES > 2
    open_matrix(launch, 2, W2, B2, Y2, TO_Y2, work, outputs.result[2]);
#endif
#if MATRICES > 3
    open_matrix(launch, 3, W3, B3, Y3, TO_Y3, work, outputs.result[3]);
#endif
    work.formats = NUMBERS;
    work.prepare(columns, PAIRED);
    outputs.residual = (const float *)operand_at(launch, RESIDUAL);
    outputs.residual_stride = stride_at(launch, RESIDUAL);
    outputs.activation = PAIRED ? packet_of(launch, GATE)->size[SWIGLU_ACTIVATION] : 0;

    STREAM_MEMORY<PRODUCT_SHAPE> memory(shared, work, SLOT_BITS);
    memory.begin(work.steps, false);
    RING<PRODUCT_SHAPE> ring(work);
    ring.begin(memory, threadIdx.x / WARP_LANES);
    CHUNK_LIST<PRODUCT_SHAPE> list;
    list.begin(work, memory, threadIdx.x / WARP_LANES);
    const unsigned tokens = count_by(product, counted);
    if (outputs.first_token >= tokens) {
        ring.drain(memory, threadIdx.x / WARP_LANES);
        PRECEDING_DONE;
        return;
    }
    const int own = min(tokens - outputs.first_token, TOKENS);
#if X >= 0
    const size_t stride = stride_at(launch, X);
    const SHARED_COLUMNS<PRODUCT_SHAPE> shared_columns = {work, memory, (unsigned)own};
    shared_columns.begin(NORM >= 0);
    const unsigned team = WHOLE_ROWS && TOKENS > 1 ? threadIdx.x / (TEAM_WARPS * WARP_LANES) : 0;
    const unsigned first_column = work.first_unit() * UNIT_COLUMNS;
    const float *weight = (const float *)operand_at(launch, NORM_WEIGHT);
    const FLOAT_ROWS<> rows = {
        (const float *)operand_at(launch, X) + (outputs.first_token + team) * stride + first_column,
        stride,
        weight ? weight + first_column : 0,
        NORM >= 0 ? packet_of(launch, NORM)->real[RMS_NORM_EPS] : 0.0f,
        CLUSTER == 1 ? columns : min(columns - first_column, work.own_units() * UNIT_COLUMNS),
        WHOLE_ROWS ? (unsigned)(team < own) : (unsigned)own,
    };
    const ACTIVATIONS own_x = from_token(memory.x, team);
#if WHOLE_ROWS
    ONE_ROW<TEAM_WARPS, (NORM >= 0), NORM_UNITS, HELD_UNITS> quantizer(own_x, rows);
#else
    ROW_QUANTIZER<WARPS, (NORM >= 0), TOKENS == 1> quantizer(own_x, rows);
#endif
    quantizer.load_weights();
    shared_columns.meet();
    PRECEDING_DONE;
#if WHOLE_ROWS
    quantizer.run(shared_columns.squares_of(team, columns));
#else
    quantizer.run(memory.squares);
#endif
#else
    const INTEGER_ROWS rows = {
        (const unsigned *)operand_at(launch, M) + outputs.first_token * (stride_at(launch, M) / 2),
        (const unsigned *)operand_at(launch, SUMS) + outputs.first_token * stride_at(launch, SUMS),
        (const float *)operand_at(launch, SCALE) + outputs.first_token * stride_at(launch, SCALE),
        stride_at(launch, M) / 2,
        stride_at(launch, SUMS),
        stride_at(launch, SCALE),
        (unsigned)own,
    };
    PRECEDING_DONE;
    take_rows<WARPS>(memory.x, rows);
#endif
    stream_product<PRODUCT_SHAPE>(work, ring, list, memory, own, outputs);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPS *WARP_LANES, 1)
    unit_product(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    BLOCK_MEMORY(shared);
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    multiply_tokens(launch, shared);
    meet_others(launch);
}
