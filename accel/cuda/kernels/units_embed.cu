// EMBED from a table stored in units (units.h): y[t] = table[query[t].token], converted to
// binary32. DTYPE is the format. Formats of 32-blocks give q d (+ minimum), super-blocks (d sc) q
// (- dmin mn), every operation rounded.

#include "packets.h"
#include "unit_product.h"

typedef UNIT_FORMAT<DTYPE> FORMAT;
typedef unsigned char BYTE;

// The integer of column i of a unit's row.
DEVICE int element_of(const BYTE *unit, int row, int i) {
    const int j = i / 32, lane = row % 8 * 4 + i % 16 / 4, word = i % 32 / 16 * 2 + row / 8;
    const int at = lane * 16 + word * 4 + i % 4;
    if (FORMAT::bytes) return (signed char)unit[j * 512 + at];
    int code = 0, above = 0;
    if (FORMAT::nibbles) code = unit[j / 2 * 512 + at] >> j % 2 * 4 & 15, above = 4;
    if (FORMAT::pairs) {
        code |= (unit[FORMAT::pairs_at + j / 4 * 512 + at] >> j % 4 * 2 & 3) << above;
        above += 2;
    }
    if (FORMAT::bits) code |= (unit[FORMAT::bits_at + at] >> j & 1) << above;
    if (!FORMAT::table) return code - FORMAT::zero;
    unsigned low, high;
    look_up<DTYPE>(code, low, high);
    return (signed char)low;
}

DEVICE float half_at(const BYTE *address) { return half_bits(*(const unsigned short *)address); }

DEVICE float value_of(const BYTE *unit, int row, int i) {
    const BYTE *scales = unit + FORMAT::scales_at + row * FORMAT::row_scales;
    const BYTE *rest = unit + FORMAT::rest_at + row * FORMAT::row_rest;
    const float q = (float)element_of(unit, row, i);
    if (!FORMAT::super) {
        const int b = i / 32;
        if (DTYPE == FORMAT_MXFP4) return q * exponent_scale(scales[b]);
        const float value = q * half_at(scales + 2 * b);
        return FORMAT::minima ? value + half_at(rest + 2 * b) : value;
    }
    if (DTYPE == FORMAT_Q4_K || DTYPE == FORMAT_Q5_K) {
        const uint4 header = vector_at(scales);
        unsigned factor[2], minimum[2];
        six_bit_pairs(header, factor, minimum);
        const int b = i / 32;
        const float d = half_bits(header.x & 0xFFFFu), d_min = half_bits(header.x >> 16);
        return d * (float)byte_of(factor[b / 4], b % 4) * q -
               d_min * (float)byte_of(minimum[b / 4], b % 4);
    }
    if (DTYPE == FORMAT_IQ4_XS) return half_at(scales) * (float)iq4_xs_factor(scales, i / 32) * q;
    const float value = half_at(rest) * (float)half_block_factor<DTYPE>(scales, i / 16) * q;
    return FORMAT::minima ? value - half_at(rest + 2) * (float)(scales[i / 16] >> 4) : value;
}

extern "C" __global__ void units_embed(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    FOLLOWING_MAY_START;
    const OP op = opened(launch);
    PRECEDING_DONE;
    const unsigned units = (op.hidden + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const size_t step = (size_t)gridDim.x * blockDim.x, all = (size_t)op.tokens * op.hidden;
    for (size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x; n < all; n += step) {
        const unsigned token = (unsigned)(n / op.hidden), k = (unsigned)(n % op.hidden);
        const unsigned row = ((const unsigned *)op.query)[(size_t)token * op.query_stride];
        const size_t unit = (size_t)(row / UNIT_ROWS) * units + k / UNIT_COLUMNS;
        ((float *)op.y)[(size_t)token * op.y_stride + k] = value_of(
            (const BYTE *)op.table + unit * FORMAT::unit_bytes, row % UNIT_ROWS, k % UNIT_COLUMNS);
    }
}
