// The experts of each token added up in order (rule R7):
// y = residual or 0; y += weights[t, e] * (products[t, e] * expert_scale[ids[t, e]]), e in order.
//
// products is [tokens * used, width], ids and weights [tokens, used], expert_scale [experts].

INLINE float16 expert_sum(const expert_sum_fields *op, uint token, uint k, int count,
                          float16 sum) {
    const GLOBAL float *products = op->products + (ulong)token * op->used * op->products_stride + k;
    const GLOBAL int *ids = op->ids + (ulong)token * op->ids_stride;
    const GLOBAL float *weights = op->weights + (ulong)token * op->weights_stride;
    for (uint rank = 0; rank < op->used; rank++) {
        float16 product = load_padded(products + (ulong)rank * op->products_stride, count);
        if (op->expert_scale) product = product * op->expert_scale[ids[rank]];
        sum = sum + weights[rank] * product;
    }
    return sum;
}

DEFINE_BY_COLUMNS(expert_sum, ,
                  expert_sum(&op, token, k, count, op.residual ? A(residual) : (float16)(0.0f)))
