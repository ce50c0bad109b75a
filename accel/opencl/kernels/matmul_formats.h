// The integers and scales of arranged matrices (lanes_layout.h), as lanes.

#ifndef MATMUL_FORMATS_H
#define MATMUL_FORMATS_H

#define IS_FLOAT(dtype) ((dtype) == F32 || (dtype) == F16 || (dtype) == BF16)
#define HAS_TABLE(dtype) ((dtype) == IQ4_NL || (dtype) == IQ4_XS || (dtype) == MXFP4)
#define OFFSET(dtype)                                                         \
    ((dtype) == Q3_K                                           ? 4            \
     : (dtype) == Q4_0                                         ? 8            \
     : (dtype) == MXFP4                                        ? 12           \
     : (dtype) == Q5_0                                         ? 16           \
     : (dtype) == Q6_K                                         ? 32           \
     : (dtype) == Q8_0 || (dtype) == IQ4_NL || (dtype) == IQ4_XS ? 128        \
                                                               : 0)

// The largest integer plus OFFSET.
#define MAX_INTEGER(dtype)                                                    \
    ((dtype) == MXFP4                     ? 24                                \
     : HAS_TABLE(dtype)                   ? 241                               \
     : (dtype) == Q8_0                    ? 255                               \
                                          : (1 << (LOWER_BITS(dtype) + UPPER_BITS(dtype))) - 1)
// Sums of two products of such an integer and a signed byte are 16-bit numbers.
#define MULTIPLIES_BYTES(dtype) (BYTE_PRODUCTS && MAX_INTEGER(dtype) <= 63)

// The sixteen values of a table plus OFFSET, as bytes.
INLINE uint4 table_bytes(uint dtype) {
    return dtype == MXFP4 ? make_uint4(0x0F0E0D0Cu, 0x18141210u, 0x090A0B0Cu, 0x00040608u)
                          : make_uint4(0x3F2D1801u, 0x766A5D4Fu, 0xA6998D81u, 0xF1D9C5B5u);
}

// MXFP4's 2^(e - 128), and 0 for the exponents whose scale would be subnormal.
INLINE float power_scale(uint e) { return as_float((max(e, 1u) - 1u) << 23); }

MATMUL_TARGET_BEGIN

INLINE uint16 shift_left(uint16 value, int bits) {
    return bits >= 0 ? value << (uint)bits : value >> (uint)-bits;
}

// Elements 4t to 4t + 3 of 32 whose vectors begin at `block`, as unsigned bytes; t is a constant.
INLINE uint16 weight_bytes(uint dtype, const GLOBAL uchar *block, int t) {
    const GLOBAL uchar *lower = block + UPPER_BITS(dtype) * VECTOR_BYTES;
    if (LOWER_BITS(dtype) == 8) return load_lanes(lower + t * VECTOR_BYTES);
    uint16 q;
    if (LOWER_BITS(dtype) == 4)
        q = (load_lanes(lower + t / 2 * VECTOR_BYTES) >> (uint)(4 * (t & 1))) & 0x0F0F0F0Fu;
    else
        q = (load_lanes(lower + t / 4 * VECTOR_BYTES) >> (uint)(2 * (t & 3))) & 0x03030303u;
    if (UPPER_BITS(dtype) == 1)
        q |= shift_left(load_lanes(block), LOWER_BITS(dtype) - t) &
             (0x01010101u << LOWER_BITS(dtype));
    else if (UPPER_BITS(dtype) == 2)
        q |= shift_left(load_lanes(block + t / 4 * VECTOR_BYTES), 4 - 2 * (t & 3)) & 0x30303030u;
    return HAS_TABLE(dtype) ? look_up(table_bytes(dtype), q) : q;
}

// The scales of the blocks (or super-blocks) whose part of the header begins at `unit`.
INLINE float16 load_scales(uint dtype, const GLOBAL uchar *unit) {
    if (dtype != MXFP4) return load_halves(unit);
    return as_float16((convert_uint16(max(vload16(0, unit), (uchar)1)) - 1u) << 23u);
}

INLINE float16 load_minima(const GLOBAL uchar *unit) { return load_halves(unit + 2 * LANES); }

// Sub-block scales of a super-block, sub-blocks 4i to 4i + 3 in the bytes of scale[i]. IQ4_XS:
// their low nibbles side by side in scale[0], their high bits in scale[1].
typedef struct {
    uint16 scale[4];
    uint16 minimum[4];
} SUB_SCALES;

