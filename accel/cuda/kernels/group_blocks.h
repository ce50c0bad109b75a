// The blocks that unit_groups.cu takes in turn: which tokens, or pairs of a token and an expert, each
// multiplies by which rows. Compiled with the macros of unit_groups.cu.

#ifndef GROUP_BLOCKS_H
#define GROUP_BLOCKS_H

#include "group_rows.h"

#if EXPERT_PAIRS

// Takes the chunk, of `chunks`, and the rows of block `block`; blocks of one chunk follow each other.
DEVICE bool open_block(const LAUNCH &launch, U64 workspace, unsigned chunks, unsigned block,
                       GROUP_WORK &work, RESULT &result) {
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MAX_CHUNKS};
    const unsigned of_chunk = (tiles_of(launch, W0) + BLOCK_TILES - 1) / BLOCK_TILES;
    if (block >= of_chunk * chunks) return false;
    const CHUNK chunk = table.chunk(block / of_chunk);
    open_step(launch, chunk.eight * 8 + chunk.count, work, result);
    work.planes = (const unsigned char *)(workspace + PLANES_AT);
    work.sums = (const unsigned char *)(workspace + SUMS_AT);
    work.scales = (const float *)(workspace + SCALES_AT);
    work.first_token = chunk.eight * 8, work.expert = chunk.expert;
    return open_rows(launch, block % of_chunk, threadIdx.x / WARP_LANES % SHARE_TILES, work,
                     result);
}

// Keeps what the end of block `block` needs to know of its pairs.
DEVICE void keep_pairs(const LAUNCH &launch, U64 workspace, unsigned block, unsigned *pairs) {
    const EXPERT_TABLE table = {(const unsigned *)workspace + TABLE_AT, MAX_CHUNKS};
    const unsigned of_chunk = (tiles_of(launch, W0) + BLOCK_TILES - 1) / BLOCK_TILES;
    if (threadIdx.x >= BLOCK_TOKENS) return;
    const CHUNK chunk = table.chunk(block / of_chunk);
    begin_word(pairs + threadIdx.x,
               table.pairs() + chunk.first + min((unsigned)threadIdx.x, chunk.count - 1));
    end_parts();
    if (threadIdx.x == 0) {
        pairs[BLOCK_TOKENS] = chunk.count;
        if (block % of_chunk == 0) count_uses(launch, W0, chunk.expert, chunk.count);
    }
}

// The rows of a block whose pairs are kept.
DEVICE void open_end(const LAUNCH &launch, U64, unsigned, unsigned block, const unsigned *pairs,
                     GROUP_WORK &work, RESULT &result) {
    const unsigned of_chunk = (tiles_of(launch, W0) + BLOCK_TILES - 1) / BLOCK_TILES;
    await_parts<0>();
    __syncthreads();
    open_step(launch, pairs[BLOCK_TOKENS], work, result);
    result.pairs = pairs, result.first_token = 0, work.expert = 0;
    open_rows(launch, block % of_chunk, threadIdx.x / WARP_LANES % SHARE_TILES, work, result);
}

#else

// Opens block `block` of the step. Blocks of the same rows, each with other tokens, follow each
// other, so that several multiprocessors read the same weights. False if there are none left.
DEVICE bool open_block(const LAUNCH &launch, U64, unsigned tokens, unsigned block,
                       GROUP_WORK &work, RESULT &result) {
    const unsigned of_rows = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    open_step(launch, tokens, work, result);
    result.first_token = work.first_token = block % of_rows * BLOCK_TOKENS;
    return open_rows(launch, block / of_rows, threadIdx.x / WARP_LANES % SHARE_TILES, work, result);
}

DEVICE void keep_pairs(const LAUNCH &, U64, unsigned, unsigned *) {}

DEVICE void open_end(const LAUNCH &launch, U64 workspace, unsigned tokens, unsigned block,
                     const unsigned *, GROUP_WORK &work, RESULT &result) {
    open_block(launch, workspace, tokens, block, work, result);
}

#endif

#endif
