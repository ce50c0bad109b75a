// Stored matrices become the layout of lanes_layout.h, once, when they are uploaded.
//
// Build options: DTYPE is the format, SHARED_ADDRESSES as in packet.h. A work-item arranges all 16
// rows of a group.

#define TWO_HALVES (UNIT_BYTES(DTYPE) == 64)
// A block in the file: its dwords, and one or two 16-bit words (MXFP4: one byte) of the header.
#define UNIT_VECTORS \
    (UNIT_ELEMENTS(DTYPE) / 32 * BLOCK_VECTORS(DTYPE) + SUB_SCALE_VECTORS(DTYPE))
#define BLOCK_DWORDS (UNIT_VECTORS + (TWO_HALVES ? 1 : 0))
#define BLOCK_BYTES (UNIT_VECTORS * 4 + UNIT_BYTES(DTYPE) / LANES)
// Where the first dword begins, and a header word that is in none of them.
#define DWORDS_AT (DTYPE == MXFP4 ? 1 : IS_SUPER(DTYPE) ? 0 : TWO_HALVES ? 0 : 2)
#define HALF_AT (IS_SUPER(DTYPE) ? BLOCK_BYTES - 2 : 0)
// Dwords with both header words, with sub-block scales, and the first ones of the integers' bits.
#define HALVES_DWORD (DTYPE == Q2_K ? 20 : 0)
#define SUB_SCALE_DWORD \
    (DTYPE == Q2_K ? 0 : DTYPE == Q3_K ? 24 : DTYPE == Q6_K ? 48 : 1)
#define UPPER_DWORD \
    (DTYPE == Q5_1 ? 1 : DTYPE == Q5_K ? 4 : DTYPE == Q6_K ? 32 : 0)
#define LOWER_DWORD                                                           \
    (DTYPE == Q5_0 || DTYPE == Q4_1                                  ? 1      \
     : DTYPE == Q5_1 || DTYPE == IQ4_XS                              ? 2      \
     : DTYPE == Q2_K || DTYPE == Q4_K                                ? 4      \
     : DTYPE == Q3_K                                                 ? 8      \
     : DTYPE == Q5_K                                                 ? 12     \
                                                                     : 0)

#if SHARED_ADDRESSES
#define ADDRESS ulong
#else
#define ADDRESS GLOBAL uchar *
#endif

// Dwords of 16 rows, one in each lane. Rows that are not there read as zeros.
typedef uint16 DWORDS;
typedef struct {
    const GLOBAL uchar *block[LANES];
    uint count;
    DWORDS present;
} ROWS;

INLINE ROWS rows_of(const GLOBAL uchar *first, ulong row_bytes, uint count) {
    const int16 lanes = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROWS r;
    for (uint i = 0; i < LANES; i++) r.block[i] = first + min(i, count - 1) * row_bytes;
    r.count = count;
    r.present = as_uint16(lanes < (int)count);
    return r;
}

INLINE uint4 load_four(const GLOBAL uchar *bytes) { return as_uint4(vload16(0, bytes)); }

// Dword i of rows n, n + 4, n + 8 and n + 12, for four i.
INLINE uint16 load_quarter(const ROWS *rows, ulong offset, int n) {
    return make_uint16(
        load_four(rows->block[n] + offset), load_four(rows->block[n + 4] + offset),
        load_four(rows->block[n + 8] + offset), load_four(rows->block[n + 12] + offset));
}

// Rows 0 to 3 of dwords 2i and 2i + 1, of rows 4 to 7, and so on.
INLINE uint16 low_pairs(uint16 a, uint16 b) {
    return make_uint16(a.s0, b.s0, a.s1, b.s1, a.s4, b.s4, a.s5, b.s5, a.s8, b.s8, a.s9, b.s9, a.sC,
                    b.sC, a.sD, b.sD);
}

INLINE uint16 high_pairs(uint16 a, uint16 b) {
    return make_uint16(a.s2, b.s2, a.s3, b.s3, a.s6, b.s6, a.s7, b.s7, a.sA, b.sA, a.sB, b.sB, a.sE,
                    b.sE, a.sF, b.sF);
}

