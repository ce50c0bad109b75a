// What the query records of a step say about its tokens: their slots, and which of them begin a
// sequence.

#ifndef QUERIES_H
#define QUERIES_H

#include "packets.h"

struct QUERIES {
    const unsigned *first;
    size_t stride;
    __device__ __forceinline__ unsigned slot(unsigned token) const {
        return first[token * stride + QUERY_SLOT];
    }
    __device__ __forceinline__ bool starts(unsigned token) const {
        return first[token * stride + QUERY_POSITION] == 0;
    }
};

#endif
