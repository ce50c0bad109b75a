// How a quantized matrix is arranged for the products (Layout.LANES of layouts.py).
//
// Rows are cut in groups of 16, the last padded with zeros. A group is a header and a body, each a
// whole number of 64-byte vectors:
//   header: for every block (of 32, or super-block) 16 binary16 scales (MXFP4: 16 exponents of one
//           byte), then 16 minima if any (IQ4_XS: the 16 words scales_h)
//   body:   for every super-block 1 (IQ4_XS), 3 (Q3_K, Q4_K, Q5_K) or 4 (Q2_K, Q6_K) vectors of
//           sub-block scales, a dword of the stored bytes to a lane; for every 32 elements the
//           vectors of their upper bits, then those of their lower bits
// Vector i of nibbles holds elements 8i to 8i + 3 in the low and 8i + 4 to 8i + 7 in the high
// nibbles, bytes in the order of matmul_lanes.h. Other bits of elements 4t to 4t + 3 lie in the
// bytes of the same order: single bits at bit t, pairs at bit 2 (t % 4) of vector t / 4, whole
// bytes in vector t. Integers are stored unsigned: OFFSET is to be subtracted. Nibbles of IQ4_NL,
// IQ4_XS and MXFP4 are indices into a table.

#ifndef LANES_LAYOUT_H
#define LANES_LAYOUT_H

#define LANES 16
#define VECTOR_BYTES 64
#define LAYOUT_LANES 1  // packet->layout, mirrored by layouts.py

// `dtype` is a constant wherever these are used, so that each format gets code of its own.
#define IS_SUPER(dtype)                                             \
    ((dtype) == Q4_K || (dtype) == Q5_K || HAS_HALF_BLOCKS(dtype) || \
     (dtype) == IQ4_XS)
// Sub-blocks of 16 elements, two in each block of 32.
#define HAS_HALF_BLOCKS(dtype) ((dtype) == Q2_K || (dtype) == Q3_K || (dtype) == Q6_K)
#define HAS_MINIMUM(dtype)                                                            \
    ((dtype) == Q4_1 || (dtype) == Q5_1 || (dtype) == Q4_K || (dtype) == Q5_K || \
     (dtype) == Q2_K)
#define UPPER_BITS(dtype)                                                         \
    ((dtype) == Q3_K || (dtype) == Q5_0 || (dtype) == Q5_1 || (dtype) == Q5_K ? 1 \
     : (dtype) == Q6_K                                                        ? 2 \
                                                                              : 0)
#define LOWER_BITS(dtype) ((dtype) == Q8_0 ? 8 : (dtype) == Q2_K || (dtype) == Q3_K ? 2 : 4)
// A vector holds one bit of all of 32 elements of 16 rows.
#define BLOCK_VECTORS(dtype) (LOWER_BITS(dtype) + UPPER_BITS(dtype))
#define SUB_SCALE_VECTORS(dtype)                \
    ((dtype) == Q2_K || (dtype) == Q6_K ? 4     \
     : (dtype) == IQ4_XS                ? 1     \
     : IS_SUPER(dtype)                  ? 3     \
                                        : 0)
#define UNIT_ELEMENTS(dtype) (IS_SUPER(dtype) ? 256 : 32)
#define UNIT_BYTES(dtype) \
    ((dtype) == MXFP4 ? 16 : HAS_MINIMUM(dtype) || (dtype) == IQ4_XS ? 64 : 32)

INLINE uint header_bytes(uint dtype, uint columns) {
    return (columns / UNIT_ELEMENTS(dtype) * UNIT_BYTES(dtype) + VECTOR_BYTES - 1) / VECTOR_BYTES *
           VECTOR_BYTES;
}

// Vectors of the body before a column that begins a segment (or ends the row).
INLINE uint body_vectors(uint dtype, uint column) {
    return column / 32 * BLOCK_VECTORS(dtype) + column / 256 * SUB_SCALE_VECTORS(dtype);
}

// Bytes of UNIT_ELEMENTS elements of 16 rows, in header and body.
#define STORED_BYTES(dtype) \
    (UNIT_BYTES(dtype) + body_vectors(dtype, UNIT_ELEMENTS(dtype)) * VECTOR_BYTES)

INLINE uint group_bytes(uint dtype, uint columns) {
    return header_bytes(dtype, columns) + body_vectors(dtype, columns) * VECTOR_BYTES;
}

#endif
