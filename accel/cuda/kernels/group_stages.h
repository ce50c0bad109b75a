// The stages in shared memory from which unit_groups.cu reads: the weights of a unit of a block's
// or a group's rows, and packed tokens. Compiled with the macros of unit_groups.cu.

#ifndef GROUP_STAGES_H
#define GROUP_STAGES_H

#include "groups.h"
#include "unit_scales.h"

typedef UNIT_FORMAT<FORMAT_ID> FORMAT;
typedef UNIT_SCALES<FORMAT_ID> SCALES;

#define THREADS (WARP_GROUPS * GROUP_WARPS * WARP_LANES)
#define GROUP_THREADS (GROUP_WARPS * WARP_LANES)
#define EIGHTS (BLOCK_TOKENS / 8)
#define VALUES (4 * EIGHTS)  // of a thread
// If there are registers for it, one product is computed while the sums of the last one are scaled.
#define AHEAD(values) ((values) < 24 || WARP_GROUPS < 4)
// Data that is loaded together: of a group or, if tokens are shared, of a block.
#define SHARE_GROUPS (SPLIT ? 1 : WARP_GROUPS)
#define SHARES (WARP_GROUPS / SHARE_GROUPS)
#define SHARE_TILES (SHARE_GROUPS * GROUP_WARPS)
#define PAIRED (GATE >= 0)
#define BLOCK_TILES (PAIRED ? SHARE_TILES / 2 : SHARE_TILES)  // of each matrix
#define SUMS_BYTES EIGHT_SUMS_BYTES
#define SCALES_BYTES (8 * 4)
#define AT_TOKEN_SUMS (BLOCK_TOKENS * UNIT_PLANES)
#define AT_SCALES (AT_TOKEN_SUMS + BLOCK_TOKENS * UNIT_SUMS * 2)
#define AT_UNITS (AT_SCALES + BLOCK_TOKENS * 4)
#define STAGE_BYTES (AT_UNITS + SHARE_TILES * FORMAT::unit_bytes)
#define AT_BARRIERS (SHARES * STAGES * STAGE_BYTES)
#define AT_TOTALS (AT_BARRIERS + SHARES * STAGES * 8)  // [VALUES][thread]
// With EXPERT_PAIRS the rows of results of two blocks' tokens in turn, and how many there are.
#define AT_PAIRS (AT_TOTALS + VALUES * THREADS * 4)
#define BLOCK_PAIRS_WORDS (BLOCK_TOKENS + 1)

// Tiles `first_tile` to `tiles` - 1 of all matrices, numbered consecutively, or of both matrices of
// a pair. `own` is the warp's tile, 0 without one.
struct GROUP_WORK {
    const unsigned char *planes, *sums, *own;
    const float *scales;
    unsigned units, tiles, first_tile, first_token, tokens;
    unsigned first_unit, end_unit;  // of the block's part of the columns
    unsigned expert;                // of the block's tokens, if EXPERT_PAIRS

    __device__ __forceinline__ unsigned own_tiles() const {
        const unsigned each = min(tiles - first_tile, (unsigned)BLOCK_TILES);
        return PAIRED ? 2 * each : each;
    }
    // Eights of tokens that exist.
    __device__ __forceinline__ unsigned eights() const {
        return min((tokens - first_token + 7) / 8, (unsigned)EIGHTS);
    }
};

// Stages of a share. Each of its warps requests a part, one copy after the other; if one warp did
// all requests, all others would wait for it.
struct STAGE_RING {
    unsigned char *stages;
    COPY_BARRIER *barriers;

