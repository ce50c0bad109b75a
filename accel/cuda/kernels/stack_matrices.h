// Where a matrix of a stack lies. An operand with a stride is the address of consecutive matrices.
// An operand without one is the address of a list of addresses: of the counts of uses, which is one
// word for each matrix, then of each matrix.

#ifndef STACK_MATRICES_H
#define STACK_MATRICES_H

#include "packets.h"

DEVICE const unsigned char *matrix_of(const LAUNCH &launch, int stack, unsigned id,
                                      size_t matrix_bytes) {
    const unsigned char *at = operand_at(launch, stack);
    if (stride_at(launch, stack)) return at + id * matrix_bytes;
    return (const unsigned char *)((const U64 *)at)[1 + id];
}

// Counts `times` uses of a matrix of a list. One thread of a launch calls this.
DEVICE void count_uses(const LAUNCH &launch, int stack, unsigned id, unsigned times) {
    if (stride_at(launch, stack)) return;
    unsigned *counts = (unsigned *)((const U64 *)operand_at(launch, stack))[0];
    atomicAdd(counts + id, times);
}

#endif