INLINE uint16 low_halves(uint16 x, uint16 y) {
    const ulong8 a = as_ulong8(x), b = as_ulong8(y);
    return as_uint16(make_ulong8(a.s0, b.s0, a.s2, b.s2, a.s4, b.s4, a.s6, b.s6));
}

INLINE uint16 high_halves(uint16 x, uint16 y) {
    const ulong8 a = as_ulong8(x), b = as_ulong8(y);
    return as_uint16(make_ulong8(a.s1, b.s1, a.s3, b.s3, a.s5, b.s5, a.s7, b.s7));
}

// Four dwords of a row at a time, transposed; the last four may overlap those before.
INLINE void load_dwords(const ROWS *rows, ulong offset, DWORDS *dword) {
    for (uint next = 0; next < BLOCK_DWORDS; next += 4) {
        const uint i = min(next, (uint)BLOCK_DWORDS - 4);
        const uint16 a = load_quarter(rows, offset + 4 * i, 0);
        const uint16 b = load_quarter(rows, offset + 4 * i, 1);
        const uint16 c = load_quarter(rows, offset + 4 * i, 2);
        const uint16 d = load_quarter(rows, offset + 4 * i, 3);
        const uint16 low_ab = low_pairs(a, b), low_cd = low_pairs(c, d);
        const uint16 high_ab = high_pairs(a, b), high_cd = high_pairs(c, d);
        dword[i] = low_halves(low_ab, low_cd) & rows->present;
        dword[i + 1] = high_halves(low_ab, low_cd) & rows->present;
        dword[i + 2] = low_halves(high_ab, high_cd) & rows->present;
        dword[i + 3] = high_halves(high_ab, high_cd) & rows->present;
    }
}

INLINE void store_dwords(const ROWS *rows, GLOBAL uchar *vector, DWORDS value) {
#ifdef __clang__
    // Nobody reads it soon, and a whole cache line need not be read before it is written.
    __builtin_nontemporal_store(value, (GLOBAL uint16 *)vector);
#else
    *(GLOBAL uint16 *)vector = value;
#endif
}

INLINE void store_halves(const ROWS *rows, GLOBAL uchar *header, DWORDS both) {
    ((GLOBAL ushort16 *)header)[0] = convert_ushort16(both & 0xFFFFu);
    ((GLOBAL ushort16 *)header)[1] = convert_ushort16(both >> 16);
}

INLINE void store_header_words(const ROWS *rows, GLOBAL uchar *header, ulong offset) {
    for (uint n = 0; n < LANES; n++) {
        const GLOBAL uchar *b = rows->block[n] + offset;
        const bool present = n < rows->count;
        if (DTYPE == MXFP4) header[n] = present ? b[0] : 0;
        else ((GLOBAL ushort *)header)[n] = present ? *(const GLOBAL ushort *)b : 0;
    }
}

// Bytes 0 1 2 3 of every dword in the order 0 2 1 3.
INLINE DWORDS swap_middle(DWORDS x) {
    return (x & 0xFF0000FFu) | (x >> 8 & 0xFF00u) | (x << 8 & 0xFF0000u);
}

// Vector i of the nibbles of block b.
INLINE DWORDS nibbles(const DWORDS *lower, int b, int i) {
    int first = 4 * b + 2 * (i & 1), high = i >> 1;
    if (DTYPE == Q4_K) first = 8 * (b / 2) + 2 * i, high = b & 1;
    if (DTYPE == Q5_K) first = 8 * (b / 2) + 2 * i, high = b & 1;
    if (DTYPE == Q6_K) first = 16 * (b / 4) + 8 * (b & 1) + 2 * i, high = b >> 1 & 1;
    const DWORDS mask = 0x0F0F0F0Fu;
    const DWORDS even = lower[first], odd = lower[first + 1];
    return high ? (even >> 4 & mask) | (odd & ~mask) : (even & mask) | (odd & mask) << 4;
}

// Vector i of the pairs of bits of block b.
INLINE DWORDS bit_pairs(const DWORDS *pairs, int b, int i) {
    DWORDS v = 0;
    UNROLL for (int t = 0; t < 4; t++)
        v |= (pairs[8 * (b / 4) + 4 * i + t] >> (uint)(2 * (b & 3)) & 0x03030303u) << (uint)(2 * t);
    return v;
}