    __device__ __forceinline__ unsigned char *stage(unsigned step) const {
        return stages + step % STAGES * STAGE_BYTES;
    }
    // The weights of `unit` for warp `warp` of the share, which do not change while a step runs.
    // One lane calls this and the following functions.
    __device__ __forceinline__ void fetch_weights(const GROUP_WORK &work, unsigned step,
                                                  unsigned unit, unsigned warp) const {
        const unsigned of_eight = EIGHT_BYTES + SUMS_BYTES + SCALES_BYTES;
        COPY_BARRIER *barrier = barriers + step % STAGES;
        if (warp == 0)
            announce(barrier, work.own_tiles() * FORMAT::unit_bytes + work.eights() * of_eight);
        if (work.own)
            copy_to_stage(barrier, stage(step) + AT_UNITS + warp * FORMAT::unit_bytes,
                          work.own + (size_t)unit * FORMAT::unit_bytes, FORMAT::unit_bytes);
    }
    // One warp requests a group of eight tokens or, if there are enough warps, two warps do.
    __device__ __forceinline__ void fetch_tokens(const GROUP_WORK &work, unsigned step,
                                                 unsigned unit, unsigned warp) const {
        constexpr bool apart = SHARE_TILES >= 2 * EIGHTS;
        const bool small = !apart || warp >= EIGHTS;
        const unsigned eight = apart && small ? warp - EIGHTS : warp;
        if (eight >= work.eights()) return;
        COPY_BARRIER *barrier = barriers + step % STAGES;
        unsigned char *to = stage(step);
        const size_t unit_eight = (size_t)(work.first_token / 8 + eight) * work.units + unit;
        if (!apart || !small)
            copy_to_stage(barrier, to + eight * EIGHT_BYTES, work.planes + unit_eight * EIGHT_BYTES,
                          EIGHT_BYTES);
        if (!small) return;
        copy_to_stage(barrier, to + AT_TOKEN_SUMS + eight * SUMS_BYTES,
                      work.sums + unit_eight * SUMS_BYTES, SUMS_BYTES);
        copy_to_stage(barrier, to + AT_SCALES + eight * SCALES_BYTES,
                      (const unsigned char *)work.scales + unit_eight * SCALES_BYTES, SCALES_BYTES);
    }
    __device__ __forceinline__ void fetch(const GROUP_WORK &work, unsigned step, unsigned unit,
                                          unsigned warp) const {
        if (threadIdx.x % WARP_LANES == 0) {
            fetch_weights(work, step, unit, warp);
            fetch_tokens(work, step, unit, warp);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void await(unsigned step) const {
        await_stage(barriers + step % STAGES, step / STAGES);
    }
};

// A lane's requests for every unit, if all warps of a block share its stages: weights of its warp's
// tile, or a part of eight tokens.
struct LANE_COPY {
    const unsigned char *from;
    unsigned to, bytes, of_block;

    __device__ __forceinline__ static bool of_weights() { return threadIdx.x % WARP_LANES == 0; }
    __device__ __forceinline__ void open(const GROUP_WORK &work, unsigned warp) {
        const unsigned part = threadIdx.x % WARP_LANES, eights = work.eights();
        of_block = work.own_tiles() * FORMAT::unit_bytes +
                   eights * (EIGHT_BYTES + SUMS_BYTES + SCALES_BYTES);
        from = work.own;
        to = AT_UNITS + warp * FORMAT::unit_bytes, bytes = from ? FORMAT::unit_bytes : 0;
        if (part == 0) return;
        // Two warps have an eight, if there are enough.
        constexpr bool apart = SHARE_TILES >= 2 * EIGHTS;
        const unsigned kind = part + (apart && warp >= EIGHTS), eight = apart ? warp % EIGHTS : warp;
        const size_t unit_eight = (size_t)(work.first_token / 8 + eight) * work.units;
        const bool own = kind <= 3 && !(apart && warp < EIGHTS && kind > 1);
        if (kind == 1) {
            from = work.planes + unit_eight * EIGHT_BYTES;
            to = eight * EIGHT_BYTES, bytes = EIGHT_BYTES;
        } else if (kind == 2) {
            from = work.sums + unit_eight * SUMS_BYTES;
            to = AT_TOKEN_SUMS + eight * SUMS_BYTES, bytes = SUMS_BYTES;
        } else {
            from = (const unsigned char *)work.scales + unit_eight * SCALES_BYTES;
            to = AT_SCALES + eight * SCALES_BYTES, bytes = SCALES_BYTES;
        }
        if (!own || eight >= eights || warp >= 2 * EIGHTS) bytes = 0;
    }
    // The next unit.
    __device__ __forceinline__ void fetch(const STAGE_RING &ring, unsigned step) {
        COPY_BARRIER *barrier = ring.barriers + step % STAGES;
        if (threadIdx.x == 0) announce(barrier, of_block);
        if (bytes) copy_to_stage(barrier, ring.stage(step) + to, from, bytes);
        from += bytes;
    }
};

#endif
