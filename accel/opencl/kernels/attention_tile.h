// A tile of 64 keys and values as pairs of 16-bit integers, in the orders the products want.

#ifndef ATTENTION_TILE_H
#define ATTENTION_TILE_H

// Sums of a block product that are kept in registers: rows by vectors of sixteen.
#define STEP_ROWS 4
#if defined(__AVX512F__)
#define STEP_VECTORS 4
#else
#define STEP_VECTORS 1
#endif
#define TILE_VECTORS (KV_TILE / 16)
#define TILE_PAIRS (KV_TILE / 2)
// With fewer queries than this, keys are not turned into lanes.
#define MANY_ROWS 6

// Rows of head_dim are padded with zeros to whole vectors of pairs.
#define MAX_PAIR_VECTORS (HEAD_DIM_MAX / 32)
static inline uint pair_vectors(uint head_dim) {
    return (head_dim + 31) / 32;
}

typedef struct {
    uint16 page[PAGE_TOKENS][MAX_PAIR_VECTORS];     // keys of one page, pairs of channels
    uint16 keys[HEAD_DIM_MAX / 2][TILE_VECTORS];    // pairs of channels, lanes are positions
    uint16 values[TILE_PAIRS * HEAD_DIM_MAX / 16];  // pairs of positions, lanes are channels
    float16 key_scale[TILE_VECTORS];
    float16 exponent[TILE_VECTORS];                 // of the value; infinite: a broken row
    float16 value_scale[TILE_VECTORS];
} KV_INTEGERS;

MATMUL_TARGET_BEGIN

INLINE ulong kv_bytes(uint dtype, ulong elements) {
    if (dtype == Q8_0) return elements / Q8_0_ELEMENTS * Q8_0_BYTES;
    return elements * (dtype == F32 ? 4 : 2);
}

// Sixteen elements, of which `count` exist; `whole` promises that all do, as in Q8_0 always, where
// they begin at a multiple of 16.
INLINE float16 load_kv(const KV_HEAD *head, uint dtype, bool whole, ulong element, int count) {
    const GLOBAL float *x = (const GLOBAL float *)head->kv + element;
    const GLOBAL half *y = (const GLOBAL half *)head->kv + element;
    if (dtype == Q8_0) {
        const GLOBAL uchar *block = head->kv + element / Q8_0_ELEMENTS * Q8_0_BYTES;
        const GLOBAL char *q = (const GLOBAL char *)block + 2 + element % Q8_0_ELEMENTS;
        return convert_float16(vload16(0, q)) * half_at(block);
    }
    if (dtype == F32) return whole ? vload16(0, x) : load_padded(x, count);
    if (whole || count >= 16) return load_halves((const GLOBAL uchar *)y);
    float lane[16];
    for (int i = 0; i < 16; i++) lane[i] = i < count ? vload_half(i, y) : 0.0f;
    return vload16(0, lane);
}

// Hints that row i of keys or values from `position` on is wanted soon; of I12, I4R and I3R a sixteenth
// of half a record. Spread over the work on the page before, so that its loads wait for nothing. Position
// 0 is none.
INLINE void prefetch_row(const KV_HEAD *head, uint position, uint which, uint i) {
    const GLOBAL uchar *bytes;
    uint count;
    if (!position) return;
    if (head->dtype == I12) {
        count = (3 * head->head_dim + 2) / 2;
        bytes = i12_page(head, position) + (which * PAGE_TOKENS + i) * count;
    } else if (head->dtype == I4R || head->dtype == I3R) {
        const uint head_dim = head->head_dim;
        count = CODED_BYTES(head->dtype) / 32;
        bytes = coded_page(head, position) + (which * PAGE_TOKENS + i) * count;
    } else {
        count = kv_bytes(head->dtype, head->head_dim);
        bytes = head->kv + kv_bytes(head->dtype, kv_row(head, position + i, which));
    }
    for (uint d = 0; d < count; d += 64) prefetch_line(bytes + d);
}

INLINE int16 magnitude_bits(float16 x) {
    return as_int16(x) & 0x7FFFFFFF;
}

INLINE int max_of_16(int16 v) {
    int8 a = max(v.lo, v.hi);
    int4 b = max(a.lo, a.hi);
    int2 c = max(b.lo, b.hi);
    return max(c.x, c.y);
}

