// The operands of one matrix product, as pointers; strides count elements, weight_stride bytes.

#ifndef MATMUL_OPERANDS_H
#define MATMUL_OPERANDS_H

typedef struct {
    uint tokens;
    uint rows;
    uint columns;
    const GLOBAL uchar *weight;
    ulong weight_stride;
    const GLOBAL float *x;  // float weights
    ulong x_stride;
    const GLOBAL short *m;  // quantized weights: what quantize_activation wrote
    ulong m_stride;
    const GLOBAL float *scale;
    ulong scale_stride;
    const GLOBAL uint *sums;  // a dword for 32 columns: sums of m over 16 and the next 16 columns
    ulong sums_stride;
    GLOBAL float *y;
    ulong y_stride;
    const GLOBAL int *source;  // the row each token has in x or m, scale and sums; 0: its own
    const GLOBAL int *target;  // the row each token has in y; 0: its own
} MATMUL;

INLINE ulong source_row(const MATMUL *p, uint token) {
    return p->source ? (ulong)p->source[token] : token;
}

INLINE ulong target_row(const MATMUL *p, uint token) {
    return p->target ? (ulong)p->target[token] : token;
}

#endif
