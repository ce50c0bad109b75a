// The running arg-max of a row: the largest logit, the lowest id among equals, and whether all were
// finite (rule R9).

#ifndef ARGMAX_H
#define ARGMAX_H

#define NO_TOKEN -1

typedef struct {
    float value;
    int id;       // NO_TOKEN: nothing seen
    int finite;   // 0: a NaN or an infinity was seen
} BEST;

static inline bool is_finite(float x) {
    return (as_uint(x) & ~SIGN_BIT) < INFINITY_BITS;
}

static inline BEST best_of(BEST a, BEST b) {
    BEST best = b.id == NO_TOKEN || (a.id != NO_TOKEN && (a.value > b.value ||
                (a.value == b.value && a.id < b.id))) ? a : b;
    best.finite = a.finite & b.finite;
    return best;
}

// Arg-max of x[begin, end), ids counted from 0. A non-finite value only clears `finite`.
static BEST best_in(const GLOBAL float *x, uint begin, uint end) {
    const int16 lane = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    BEST best = {0.0f, NO_TOKEN, 1};
    uint k = begin;
    if (begin + 16 <= end) {
        float16 value = vload16(0, x + begin);
        int16 id = lane + (int)begin, magnitude = as_int16(value) & 0x7FFFFFFF;
        for (k = begin + 16; k + 16 <= end; k += 16) {
            float16 next = vload16(0, x + k);
            int16 more = next > value;
            value = select(value, next, more);
            id = select(id, lane + (int)k, more);
            magnitude = max(magnitude, as_int16(next) & 0x7FFFFFFF);
        }
        float values[16];
        int ids[16], magnitudes[16];
        vstore16(value, 0, values);
        vstore16(id, 0, ids);
        vstore16(magnitude, 0, magnitudes);
        for (int i = 0; i < 16; i++) {
            BEST one = {values[i], ids[i], magnitudes[i] < (int)INFINITY_BITS};
            best = best_of(best, one);
        }
    }
    for (; k < end; k++) {
        BEST one = {x[k], (int)k, is_finite(x[k])};
        best = best_of(best, one);
    }
    return best;
}

static inline int token_of(BEST best) {
    return best.finite ? best.id : NO_TOKEN;
}

#endif