// The bits of the largest magnitude of a row of KV pages.
INLINE int kv_most(const KV_HEAD *head, uint dtype, bool whole, ulong row) {
    if (dtype == F16 && whole) {
        // Magnitudes of halves compare as their bits do.
        const GLOBAL ushort *bits = (const GLOBAL ushort *)head->kv + row;
        ushort16 largest = (ushort16)(0);
        for (uint d = 0; d < head->head_dim; d += 16)
            largest = max(largest, vload16(0, bits + d) & (ushort16)(0x7FFF));
        ushort8 a = max(largest.lo, largest.hi);
        ushort4 b = max(a.lo, a.hi);
        ushort2 c = max(b.lo, b.hi);
        const ushort half_bits = max(c.x, c.y);
        return as_int(vload_half(0, (const half *)&half_bits));
    }
    int16 most = (int16)(0);
    for (uint d = 0; d < head->head_dim; d += 16)
        most = max(most, magnitude_bits(load_kv(head, dtype, whole, row + d,
                                                (int)(head->head_dim - d))));
    return max_of_16(most);
}

// In the low half of each lane: the nearest integer of x * factor, below 2^15.
INLINE uint16 row_integers(float16 x, float factor) {
    return as_uint16(x * factor + ROUNDER);
}

// Pairs of integers to within +-limit.
INLINE uint16 clamp_pairs(uint16 pairs, short limit) {
    const short16 most = (short16)(limit);
    return make_uint16(as_uint8(min(max(as_short16(pairs.lo), -most), most)),
                    as_uint8(min(max(as_short16(pairs.hi), -most), most)));
}

// Pairs of two times sixteen integers.
INLINE uint16 pairs_of(uint16 low, uint16 high) {
    return (low & 0xFFFFu) | (high << 16);
}

// The same thirty-two integers as pairs of neighbours, as I12 keeps them.
INLINE uint16 neighbour_pairs(uint16 pairs) {
    const short16 low = convert_short16(as_int16(pairs));
    const short16 high = convert_short16(as_int16(pairs >> 16));
    return make_uint16(as_uint8(low), as_uint8(high));
}

// Whether rounding takes the largest magnitude of a row beyond KV_MAX. Never that of a half.
INLINE bool rounds_up(int most) {
    return (most & 0x7FFFFF) >= 0x7FF000;
}

// Keys of one page as pairs of channels 16 apart, and their exponents. Of positions [begin, end) of
// the page; the others are zero.
INLINE void load_keys(const KV_HEAD *head, uint dtype, bool whole, uint position, uint begin,
                      uint end, uint next, KV_INTEGERS *tile, int *exponent) {
    const uint vectors = pair_vectors(head->head_dim), stride = head->kv_heads * head->head_dim;
    const ulong page = kv_row(head, position, 0);
    for (uint i = 0; i < PAGE_TOKENS; i++) {
        prefetch_row(head, next, 0, i);
        exponent[i] = MIN_EXPONENT;
        if (i < begin || i >= end) {
            for (uint n = 0; n < vectors; n++) tile->page[i][n] = (uint16)(0);
            continue;
        }
        const ulong row = page + i * stride;
        const int most = kv_most(head, dtype, whole, row);
        const float factor = row_factor(most, KV_BITS);
        exponent[i] = row_exponent(most);
        for (uint n = 0; n < vectors; n++) {
            const int left = (int)head->head_dim - 32 * (int)n;
            const ulong index = row + 32 * n;
            const uint16 low = row_integers(load_kv(head, dtype, whole, index, left), factor);
            uint16 high = (uint16)(0);
            if (left > 16)
                high = row_integers(load_kv(head, dtype, whole, index + 16, left - 16), factor);
            tile->page[i][n] = pairs_of(low, high);
        }
        if (rounds_up(most))
            for (uint n = 0; n < vectors; n++)
                tile->page[i][n] = clamp_pairs(tile->page[i][n], KV_MAX);
    }
}