// The single bits of block b: of 8 dwords with a bit for each block, or one with a bit an element.
INLINE DWORDS single_bits(const DWORDS *bits, int b) {
    DWORDS v = 0;
    UNROLL for (int t = 0; t < 8; t++) {
        if (IS_SUPER(DTYPE)) v |= (bits[t] >> (uint)b & 0x01010101u) << (uint)t;
        else v |= ((bits[0] >> (uint)(4 * t) & 15u) * 0x00204081u & 0x01010101u) << (uint)t;
    }
    return v;
}

INLINE void arrange_unit(const ROWS *rows, ulong offset, GLOBAL uchar *header,
                         GLOBAL uchar *vector) {
    DWORDS dword[BLOCK_DWORDS];
    load_dwords(rows, offset + DWORDS_AT, dword);
    if (TWO_HALVES) store_halves(rows, header, dword[HALVES_DWORD]);
    else store_header_words(rows, header, offset + HALF_AT);
    for (int i = 0; i < SUB_SCALE_VECTORS(DTYPE); i++, vector += VECTOR_BYTES)
        store_dwords(rows, vector, dword[SUB_SCALE_DWORD + i]);
    for (int b = 0; b < UNIT_ELEMENTS(DTYPE) / 32; b++) {
        UNROLL for (int i = 0; i < UPPER_BITS(DTYPE); i++, vector += VECTOR_BYTES) {
            const DWORDS *upper = dword + UPPER_DWORD;
            const DWORDS v =
                UPPER_BITS(DTYPE) == 1 ? single_bits(upper, b) : bit_pairs(upper, b, i);
            store_dwords(rows, vector, swap_middle(v));
        }
        UNROLL for (int i = 0; i < LOWER_BITS(DTYPE); i++, vector += VECTOR_BYTES) {
            const DWORDS *lower = dword + LOWER_DWORD;
            const DWORDS v = LOWER_BITS(DTYPE) == 8   ? lower[i] ^ 0x80808080u
                             : LOWER_BITS(DTYPE) == 4 ? nibbles(lower, b, i)
                                                      : bit_pairs(lower, b, i);
            store_dwords(rows, vector, swap_middle(v));
        }
    }
}

// Row groups first_group to first_group + groups - 1 of matrices of `rows` rows, each of which
// begins a group of its own. `stored` begins with the first row of the first of them, `arranged`
// with group 0.
static void arrange_groups(const GLOBAL uchar *stored, GLOBAL uchar *arranged, uint rows,
                           uint columns, uint first_group, uint groups, uint worker,
                           uint workers) {
    const uint matrix_groups = (rows + LANES - 1) / LANES, units = columns / UNIT_ELEMENTS(DTYPE);
    const ulong row_bytes = (ulong)units * BLOCK_BYTES;
    const ulong first_row = (ulong)(first_group / matrix_groups) * rows +
                            first_group % matrix_groups * LANES;
    const SHARE own = share(groups, 1, worker, workers);
    for (uint group = first_group + own.begin; group < first_group + own.end; group++) {
        const uint inside = group % matrix_groups * LANES;
        const ulong row = (ulong)(group / matrix_groups) * rows + inside;
        const ROWS of_group = rows_of(stored + (row - first_row) * row_bytes, row_bytes,
                                      min(rows - inside, (uint)LANES));
        GLOBAL uchar *header = arranged + (ulong)group * group_bytes(DTYPE, columns);
        GLOBAL uchar *body = header + header_bytes(DTYPE, columns);
        for (uint i = units * UNIT_BYTES(DTYPE); header + i < body; i += 4)
            *(GLOBAL uint *)(header + i) = 0;
        for (uint unit = 0; unit < units; unit++)
            arrange_unit(&of_group, (ulong)unit * BLOCK_BYTES, header + unit * UNIT_BYTES(DTYPE),
                         body + (ulong)unit * (UNIT_VECTORS * VECTOR_BYTES));
    }
}

#ifndef NATIVE_C
__kernel void arrange(ADDRESS source, ADDRESS target, ulong target_offset, uint rows, uint columns,
                      uint first_group, uint groups) {
    arrange_groups((const GLOBAL uchar *)source, (GLOBAL uchar *)target + target_offset, rows,
                   columns, first_group, groups, get_global_id(0), get_global_size(0));
}
#endif
