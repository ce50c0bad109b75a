// Tokens grouped by expert.
//
// expert_order.cu writes a table of words: the number of chunks; for each chunk the expert (for the
// shared expert the number of experts), the index of its first pair, its number of pairs, and how
// many eights of pairs come before it, of which each chunk fills whole ones; then all pairs of a
// token and an expert, ordered by expert. The pairs of a chunk of the shared expert are tokens.

#ifndef EXPERT_TABLE_H
#define EXPERT_TABLE_H

#include "warp.h"

#define CHUNK_WORDS 4
#define TABLE_CHUNKS 1  // the word where they begin

struct CHUNK {
    unsigned expert, first, count, eight;
};

// The words of a table; blocks of the launch after the next may read them before that launch has
// ended.
struct EXPERT_TABLE {
    const unsigned *words;
    unsigned max_chunks;

    __device__ __forceinline__ unsigned chunks() const { return load_shared_word(words); }
    __device__ __forceinline__ CHUNK chunk(unsigned number) const {
        const unsigned *one = words + TABLE_CHUNKS + number * CHUNK_WORDS;
        return {load_shared_word(one), load_shared_word(one + 1), load_shared_word(one + 2),
                load_shared_word(one + 3)};
    }
    __device__ __forceinline__ const unsigned *pairs() const {
        return words + TABLE_CHUNKS + max_chunks * CHUNK_WORDS;
    }
    __device__ __forceinline__ unsigned pair(unsigned index) const {
        return load_shared_word(pairs() + index);
    }
};

#endif