INLINE SUB_SCALES load_sub_scales(uint dtype, const GLOBAL uchar *unit, const GLOBAL uchar *body) {
    SUB_SCALES s;
    uint16 v[4];
    for (int i = 0; i < SUB_SCALE_VECTORS(dtype); i++) v[i] = load_lanes(body + i * VECTOR_BYTES);
    if (dtype == IQ4_XS) {
        s.scale[0] = v[0];
        s.scale[1] = convert_uint16(vload16(0, (const GLOBAL ushort *)(unit + 2 * LANES)));
    } else if (dtype == Q2_K || dtype == Q6_K) {
        UNROLL for (int i = 0; i < 4; i++) {
            s.scale[i] = dtype == Q2_K ? v[i] & 0x0F0F0F0Fu : v[i];
            s.minimum[i] = (v[i] >> 4) & 0x0F0F0F0Fu;
        }
    } else if (dtype == Q3_K) {
        UNROLL for (int i = 0; i < 4; i++) {
            uint16 number = ((v[i & 1] >> (uint)(i / 2 * 4)) & 0x0F0F0F0Fu) |
                            (shift_left(v[2], 4 - 2 * i) & 0x30303030u);
            s.scale[i] = ((number | 0x80808080u) - 0x20202020u) ^ 0x80808080u;
        }
    } else {
        s.scale[0] = v[0] & 0x3F3F3F3Fu;
        s.scale[1] = (v[2] & 0x0F0F0F0Fu) | ((v[0] >> 2) & 0x30303030u);
        s.minimum[0] = v[1] & 0x3F3F3F3Fu;
        s.minimum[1] = ((v[2] >> 4) & 0x0F0F0F0Fu) | ((v[1] >> 2) & 0x30303030u);
    }
    return s;
}

// The scale or the minimum of sub-block i.
INLINE int16 sub_block_number(uint dtype, const uint16 *vectors, int i) {
    if (dtype == IQ4_XS) {
        uint16 high = (vectors[1] >> (uint)(2 * i)) & 3u;
        return as_int16(((vectors[0] >> (uint)(4 * i)) & 15u) | high << 4) - 32;
    }
    uint16 raised = vectors[i / 4] << (uint)(24 - 8 * (i & 3));
    return dtype == Q3_K || dtype == Q6_K ? as_int16(raised) >> 24 : as_int16(raised >> 24);
}

INLINE uint16 twice(int16 number) {
    uint16 low = as_uint16(number) & 0xFFFFu;
    return low | low << 16;
}

// The minima of the two halves of block b, as 16-bit numbers.
INLINE uint16 minimum_pair(uint dtype, const SUB_SCALES *scales, int b) {
    if (!HAS_HALF_BLOCKS(dtype)) return twice(sub_block_number(dtype, scales->minimum, b));
    uint16 bytes = scales->minimum[b / 2] >> (uint)(16 * (b & 1));
    return (bytes & 0xFFu) | (bytes & 0xFF00u) << 8;
}

// What the offset of the integers takes from a block, as the factors of its two sums.
INLINE uint16 offset_pair(uint dtype, const SUB_SCALES *scales, int b) {
    if (!HAS_HALF_BLOCKS(dtype))
        return twice(-OFFSET(dtype) * sub_block_number(dtype, scales->scale, b));
    const int16 low = -OFFSET(dtype) * sub_block_number(dtype, scales->scale, 2 * b);
    const int16 high = -OFFSET(dtype) * sub_block_number(dtype, scales->scale, 2 * b + 1);
    return (as_uint16(low) & 0xFFFFu) | as_uint16(high) << 16;
}

MATMUL_TARGET_END

// The same for one lane, whose dword of the body's vector 0 is at `lane`.

// Elements 4t to 4t + 3 of the 32 elements whose vectors begin at `vector`, as unsigned bytes:
// where there is a table, indices into it.
INLINE uint lane_bytes(uint dtype, const GLOBAL uint *lane, uint vector, int t) {
    const uint lower = vector + UPPER_BITS(dtype);
    if (LOWER_BITS(dtype) == 8) return lane[(lower + t) * LANES];
    uint q;
    if (LOWER_BITS(dtype) == 4)
        q = (lane[(lower + t / 2) * LANES] >> (4 * (t & 1))) & 0x0F0F0F0Fu;
    else
        q = (lane[(lower + t / 4) * LANES] >> (2 * (t & 3))) & 0x03030303u;
    if (UPPER_BITS(dtype) == 1)
        q |= (lane[vector * LANES] >> t & 0x01010101u) << LOWER_BITS(dtype);
    else if (UPPER_BITS(dtype) == 2)
        q |= (lane[(vector + t / 4) * LANES] >> (2 * (t & 3)) & 0x03030303u) << 4;
    return q;
}

