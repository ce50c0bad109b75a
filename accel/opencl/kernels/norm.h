// The sum of squares of a row (rules R3 and R4), which norms divide by.

#ifndef NORM_H
#define NORM_H

static float sum_of_squares(const GLOBAL float *x, uint width) {
    SPAN_FOLD fold = {0.0f, 0.0f, 0};
    for (uint first = 0; first < width; first += SEGMENT) {
        float16 squares[16];
        if (first + SEGMENT <= width) {
            UNROLL for (int i = 0; i < 16; i++) squares[i] = vload16(i, x + first);
        } else {
            for (int i = 0; i < 16; i++) {
                int k = first + 16 * i;
                squares[i] = k < (int)width ? load_padded(x + k, (int)width - k) : (float16)(0.0f);
            }
        }
        UNROLL for (int i = 0; i < 16; i++) squares[i] = squares[i] * squares[i];
        fold_next(&fold, fold_segment(squares));
    }
    return fold_end(&fold);
}

#endif
