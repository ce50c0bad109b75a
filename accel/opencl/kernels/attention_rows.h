// Rule R6, version 2: rows of queries, keys and values as integers with one exponent a row.

#ifndef ATTENTION_ROWS_H
#define ATTENTION_ROWS_H

#define KV_TILE 64
#define SPAN_TILES 16
#define PAGE_TOKENS 16
#define HEAD_DIM_MAX 576

// Keys and values have KV_BITS fraction bits, see query_bits() for queries.
#define KV_BITS 10
#define KV_MAX 2047
#define MIN_EXPONENT -40
#define BROKEN_ROW -128

// What the queries of a unit read: one KV head of one slot.
typedef struct {
    const GLOBAL uchar *kv;       // [pages, 2, PAGE_TOKENS, width]
    const GLOBAL int *pages;      // the slot's row of the page table
    uint dtype;
    uint kv_heads;
    uint kv_head;
    uint head_dim;
    uint window;                  // positions attended; 0: all
    float scale;
    float soft_cap;               // 0: none
} KV_HEAD;

// Element offset of a position's row; which is 0 for keys, 1 for values.
static inline ulong kv_row(const KV_HEAD *head, uint position, uint which) {
    ulong page = head->pages[position / PAGE_TOKENS];
    ulong row = (page * 2 + which) * PAGE_TOKENS + position % PAGE_TOKENS;
    return (row * head->kv_heads + head->kv_head) * head->head_dim;
}

// I12: a page is [kv_heads] of records of 16 positions. An integer is 16 high + low; a byte of
// low holds channel i and above it channel i + head_dim / 2.
//   K high char[16][head_dim], low uchar[16][head_dim / 2], V high char[head_dim][16],
//   low uchar[head_dim / 2][16], exponents of K and of V char[16]
static inline ulong i12_record(uint head_dim, uint kv_heads, ulong page, uint kv_head) {
    return (page * kv_heads + kv_head) * PAGE_TOKENS * (3 * head_dim + 2);
}

#define I12_LOW (PAGE_TOKENS * head_dim)
#define I12_VALUES (PAGE_TOKENS * head_dim * 3 / 2)
#define I12_EXPONENTS (PAGE_TOKENS * head_dim * 3)

static inline const GLOBAL uchar *i12_page(const KV_HEAD *head, uint position) {
    const ulong page = head->pages[position / PAGE_TOKENS];
    return head->kv + i12_record(head->head_dim, head->kv_heads, page, head->kv_head);
}

// I4R and I3R, rule R13: records as of I12. A byte of codes holds the low four bits of channels i and
// i + 16 of a group of 32, or of 3-bit values the low two bits of channels i, i + 8, i + 16, i + 24.
//   codes of K uchar[16][head_dim / 2] and of V uchar[bytes][16], top bits uint[16][groups] of K in
//   I4R, uint[groups][16] of V in I3R, scales of K uchar[16][groups] and of V uchar[groups][16],
//   exponents of K and of V char[16]
#define CODED_VALUES (8 * head_dim)
#define CODED_TOPS(dtype) (((dtype) == I3R ? 12 : 16) * head_dim)
#define CODED_SCALES(dtype) (CODED_TOPS(dtype) + 2 * head_dim)
#define CODED_VALUE_SCALES (head_dim / 2)
#define CODED_EXPONENTS(dtype) (CODED_TOPS(dtype) + 3 * head_dim)
#define CODED_BYTES(dtype) (CODED_EXPONENTS(dtype) + 2 * PAGE_TOKENS)

static inline ulong coded_record(uint dtype, uint head_dim, uint kv_heads, ulong page, uint kv_head) {
    return (page * kv_heads + kv_head) * CODED_BYTES(dtype);
}

static inline const GLOBAL uchar *coded_page(const KV_HEAD *head, uint position) {
    const ulong page = head->pages[position / PAGE_TOKENS];
    return head->kv +
           coded_record(head->dtype, head->head_dim, head->kv_heads, page, head->kv_head);
}

// Of a window, or of a chunk whose size is negative.
static inline uint first_visible(uint position, uint window) {
    if (window > 0x80000000u) return position - position % (0u - window);
    return window && position + 1 > window ? position + 1 - window : 0;
}

// How the positions a query sees are cut for workers: parts of one tile where `slots` have room for
// them, else of one span. Part i begins at tile (first + i) * tiles.
typedef struct {
    uint first;
    uint count;
    uint tiles;
} PARTS;

static inline PARTS parts_of(uint first, uint position, uint slots) {
    PARTS parts;
    parts.tiles = position / KV_TILE - first / KV_TILE < slots ? 1 : SPAN_TILES;
    parts.first = first / KV_TILE / parts.tiles;
    parts.count = position / KV_TILE / parts.tiles + 1 - parts.first;
    return parts;
}

