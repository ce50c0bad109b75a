// One tile of rule R6 for a block of queries that share a slot and a KV head.

#ifndef ATTENTION_H
#define ATTENTION_H

#define KV_TILE 64
#define PAGE_TOKENS 16
#define HEAD_DIM_MAX 512
#ifndef ATTENTION_QUERIES
#define ATTENTION_QUERIES 16
#endif
// Queries that use a key or value in turn once it is in registers: their folds hide one another's
// latency.
#define QUERY_STEP 4

// What the queries of a block read: one KV head of one slot.
typedef struct {
    const GLOBAL uchar *kv;       // [pages, 2, PAGE_TOKENS, width]
    const GLOBAL int *pages;      // the slot's row of the page table
    uint dtype;
    uint width;                   // kv_heads * head_dim
    uint column;                  // first column of the KV head
    uint head_dim;
    float scale;
    float soft_cap;               // 0: none
} KV_HEAD;

// Up to ATTENTION_QUERIES (token, head) pairs. A pair attends positions [first, end).
typedef struct {
    uint count;
    uint first[ATTENTION_QUERIES];
    uint end[ATTENTION_QUERIES];
    float q[ATTENTION_QUERIES * HEAD_DIM_MAX];  // rows of padded_dim
} QUERY_BLOCK;

// Row length of what is kept per query. Not HEAD_DIM_MAX: rows that a power of two separates would
// share the sets of a cache.
static inline uint padded_dim(uint head_dim) {
    return (head_dim + 15) / 16 * 16;
}

// Softmax over the positions so far.
typedef struct {
    float maximum;
    float total;
} SOFTMAX;

// Element offset of a position's row; which is 0 for keys, 1 for values.
static inline ulong kv_row(const KV_HEAD *head, uint position, uint which) {
    ulong page = head->pages[position / PAGE_TOKENS];
    ulong row = (page * 2 + which) * PAGE_TOKENS + position % PAGE_TOKENS;
    return row * head->width + head->column;
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
    if (whole || count >= 16) return vload_half16(0, y);
    float lane[16];
    for (int i = 0; i < 16; i++) lane[i] = i < count ? vload_half(i, y) : 0.0f;
    return vload16(0, lane);
}

// Rows become columns: four rounds of interleaving row i with row i + 8.
INLINE void transpose16(float16 *v) {
    float16 t[16];
#define INTERLEAVE(to, from)                                                                     \
    UNROLL for (int i = 0; i < 8; i++) {                                                         \
        float16 a = from[i], b = from[i + 8];                                                    \
        to[2 * i] = (float16)(a.s0, b.s0, a.s1, b.s1, a.s2, b.s2, a.s3, b.s3, a.s4, b.s4, a.s5,  \
                              b.s5, a.s6, b.s6, a.s7, b.s7);                                     \
        to[2 * i + 1] = (float16)(a.s8, b.s8, a.s9, b.s9, a.sa, b.sa, a.sb, b.sb, a.sc, b.sc,    \
                                  a.sd, b.sd, a.se, b.se, a.sf, b.sf);                           \
    }
    INTERLEAVE(t, v)
    INTERLEAVE(v, t)
    INTERLEAVE(t, v)
    INTERLEAVE(v, t)
#undef INTERLEAVE
}

// total[query] += the products of 16 columns, for `queries` rows of q.
INLINE void add_products(const float16 *key, const float *q, uint padded, uint queries,
                         float16 *total) {
    float16 chunk[QUERY_STEP];
    const float *row[QUERY_STEP];
    UNROLL for (uint n = 0; n < queries; n++) {
        chunk[n] = (float16)(0.0f);
        row[n] = q + (ulong)n * padded;
    }
    UNROLL for (int i = 0; i < 16; i++)
        UNROLL for (uint n = 0; n < queries; n++) chunk[n] = chunk[n] + row[n][i] * key[i];
    UNROLL for (uint n = 0; n < queries; n++) total[n] = total[n] + chunk[n];
}

