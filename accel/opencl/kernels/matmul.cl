// y = x weight^T by rules R3 to R5.
//
// operands: x, scale, sums, weight, y, ids, chunks, order. For a quantized weight x, scale and sums are what
//           quantize_activation wrote; for a float weight x is float [tokens, columns] and
//           scale and sums are absent.
// sizes:    tokens, rows, columns, row_pairs, used
// With row_pairs = 0 there is one matrix. Else there is one for every expert, ids int [tokens, used]
// says which a row of y wants, and row_pairs rows of y share one of x: see matmul_experts.h. chunks
// and order are what expert_group wrote; without them every row of y is computed by itself.
// Float weights are stored as in the model file, weight_stride bytes a row; quantized ones in the
// layout of lanes_layout.h. Rows are split among workers by column_granule().

MATMUL_TARGET_BEGIN

#define DEFINE_QUANTIZED(dtype)                                             \
    OUTLINED void decode_##dtype(const MATMUL *p, uint begin, uint end) {   \
        decode_rows(dtype, p, begin, end);                                  \
    }                                                                       \
    OUTLINED void few_##dtype(const MATMUL *p, uint begin, uint end) {      \
        few_rows(dtype, p, begin, end);                                     \
    }                                                                       \
    OUTLINED void prefill_##dtype(const MATMUL *p, uint begin, uint end) {  \
        prefill_rows(dtype, p, begin, end);                                 \
    }                                                                       \
    static void rows_##dtype(const MATMUL *p, uint begin, uint end) {       \
        if (p->tokens == 1)                                                 \
            decode_##dtype(p, begin, end);                                  \
        else if (p->tokens <= FEW_TOKENS)                                   \
            few_##dtype(p, begin, end);                                     \
        else                                                                \
            prefill_##dtype(p, begin, end);                                 \
    }

#define DEFINE_FLOAT(dtype)                                                 \
    OUTLINED void rows_##dtype(const MATMUL *p, uint begin, uint end) {     \
        float_rows(dtype, p, begin, end);                                   \
    }

FOR_EACH_QUANTIZED(DEFINE_QUANTIZED)
FOR_EACH_FLOAT(DEFINE_FLOAT)

MATMUL_TARGET_END

#define ROWS_CASE(dtype)                         \
    case dtype:                                  \
        rows_##dtype(p, mine.begin, mine.end);   \
        break;

// A core computes the rows that are its share.
static void multiply_rows(uint dtype, const MATMUL *p, SHARE mine) {
    switch (dtype) {
        FOR_EACH_QUANTIZED(ROWS_CASE)
        FOR_EACH_FLOAT(ROWS_CASE)
    }
}

static EXPERTS experts_of(const matmul_fields *op, uint dtype) {
    EXPERTS e = {0};
    e.pairs = op->tokens;
    e.row_pairs = op->row_pairs;
    if (!e.row_pairs) return e;
    e.used = op->used;
    e.ids = op->ids;
    e.ids_stride = op->ids_stride;
    e.chunks = op->chunks;
    e.order = op->order;
    e.expert_bytes = (ulong)(IS_FLOAT(dtype) ? op->rows : (op->rows + LANES - 1) / LANES) *
                     op->weight_stride;
    return e;
}

void op_matmul(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(matmul);
    MATMUL p = {0};
    p.tokens = op.tokens;
    p.rows = op.rows;
    p.columns = op.columns;
    p.x = op.x;
    p.m = op.x;
    p.x_stride = p.m_stride = op.x_stride;
    p.scale = op.scale;
    p.scale_stride = op.scale_stride;
    p.sums = op.sums;
    p.sums_stride = op.sums_stride;
    p.weight = op.weight;
    p.weight_stride = op.weight_stride;
    p.y = op.y;
    p.y_stride = op.y_stride;
    const EXPERTS experts = experts_of(&op, packet->dtype);
    const SHARE mine = share(p.rows, column_granule(memory), worker, workers);
    const uint chunks = chunk_count(&experts);
    for (uint chunk = 0; chunk < chunks; chunk++) {
        const MATMUL q = chunk_product(&p, &experts, chunk);
        multiply_rows(packet->dtype, &q, mine);
    }
}
