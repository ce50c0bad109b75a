// How tuned products keep a quantized matrix: units of 16 rows and 256 columns.
//
// A matrix is cut in tiles of 16 rows, the last padded with zeros, a tile in units of 256 columns,
// the last padded with zeros; units of a tile lie one behind the other. A unit has the bits of the
// model file and no others. It holds planes, then the scales of its rows.
//
// Planes are in the order of the operands of mma.m16n8k32: sub-block j of 32 columns is one 16 x 32
// operand, of which lane (g, t) = (lane / 4, lane % 4) has four words, word r with the columns
// 16 (r / 2) + 4 t + (0..3) of row g + 8 (r % 2), a byte each. Every plane is an array of 16 bytes
// a lane, the four words:
//   nibbles, 4 vectors: vector v has sub-block 2 v in the low and 2 v + 1 in the high halves
//   pairs, 2 vectors:   vector v has two bits of sub-blocks 4 v .. 4 v + 3, the first lowest
//   bits, 1 vector:     one bit of all eight, the first lowest
//   bytes, 8 vectors:   one a sub-block
// What follows, for each row in turn:
//   formats of 32-blocks: eight binary16 scales (MXFP4: exponents of one byte); then, for each row
//                         again, eight minima if there are any
//   Q4_K, Q5_K:           d, dmin and the 12 bytes of scales and minima
//   Q2_K, Q6_K:           16 bytes of scales; then d, for Q2_K dmin behind it
//   Q3_K:                 12 bytes of scales; then d
//   IQ4_XS:               d, scales_h, scales_l

#ifndef UNITS_H
#define UNITS_H

#define UNIT_ROWS 16
#define UNIT_COLUMNS 256
#define UNIT_SUB_BLOCKS 8
#define SPAN_UNITS 4

// GGML type ids.
enum {
    FORMAT_Q4_0 = 2,
    FORMAT_Q4_1 = 3,
    FORMAT_Q5_0 = 6,
    FORMAT_Q5_1 = 7,
    FORMAT_Q8_0 = 8,
    FORMAT_Q2_K = 10,
    FORMAT_Q3_K = 11,
    FORMAT_Q4_K = 12,
    FORMAT_Q5_K = 13,
    FORMAT_Q6_K = 14,
    FORMAT_IQ4_NL = 20,
    FORMAT_IQ4_XS = 23,
    FORMAT_MXFP4 = 39
};

// The contents of a format. `zero` is the code of the integer 0; `table` marks codes that index a
// table of integers.
template <int dtype> struct UNIT_FORMAT {
    static constexpr bool super =
        (dtype >= FORMAT_Q2_K && dtype <= FORMAT_Q6_K) || dtype == FORMAT_IQ4_XS;
    static constexpr bool halves = dtype == FORMAT_Q2_K || dtype == FORMAT_Q3_K ||
                                   dtype == FORMAT_Q6_K;  // sub-blocks of 16 columns
    static constexpr bool table =
        dtype == FORMAT_IQ4_NL || dtype == FORMAT_IQ4_XS || dtype == FORMAT_MXFP4;
    static constexpr bool bytes = dtype == FORMAT_Q8_0;
    static constexpr bool pairs = halves;
    static constexpr bool bits = dtype == FORMAT_Q5_0 || dtype == FORMAT_Q5_1 ||
                                 dtype == FORMAT_Q5_K || dtype == FORMAT_Q3_K;
    static constexpr bool nibbles = !bytes && dtype != FORMAT_Q2_K && dtype != FORMAT_Q3_K;
    static constexpr bool minima = dtype == FORMAT_Q4_1 || dtype == FORMAT_Q5_1 ||
                                   dtype == FORMAT_Q2_K || dtype == FORMAT_Q4_K ||
                                   dtype == FORMAT_Q5_K;
    static constexpr int zero = dtype == FORMAT_Q4_0   ? 8
                                : dtype == FORMAT_Q5_0 ? 16
                                : dtype == FORMAT_Q3_K ? 4
                                : dtype == FORMAT_Q6_K ? 32
                                                       : 0;
    static constexpr bool is_signed = bytes || table;
    // A format that has only nibbles does not move them: those of the odd sub-blocks count 16
    // times.
    static constexpr int odd_shift = nibbles && !pairs && !bits && !table ? 4 : 0;

    static constexpr int pairs_at = nibbles ? 2048 : 0;
    static constexpr int bits_at = pairs_at + (pairs ? 1024 : 0);
    static constexpr int scales_at = bytes ? 4096 : bits_at + (bits ? 512 : 0);
    // Bytes of a row's scales in the first of their two arrays, and in the second.
    static constexpr int row_scales = dtype == FORMAT_MXFP4    ? 8
                                      : dtype == FORMAT_Q3_K   ? 12
                                      : dtype == FORMAT_IQ4_XS ? 8
                                                               : 16;
    static constexpr int row_rest = dtype == FORMAT_Q4_1 || dtype == FORMAT_Q5_1   ? 16
                                    : dtype == FORMAT_Q2_K                         ? 4
                                    : dtype == FORMAT_Q3_K || dtype == FORMAT_Q6_K ? 2
                                                                                   : 0;
    static constexpr int rest_at = scales_at + UNIT_ROWS * row_scales;
    static constexpr int unit_bytes = rest_at + UNIT_ROWS * row_rest;
};

#endif
