// Norm and rotation of heads, the write of their keys and values, and FLASH_ATTN of few tokens over
// I12 pages, or coded ones (rules R3, R4, R6 and R13). A cluster of blocks computes a span of 1,024 positions for one
// token and up to four heads that read one KV head; four warps compute a tile. Every block that
// needs a row of queries, new keys or new values computes it itself. One block writes the new keys
// and values to their page, and no block reads them from there.
//
// Compiled with WARPS, TOKENS, GRID (the number of blocks) and BLOCKS (blocks of a multiprocessor);
// with ALL_HEADS, KV_HEADS, HEAD_DIM and DTYPE; with the operand numbers of head_rows.cu and with
// PARTS_AT, which stores U, l and o of spans, and Y_AT; with the packet numbers PART, Q_ROPE,
// K_ROPE, Q_NORM and K_NORM, the last two -1 for absent norms. workspace has a counter for every
// token, group of heads and block of a cluster; all are 0 between steps.

#define STAGES 1
#define RESULTS GROUPS

#include "attention_group.h"
#include "sending.h"
#include "step_rows.h"

#define CLUSTER (SPAN_TILES / GROUPS)
#define SHARE_CHANNELS (HEADS * HEAD_DIM / CLUSTER)  // that a block of a cluster merges
#define PART_FLOATS (PART_HEADER + HEAD_DIM)
#define TASKS (HEADS + 2 * TOKENS)  // rows a block makes at most

#define AT_ROWS AT_GROUPS_END
#define AT_BARRIERS (AT_ROWS + (WHOLE_TURN ? 0 : WARPS * HEAD_DIM * 4))  // of a warp's copy
#define AT_FILLS (AT_BARRIERS + WARPS * 8)              // how often a warp copied
#define AT_LAST (AT_FILLS + WARPS * 4)                  // whether the block ended last

// A block's part of a span: its tile with the number rank * GROUPS + group belongs to a group.
struct BLOCK_WORK : SPAN_WORK {
    unsigned first_tile, end_tile;  // of the span, that the token sees
    unsigned rank;                  // of the block in its cluster
    bool works;                     // whether it has any of them
    bool alone;                     // whether it has all there are
    bool writes;                    // the token's keys and values

    __device__ __forceinline__ void take_tiles(unsigned cluster_rank, bool only) {
        const unsigned begin = span * SPAN_TILES;
        rank = cluster_rank;
        first_tile = max(begin, first / KV_TILE) - begin;
        end_tile = min(begin + SPAN_TILES, position / KV_TILE + 1) - begin;
        alone = only && first_tile / GROUPS == (end_tile - 1) / GROUPS;
        works = first_tile < (rank + 1) * GROUPS && end_tile > rank * GROUPS;
    }
    __device__ __forceinline__ unsigned tile_start(unsigned group) const {
        return (span * SPAN_TILES + rank * GROUPS + group) * KV_TILE;
    }
    __device__ __forceinline__ bool has_group(unsigned group) const {
        const unsigned tile = rank * GROUPS + group;
        return tile >= first_tile && tile < end_tile;
    }
    __device__ __forceinline__ bool has(unsigned at) const {
        return at / (KV_TILE * GROUPS) == tile_start(0) / (KV_TILE * GROUPS) && at >= first &&
               at <= position;
    }
};

// Addresses of a warp's shared memory.
struct WARP_MEMORY {
    unsigned char *memory;
    __device__ __forceinline__ COPY_BARRIER *barrier(unsigned warp) const {
        return (COPY_BARRIER *)(memory + AT_BARRIERS) + warp;
    }
    __device__ __forceinline__ unsigned &fills(unsigned warp) const {
        return ((unsigned *)(memory + AT_FILLS))[warp];
    }
    __device__ __forceinline__ float *row(unsigned warp) const {
        return (float *)(memory + AT_ROWS) + warp * HEAD_DIM;
    }
    // Returns when the latest copy that the warp began has arrived.
    __device__ __forceinline__ void await(unsigned warp) const {
        await_copy<1>(barrier(warp), fills(warp) - 1);
    }
};

// The arguments of the kernel.
struct HEAD_OPERANDS {
    LAUNCH launch;
    const PACKET *part, *q_rope, *k_rope;
    unsigned tokens;

    __device__ __forceinline__ const unsigned *query(unsigned token) const {
        return (const unsigned *)operand_at(launch, QUERY_AT) + token * stride_at(launch, QUERY_AT);
    }
    __device__ __forceinline__ const float *row(int operand, unsigned token, unsigned head) const {
        return (const float *)operand_at(launch, operand) + token * stride_at(launch, operand) +
               head * HEAD_DIM;
    }
};

#define Q_ROW 0
#define K_ROW 1
#define V_ROW 2

