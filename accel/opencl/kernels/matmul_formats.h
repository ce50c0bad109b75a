// How weights.py arranges a quantized matrix (Layout.LANES), and its integers as lanes.
//
// Rows are cut in groups of 16, the last padded with zeros. A group is a header and a body, each a
// whole number of 64-byte vectors:
//   header: for every block (of 32, or super-block) 16 binary16 scales, then 16 minima if any
//   body:   for every super-block 3 (Q4_K, Q5_K) or 4 (Q6_K) vectors of sub-block scales, a dword
//           of the stored bytes to a lane; for every 32 elements the vectors of their upper bits,
//           then those of their nibbles (or, Q8_0, bytes)
// Vector i of nibbles holds elements 8i to 8i + 3 in the low and 8i + 4 to 8i + 7 in the high
// nibbles, bytes in the order of matmul_lanes.h. The upper bits of elements 4t to 4t + 3 lie in the
// bytes of the same order, at bit t (1 bit) or at bit 2 (t % 4) of vector t / 4 (2 bits).
// Integers are stored unsigned: OFFSET is to be subtracted.

#ifndef MATMUL_FORMATS_H
#define MATMUL_FORMATS_H

#define LAYOUT_LANES 1  // packet->layout, mirrored by weights.py

// `dtype` is a constant wherever these are used, so that each format gets code of its own.
#define IS_FLOAT(dtype) ((dtype) == F32 || (dtype) == F16 || (dtype) == BF16)
#define IS_SUPER(dtype) ((dtype) == Q4_K || (dtype) == Q5_K || (dtype) == Q6_K)
#define HAS_MINIMUM(dtype) \
    ((dtype) == Q4_1 || (dtype) == Q5_1 || (dtype) == Q4_K || (dtype) == Q5_K)
#define OFFSET(dtype) \
    ((dtype) == Q4_0 ? 8 : (dtype) == Q5_0 ? 16 : (dtype) == Q6_K ? 32 : (dtype) == Q8_0 ? 128 : 0)
#define UPPER_VECTORS(dtype) \
    ((dtype) == Q5_0 || (dtype) == Q5_1 || (dtype) == Q5_K ? 1 : (dtype) == Q6_K ? 2 : 0)
#define BLOCK_VECTORS(dtype) ((dtype) == Q8_0 ? 8 : 4 + UPPER_VECTORS(dtype))
#define SUB_SCALE_VECTORS(dtype) ((dtype) == Q6_K ? 4 : IS_SUPER(dtype) ? 3 : 0)
#define UNIT_ELEMENTS(dtype) (IS_SUPER(dtype) ? 256 : 32)
#define UNIT_BYTES(dtype) (HAS_MINIMUM(dtype) ? 64 : 32)

INLINE uint header_bytes(uint dtype, uint columns) {
    return (columns / UNIT_ELEMENTS(dtype) * UNIT_BYTES(dtype) + VECTOR_BYTES - 1) / VECTOR_BYTES *
           VECTOR_BYTES;
}

// Vectors of the body before a column that begins a segment (or ends the row).
INLINE uint body_vectors(uint dtype, uint column) {
    return column / 32 * BLOCK_VECTORS(dtype) + column / 256 * SUB_SCALE_VECTORS(dtype);
}

INLINE uint group_bytes(uint dtype, uint columns) {
    return header_bytes(dtype, columns) + body_vectors(dtype, columns) * VECTOR_BYTES;
}

MATMUL_TARGET_BEGIN

INLINE uint16 shift_left(uint16 value, int places) {
    return places >= 0 ? value << (uint)places : value >> (uint)-places;
}

// Elements 4t to 4t + 3 of 32 whose vectors begin at `block`, as unsigned bytes; t is a constant.
INLINE uint16 weight_bytes(uint dtype, const GLOBAL uchar *block, int t) {
    const GLOBAL uchar *nibbles = block + UPPER_VECTORS(dtype) * VECTOR_BYTES;
    if (dtype == Q8_0) return load_lanes(nibbles + t * VECTOR_BYTES);
    uint16 q = load_lanes(nibbles + t / 2 * VECTOR_BYTES);
    q = (t & 1 ? q >> 4 : q) & 0x0F0F0F0Fu;
    if (UPPER_VECTORS(dtype) == 1)
        q |= shift_left(load_lanes(block), 4 - t) & 0x10101010u;
    else if (UPPER_VECTORS(dtype) == 2)
        q |= shift_left(load_lanes(block + t / 4 * VECTOR_BYTES), 4 - 2 * (t & 3)) & 0x30303030u;
    return q;
}

