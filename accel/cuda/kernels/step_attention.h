// A phase of attention of a step kernel. Whoever needs a head of this step makes it for itself: norm,
// rotation, and keys and values of all tokens of the step that lie in a span. So several blocks may
// write the same bytes to a page, and none waits for another to do so.

#ifndef STEP_ATTENTION_H
#define STEP_ATTENTION_H

#define STAGES 0  // records are read where they are
#define RESULTS GROUPS

#include "attention_group.h"
#include "heads.h"
#include "step_table.h"

#define AT_LAST AT_GROUPS_END   // whether a block came last
#define AT_ROWS (AT_LAST + 16)  // [heads, then K and V of every token][HEAD_DIM]
#define PART_FLOATS (PART_HEADER + HEAD_DIM)
#define BLOCK_THREADS (WARPS * WARP_LANES)
#define THREAD_CHANNELS ((HEADS * HEAD_DIM + BLOCK_THREADS - 1) / BLOCK_THREADS)
#define MOST_TILE_PARTS 32u  // more take the block that merges them too long
#define AHEAD 8              // parts that are read at once when they are merged

// What a block takes of a token's context: tiles, each of them a part, where those are few, else a
// span, which is a part.
struct ITEM_WORK : SPAN_WORK {
    PARTS parts;
    unsigned each;        // parts of an item
    unsigned begin, end;  // tiles of this item

    __device__ __forceinline__ void take_token(const unsigned *query, unsigned window,
                                               unsigned slots) {
        position = query[QUERY_POSITION];
        first = first_visible(position, window);
        parts = parts_of(first, position, min(slots, MOST_TILE_PARTS));
        each = parts.tiles == 1 ? GROUPS : 1;
    }
    __device__ __forceinline__ unsigned items() const { return (parts.count + each - 1) / each; }
    __device__ __forceinline__ void take_item(unsigned item) {
        begin = max((parts.first + item * each) * parts.tiles, first / KV_TILE);
        end = min((parts.first + (item + 1) * each) * parts.tiles, position / KV_TILE + 1);
    }
    __device__ __forceinline__ bool has(unsigned at) const {
        return at / KV_TILE >= begin && at / KV_TILE < end && at >= first && at <= position;
    }
};

struct ATTENTION_RESULT {
    const ATTENTION_PHASE &phase;
    const STEP_MEMORY &step;
    size_t token;
    unsigned head;
    __device__ __forceinline__ void operator()(unsigned i, float value) const {
        const unsigned channel = head * HEAD_DIM + i;
        step.store(phase.y, token * phase.y_stride + channel, value);
        step.store(phase.also, token * phase.also_stride + channel, value);
    }
};

// A row of HEAD_DIM floats comes into shared memory.
DEVICE void take_row(float *row, const float *x, const INCOMING &source, int lane) {
    source.watch(x + HEAD_DIM - 1, lane);
#pragma unroll
    for (int k = 4 * lane; k < HEAD_DIM; k += 4 * WARP_LANES)
        *(float4 *)(row + k) = source.settled(source.four(x + k), x + k);
    __syncwarp();
}

DEVICE void turn_row(const ATTENTION_PHASE &phase, const STEP_MEMORY &step, float *row,
                     bool norm, U64 weight, float eps, unsigned position, int lane) {
    if (norm) norm_row(row, HEAD_DIM, step.floats(weight), eps, lane);
    const float *cosine =
        step.floats(phase.rope_table) + (size_t)position * 2 * phase.rotary_pairs;
    rotate_row(row, phase.rotary_pairs, phase.neox != 0, cosine, lane);
}

// Keys or values of token `token` for the KV head.
DEVICE void write_row(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                      const ITEM_WORK &work, unsigned token, unsigned position, bool values,
                      float *row, int lane) {
    const U64 operand = values ? phase.v : phase.k;
    const unsigned stride = values ? phase.v_stride : phase.k_stride;
    const float *x = step.floats(operand) + token * stride + work.kv_head * HEAD_DIM;
    take_row(row, x, step.incoming(operand), lane);
    if (!values)
        turn_row(phase, step, row, phase.k_norm, phase.k_weight, phase.k_eps, position, lane);
    store_row(row, HEAD_DIM, values, work.kv, work.pages[position / PAGE_TOKENS], position,
              work.kv_heads, work.kv_head, lane);
}