// A row that a warp makes.
struct ROW_TASK {
    int kind;  // -1 where there is none
    unsigned head, token, position;

    __device__ __forceinline__ ROW_TASK(const BLOCK_WORK &work, const HEAD_OPERANDS &operands,
                                        unsigned number)
        : kind(-1), head(number), token(work.token), position(work.position) {
        if (number < HEADS) {
            kind = Q_ROW;
            return;
        }
        token = (number - HEADS) / 2;
        if (token >= operands.tokens) return;
        const unsigned *query = operands.query(token);
        position = query[QUERY_POSITION];
        const bool seen = query[QUERY_SLOT] == operands.query(work.token)[QUERY_SLOT];
        if (seen && work.has(position)) kind = number % 2 == HEADS % 2 ? K_ROW : V_ROW;
    }
};

// The inputs of a row that exist before the row itself.
struct ROW_BESIDE {
    const PACKET *rope;
    const float *weights, *angles;
    unsigned char *record;
    ROW_FACTORS factors;

    __device__ __forceinline__ ROW_BESIDE(const BLOCK_WORK &work, const HEAD_OPERANDS &operands,
                                          const ROW_TASK &task, int lane) {
        const bool queries = task.kind == Q_ROW;
        rope = queries ? operands.q_rope : operands.k_rope;
        weights = (const float *)operand_at(operands.launch, queries ? Q_WEIGHT_AT : K_WEIGHT_AT);
        angles = (const float *)operand_at(operands.launch, TABLE_AT) +
                 (size_t)task.position * 2 * rope->size[ROPE_ROTARY_PAIRS];
        record = 0;
        if (task.kind < 0) return;
        if (task.kind != V_ROW) factors.load(weights, angles, lane);
        if (!queries && work.writes && task.token == work.token)
            record = (unsigned char *)record_of(work, task.position);
    }
};

// Converts queries to bytes, and keys and values to the record in shared memory; if the block
// writes the token's keys and values, also to their page.
DEVICE void make_row(const BLOCK_WORK &work, const HEAD_OPERANDS &operands, const ROW_TASK &task,
                     const ROW_BESIDE &beside, const WARP_MEMORY &own, unsigned warp, int lane) {
    if (task.kind < 0) return;
    const bool queries = task.kind == Q_ROW, exists = !queries || task.head < work.heads;
    HEAD_ROW row = {};
    if (exists) {
        row.read(queries ? operands.row(Q_AT, task.token, work.head + task.head)
                         : operands.row(task.kind == K_ROW ? K_AT : V_AT, task.token, work.kv_head),
                 lane);
        if (task.kind != V_ROW) {
            const int norm = queries ? Q_NORM : K_NORM;
            if (norm >= 0)
                row.normalize(beside.factors, beside.weights != 0,
                              packet_of(operands.launch, norm)->real[RMS_NORM_EPS]);
            row.turn(beside.factors, beside.angles, beside.rope->size[ROPE_ROTARY_PAIRS],
                     beside.rope->size[ROPE_NEOX] != 0, own.row(warp), lane);
        }
        row.mix(lane);
    }
    if (queries) {
        row.split(exists, operands.part->real[FLASH_ATTN_PART_SCALE], own.memory, task.head, lane);
        return;
    }
    const unsigned group = task.position / KV_TILE % GROUPS;
    const unsigned page = task.position % KV_TILE / PAGE_TOKENS;
    own.await(group * TILE_WARPS + page);
    row.store<false>(task.kind == V_ROW, beside.record, group_record(own.memory, group, page),
              task.position % PAGE_TOKENS, lane);
}

// Folds the tiles of the span from the left, for one channel of a head that the caller merges.
DEVICE SOFTMAX merged_groups(const BLOCK_WORK &work, const unsigned char *memory, unsigned head,
                             unsigned channel, float &sum) {
    SOFTMAX part[SPAN_TILES];
    float o[SPAN_TILES];
#pragma unroll
    for (unsigned tile = 0; tile < SPAN_TILES; tile++) {
        if (tile < work.first_tile || tile >= work.end_tile) continue;
        const unsigned i = head * HEAD_DIM + channel;
        const float *top = group_top(memory, tile % GROUPS, i);
        part[tile].top = float_of_peer(top, tile / GROUPS);
        part[tile].total = float_of_peer(top + 1, tile / GROUPS);
        o[tile] = float_of_peer(group_sum(memory, tile % GROUPS, i), tile / GROUPS);
    }
    const float *units = (const float *)(memory + AT_UNITS);
    const bool broken = float_of_peer(units + 2 * head + 1, work.first_tile / GROUPS) != 0.0f;
    SOFTMAX all = no_softmax();
    sum = 0.0f;
#pragma unroll
    for (unsigned tile = 0; tile < SPAN_TILES; tile++) {
        if (tile < work.first_tile || tile >= work.end_tile) continue;
        const FACTORS factors = merge_later(all, part[tile]);
        sum = sum * factors.keep + o[tile] * factors.add;
    }
    if (broken) all.total = nan_value();
    return all;
}