// Sub-block scales of a super-block, sub-blocks 4i to 4i + 3 in the bytes of scale[i].
typedef struct {
    uint16 scale[4];
    uint16 minimum[2];
} SUB_SCALES;

INLINE SUB_SCALES load_sub_scales(uint dtype, const GLOBAL uchar *body) {
    SUB_SCALES s;
    uint16 a = load_lanes(body), b = load_lanes(body + VECTOR_BYTES);
    uint16 c = load_lanes(body + 2 * VECTOR_BYTES);
    if (dtype == Q6_K) {
        s.scale[0] = a;
        s.scale[1] = b;
        s.scale[2] = c;
        s.scale[3] = load_lanes(body + 3 * VECTOR_BYTES);
    } else {
        s.scale[0] = a & 0x3F3F3F3Fu;
        s.scale[1] = (c & 0x0F0F0F0Fu) | ((a >> 2) & 0x30303030u);
        s.minimum[0] = b & 0x3F3F3F3Fu;
        s.minimum[1] = ((c >> 4) & 0x0F0F0F0Fu) | ((b >> 2) & 0x30303030u);
    }
    return s;
}

// Byte i % 4 of vector i / 4 as a number: signed for Q6_K, whose scales are.
INLINE int16 sub_block_number(uint dtype, const uint16 *vectors, int i) {
    uint16 raised = vectors[i / 4] << (uint)(24 - 8 * (i & 3));
    return dtype == Q6_K ? as_int16(raised) >> 24 : as_int16(raised >> 24);
}

MATMUL_TARGET_END

// The dword of lane `row % 16` in vector `vector` of a body.
INLINE uint lane_dword(const GLOBAL uchar *body, uint vector, uint row) {
    return ((const GLOBAL uint *)body)[vector * LANES + row % LANES];
}

// Element (row, column) of a matrix in this layout, dequantized: q d (+ minimum), or
// (d sc) q (- dmin mn), every operation rounded.
static float lanes_element(uint dtype, const GLOBAL uchar *matrix, uint columns, uint row,
                           uint column) {
    const GLOBAL uchar *group = matrix + (ulong)(row / LANES) * group_bytes(dtype, columns);
    const GLOBAL half *unit =
        (const GLOBAL half *)(group + column / UNIT_ELEMENTS(dtype) * UNIT_BYTES(dtype));
    const GLOBAL uchar *body = group + header_bytes(dtype, columns);
    const uint first = column / 256 * 256, in_block = column % 32, t = in_block / 4;
    const uint byte = 8 * ((column & 1) << 1 | (column >> 1 & 1));
    uint vector = body_vectors(dtype, first), scales = vector;
    vector += SUB_SCALE_VECTORS(dtype) + (column - first) / 32 * BLOCK_VECTORS(dtype);
    uint upper = vector, nibbles = vector + UPPER_VECTORS(dtype);
    int q;
    if (dtype == Q8_0) {
        q = lane_dword(body, nibbles + t, row) >> byte & 0xFF;
    } else {
        q = lane_dword(body, nibbles + t / 2, row) >> (byte + 4 * (t & 1)) & 15;
        if (UPPER_VECTORS(dtype) == 1) q |= (lane_dword(body, upper, row) >> (byte + t) & 1) << 4;
        if (UPPER_VECTORS(dtype) == 2)
            q |= (lane_dword(body, upper + t / 4, row) >> (byte + 2 * (t & 3)) & 3) << 4;
    }
    float value = (float)(q - OFFSET(dtype));
    float d = vload_half(row % LANES, unit);
    float minimum = HAS_MINIMUM(dtype) ? vload_half(LANES + row % LANES, unit) : 0.0f;
    if (!IS_SUPER(dtype)) return HAS_MINIMUM(dtype) ? value * d + minimum : value * d;
    if (dtype == Q6_K) {
        uint s = (column - first) / 16;
        int scale = (char)(lane_dword(body, scales + s / 4, row) >> 8 * (s & 3));
        return d * (float)scale * value;
    }
    uint s = (column - first) / 32, place = 8 * (s & 3);
    uint a = lane_dword(body, scales, row) >> place, b = lane_dword(body, scales + 1, row) >> place;
    uint c = lane_dword(body, scales + 2, row) >> place;
    uint scale = s < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
    uint mn = s < 4 ? b & 63 : (c >> 4 & 15) | (b >> 2 & 48);
    return d * (float)scale * value - minimum * (float)mn;
}

#endif