// total[query] = q . k_j for the 16 positions of one page.
INLINE void page_products(const KV_HEAD *head, uint dtype, bool whole, const QUERY_BLOCK *block,
                          uint position, float16 *total) {
    const ulong row = kv_row(head, position, 0);
    const uint padded = padded_dim(head->head_dim);
    for (uint n = 0; n < block->count; n++) total[n] = (float16)(0.0f);
    for (uint d = 0; d < head->head_dim; d += 16) {
        float16 key[16];
        UNROLL for (int i = 0; i < 16; i++)
            key[i] = load_kv(head, dtype, whole, row + (ulong)i * head->width + d,
                             (int)(head->head_dim - d));
        transpose16(key);
        uint n = 0;
        for (; n + QUERY_STEP <= block->count; n += QUERY_STEP)
            add_products(key, block->q + n * padded + d, padded, QUERY_STEP, total + n);
        for (; n < block->count; n++)
            add_products(key, block->q + n * padded + d, padded, 1, total + n);
    }
}

// CALL(dtype, whole) with the storage type and wholeness of this head as constants.
#define FOR_KV_TYPE(head, CALL)                                    \
    {                                                              \
        if ((head)->head_dim % 16) CALL((head)->dtype, false);     \
        else if ((head)->dtype == F32) CALL(F32, true);            \
        else if ((head)->dtype == Q8_0) CALL(Q8_0, true);          \
        else CALL(F16, true);                                      \
    }

// scores[query][j] = (q . k_j) * scale, soft-capped, for the 16 positions of one page.
static void page_scores(const KV_HEAD *head, const QUERY_BLOCK *block, uint position,
                        float (*scores)[KV_TILE]) {
    float16 total[ATTENTION_QUERIES];
#define CALL(dtype, whole) page_products(head, dtype, whole, block, position, total)
    FOR_KV_TYPE(head, CALL)
#undef CALL
    for (uint n = 0; n < block->count; n++) {
        float16 score = total[n] * head->scale;
        if (head->soft_cap > 0.0f) score = soft_cap16(score, (float16)(head->soft_cap));
        vstore16(score, 0, scores[n] + position % KV_TILE);
    }
}

// scores become weights exp(score - maximum), +0 where masked; returns maximum and weight sum.
static SOFTMAX tile_weights(float *scores, uint begin, uint end) {
    const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float16 weight[4], most = (float16)(-INFINITY);
    int16 kept[4];
    UNROLL for (int i = 0; i < 4; i++) {
        int16 place = lane + 16 * i;
        kept[i] = (place >= (int16)(int)begin) & (place < (int16)(int)end);
        weight[i] = select((float16)(-INFINITY), vload16(i, scores), kept[i]);
        most = larger16(most, weight[i]);
    }
    SOFTMAX tile;
    tile.maximum = largest_of_16(most);
    UNROLL for (int i = 0; i < 4; i++) {
        weight[i] = select((float16)(0.0f), exp16(weight[i] - tile.maximum), kept[i]);
        vstore16(weight[i], i, scores);
    }
    tile.total = fold16((weight[0] + weight[2]) + (weight[1] + weight[3]));
    return tile;
}

// Adds weight * v[d] of positions [begin, end), one after the other, to columns [d, d + 16 vectors)
// of `queries` rows of output.
INLINE void add_columns(const KV_HEAD *head, uint dtype, bool whole, uint tile,
                        float (*weights)[KV_TILE], uint begin, uint end, uint d,
                        uint vectors, uint queries, float *output) {
    const uint padded = padded_dim(head->head_dim);
    float16 sum[QUERY_STEP][4];
    UNROLL for (uint n = 0; n < queries; n++)
        UNROLL for (uint i = 0; i < vectors; i++)
            sum[n][i] = vload16(i, output + n * padded + d);
    for (uint j = begin; j < end;) {
        const uint stop = min(end, (j / PAGE_TOKENS + 1) * PAGE_TOKENS);
        ulong row = kv_row(head, tile * KV_TILE + j, 1) + d;
        for (; j < stop; j++, row += head->width) {
            UNROLL for (uint i = 0; i < vectors; i++) {
                const float16 value = load_kv(head, dtype, whole, row + 16 * i,
                                              (int)(head->head_dim - d - 16 * i));
                UNROLL for (uint n = 0; n < queries; n++)
                    sum[n][i] = sum[n][i] + weights[n][j] * value;
            }
        }
    }
    UNROLL for (uint n = 0; n < queries; n++)
        UNROLL for (uint i = 0; i < vectors; i++)
            vstore16(sum[n][i], i, output + n * padded + d);
}