// Rows of an item: queries of its heads, as bytes, and of every token of its slot up to its own keys
// and values in its tiles.
DEVICE void make_rows(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                      const ITEM_WORK &work, unsigned tokens, unsigned char *memory) {
    float *rows = (float *)(memory + AT_ROWS);
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned *queries = (const unsigned *)step.at(phase.query);
    const unsigned slot = queries[work.token * phase.query_stride + QUERY_SLOT];
#pragma unroll 1
    for (unsigned task = warp; task < HEADS + 2 * tokens; task += WARPS) {
        float *row = rows + task * HEAD_DIM;
        if (task < HEADS) {
            const float *x = step.floats(phase.q) + work.token * phase.q_stride +
                             (work.head + task) * HEAD_DIM;
            if (task < work.heads) {
                take_row(row, x, step.incoming(phase.q), lane);
                turn_row(phase, step, row, phase.q_norm, phase.q_weight, phase.q_eps,
                         work.position, lane);
            }
            split_query(row, task < work.heads, phase.scale, memory, task, lane);
            continue;
        }
        const unsigned token = (task - HEADS) / 2;
        const unsigned *query = queries + token * phase.query_stride;
        const unsigned position = query[QUERY_POSITION];
        if (query[QUERY_SLOT] == slot && work.has(position))
            write_row(phase, step, work, token, position, (task - HEADS) % 2, row, lane);
    }
}

// Records of the item's first tiles.
DEVICE void call_item(const ITEM_WORK &work) {
    const unsigned warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned page = work.begin * TILE_PAGES + warp;
    if (page >= work.end * TILE_PAGES || page * PAGE_TOKENS > work.position) return;
    const unsigned char *record = record_of(work, page * PAGE_TOKENS);
    for (unsigned at = 128 * lane; at < RECORD; at += 128 * WARP_LANES) call_near(record + at);
}

// Where parts of a token's groups of heads wait, and how many of its items are done.
struct ITEM_PARTS {
    float *parts;
    unsigned slots, *counter;
    __device__ __forceinline__ float *part(unsigned head, unsigned number) const {
        return parts + ((size_t)head * slots + number) * PART_FLOATS;
    }
};

DEVICE void store_part(float *part, const SOFTMAX &softmax, float sum, unsigned channel) {
    __stcg(part + PART_HEADER + channel, sum);
    if (channel == 0) __stcg(part, softmax.top), __stcg(part + 1, softmax.total);
}

// Tiles `tile` to end - 1 of those the groups had, for channel i: into the sum, and as parts where
// they are parts and not all there is.
DEVICE void add_group_tiles(const ITEM_WORK &work, const ITEM_PARTS &to, unsigned tile, unsigned i,
                            const unsigned char *memory, CHANNEL_SUM &channel) {
    const unsigned head = i / HEAD_DIM;
#pragma unroll 1
    for (unsigned group = 0; group < GROUPS && tile + group < work.end; group++) {
        SOFTMAX top = softmax_at(group_top(memory, group, i));
        const float sum = *group_sum(memory, group, i);
        if (broken_query(memory, head)) top.total = nan_value();
        if (work.parts.tiles == 1 && work.items() > 1)
            store_part(to.part(head, tile + group - work.parts.first), top, sum, i % HEAD_DIM);
        else
            channel.add_tile(top, sum);
        if ((tile + group + 1) % SPAN_TILES == 0 && work.parts.tiles == 1) channel.end_span();
    }
}

// All parts of channel i from the left.
DEVICE void add_parts(const ITEM_WORK &work, const ITEM_PARTS &from, unsigned i,
                      CHANNEL_SUM &channel) {
#pragma unroll 1
    for (unsigned first = 0; first < work.parts.count; first += AHEAD) {
        SOFTMAX top[AHEAD];
        float sum[AHEAD];
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            const float *part = from.part(i / HEAD_DIM, min(first + n, work.parts.count - 1));
            top[n] = softmax_of(__ldcg(part), __ldcg(part + 1));
            sum[n] = __ldcg(part + PART_HEADER + i % HEAD_DIM);
        }
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            if (first + n >= work.parts.count) break;
            channel.add_tile(top[n], sum[n]);
            const unsigned behind = (work.parts.first + first + n + 1) * work.parts.tiles;
            if (behind % SPAN_TILES == 0) channel.end_span();
        }
    }
}