// Spans of the token from the left.
DEVICE SOFTMAX merged_spans(const float *part, unsigned spans, unsigned channel, float &sum) {
    SOFTMAX all = no_softmax();
    sum = 0.0f;
#pragma unroll 4
    for (unsigned span = 0; span < spans; span++, part += PART_FLOATS) {
        const FACTORS factors = merge_later(all, softmax_of(__ldcg(part), __ldcg(part + 1)));
        sum = sum * factors.keep + __ldcg(part + PART_HEADER + channel) * factors.add;
    }
    return all;
}

// Where results go, and parts of several spans.
struct SPAN_RESULTS {
    float *y, *parts;
    unsigned slots, begin, end, *counter;
    SENT sent;

    __device__ __forceinline__ void store(unsigned i, float value) const { sent.store(y + i, value); }
};

// All channels, of tiles that are the block's own.
DEVICE void merge_own(const BLOCK_WORK &work, const SPAN_RESULTS &results,
                      const unsigned char *memory) {
    constexpr int threads = WARPS * WARP_LANES, each = (HEADS * HEAD_DIM + threads - 1) / threads;
#pragma unroll
    for (int n = 0; n < each; n++) {
        const unsigned i = threadIdx.x + n * threads;
        if (i >= work.heads * HEAD_DIM) break;
        CHANNEL_SUM channel;
        channel.begin();
#pragma unroll
        for (unsigned group = 0; group < GROUPS; group++)
            if (work.has_group(group))
                channel.add_tile(softmax_at(group_top(memory, group, i)),
                                 *group_sum(memory, group, i));
        if (broken_query(memory, i / HEAD_DIM)) channel.span.total = nan_value();
        results.store(i, attention_output(channel.part, channel.span.total));
    }
}

// The block's channels over the tiles of the whole cluster: the result or, if there are several
// spans, a part.
DEVICE void merge_block(const BLOCK_WORK &work, const SPAN_RESULTS &results,
                        const unsigned char *memory) {
    const unsigned i = work.rank * SHARE_CHANNELS + threadIdx.x;
    const unsigned head = i / HEAD_DIM, channel = i % HEAD_DIM;
    if (threadIdx.x >= SHARE_CHANNELS || head >= work.heads) return;
    float sum;
    const SOFTMAX all = merged_groups(work, memory, head, channel, sum);
    if (results.end == results.begin + 1) {
        results.store(i, attention_output(sum, all.total));
        return;
    }
    float *part = results.parts +
                  ((size_t)head * results.slots + work.span - results.begin) * PART_FLOATS;
    part[PART_HEADER + channel] = sum;
    if (channel % SHARE_CHANNELS == 0) part[0] = all.top, part[1] = all.total;
}

DEVICE void merge_later_spans(const BLOCK_WORK &work, const SPAN_RESULTS &results,
                              unsigned char *memory) {
    unsigned *last = (unsigned *)(memory + AT_LAST), *counter = results.counter + work.rank;
    const unsigned spans = results.end - results.begin;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last[0] = atomicAdd(counter, 1) + 1 == spans;
        __threadfence();
    }
    __syncthreads();
    if (!last[0]) return;
    const unsigned i = work.rank * SHARE_CHANNELS + threadIdx.x, head = i / HEAD_DIM;
    if (threadIdx.x < SHARE_CHANNELS && head < work.heads) {
        const float *part = results.parts + (size_t)head * results.slots * PART_FLOATS;
        float sum;
        const SOFTMAX all = merged_spans(part, spans, i % HEAD_DIM, sum);
        results.store(i, attention_output(sum, all.total));
    }
    if (threadIdx.x == 0) *counter = 0;
}

// The rows that a warp computes: the first warps compute queries, the last ones keys and values.
DEVICE unsigned first_task(unsigned warp) {
    return warp < HEADS ? warp : HEADS + (WARPS - 1 - warp);
}
DEVICE unsigned later_task(unsigned task) {
    return task < HEADS ? TASKS : task + WARPS - HEADS;
}

