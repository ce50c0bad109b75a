// An attention phase of a step kernel. Every block that needs a head of this step computes it
// itself: the norm, the rotation, and the keys and values of all tokens of the step in its tiles.
// Results over coded pages stay rotated by rule R13: the product that reads them rotates them back.
// So several blocks may write the same bytes to a page, and no block waits for another's write.
//
// Page records of tiles are copied to shared memory while the block waits for rows, and new keys
// and values are also written there. A long context is divided among blocks, which write their
// tiles as parts to the workspace, in words as in exchange.h. Every block merges some channels of
// all parts and resets the words it has read to 0. Phases use two areas for parts in turn. GROUPS
// tiles are computed at the same time.
//
// Several devices have pages of their own KV heads, or whole pages. Then they divide the groups of
// heads of a long context, and each also writes the new keys and values of heads to which it does not
// attend.

#ifndef STEP_ATTENTION_H
#define STEP_ATTENTION_H

#define STAGES 1
#define RESULTS GROUPS

#include "step_parts.h"
#include "step_rows.h"

#define AT_ROWS AT_GROUPS_END                              // [warp][HEAD_DIM]
#define BLOCK_THREADS (WARPS * WARP_LANES)
#define THREAD_CHANNELS ((HEADS * HEAD_DIM + BLOCK_THREADS - 1) / BLOCK_THREADS)

// A barrier of every warp for its copies of records, and the count of completed waits, which is in
// shared memory between phases because products have no register to spare.
struct RECORD_COPIES {
    COPY_BARRIER *barriers;
    unsigned rounds;

    __device__ __forceinline__ RECORD_COPIES(void *address)
        : barriers((COPY_BARRIER *)address), rounds(*(const unsigned *)(barriers + WARPS)) {}
    // By all threads, before a barrier of the block.
    __device__ __forceinline__ void keep() const {
        if (threadIdx.x == 0) *(unsigned *)(barriers + WARPS) = rounds;
    }
};

// A round of tiles, from `tile` to end - 1 of an item.
struct ROUND {
    const ITEM_WORK &work;
    const RECORD_COPIES &copies;
    unsigned char *memory;
    unsigned tile, end;
    bool settled;

    // All warps call this once; afterwards the records of all of them have arrived.
    __device__ __forceinline__ void settle() {
        if (settled) return;
        const unsigned warp = threadIdx.x / WARP_LANES;
        if (warp / TILE_WARPS < GROUPS) await_copy<1>(copies.barriers + warp, copies.rounds);
        __syncthreads();
        settled = true;
    }
    __device__ __forceinline__ bool has(unsigned position) const {
        return position / KV_TILE >= tile && position / KV_TILE < end &&
               position >= work.first && position <= work.position;
    }
    __device__ __forceinline__ unsigned char *record(unsigned position) const {
        return group_record(memory, position / KV_TILE - tile, position % KV_TILE / PAGE_TOKENS);
    }
};
DEVICE void open_records(void *address) {
    open_copies((COPY_BARRIER *)address + threadIdx.x / WARP_LANES, 1);
    if (threadIdx.x == 0) *(unsigned *)((COPY_BARRIER *)address + WARPS) = 0;
}

DEVICE const unsigned *query_of(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                                unsigned token) {
    return (const unsigned *)step.at(phase.query) + token * phase.query_stride;
}

enum HEAD_KIND { QUERY_HEAD, KEY_HEAD, VALUE_HEAD };

// A head of a token, as it is used or stored.
DEVICE HEAD_ROW head_row(const ATTENTION_PHASE &phase, const STEP_MEMORY &step, HEAD_KIND kind,
                         unsigned head, unsigned token, unsigned position, float *room, int lane) {
    const bool query = kind == QUERY_HEAD, values = kind == VALUE_HEAD;
    const U64 operand = query ? phase.q : values ? phase.v : phase.k;
    const U64 weight = query ? phase.q_weight : phase.k_weight;
    const unsigned stride = query ? phase.q_stride : values ? phase.v_stride : phase.k_stride;
    const float *angles =
        step.floats(phase.rope_table) + (size_t)position * 2 * phase.rotary_pairs;
    ROW_FACTORS factors;
    if (!values) factors.load(step.floats(weight), angles, lane);
    HEAD_ROW row;
    row.load(step.floats(operand) + token * stride + head * HEAD_DIM, step.incoming(operand), lane);
    if (!values) {
        if (query ? phase.q_norm : phase.k_norm)
            row.normalize(factors, weight != 0, query ? phase.q_eps : phase.k_eps);
        row.turn(factors, angles, phase.rotary_pairs, phase.neox != 0, room, lane);
    }
    row.mix(lane);
    return row;
}