static inline bool ends_span(PARTS parts, uint part) {
    return (parts.first + part + 1) * parts.tiles % SPAN_TILES == 0;
}

// U and l of a part, before its o.
#define PART_HEADER 2
// Below every maximum, so that what is merged with it is assigned.
#define NO_TOP -0x1p21f

// 2^n for n in -126 to 127.
INLINE float two_to(int n) {
    return as_float((uint)(n + 127) << 23);
}

// Fraction bits of a query's integers: as many as keep q.k in 32 bits.
static inline int query_bits(uint head_dim) {
    int bits = 19;
    for (uint d = 1; d < head_dim; d *= 2) bits--;
    return min(bits, 13);
}

// Exponent of the row whose largest magnitude has these bits. NaN compares above infinity.
INLINE int row_exponent(int most) {
    if (most >= (127 + 40) << 23) return BROKEN_ROW;
    return max((most >> 23) - 127, MIN_EXPONENT);
}

// What the elements of that row are multiplied by; 0 where all integers are 0.
INLINE float row_factor(int most, int bits) {
    const int e = row_exponent(most);
    return e == BROKEN_ROW || most < (127 + MIN_EXPONENT) << 23 ? 0.0f : two_to(bits - e);
}

INLINE float16 two_to_16(int16 n) { return as_float16((n + 127) << (int16)(23)); }

// 2^ek of sixteen positions, and 0 for broken rows: their values' exponents make the tile's maximum
// infinite.
INLINE float16 key_scales(int16 exponent) {
    return select(two_to_16(exponent), (float16)(0.0f), exponent == (int16)(BROKEN_ROW));
}

INLINE float16 tile_exponents(int16 key, int16 value) {
    const int16 broken = (key == (int16)(BROKEN_ROW)) | (value == (int16)(BROKEN_ROW));
    return select(convert_float16(value), (float16)(INFINITY), broken);
}

// What turns the positions' weights into integers.
INLINE float16 value_scales(int16 exponent) {
    return select(two_to_16(exponent + 13), (float16)(0.0f), exponent == (int16)(BROKEN_ROW));
}

// U and l of some positions.
typedef struct {
    float top;
    float total;
} SOFTMAX;

#define NO_SOFTMAX {NO_TOP, 0.0f}

// What a merge multiplies o so far and the later o by.
typedef struct {
    float keep;
    float add;
} FACTORS;

// A power of two that merges: below 2^-60 it is +0.
INLINE float merge_factor(float difference) {
    return difference < -60.0f ? 0.0f : two_to((int)difference);
}

INLINE FACTORS merge_later(SOFTMAX *so_far, SOFTMAX later) {
    const float top = so_far->top > later.top ? so_far->top : later.top;
    FACTORS factors = {merge_factor(so_far->top - top), merge_factor(later.top - top)};
    so_far->total = so_far->total * factors.keep + later.total * factors.add;
    so_far->top = top;
    return factors;
}

// Multiplies q.k: without soft cap the score is in base 2 already.
static inline float score_factor(const KV_HEAD *head, int query_exponent) {
    const float scale = head->soft_cap > 0.0f ? head->scale : head->scale * LOG2E;
    return scale * two_to(query_exponent - query_bits(head->head_dim) - KV_BITS);
}

// An attention sink: a last part that has a weight and no value. Multiplies o.
INLINE float merge_sink(SOFTMAX *all, float sink) {
    const float x = sink * LOG2E, top = rint_small1(x);
    if (!(fabs(top) < 0x1p20f)) {
        all->total = as_float(QUIET_NAN);
        return 0.0f;
    }
    const SOFTMAX part = {top, exp2_1(x - top)};
    return merge_later(all, part).keep;
}

// y of one channel of a head whose positions weigh `total`.
INLINE float attention_output(float output, float total) {
    if (total != total) return as_float(QUIET_NAN);
    return fabs(output) < 0x1p-20f ? 0.0f : divide1(output * 0x1p-23f, total);
}

// The KV heads an attention op reads, without slot and column.
static KV_HEAD kv_head_of(const GLOBAL uchar *kv, uint dtype, uint kv_heads, uint head_dim,
                          uint window, float scale, float soft_cap) {
    KV_HEAD head;
    head.kv = kv;
    head.pages = 0;
    head.dtype = dtype;
    head.kv_heads = kv_heads;
    head.kv_head = 0;
    head.head_dim = head_dim;
    head.window = window;
    head.scale = scale;
    head.soft_cap = soft_cap;
    return head;
}

#define OPENED_KV_HEAD                                                                 \
    kv_head_of(op.kv, packet->dtype, op.kv_heads, op.head_dim, op.window, op.scale, op.soft_cap)

#endif