// Values of one page as pairs of positions, and their exponents.
INLINE void load_values(const KV_HEAD *head, uint dtype, bool whole, uint position, uint begin,
                        uint end, uint next, uint16 *values, int *exponent) {
    const uint vectors = 2 * pair_vectors(head->head_dim);
    const uint stride = head->kv_heads * head->head_dim;
    const ulong page = kv_row(head, position, 1);
    for (uint i = 0; i < PAGE_TOKENS; i += 2, values += vectors) {
        ulong row[2];
        float factor[2];
        bool exists[2], clamped = false;
        UNROLL for (uint k = 0; k < 2; k++) {
            prefetch_row(head, next, 1, i + k);
            exists[k] = i + k >= begin && i + k < end;
            exponent[i + k] = MIN_EXPONENT;
            row[k] = 0;
            factor[k] = 0.0f;
            if (!exists[k]) continue;
            row[k] = page + (i + k) * stride;
            const int most = kv_most(head, dtype, whole, row[k]);
            factor[k] = row_factor(most, KV_BITS);
            exponent[i + k] = row_exponent(most);
            clamped |= rounds_up(most);
        }
        for (uint n = 0; n < vectors; n++) {
            const int left = (int)head->head_dim - 16 * (int)n;
            uint16 pair[2];
            UNROLL for (uint k = 0; k < 2; k++) {
                pair[k] = (uint16)(0);
                if (exists[k] && left > 0)
                    pair[k] = row_integers(load_kv(head, dtype, whole, row[k] + 16 * n, left),
                                           factor[k]);
            }
            values[n] = pairs_of(pair[0], pair[1]);
        }
        for (uint n = 0; clamped && n < vectors; n++) values[n] = clamp_pairs(values[n], KV_MAX);
    }
}

// Sixteen integers of I12, of which the low halves are in bits `shift` to shift + 3.
INLINE short16 i12_integers(const GLOBAL uchar *high, const GLOBAL uchar *low, short shift) {
    const short16 above = convert_short16(vload16(0, (const GLOBAL char *)high));
    const short16 below = convert_short16(vload16(0, low));
    return (above << (short16)(4)) | ((below >> (short16)(shift)) & (short16)(15));
}

INLINE short i12_integer(const GLOBAL uchar *high, const GLOBAL uchar *low, uint shift) {
    return (short)(*(const GLOBAL char *)high * 16 | (*low >> shift & 15));
}

// load_keys for I12, as pairs of neighbours; `whole`: halves of a row are whole sixteens.
INLINE void load_keys_i12(const KV_HEAD *head, bool whole, uint position, uint begin, uint end,
                          uint next, KV_INTEGERS *tile, int *exponent) {
    const uint head_dim = head->head_dim, half_dim = head_dim / 2;
    const GLOBAL uchar *record = i12_page(head, position);
    const GLOBAL char *exponents = (const GLOBAL char *)record + I12_EXPONENTS;
    for (uint i = 0; i < PAGE_TOKENS; i++) {
        const GLOBAL uchar *high = record + i * head_dim, *low = record + I12_LOW + i * half_dim;
        short16 *row = (short16 *)tile->page[i];
        prefetch_row(head, next, 0, i);
        exponent[i] = i < begin || i >= end ? MIN_EXPONENT : exponents[i];
        if (whole) {
            for (uint d = 0; d < half_dim; d += 16) {
                row[d / 16] = i12_integers(high + d, low + d, 0);
                row[(d + half_dim) / 16] = i12_integers(high + d + half_dim, low + d, 4);
            }
            continue;
        }
        for (uint n = 0; n < 2 * pair_vectors(head_dim); n++) row[n] = (short16)(0);
        for (uint d = 0; d < half_dim; d++) {
            ((short *)row)[d] = i12_integer(high + d, low + d, 0);
            ((short *)row)[d + half_dim] = i12_integer(high + d + half_dim, low + d, 4);
        }
    }
}

// load_values for I12. Positions that are not written yet hold any integers.
INLINE void load_values_i12(const KV_HEAD *head, bool whole, uint position, uint begin, uint end,
                            uint next, uint16 *values, int *exponent) {
    const uint head_dim = head->head_dim, half_dim = head_dim / 2;
    const uint vectors = 2 * pair_vectors(head_dim);
    const GLOBAL uchar *record = i12_page(head, position);
    const GLOBAL char *exponents = (const GLOBAL char *)record + I12_EXPONENTS + PAGE_TOKENS;
    const GLOBAL uchar *high = record + I12_VALUES, *low = high + I12_LOW;
    for (uint i = 0; i < PAGE_TOKENS; i++)
        exponent[i] = i < begin || i >= end ? MIN_EXPONENT : exponents[i];
    for (uint n = 0; n < vectors; n++) {
        short16 channel[16];
        for (uint i = n * PAGE_TOKENS / vectors; i < (n + 1) * PAGE_TOKENS / vectors; i++)
            prefetch_row(head, next, 1, i);
        UNROLL for (uint k = 0; k < 16; k++) {
            const uint d = 16 * n + k, shift = d < half_dim ? 0 : 4;
            const uint pair = d < half_dim ? d : d - half_dim;
            channel[k] = (short16)(0);
            if (whole || d < head_dim)
                channel[k] = i12_integers(high + d * PAGE_TOKENS, low + pair * PAGE_TOKENS, shift);
        }
        channels_to_lanes(channel, values + n, vectors);
    }
}

