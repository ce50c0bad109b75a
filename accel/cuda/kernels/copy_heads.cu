// COPY_HEADS: target[pairs[r, 1]] = source[pairs[r, 0]] for some words of every stretch of a row,
// bits unchanged; targets are distinct. The words of all rows are divided among threads.
//
// Compiled with these operand numbers (see packets.h): SOURCE_AT, PAIRS_AT and TARGET_AT.

#include "packets.h"
#include "warp.h"

// Words that are T at a time.
template <typename T> DEVICE void copy_words(const LAUNCH &launch, const PACKET *packet) {
    const unsigned each = sizeof(T) / sizeof(unsigned), width = packet->size[COPY_HEADS_WORDS] / each;
    const unsigned of_row = packet->size[COPY_HEADS_STRETCHES] * width;
    const unsigned all = count_of(launch, packet) * of_row;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += gridDim.x * blockDim.x) {
        const unsigned row = i / of_row, stretch = i % of_row / width, word = i % width * each;
        const unsigned *pair =
            (const unsigned *)operand_at(launch, PAIRS_AT) + row * stride_at(launch, PAIRS_AT);
        const unsigned *source = (const unsigned *)operand_at(launch, SOURCE_AT) +
                                 (size_t)pair[0] * stride_at(launch, SOURCE_AT);
        unsigned *target = (unsigned *)operand_at(launch, TARGET_AT) +
                           (size_t)pair[1] * stride_at(launch, TARGET_AT);
        *(T *)(target + stretch * packet->size[COPY_HEADS_TARGET_STEP] + word) =
            *(const T *)(source + stretch * packet->size[COPY_HEADS_SOURCE_STEP] + word);
    }
}

extern "C" __global__ void copy_heads(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                                      U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    PRECEDING_DONE;
    FOLLOWING_MAY_START;
    const PACKET *packet = packet_of(launch, 0);
    const U64 places = (U64)operand_at(launch, SOURCE_AT) | (U64)operand_at(launch, TARGET_AT);
    const U64 steps = (U64)stride_at(launch, SOURCE_AT) | stride_at(launch, TARGET_AT) |
                      (unsigned)packet->size[COPY_HEADS_WORDS] |
                      (unsigned)packet->size[COPY_HEADS_SOURCE_STEP] |
                      (unsigned)packet->size[COPY_HEADS_TARGET_STEP];
    if ((places | steps * sizeof(unsigned)) % sizeof(uint4) == 0)
        copy_words<uint4>(launch, packet);
    else
        copy_words<unsigned>(launch, packet);
}
