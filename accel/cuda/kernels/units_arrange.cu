// Converts stored matrices to the units of units.h, once, when they are uploaded. DTYPE is the
// format. A block writes units; a thread writes words of their planes and bytes of their scales.

#include "units.h"

typedef UNIT_FORMAT<DTYPE> FORMAT;
typedef unsigned char BYTE;

// Stored blocks: elements and bytes of one, and the offset of a row's columns from 256 u on.
#define BLOCK_ELEMENTS (FORMAT::super ? 256 : 32)
#define BLOCK_BYTES (FORMAT::unit_bytes / UNIT_ROWS * BLOCK_ELEMENTS / UNIT_COLUMNS)
// Where the fields of a block begin.
#define NIBBLES_AT                                         \
    (DTYPE == FORMAT_Q4_0 || DTYPE == FORMAT_IQ4_NL   ? 2  \
     : DTYPE == FORMAT_Q4_1                           ? 4  \
     : DTYPE == FORMAT_Q5_0                           ? 6  \
     : DTYPE == FORMAT_Q5_1 || DTYPE == FORMAT_IQ4_XS ? 8  \
     : DTYPE == FORMAT_MXFP4                          ? 1  \
     : DTYPE == FORMAT_Q4_K                           ? 16 \
     : DTYPE == FORMAT_Q5_K                           ? 48 \
                                                      : 0)
#define PAIRS_AT (DTYPE == FORMAT_Q2_K ? 16 : DTYPE == FORMAT_Q3_K ? 32 : 128)
#define BITS_AT \
    (DTYPE == FORMAT_Q5_0 ? 2 : DTYPE == FORMAT_Q5_1 ? 4 : DTYPE == FORMAT_Q5_K ? 16 : 0)

// Column i of a unit's 256 in the stored row that begins with them.
static __device__ __forceinline__ unsigned nibble_at(const BYTE *row, int i) {
    const BYTE *q = row + i / BLOCK_ELEMENTS * BLOCK_BYTES + NIBBLES_AT;
    if (DTYPE == FORMAT_Q4_K || DTYPE == FORMAT_Q5_K)
        return q[i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
    if (DTYPE == FORMAT_Q6_K) return q[i / 128 * 64 + i % 64] >> i / 64 % 2 * 4 & 15;
    if (DTYPE == FORMAT_IQ4_XS) q += i / 32 * 16;
    return q[i % 16] >> i / 16 % 2 * 4 & 15;
}

static __device__ __forceinline__ unsigned pair_at(const BYTE *row, int i) {
    return row[PAIRS_AT + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
}

static __device__ __forceinline__ unsigned bit_at(const BYTE *row, int i) {
    const BYTE *bits = row + i / BLOCK_ELEMENTS * BLOCK_BYTES + BITS_AT;
    if (FORMAT::super) return bits[i % 32] >> i / 32 & 1;
    return bits[i % 32 / 8] >> i % 8 & 1;
}

// Byte i of a row's scales, of the array that comes first (rest false) or second.
static __device__ __forceinline__ BYTE scale_byte(const BYTE *row, int columns, int i, bool rest) {
    if (!FORMAT::super) {
        const int width = DTYPE == FORMAT_MXFP4 ? 1 : 2;
        if (i / width * 32 >= columns) return 0;
        return row[i / width * BLOCK_BYTES + i % width + (rest ? 2 : 0)];
    }
    if (DTYPE == FORMAT_Q2_K) return row[rest ? 80 + i : i];
    if (DTYPE == FORMAT_Q3_K) return row[rest ? 108 + i : 96 + i];
    if (DTYPE == FORMAT_Q6_K) return row[rest ? 208 + i : 192 + i];
    return row[i];
}

// Word `index` of the planes. `stored` has the columns of the unit's first row; `rows` of 16 exist.
static __device__ unsigned plane_word(const BYTE *stored, size_t row_bytes, unsigned rows,
                                      unsigned columns, int index) {
    const int at = index * 4, r = index % 4, lane = index / 4 % 32;
    const unsigned in_tile = lane / 4 + 8 * (r % 2);
    if (in_tile >= rows) return 0;
    const BYTE *row = stored + in_tile * row_bytes;
    const int first = r / 2 * 16 + lane % 4 * 4;
    unsigned word = 0;
    for (int e = 0; e < 4; e++) {
        const int i = first + e;
        unsigned byte = 0;
        if (FORMAT::bytes) {
            const int column = at / 512 * 32 + i;
            if (column < (int)columns) byte = row[column / 32 * BLOCK_BYTES + 2 + column % 32];
        } else if (FORMAT::nibbles && at < FORMAT::pairs_at) {
            const int column = at / 512 * 64 + i;
            if (column < (int)columns) byte = nibble_at(row, column);
            if (column + 32 < (int)columns) byte |= nibble_at(row, column + 32) << 4;
        } else if (FORMAT::pairs && at < FORMAT::bits_at) {
            const int column = (at - FORMAT::pairs_at) / 512 * 128 + i;
            for (int j = 0; j < 4; j++) byte |= pair_at(row, column + 32 * j) << 2 * j;
        } else {
            for (int j = 0; j < 8; j++)
                if (32 * j < (int)columns) byte |= bit_at(row, 32 * j + i) << j;
        }
        word |= byte << 8 * e;
    }
    return word;
}

// Units of tiles first_tile to first_tile + tiles - 1 of matrices of `rows` rows; each matrix
// begins a new tile. `stored` begins with the first row of the first tile, `arranged` with its
// first unit.
extern "C" __global__ void arrange_units(const BYTE *stored, BYTE *arranged, unsigned rows,
                                         unsigned columns, unsigned first_tile, unsigned tiles) {
    const unsigned units = (columns + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
    const unsigned matrix_tiles = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
    const size_t row_bytes = (size_t)(columns / BLOCK_ELEMENTS) * BLOCK_BYTES;
    const size_t unit_row_bytes = UNIT_COLUMNS / BLOCK_ELEMENTS * BLOCK_BYTES;
    const size_t begin = (size_t)(first_tile / matrix_tiles) * rows +
                         (size_t)(first_tile % matrix_tiles) * UNIT_ROWS;
    for (size_t n = blockIdx.x; n < (size_t)tiles * units; n += gridDim.x) {
        const unsigned tile = first_tile + (unsigned)(n / units), unit = (unsigned)(n % units);
        const unsigned inside = tile % matrix_tiles * UNIT_ROWS;
        const size_t row = (size_t)(tile / matrix_tiles) * rows + inside - begin;
        const BYTE *source = stored + row * row_bytes + unit * unit_row_bytes;
        BYTE *target = arranged + n * FORMAT::unit_bytes;
        const unsigned present = rows - inside < UNIT_ROWS ? rows - inside : UNIT_ROWS;
        const unsigned left = columns - unit * UNIT_COLUMNS;
        for (int i = threadIdx.x; i < FORMAT::scales_at / 4; i += blockDim.x)
            ((unsigned *)target)[i] = plane_word(source, row_bytes, present, left, i);
        for (int i = threadIdx.x; i < UNIT_ROWS * (FORMAT::row_scales + FORMAT::row_rest);
             i += blockDim.x) {
            const bool rest = i >= UNIT_ROWS * FORMAT::row_scales;
            const int at = rest ? i - UNIT_ROWS * FORMAT::row_scales : i;
            const unsigned width = rest ? FORMAT::row_rest : FORMAT::row_scales, of = at / width;
            target[FORMAT::scales_at + i] =
                of < present ? scale_byte(source + of * row_bytes, left, at % width, rest) : 0;
        }
    }
}