// CALL(dtype, whole) with the storage type and wholeness of this head as constants.
#define FOR_KV_TYPE(head, CALL)                                    \
    {                                                              \
        if ((head)->head_dim % 16) CALL((head)->dtype, false)      \
        else if ((head)->dtype == F32) CALL(F32, true)             \
        else if ((head)->dtype == Q8_0) CALL(Q8_0, true)           \
        else CALL(F16, true)                                       \
    }

// The keys of a page become vector `lanes` of every pair of channels.
INLINE void keys_to_lanes(KV_INTEGERS *tile, uint vectors, uint lanes) {
    for (uint n = 0; n < vectors; n++) {
        uint16 v[16];
        UNROLL for (int i = 0; i < 16; i++) v[i] = tile->page[i][n];
        transpose16(v);
        UNROLL for (int i = 0; i < 16; i++) tile->keys[16 * n + i][lanes] = v[i];
    }
}

// Sums of 16 rows: lane i is that of row i.
INLINE int16 add_lanes(const int16 *row) {
    int16 a[8], b[4], c[2];
    UNROLL for (int i = 0; i < 8; i++)
        a[i] = make_int16(row[2 * i].lo, row[2 * i + 1].lo) +
               make_int16(row[2 * i].hi, row[2 * i + 1].hi);
    UNROLL for (int i = 0; i < 4; i++) {
        int16 p = a[2 * i], q = a[2 * i + 1];
        b[i] = make_int16(p.s0123, p.s89ab, q.s0123, q.s89ab) +
               make_int16(p.s4567, p.scdef, q.s4567, q.scdef);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        int16 p = b[2 * i], q = b[2 * i + 1];
        c[i] = make_int16(p.s01, p.s45, p.s89, p.scd, q.s01, q.s45, q.s89, q.scd) +
               make_int16(p.s23, p.s67, p.sab, p.sef, q.s23, q.s67, q.sab, q.sef);
    }
    return make_int16(c[0].even, c[1].even) + make_int16(c[0].odd, c[1].odd);
}

// q . k of the 16 keys of a page.
INLINE int16 page_dots(const KV_INTEGERS *tile, const uint16 *q, uint vectors) {
    int16 sum[16];
    UNROLL for (int i = 0; i < 16; i += 4 * STEP_VECTORS) {
        int16 some[4 * STEP_VECTORS];
        UNROLL for (int k = 0; k < 4 * STEP_VECTORS; k++) some[k] = (int16)(0);
        for (uint n = 0; n < vectors; n++)
            UNROLL for (int k = 0; k < 4 * STEP_VECTORS; k++)
                some[k] = dot_pairs(some[k], q[n], tile->page[i + k][n]);
        UNROLL for (int k = 0; k < 4 * STEP_VECTORS; k++) sum[i + k] = some[k];
    }
    return add_lanes(sum);
}

// sum[r][i] = products of pairs [0, pairs) of row r of a with those of vector i of b, whose
// vectors of one pair are `stride` apart.
INLINE void tile_products(const uint *a, uint a_stride, const uint16 *b, uint stride, uint pairs,
                           uint rows, uint vectors, int16 (*sum)[STEP_VECTORS]) {
    UNROLL for (uint r = 0; r < rows; r++)
        UNROLL for (uint i = 0; i < vectors; i++) sum[r][i] = (int16)(0);
    for (uint p = 0; p < pairs; p++, b += stride) {
        uint16 column[STEP_VECTORS];
        UNROLL for (uint i = 0; i < vectors; i++) column[i] = b[i];
        UNROLL for (uint r = 0; r < rows; r++) {
            const uint16 pair = (uint16)(a[r * a_stride + p]);
            UNROLL for (uint i = 0; i < vectors; i++)
                sum[r][i] = dot_pairs(sum[r][i], pair, column[i]);
        }
    }
}

MATMUL_TARGET_END

#endif
