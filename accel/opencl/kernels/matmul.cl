// y = x weight^T by rules R3 to R5.
//
// operands: x, scale, sums, weight, y, ids, chunks, order. For a quantized weight x, scale and sums are what
//           quantize_activation wrote; for a float weight x is float [tokens, columns] and
//           scale and sums are absent.
// sizes:    tokens, rows, columns, places, used
// With places = 0 there is one matrix. Else there is one for every expert, ids int [tokens, used]
// says which a row of y wants, and places rows of y share a row of x: see matmul_experts.h. chunks
// and order are what expert_group wrote; without them every row of y is computed by itself.
// Float weights are stored as in the model file, stride[3] bytes a row; quantized ones in the
// layout of lanes_layout.h. Rows are split among workers by COLUMN_GRANULE, for every number
// of tokens; or work-groups share them in any way.

#if GROUP_SIZE == 1

MATMUL_TARGET_BEGIN

#define DEFINE_QUANTIZED(dtype)                                             \
    OUTLINED void decode_##dtype(const MATMUL *p, uint begin, uint end) {   \
        decode_rows(dtype, p, begin, end);                                  \
    }                                                                       \
    OUTLINED void prefill_##dtype(const MATMUL *p, uint begin, uint end) {  \
        prefill_rows(dtype, p, begin, end);                                 \
    }                                                                       \
    static void rows_##dtype(const MATMUL *p, uint begin, uint end) {       \
        if (p->tokens <= DECODE_TOKENS)                                     \
            decode_##dtype(p, begin, end);                                  \
        else                                                                \
            prefill_##dtype(p, begin, end);                                 \
    }

#define DEFINE_FLOAT(dtype)                                                 \
    OUTLINED void rows_##dtype(const MATMUL *p, uint begin, uint end) {     \
        float_rows(dtype, p, begin, end);                                   \
    }

DEFINE_QUANTIZED(Q4_0)
DEFINE_QUANTIZED(Q4_1)
DEFINE_QUANTIZED(Q5_0)
DEFINE_QUANTIZED(Q5_1)
DEFINE_QUANTIZED(Q8_0)
DEFINE_QUANTIZED(Q4_K)
DEFINE_QUANTIZED(Q5_K)
DEFINE_QUANTIZED(Q6_K)
DEFINE_QUANTIZED(Q2_K)
DEFINE_QUANTIZED(Q3_K)
DEFINE_QUANTIZED(IQ4_NL)
DEFINE_QUANTIZED(IQ4_XS)
DEFINE_QUANTIZED(MXFP4)
DEFINE_FLOAT(F32)
DEFINE_FLOAT(F16)
DEFINE_FLOAT(BF16)

MATMUL_TARGET_END

#define ROWS_CASE(dtype)                         \
    case dtype:                                  \
        rows_##dtype(p, mine.begin, mine.end);   \
        break;

#else

#define ROWS_CASE(dtype)                                   \
    case dtype:                                            \
        if (IS_FLOAT(dtype))                               \
            group_float_rows(dtype, memory, p, experts);   \
        else                                               \
            group_rows(dtype, memory, p, experts);         \
        break;

#endif

// A core computes the rows that are its share; work-groups share all rows of all chunks.
static void multiply_rows(MEMORY memory, uint dtype, const MATMUL *p, const EXPERTS *experts,
                          SHARE mine) {
    switch (dtype) {
        ROWS_CASE(Q4_0)
        ROWS_CASE(Q4_1)
        ROWS_CASE(Q5_0)
        ROWS_CASE(Q5_1)
        ROWS_CASE(Q8_0)
        ROWS_CASE(Q4_K)
        ROWS_CASE(Q5_K)
        ROWS_CASE(Q6_K)
        ROWS_CASE(Q2_K)
        ROWS_CASE(Q3_K)
        ROWS_CASE(IQ4_NL)
        ROWS_CASE(IQ4_XS)
        ROWS_CASE(MXFP4)
        ROWS_CASE(F32)
        ROWS_CASE(F16)
        ROWS_CASE(BF16)
    }
}

static EXPERTS experts_of(MEMORY memory, const GLOBAL PACKET *packet) {
    EXPERTS e = {0};
    e.pairs = packet->size[0];
    e.places = packet->size[3];
    if (!e.places) return e;
    e.used = packet->size[4];
    e.ids = OPERAND(int, 5);
    e.ids_stride = packet->stride[5];
    if (packet->operand[6] != ABSENT) {
        e.chunks = OPERAND(CHUNK, 6);
        e.order = OPERAND(int, 7);
    }
    const uint rows = packet->size[1];
    e.expert_bytes = (ulong)(IS_FLOAT(packet->dtype) ? rows : (rows + LANES - 1) / LANES) *
                     packet->stride[3];
    return e;
}

void op_matmul(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    MATMUL p = {0};
    p.tokens = packet->size[0];
    p.rows = packet->size[1];
    p.columns = packet->size[2];
    p.x = OPERAND(float, 0);
    p.m = OPERAND(short, 0);
    p.x_stride = p.m_stride = packet->stride[0];
    if (!IS_FLOAT(packet->dtype)) {
        p.scale = OPERAND(float, 1);
        p.scale_stride = packet->stride[1];
        p.sums = OPERAND(uint, 2);
        p.sums_stride = packet->stride[2];
    }
    p.weight = OPERAND(uchar, 3);
    p.weight_stride = packet->stride[3];
    p.y = OPERAND(float, 4);
    p.y_stride = packet->stride[4];
    const EXPERTS experts = experts_of(memory, packet);
    const SHARE mine = share(p.rows, COLUMN_GRANULE, worker, workers);
#if GROUP_SIZE == 1
    const uint chunks = chunk_count(&experts);
    for (uint chunk = 0; chunk < chunks; chunk++) {
        const MATMUL q = chunk_product(&p, &experts, chunk);
        multiply_rows(memory, packet->dtype, &q, &experts, mine);
    }
#else
    multiply_rows(memory, packet->dtype, &p, &experts, mine);
#endif
}