#if SHARED_STEP
// Writes keys and values of the token to the pages of all KV heads but those from `first` to
// end - 1, each by one warp.
DEVICE void write_new_rows(const ATTENTION_PHASE &phase, const STEP_MEMORY &step, ITEM_WORK &work,
                           unsigned first, unsigned end, unsigned char *memory) {
    const unsigned warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned rows = 2 * (work.kv_heads - (end - first));
    float *room = (float *)(memory + AT_ROWS) + warp * HEAD_DIM;
#pragma unroll 1
    for (unsigned task = blockIdx.x + warp * gridDim.x; task < rows; task += WARPS * gridDim.x) {
        const bool values = task % 2 != 0;
        work.kv_head = task / 2 < first ? task / 2 : task / 2 + end - first;
        unsigned char *record = (unsigned char *)record_of(work, work.position);
        const HEAD_ROW row = head_row(phase, step, values ? VALUE_HEAD : KEY_HEAD, work.kv_head,
                                      work.token, work.position, room, lane);
        row.store(values, record, record, work.position % PAGE_TOKENS, lane);
    }
}
#endif

// Rows of a round of tiles: queries of the item's heads in the first round, as bytes, and every
// token's new keys and values in these tiles. A warp waits for records when it has its first row.
// All kinds of rows share the instructions, which are fetched once a layer.
DEVICE void make_rows(const ATTENTION_PHASE &phase, const STEP_MEMORY &step, ROUND round,
                      unsigned tokens, bool queries) {
    const ITEM_WORK &work = round.work;
    const unsigned warp = threadIdx.x / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES;
    float *room = (float *)(round.memory + AT_ROWS) + warp * HEAD_DIM;
#pragma unroll 1
    for (unsigned task = queries ? warp : HEADS + warp; task < HEADS + 2 * tokens; task += WARPS) {
        const bool query = task < HEADS, values = !query && (task - HEADS) % 2 != 0;
        const unsigned token = query ? work.token : (task - HEADS) / 2;
        unsigned position = work.position;
        const bool exists = task < work.heads;
        if (token != work.token) {
            const unsigned *other = query_of(phase, step, token);
            position = other[QUERY_POSITION];
            if (other[QUERY_SLOT] != query_of(phase, step, work.token)[QUERY_SLOT]) continue;
        }
        if (!query && !round.has(position)) continue;
        HEAD_ROW row;
        if (!query || exists)
            row = head_row(phase, step, query ? QUERY_HEAD : values ? VALUE_HEAD : KEY_HEAD,
                           query ? work.head + task : work.kv_head, token, position, room, lane);
        round.settle();
        if (query)
            row.split(exists, phase.scale, round.memory, task, lane);
        else
            row.store(values, (unsigned char *)record_of(work, position), round.record(position),
                      position % PAGE_TOKENS, lane);
    }
    round.settle();
    __syncthreads();
}

// Requests the records of the tiles from `tile` on, a page a warp; all warps of groups must call
// this.
DEVICE void begin_records(const ITEM_WORK &work, const RECORD_COPIES &copies, unsigned tile,
                          unsigned char *memory) {
    const unsigned warp = threadIdx.x / WARP_LANES, group = warp / TILE_WARPS;
    if (group >= GROUPS) return;
    const unsigned page = warp % TILE_WARPS;
    begin_copy(copies.barriers + warp, group_record(memory, group, page),
               record_of(work, (tile + group) * KV_TILE + page * PAGE_TOKENS), RECORD);
}

// Prefetches the records of tiles `tile` to end - 1.
DEVICE void call_records(const ITEM_WORK &work, unsigned tile, unsigned end) {
    const unsigned warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
#pragma unroll 1
    for (unsigned page = tile * TILE_PAGES + warp; page < end * TILE_PAGES; page += WARPS) {
        const unsigned char *record = record_of(work, page * PAGE_TOKENS);
        for (unsigned at = 128 * lane; at < RECORD; at += 128 * WARP_LANES) call_near(record + at);
    }
}

// Adds the groups' tiles from `tile` on, for channel i of the item's heads, to the sum, or writes
// them as parts if there are several parts.
DEVICE void add_group_tiles(const ITEM_WORK &work, const PART_ADDRESSES &addresses, unsigned tile,
                            unsigned i, const unsigned char *memory, CHANNEL_SUM &channel) {
#pragma unroll 1
    for (unsigned group = 0; group < GROUPS && tile + group < work.end; group++) {
        SOFTMAX top = softmax_at(group_top(memory, group, i));
        const float sum = *group_sum(memory, group, i);
        if (broken_query(memory, i / HEAD_DIM)) top.total = nan_value();
        if (work.parts.tiles == 1 && work.items > 1) {
            addresses.store(work.token, work.head * HEAD_DIM + i, tile + group - work.parts.first,
                            top, sum);
            continue;
        }
        channel.add_tile(top, sum);
        if ((tile + group + 1) % SPAN_TILES == 0 && work.parts.tiles == 1) channel.end_span();
    }
}