// A block's part of a span. All blocks of the cluster call.
DEVICE void attend_block(const BLOCK_WORK &work, const HEAD_OPERANDS &operands,
                         const SPAN_RESULTS &results, const WARP_MEMORY &own) {
    const unsigned warp = threadIdx.x / WARP_LANES;
    const int lane = threadIdx.x % WARP_LANES;
    const unsigned group = warp / TILE_WARPS, page = warp % TILE_WARPS;
    const unsigned start = work.tile_start(group), page_start = start + page * PAGE_TOKENS;
    const bool copies = work.has_group(group) && page_start <= work.position &&
                        page_start + PAGE_TOKENS > work.first;
    ROW_TASK task(work, operands, first_task(warp));
    if (!work.works) task.kind = -1;
    const ROW_BESIDE beside(work, operands, task, lane);
    if (copies) {
        begin_copy(own.barrier(warp), group_record(own.memory, group, page),
                   record_of(work, page_start), RECORD);
        if (lane == 0) own.fills(warp)++;
    }
    __syncthreads();
    PRECEDING_DONE;
    make_row(work, operands, task, beside, own, warp, lane);
#if TASKS > WARPS
    for (unsigned number = later_task(first_task(warp)); work.works && number < TASKS;
         number = later_task(number)) {
        task = ROW_TASK(work, operands, number);
        make_row(work, operands, task, ROW_BESIDE(work, operands, task, lane), own, warp, lane);
    }
#endif
    if (work.works && copies) own.await(warp);
    __syncthreads();
    if (work.has_group(group))
        attend_copied_tile(work, start, own.memory, 0, group, group, page, lane);
    if (work.alone) {
        __syncthreads();
        merge_own(work, results, own.memory);
    } else {
        arrive_at_cluster();
        await_cluster();
        merge_block(work, results, own.memory);
        arrive_at_cluster();
        if (results.end > results.begin + 1) merge_later_spans(work, results, own.memory);
        await_cluster();
    }
    show_to_copies();
    __syncthreads();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WARPS *WARP_LANES, BLOCKS)
    attention_clusters(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    BLOCK_MEMORY(shared);
    const WARP_MEMORY own = {shared};
    HEAD_OPERANDS operands;
    operands.launch = {scratch, inputs, (U64)&packets, 0u};
    const LAUNCH &launch = operands.launch;
    FOLLOWING_MAY_START;
    const PACKET *part = operands.part = packet_of(launch, PART);
    operands.q_rope = packet_of(launch, Q_ROPE), operands.k_rope = packet_of(launch, K_ROPE);
    // The first token, whose memory exists even if the token does not, is requested together with
    // the count.
    const unsigned position = operands.query(0)[QUERY_POSITION];
    const unsigned slot = operands.query(0)[QUERY_SLOT];
    operands.tokens = count_of(launch, part);
    __builtin_assume(gridDim.x == GRID);
    constexpr unsigned heads = ALL_HEADS;
    const unsigned slots = part->size[FLASH_ATTN_PART_MAX_PARTS];
    BLOCK_WORK work;
    work.kv_heads = KV_HEADS;
    work.kv = (U64)operand_at(launch, KV_AT);
    constexpr unsigned sharing = heads / KV_HEADS, groups = (sharing + HEADS - 1) / HEADS;
    constexpr unsigned each = KV_HEADS * groups;
    open_copies(own.barrier(threadIdx.x / WARP_LANES), 1);
    if (threadIdx.x < WARPS) own.fills(threadIdx.x) = 0;
    __syncthreads();
    unsigned unit = blockIdx.x / CLUSTER;
#pragma unroll 1
    for (work.token = 0; work.token < operands.tokens; work.token++) {
        const unsigned *query = operands.query(work.token);
        work.position = work.token ? query[QUERY_POSITION] : position;
        work.first = first_visible(work.position, part->size[FLASH_ATTN_PART_WINDOW]);
        work.pages = (const unsigned *)operand_at(launch, PAGES_AT) +
                     (work.token ? query[QUERY_SLOT] : slot) * stride_at(launch, PAGES_AT);
        SPAN_RESULTS results;
        results.sent.open(launch, TO_Y_AT);
        results.slots = slots;
        results.begin = work.first / (KV_TILE * SPAN_TILES);
        results.end = work.position / (KV_TILE * SPAN_TILES) + 1;
        const unsigned units = (results.end - results.begin) * each;
#pragma unroll 1
        for (; unit < units; unit += gridDim.x / CLUSTER) {
            const unsigned group = unit % each;
            work.span = results.begin + unit / each;
            work.take_group(group, sharing);
            work.take_tiles(blockIdx.x % CLUSTER, results.end == results.begin + 1);
            work.writes = group % groups == 0;
            if (work.alone && !work.works) continue;
            results.y = (float *)operand_at(launch, Y_AT) + work.token * stride_at(launch, Y_AT) +
                        work.head * HEAD_DIM;
            results.parts = (float *)operand_at(launch, PARTS_AT) +
                            (size_t)(work.token * heads + work.head) * slots * PART_FLOATS;
            results.counter =
                (unsigned *)workspace + (work.token * each + group) * CLUSTER;
            attend_block(work, operands, results, own);
        }
        unit -= units;
    }
    // A launch that follows this one also follows the launch before this one.
    if (blockIdx.x == 0) PRECEDING_DONE;
    meet_others(launch);
}
