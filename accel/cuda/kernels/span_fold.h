// Folds rows from the spans that unit_groups.cu or unit_spans.cu wrote to the workspace. FOLDED is
// the packet number of the product, -1 without one; BIAS and RESIDUAL are operand numbers (see
// packets.h), SPANS is the number of spans.

#ifndef SPAN_FOLD_H
#define SPAN_FOLD_H

#include "packets.h"

#if FOLDED >= 0

#define MAX_UNROLLED 16

DEVICE float4 plus(const float4 &a, const float4 &b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Four values of row `token` of x from column `row` on: the left fold over spans (rule R3), then the bias,
// then the residual.
DEVICE float4 fold_four(const LAUNCH &launch, unsigned token, unsigned tokens, unsigned rows,
                        const float *spans, unsigned row) {
    const float *bias = (const float *)operand_at(launch, BIAS);
    const float *residual =
        (const float *)operand_at(launch, RESIDUAL) + token * stride_at(launch, RESIDUAL);
    const float4 own = *(const float4 *)(residual + row);
    const float *value = spans + (size_t)token * rows + row;
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
    // All values are requested before any is waited for.
#pragma unroll(SPANS < MAX_UNROLLED ? SPANS : MAX_UNROLLED)
    for (int span = 0; span < SPANS; span++, value += (size_t)tokens * rows)
        total = plus(total, *(const float4 *)value);
    if (bias) total = plus(total, *(const float4 *)(bias + row));
    return plus(own, total);
}

#endif

#endif