// An item of a group of heads, whose rows are made; whoever comes last merges all of them.
DEVICE void attend_item(const ITEM_WORK &work, const ITEM_PARTS &parts,
                        const ATTENTION_RESULT &result, unsigned char *memory) {
    const unsigned warp = threadIdx.x / WARP_LANES, group = warp / TILE_WARPS;
    const int lane = threadIdx.x % WARP_LANES, page = warp % TILE_WARPS;
    const bool only = work.items() == 1;
    CHANNEL_SUM channel[THREAD_CHANNELS];
#pragma unroll
    for (int n = 0; n < THREAD_CHANNELS; n++) channel[n].begin();
#pragma unroll 1
    for (unsigned tile = work.begin; tile < work.end; tile += GROUPS) {
        const unsigned start = (tile + group) * KV_TILE;
        if (group < GROUPS && tile + group < work.end)
            attend_group_tile(work, start, memory, record_of(work, start + page * PAGE_TOKENS),
                              record_of(work, start + lane % 4 * PAGE_TOKENS), group, group, page,
                              lane);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < THREAD_CHANNELS; n++) {
            const unsigned i = threadIdx.x + n * BLOCK_THREADS;
            if (i < work.heads * HEAD_DIM)
                add_group_tiles(work, parts, tile, i, memory, channel[n]);
        }
        __syncthreads();
    }
    if (!only) {
        unsigned *last = (unsigned *)(memory + AT_LAST);
        if (work.parts.tiles > 1)
#pragma unroll
            for (int n = 0; n < THREAD_CHANNELS; n++) {
                const unsigned i = threadIdx.x + n * BLOCK_THREADS;
                if (i < work.heads * HEAD_DIM)
                    store_part(parts.part(i / HEAD_DIM,
                                          work.begin / SPAN_TILES - work.parts.first),
                               channel[n].span, channel[n].part, i % HEAD_DIM);
            }
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            last[0] = atomicAdd(parts.counter, 1) + 1 == work.items();
            __threadfence();
        }
        __syncthreads();
        if (!last[0]) return;
        if (threadIdx.x == 0) *parts.counter = 0;
    }
#pragma unroll
    for (int n = 0; n < THREAD_CHANNELS; n++) {
        const unsigned i = threadIdx.x + n * BLOCK_THREADS;
        if (i >= work.heads * HEAD_DIM) break;
        if (!only) {
            channel[n].begin();
            add_parts(work, parts, i, channel[n]);
        }
        channel[n].end_span();
        result(i, attention_output(channel[n].sum, channel[n].all.total));
    }
}

DEVICE void attention_phase(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                            unsigned tokens, unsigned *workspace, unsigned char *memory) {
    const unsigned *queries = (const unsigned *)step.at(phase.query);
    const unsigned *pages = (const unsigned *)step.at(phase.pages);
    ITEM_WORK work;
    work.kv_heads = phase.kv_heads;
    work.kv = (U64)step.at(phase.kv);
    const unsigned sharing = phase.heads / work.kv_heads;
    const unsigned each = work.kv_heads * ((sharing + HEADS - 1) / HEADS);
    unsigned unit = blockIdx.x;
#pragma unroll 1
    for (work.token = 0; work.token < tokens; work.token++) {
        const unsigned *query = queries + work.token * phase.query_stride;
        work.take_token(query, phase.window, phase.slots);
        work.pages = pages + query[QUERY_SLOT] * phase.pages_stride;
        const unsigned units = work.items() * each;
#pragma unroll 1
        for (; unit < units; unit += gridDim.x) {
            const unsigned group = unit % each;
            work.take_item(unit / each);
            work.take_group(group, sharing);
            call_item(work);
            make_rows(phase, step, work, tokens, memory);
            __syncthreads();
            const ITEM_PARTS parts = {
                (float *)step.at(phase.parts) +
                    (size_t)(work.token * phase.heads + work.head) * phase.slots * PART_FLOATS,
                phase.slots, workspace + phase.counters + work.token * each + group};
            const ATTENTION_RESULT result = {phase, step, work.token, work.head};
            attend_item(work, parts, result, memory);
            __syncthreads();
        }
        unit -= units;
    }
}

#endif