// An item of a group of heads: its result if it is the only one, for all devices if `everywhere`,
// otherwise parts.
DEVICE void attend_item(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                        const ITEM_WORK &work, unsigned tokens, const PART_ADDRESSES &addresses,
                        RECORD_COPIES &copies, bool everywhere, unsigned char *memory) {
    const unsigned warp = threadIdx.x / WARP_LANES, group = warp / TILE_WARPS;
    const int lane = threadIdx.x % WARP_LANES, page = warp % TILE_WARPS;
    const bool only = work.items == 1;
    CHANNEL_SUM channel[THREAD_CHANNELS];
#pragma unroll
    for (int n = 0; n < THREAD_CHANNELS; n++) channel[n].begin();
    show_to_copies();
    __syncthreads();
    // The newest tiles come first if they are parts: their rows are computed together with those of
    // queries.
    const bool backwards = work.parts.tiles == 1 && !only;
    const unsigned rounds = (work.end - work.begin + GROUPS - 1) / GROUPS;
    unsigned tile = work.begin + (backwards ? rounds - 1 : 0) * GROUPS;
    begin_records(work, copies, tile, memory);
    call_records(work, backwards ? work.begin : tile + GROUPS, backwards ? tile : work.end);
#pragma unroll 1
    for (unsigned left = rounds; left; left--) {
        make_rows(phase, step, {work, copies, memory, tile, min(tile + GROUPS, work.end), false},
                  tokens, left == rounds);
        copies.rounds++;
        if (group < GROUPS && tile + group < work.end)
            attend_copied_tile(work, (tile + group) * KV_TILE, memory, 0, group, group, page,
                               lane);
        show_to_copies();
        __syncthreads();
        const unsigned next = backwards ? tile - GROUPS : tile + GROUPS;
        if (left > 1) begin_records(work, copies, next, memory);
#pragma unroll
        for (int n = 0; n < THREAD_CHANNELS; n++) {
            const unsigned i = threadIdx.x + n * BLOCK_THREADS;
            if (i < work.heads * HEAD_DIM)
                add_group_tiles(work, addresses, tile, i, memory, channel[n]);
        }
        tile = next;
    }
    const ATTENTION_RESULT result = {phase, step, work.token, everywhere};
#pragma unroll
    for (int n = 0; n < THREAD_CHANNELS; n++) {
        const unsigned i = threadIdx.x + n * BLOCK_THREADS;
        if (i >= work.heads * HEAD_DIM) break;
        if (only) {
            channel[n].end_span();
            result(work.head * HEAD_DIM + i,
                   attention_output(channel[n].sum, channel[n].all.total));
        } else if (work.parts.tiles > 1) {
            addresses.store(work.token, work.head * HEAD_DIM + i,
                            work.begin / SPAN_TILES - work.parts.first, channel[n].span,
                            channel[n].part);
        }
    }
}

APART void attention_phase(const ATTENTION_PHASE &phase, const STEP_MEMORY step, unsigned tokens,
                           unsigned char *workspace, void *barriers, unsigned char *memory) {
    RECORD_COPIES copies(barriers);
    const unsigned *pages = (const unsigned *)step.at(phase.pages);
    const PART_ADDRESSES addresses = {(unsigned *)(workspace + phase.parts), phase.heads,
                                      phase.slots};
    ITEM_WORK work;
    work.kv_heads = phase.kv_heads;
    work.kv = (U64)step.at(phase.kv);
    const unsigned sharing = phase.heads / work.kv_heads;
    const unsigned of_kv_head = (sharing + HEADS - 1) / HEADS;
#if !SHARED_STEP
    const OWN_GROUPS own(phase, of_kv_head);
#endif
    // The last blocks have the fewest tiles of products, so they arrive here first.
    unsigned unit = gridDim.x - 1 - blockIdx.x;
#pragma unroll 1
    for (work.token = 0; work.token < tokens; work.token++) {
        const unsigned *query = query_of(phase, step, work.token);
#if SHARED_STEP
        const OWN_GROUPS own(phase, of_kv_head, query, *step.peers);
#endif
        work.take_token(phase, query, own.blocks);
        work.pages = pages + query[QUERY_SLOT] * phase.pages_stride;
        const unsigned units = work.items * own.count;
#pragma unroll 1
        for (; unit < units; unit += gridDim.x) {
            work.take_item(unit / own.count);
            work.take_group(own.first + unit % own.count, sharing);
            attend_item(phase, step, work, tokens, addresses, copies, own.divided, memory);
        }
        unit -= units;
#if SHARED_STEP
        const unsigned end = (own.first + own.count + of_kv_head - 1) / of_kv_head;
        write_new_rows(phase, step, work, own.count ? own.first / of_kv_head : end, end, memory);
#endif
    }
    copies.keep();
#pragma unroll 1
    for (work.token = 0; work.token < tokens; work.token++) {
        const unsigned *query = query_of(phase, step, work.token);
#if SHARED_STEP
        const OWN_GROUPS own(phase, of_kv_head, query, *step.peers);
#endif
        work.take_token(phase, query, own.blocks);
        if (work.items == 1) {
            if (phase.other_window) settle_parts();
            continue;
        }
        const ATTENTION_RESULT result = {phase, step, work.token, own.divided};
        const bool alone = work.end_span() - work.first_span() == 1;
        const unsigned warp = alone ? threadIdx.x / WARP_LANES : 0, apart = alone ? WARPS : 1;
#pragma unroll 1
        for (unsigned task = own.head * PART_SHARES + blockIdx.x + warp * gridDim.x;
             task < own.end_head * PART_SHARES; task += apart * gridDim.x)
            merge_channels(work, addresses, task, alone, memory, result);
    }
}

#endif
