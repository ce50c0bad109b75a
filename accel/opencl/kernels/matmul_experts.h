// The products of experts, where a row of y is a pair of a token and an expert it uses: which rows
// share a matrix, as packets of matmul and expert_group say.

#ifndef MATMUL_EXPERTS_H
#define MATMUL_EXPERTS_H

// Most tokens of a chunk: a core takes all of an expert.
#define CHUNK_TOKENS 0x7FFFFFFF

// Places `first` to `first + count` of the order that expert_group makes use one expert. In a list
// of chunks the first tells how many follow in `count`.
typedef struct {
    int expert;
    int first;
    int count;
} CHUNK;

typedef struct {
    uint pairs;                  // rows of y
    uint row_pairs;              // pairs for each row of the activations; 0: there are no experts
    uint used;                   // pairs of a token
    const GLOBAL int *ids;       // [tokens, used]
    ulong ids_stride;
    const GLOBAL CHUNK *chunks;  // 0: every pair is a chunk
    const GLOBAL int *order;     // pairs in the order of their experts, then their tokens
    ulong expert_bytes;
} EXPERTS;

// The row of the activations a pair reads.
INLINE ulong pair_source(const EXPERTS *e, uint pair) {
    return e->row_pairs ? pair / e->row_pairs : pair;
}

// Bytes from the first matrix to that of the pair's expert.
INLINE ulong expert_offset(const EXPERTS *e, uint pair) {
    if (!e->row_pairs) return 0;
    return e->ids[pair / e->used * e->ids_stride + pair % e->used] * e->expert_bytes;
}

INLINE uint chunk_count(const EXPERTS *e) {
    if (e->chunks) return e->chunks[0].count;
    return e->row_pairs ? e->pairs : (e->pairs + (CHUNK_TOKENS - 1u)) / CHUNK_TOKENS;
}

// Whether every chunk is one token.
INLINE bool single_tokens(const EXPERTS *e) {
    return !e->chunks && (e->row_pairs || e->pairs == 1);
}

// `p` for the tokens of one chunk alone.
INLINE MATMUL chunk_product(const MATMUL *p, const EXPERTS *e, uint index) {
    MATMUL q = *p;
    if (e->chunks) {
        const CHUNK chunk = e->chunks[index + 1];
        q.tokens = chunk.count;
        q.weight += chunk.expert * e->expert_bytes;
        q.target = e->order + chunk.first;
        q.source = e->row_pairs == 1 ? q.target : q.target + e->pairs;
        return q;
    }
    const uint first = e->row_pairs ? index : index * CHUNK_TOKENS;
    const ulong source = pair_source(e, first);
    q.tokens = e->row_pairs ? 1 : min(p->tokens - first, (uint)CHUNK_TOKENS);
    q.weight += expert_offset(e, first);
    q.x += source * p->x_stride;
    q.m += source * p->m_stride;
    q.scale += source * p->scale_stride;
    q.sums += source * p->sums_stride;
    q.y += first * p->y_stride;
    return q;
}

#endif