INLINE void add_values(const KV_HEAD *head, uint dtype, bool whole, uint tile,
                       float (*weights)[KV_TILE], uint begin, uint end, uint queries,
                       float *output) {
    uint d = 0;
    for (; d + 64 <= head->head_dim; d += 64)
        add_columns(head, dtype, whole, tile, weights, begin, end, d, 4, queries, output);
    for (; d < head->head_dim; d += 16)
        add_columns(head, dtype, whole, tile, weights, begin, end, d, 1, queries, output);
}

static void add_values_one(const KV_HEAD *head, uint tile, float (*weights)[KV_TILE],
                           uint begin, uint end, float *output) {
#define CALL(dtype, whole) add_values(head, dtype, whole, tile, weights, begin, end, 1, output)
    FOR_KV_TYPE(head, CALL)
#undef CALL
}

static void add_values_step(const KV_HEAD *head, uint tile, float (*weights)[KV_TILE],
                            uint begin, uint end, float *output) {
#define CALL(dtype, whole) \
    add_values(head, dtype, whole, tile, weights, begin, end, QUERY_STEP, output)
    FOR_KV_TYPE(head, CALL)
#undef CALL
}

// Rows of output = left folds over positions of weight * v, for `queries` rows of weights, at most
// QUERY_STEP. Row n attends positions [begin[n], end[n]) of the tile, which may be none.
static void tile_values(const KV_HEAD *head, uint tile, float (*weights)[KV_TILE],
                        const uint *begin, const uint *end, uint queries, float *output) {
    const uint padded = padded_dim(head->head_dim);
    uint same = queries, shared = end[0];
    for (uint n = 1; n < queries; n++) {
        if (begin[n] != begin[0]) same = 0;
        shared = min(shared, end[n]);
    }
    const bool together = same == QUERY_STEP && shared > begin[0];
    for (uint i = 0; i < queries * padded; i += 16) vstore16((float16)(0.0f), 0, output + i);
    if (together) add_values_step(head, tile, weights, begin[0], shared, output);
    for (uint n = 0; n < queries; n++)
        add_values_one(head, tile, weights + n, together ? shared : begin[n], end[n],
                       output + n * padded);
}

// Adds one tile to what the earlier tiles gave: rule R6's merge.
static void merge_tile(SOFTMAX *so_far, float *output, SOFTMAX tile, const float *tile_output,
                       uint head_dim) {
    float maximum = larger(so_far->maximum, tile.maximum);
    float a = exp1(so_far->maximum - maximum), b = exp1(tile.maximum - maximum);
    so_far->total = so_far->total * a + tile.total * b;
    so_far->maximum = maximum;
    for (uint d = 0; d < head_dim; d += 16) {
        float16 sum = vload16(0, output + d) * a + vload16(0, tile_output + d) * b;
        vstore16(sum, 0, output + d);
    }
}

// Scores of a whole tile for all queries of the block, from position `from` up to before `to`.
static void tile_scores(const KV_HEAD *head, const QUERY_BLOCK *block, uint tile, uint from,
                        uint to, float (*scores)[KV_TILE]) {
    for (uint page = 0; page < KV_TILE / PAGE_TOKENS; page++) {
        uint position = tile * KV_TILE + page * PAGE_TOKENS;
        if (position + PAGE_TOKENS <= from || position >= to) continue;
        page_scores(head, block, position, scores);
    }
}

static void load_query(QUERY_BLOCK *block, const GLOBAL float *q, uint head_dim, uint position,
                       uint window) {
    const uint n = block->count++;
    block->end[n] = position + 1;
    block->first[n] = window && position + 1 > window ? position + 1 - window : 0;
    for (uint d = 0; d < head_dim; d += 16)
        vstore16(load_padded(q + d, (int)(head_dim - d)), 0,
                 block->q + n * padded_dim(head_dim) + d);
}

// y = output / total.
static void store_attention(const float *output, float total, GLOBAL float *y, uint head_dim) {
    for (uint d = 0; d < head_dim; d += 16)
        store_partial(divide16(vload16(0, output + d), (float16)(total)), y + d,
                      (int)(head_dim - d));
}

// The KV heads an attention op reads, without slot and column.
static KV_HEAD kv_head_of(const GLOBAL uchar *kv, uint dtype, uint kv_heads, uint head_dim,
                          float scale, float soft_cap) {
    KV_HEAD head = {kv, 0, dtype, kv_heads * head_dim, 0, head_dim, scale, soft_cap};
    return head;
}

#endif