INLINE float lane_scale(uint dtype, const GLOBAL uchar *unit, uint row) {
    if (dtype == MXFP4) return power_scale(unit[row % LANES]);
    return vload_half(row % LANES, (const GLOBAL half *)unit);
}

INLINE float lane_minimum(const GLOBAL uchar *unit, uint row) {
    return vload_half(LANES + row % LANES, (const GLOBAL half *)unit);
}

// The scale of sub-block s, the super-block's vectors beginning at `vector`.
INLINE int lane_sub_scale(uint dtype, const GLOBAL uchar *unit, uint row, const GLOBAL uint *lane,
                          uint vector, int s) {
    const uint shift = 8 * (s & 3);
    if (dtype == Q6_K) return (char)(lane[(vector + s / 4) * LANES] >> shift);
    if (dtype == Q2_K) return lane[(vector + s / 4) * LANES] >> shift & 15;
    if (dtype == IQ4_XS) {
        uint high = ((const GLOBAL ushort *)unit)[LANES + row % LANES];
        return (int)((lane[vector * LANES] >> 4 * s & 15) | (high >> 2 * s & 3) << 4) - 32;
    }
    uint c = lane[(vector + 2) * LANES] >> shift;
    if (dtype == Q3_K) {
        uint low = lane[(vector + (s / 4 & 1)) * LANES] >> shift >> s / 8 * 4;
        return (int)((low & 15) | (c >> s / 4 * 2 & 3) << 4) - 32;
    }
    uint a = lane[vector * LANES] >> shift;
    return s < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
}

INLINE int lane_sub_minimum(uint dtype, const GLOBAL uint *lane, uint vector, int s) {
    const uint shift = 8 * (s & 3);
    if (dtype == Q2_K) return lane[(vector + s / 4) * LANES] >> shift >> 4 & 15;
    uint b = lane[(vector + 1) * LANES] >> shift, c = lane[(vector + 2) * LANES] >> shift;
    return s < 4 ? b & 63 : (c >> 4 & 15) | (b >> 2 & 48);
}

// Element (row, column) of a matrix in this layout, dequantized: q d (+ minimum), or
// (d sc) q (- dmin mn), every operation rounded.
static float lanes_element(uint dtype, const GLOBAL uchar *matrix, uint columns, uint row,
                           uint column) {
    const GLOBAL uchar *group = matrix + (ulong)(row / LANES) * group_bytes(dtype, columns);
    const GLOBAL uchar *unit = group + column / UNIT_ELEMENTS(dtype) * UNIT_BYTES(dtype);
    const GLOBAL uint *lane =
        (const GLOBAL uint *)(group + header_bytes(dtype, columns)) + row % LANES;
    const uint first = column / 256 * 256, scales = body_vectors(dtype, first);
    const uint vector =
        scales + SUB_SCALE_VECTORS(dtype) + (column - first) / 32 * BLOCK_VECTORS(dtype);
    const uint shift = 8 * ((column & 1) << 1 | (column >> 1 & 1));
    uint byte = lane_bytes(dtype, lane, vector, column % 32 / 4) >> shift & 0xFF;
    if (HAS_TABLE(dtype)) byte = look_up_lane(table_bytes(dtype), byte) & 0xFF;
    const float q = (float)((int)byte - OFFSET(dtype)), d = lane_scale(dtype, unit, row);
    if (!IS_SUPER(dtype)) return HAS_MINIMUM(dtype) ? q * d + lane_minimum(unit, row) : q * d;
    const int s = (column - first) / (HAS_HALF_BLOCKS(dtype) ? 16 : 32);
    const float value = d * (float)lane_sub_scale(dtype, unit, row, lane, scales, s) * q;
    if (!HAS_MINIMUM(dtype)) return value;
    return value - lane_minimum(unit, row) * (float)lane_sub_minimum(dtype, lane, scales, s);
}

#endif
