// Rows of 32-bit numbers become columns.

#ifndef TRANSPOSE_H
#define TRANSPOSE_H

MATMUL_TARGET_BEGIN

#if defined(__AVX512F__)
// The lanes of vector i and of vector i + half in turn. Rows become columns by repeating it.
#define INTERLEAVE(to, from, half)                                                               \
    UNROLL for (int i = 0; i < half; i++) {                                                      \
        uint16 a = from[i], b = from[i + half];                                                  \
        to[2 * i] = make_uint16(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3, a.s4, b.s4,      \
                                a.s5, b.s5, a.s6, b.s6, a.s7, b.s7);                             \
        to[2 * i + 1] = make_uint16(a.s8, b.s8, a.s9, b.s9, a.sa, b.sa, a.sb, b.sb, a.sc, b.sc,  \
                                    a.sd, b.sd, a.se, b.se, a.sf, b.sf);                         \
    }

INLINE void transpose16(uint16 *v) {
    uint16 t[16];
    INTERLEAVE(t, v, 8)
    INTERLEAVE(v, t, 8)
    INTERLEAVE(t, v, 8)
    INTERLEAVE(v, t, 8)
}

// Sixteen channels, of sixteen positions each, become eight pairs of positions.
INLINE void channels_to_lanes(const short16 *channel, uint16 *values, uint stride) {
    uint16 v[8], t[8];
    UNROLL for (int i = 0; i < 8; i++)
        v[i] = make_uint16(as_uint8(channel[2 * i]), as_uint8(channel[2 * i + 1]));
    INTERLEAVE(t, v, 4)
    INTERLEAVE(v, t, 4)
    INTERLEAVE(t, v, 4)
    INTERLEAVE(v, t, 4)
    UNROLL for (int i = 0; i < 8; i++) values[i * stride] = v[i];
}
#else
// In steps that stay in each half of four lanes as long as possible: instructions of shorter vectors
// cross halves slowly.
INLINE void transpose8(uint8 *v) {
    uint8 t[8], s[8];
    UNROLL for (int i = 0; i < 4; i++) {
        const uint8 a = v[2 * i], b = v[2 * i + 1];
        t[2 * i] = make_uint8(a.s0, b.s0, a.s1, b.s1, a.s4, b.s4, a.s5, b.s5);
        t[2 * i + 1] = make_uint8(a.s2, b.s2, a.s3, b.s3, a.s6, b.s6, a.s7, b.s7);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const uint8 a = t[i / 2 * 4 + i % 2], b = t[i / 2 * 4 + i % 2 + 2];
        s[i / 2 * 4 + i % 2 * 2] = make_uint8(a.s0, a.s1, b.s0, b.s1, a.s4, a.s5, b.s4, b.s5);
        s[i / 2 * 4 + i % 2 * 2 + 1] = make_uint8(a.s2, a.s3, b.s2, b.s3, a.s6, a.s7, b.s6, b.s7);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        v[i] = make_uint8(s[i].lo, s[i + 4].lo);
        v[i + 4] = make_uint8(s[i].hi, s[i + 4].hi);
    }
}

INLINE void transpose16(uint16 *v) {
    uint8 low[2][8], high[2][8];  // columns, of the first rows and of the others
    UNROLL for (int i = 0; i < 16; i++) low[i / 8][i % 8] = v[i].lo, high[i / 8][i % 8] = v[i].hi;
    UNROLL for (int i = 0; i < 2; i++) {
        transpose8(low[i]);
        transpose8(high[i]);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        v[i] = make_uint16(low[0][i], low[1][i]);
        v[i + 8] = make_uint16(high[0][i], high[1][i]);
    }
}

// Sixteen channels, of sixteen positions each, become eight pairs of positions.
INLINE void channels_to_lanes(const short16 *channel, uint16 *values, uint stride) {
    uint8 v[2][8];
    UNROLL for (int i = 0; i < 16; i++) v[i / 8][i % 8] = as_uint8(channel[i]);
    UNROLL for (int i = 0; i < 2; i++) transpose8(v[i]);
    UNROLL for (int i = 0; i < 8; i++) values[i * stride] = make_uint16(v[0][i], v[1][i]);
}
#endif

MATMUL_TARGET_END

#endif
