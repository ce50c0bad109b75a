// FLASH_ATTN_BATCHED of many tokens over I12 pages (rule R6). A row is one head of one token. A
// block computes the rows of one KV head for a few consecutive tokens of one slot, and passes over
// the tiles that these tokens see.
//
// Both products are integer products on tensor cores. Queries and weights are split into 128 high +
// low, keys and values into 16 high + low. Eight times the low part of keys and values is stored
// next to the high part, so that both mixed products share one sum: 2048 hh + 16 (h l + l h) + l l
// / 8. A token that is the only one of its slot would leave most of a block's rows empty, so its
// heads are computed separately.
//
// HEAD_DIM is 64, 128 or 256; a block computes CHANNELS of the outputs. MAX_TOKENS is the number
// of tokens of the shape bucket. Compiled with these operand numbers (see packets.h): Q_AT, KV_AT,
// PAGES_AT, QUERY_AT and Y_AT.

#define WARPS 4

#include "attention_tokens.h"
#include "attention_stage.h"

#define ROWS (16 * WARPS)
#define CHANNEL_PARTS (HEAD_DIM / CHANNELS)
#define GROUPS_OF_CHANNELS (CHANNELS / 8)
#define ROW_WORDS (HEAD_DIM / 16)  // of a row, in one lane of four

// The two rows of a lane.
struct ROW_PAIR {
    unsigned high[2][ROW_WORDS], low[2][ROW_WORDS];
    float unit[2];
    unsigned position[2], first[2];
    bool broken[2];
    SOFTMAX span[2], total[2];
    float sum[GROUPS_OF_CHANNELS][4];
};

// Row r of the lane: its query as integers in two parts.
DEVICE void open_row(const float *q, float scale, int r, int t, ROW_PAIR &rows) {
    float x[HEAD_DIM / 4];
#pragma unroll
    for (int piece = 0; piece < HEAD_DIM / 16; piece++) {
        const int of_lane = piece % (PIECE_WORDS * LANE_ROUNDS);
        const unsigned channel = lane_channel(piece / (PIECE_WORDS * LANE_ROUNDS),
                                              of_lane / PIECE_WORDS, t) +
                                 of_lane % PIECE_WORDS * 4;
        const float4 v = q ? *(const float4 *)(q + channel) : float4{};
        x[4 * piece] = v.x, x[4 * piece + 1] = v.y, x[4 * piece + 2] = v.z, x[4 * piece + 3] = v.w;
    }
    rows.unit[r] = split_row<Q_SHIFT>(x, scale, rows.high[r], rows.low[r], rows.broken[r]);
}

DEVICE int joined(int high, int mixed, int low) {
    return (high * (1 << Q_SHIFT) + mixed) * 16 + (low >> 3);
}

struct SUMS_OF_PARTS {
    int high[4], mixed[4], low[4];
};

// Operand A in two parts times operand B in two parts.
DEVICE void multiply_parts(SUMS_OF_PARTS &sum, const unsigned (&high)[4], const unsigned (&low)[4],
                           unsigned b0, unsigned b1, unsigned low_b0, unsigned low_b1) {
    multiply_32<true>(sum.high, high, b0, b1);
    multiply_32<true>(sum.mixed, low, b0, b1);
    multiply_32<true>(sum.low, low, low_b0, low_b1);
    multiply_32<true>(sum.mixed, high, low_b0, low_b1);
}

// q.k with the unit and exponent of positions 8 b + 2 t and 8 b + 2 t + 1 of the tile.
DEVICE void eight_scores(const unsigned char *stage, const unsigned char *memory,
                         const ROW_PAIR &rows, int b, int lane, float (&score)[4]) {
    const int g = lane / 4, t = lane % 4;
    const unsigned in_page = b % 2 * 8 + g;
    const unsigned char *high = stage + b / 2 * RECORD + in_page * HEAD_DIM;
    const unsigned char *low = memory + AT_LOW_KEYS + (8 * b + g) * HEAD_DIM;
    SUMS_OF_PARTS sum = {};
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int round = 0; round < LANE_ROUNDS; round++) {
            unsigned h[PIECE_WORDS], l[PIECE_WORDS];
            load_piece(high, in_page, lane_channel(half, round, t), h);
            load_piece(low, in_page, lane_channel(half, round, t), l);
#pragma unroll
            for (int i = 0; i < PIECE_WORDS; i += 2) {
                const int w = (half * LANE_ROUNDS + round) * PIECE_WORDS + i;
                const unsigned q[4] = {rows.high[0][w], rows.high[1][w], rows.high[0][w + 1],
                                       rows.high[1][w + 1]};
                const unsigned p[4] = {rows.low[0][w], rows.low[1][w], rows.low[0][w + 1],
                                       rows.low[1][w + 1]};
                multiply_parts(sum, q, p, h[i], h[i + 1], l[i], l[i + 1]);
            }
        }
    const float2 scale = *(const float2 *)((const float *)(memory + AT_EXPONENTS) + 8 * b + 2 * t);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float dot = (float)joined(sum.high[e], sum.mixed[e], sum.low[e]);
        score[e] = dot * rows.unit[e / 2] * (e % 2 ? scale.y : scale.x);
    }
}

// U and l of a tile for both rows, and the weights as operands in two parts, four words for every
// page.
DEVICE void tile_weights(const unsigned char *stage, const unsigned char *memory,
                         const ROW_PAIR &rows, unsigned start, bool edge, int lane,
                         SOFTMAX (&part)[2], unsigned (&high)[TILE_PAGES][2],
                         unsigned (&low)[TILE_PAGES][2]) {
    const int t = lane % 4;
    const float *floats = (const float *)(memory + AT_EXPONENTS) + 2 * t;
    float score[8][4], most[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll
    for (int b = 0; b < 8; b++) {
        eight_scores(stage, memory, rows, b, lane, score[b]);
        const float2 exponent = *(const float2 *)(floats + KV_TILE + 8 * b);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const unsigned position = start + 8 * b + 2 * t + e % 2;
            if (edge && (position < rows.first[e / 2] || position > rows.position[e / 2]))
                score[b][e] = NEGATIVE_INFINITY;
            else
                most[e / 2] = fmaxf(most[e / 2], score[b][e] + (e % 2 ? exponent.y : exponent.x));
        }
    }
    float top[2];
    bool usable[2], seen[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        most[r] = fmaxf(most[r], __shfl_xor_sync(ALL_LANES, most[r], 1));
        most[r] = fmaxf(most[r], __shfl_xor_sync(ALL_LANES, most[r], 2));
        top[r] = rint_small(most[r]);
        usable[r] = magnitude_of(top[r]) < 1048576.0f;
        seen[r] = most[r] != NEGATIVE_INFINITY;
    }
#pragma unroll
    for (int page = 0; page < TILE_PAGES; page++) {
        unsigned pair[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int b = 2 * page + i;
            const float2 scale = *(const float2 *)(floats + 2 * KV_TILE + 8 * b);
            int weight[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float difference = score[b][e] - top[e / 2];
                const float p = exp2_of(fmaxf(difference, -80.0f));
                const bool counts = usable[e / 2] && score[b][e] != NEGATIVE_INFINITY;
                score[b][e] = counts ? p : 0.0f;
                weight[e] = rounded(score[b][e] * (e % 2 ? scale.y : scale.x));
            }
            pair[i][0] = (unsigned)weight[0] | (unsigned)weight[1] << 16;
            pair[i][1] = (unsigned)weight[2] | (unsigned)weight[3] << 16;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            high[page][r] = __byte_perm(pair[0][r] >> Q_SHIFT & 0x007F007Fu,
                                        pair[1][r] >> Q_SHIFT & 0x007F007Fu, 0x6420);
            low[page][r] =
                __byte_perm(pair[0][r] & 0x007F007Fu, pair[1][r] & 0x007F007Fu, 0x6420);
        }
    }
    // Rule R4: positions 32, 16, 8, 4, 2 and 1 apart.
    float fold[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        fold[e] = ((score[0][e] + score[4][e]) + (score[2][e] + score[6][e])) +
                  ((score[1][e] + score[5][e]) + (score[3][e] + score[7][e]));
        fold[e] = fold[e] + __shfl_xor_sync(ALL_LANES, fold[e], 2);
        fold[e] = fold[e] + __shfl_xor_sync(ALL_LANES, fold[e], 1);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        part[r] = softmax_of(top[r], fold[2 * r] + fold[2 * r + 1]);
        if (!usable[r]) part[r] = softmax_of(NO_TOP, seen[r] ? nan_value() : 0.0f);
    }
}

// Adds a tile to the span so far.
DEVICE void attend_tile(const unsigned char *stage, const unsigned char *memory, ROW_PAIR &rows,
                        unsigned start, bool edge, unsigned part, int lane) {
    SOFTMAX tile[2];
    unsigned high[TILE_PAGES][2], low[TILE_PAGES][2];
    tile_weights(stage, memory, rows, start, edge, lane, tile, high, low);
    FACTORS factors[2];
#pragma unroll
    for (int r = 0; r < 2; r++) factors[r] = merge_later(rows.span[r], tile[r]);
    // A lane names a row of eight channels of page lane / 8.
    const unsigned of_lane = lane % 8 * PAGE_TOKENS;
    const unsigned char *values = stage + lane / 8 * RECORD + I12_VALUES(HEAD_DIM) +
                                  part * CHANNELS * PAGE_TOKENS + of_lane;
    const unsigned char *low_values =
        memory + AT_LOW_VALUES + lane / 8 * (CHANNELS * PAGE_TOKENS) + of_lane;
#pragma unroll
    for (int n = 0; n < GROUPS_OF_CHANNELS; n++) {
        unsigned h[4], l[4];
        load_matrices(h, values + n * 8 * PAGE_TOKENS);
        load_matrices(l, low_values + n * 8 * PAGE_TOKENS);
        SUMS_OF_PARTS sum = {};
#pragma unroll
        for (int page = 0; page < TILE_PAGES; page += 2) {
            const unsigned w[4] = {high[page][0], high[page][1], high[page + 1][0],
                                   high[page + 1][1]};
            const unsigned v[4] = {low[page][0], low[page][1], low[page + 1][0],
                                   low[page + 1][1]};
            multiply_parts(sum, w, v, h[page], h[page + 1], l[page], l[page + 1]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float value = (float)joined(sum.high[e], sum.mixed[e], sum.low[e]);
            rows.sum[n][e] =
                rows.sum[n][e] * factors[e / 2].keep + value * factors[e / 2].add;
        }
    }
}

// Ends a span: `y` has the sum of earlier spans, which no other lane reads or writes.
DEVICE void end_span(ROW_PAIR &rows, float *const (&y)[2], bool first) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (!y[r]) continue;
        FACTORS factors = {0.0f, 1.0f};
        if (first)
            rows.total[r] = rows.span[r];
        else
            factors = merge_later(rows.total[r], rows.span[r]);
#pragma unroll
        for (int n = 0; n < GROUPS_OF_CHANNELS; n++) {
            float2 *pair = (float2 *)(y[r] + 8 * n);
            float2 all = {rows.sum[n][2 * r], rows.sum[n][2 * r + 1]};
            if (!first) {
                const float2 before = *pair;
                all.x = before.x * factors.keep + all.x * factors.add;
                all.y = before.y * factors.keep + all.y * factors.add;
            }
            *pair = all;
            rows.sum[n][2 * r] = rows.sum[n][2 * r + 1] = 0.0f;
        }
        rows.span[r] = no_softmax();
    }
}

DEVICE void store_rows(ROW_PAIR &rows, float *const (&y)[2], bool folded) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (!y[r]) continue;
        FACTORS factors = {0.0f, 1.0f};
        if (folded)
            factors = merge_later(rows.total[r], rows.span[r]);
        else
            rows.total[r] = rows.span[r];
        const float total = rows.broken[r] ? nan_value() : rows.total[r].total;
#pragma unroll
        for (int n = 0; n < GROUPS_OF_CHANNELS; n++) {
            float2 *pair = (float2 *)(y[r] + 8 * n);
            float2 all = {rows.sum[n][2 * r], rows.sum[n][2 * r + 1]};
            if (folded) {
                const float2 before = *pair;
                all.x = before.x * factors.keep + all.x * factors.add;
                all.y = before.y * factors.keep + all.y * factors.add;
            }
            *pair = {attention_output(all.x, total), attention_output(all.y, total)};
        }
    }
}

DEVICE void attend_block(const BLOCK_WORK &work, const HEAD_ROWS &operands, unsigned char *memory) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const int g = lane / 4, t = lane % 4;
    ROW_PAIR rows;
    float *y[2];
    unsigned furthest = 0, nearest = 0xFFFFFFFFu, latest_first = 0, earliest_first = 0xFFFFFFFFu;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const unsigned row = warp * 16 + g + 8 * r;
        const bool exists = row < work.rows();
        const float *q = operands.q_of(work, row);
        open_row(exists ? q : 0, operands.scale, r, t, rows);
        rows.position[r] = 0, rows.first[r] = 1, y[r] = 0;
        rows.span[r] = rows.total[r] = no_softmax();
        if (!exists) continue;
        y[r] = operands.y_of(work, row) + work.part * CHANNELS + 2 * t;
        rows.position[r] = work.position(work.begin + row / work.sharing);
        rows.first[r] = first_visible(rows.position[r], operands.window);
        furthest = max(furthest, rows.position[r]), nearest = min(nearest, rows.position[r]);
        latest_first = max(latest_first, rows.first[r]);
        earliest_first = min(earliest_first, rows.first[r]);
    }
    furthest = largest_of_warp(furthest), nearest = smallest_of_warp(nearest);
    latest_first = largest_of_warp(latest_first), earliest_first = smallest_of_warp(earliest_first);
#pragma unroll
    for (int n = 0; n < GROUPS_OF_CHANNELS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) rows.sum[n][e] = 0.0f;
    const unsigned begin = work.first / KV_TILE, end = work.last / KV_TILE + 1;
    const bool busy = warp * 16 < work.rows();
    bool folded = false;
    begin_tile(work, memory + begin % STAGES * STAGE_BYTES, begin);
    for (unsigned tile = begin; tile < end; tile++) {
        unsigned char *stage = memory + tile % STAGES * STAGE_BYTES;
        await_parts<0>();
        __syncthreads();
        if (tile + 1 < end)
            begin_tile(work, memory + (tile + 1) % STAGES * STAGE_BYTES, tile + 1);
        spread_tile(stage, memory, work.part);
        __syncthreads();
        const unsigned start = tile * KV_TILE;
        if (!busy || start > furthest || start + KV_TILE <= earliest_first) continue;
        if (tile % SPAN_TILES == 0 && tile != begin) {
            end_span(rows, y, !folded);
            folded = true;
        }
        const bool edge = start + KV_TILE - 1 > nearest || start < latest_first;
        attend_tile(stage, memory, rows, start, edge, work.part, lane);
    }
    if (busy) store_rows(rows, y, folded);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_blocks(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets, U64 workspace) {
    extern __shared__ __align__(128) unsigned char shared[];
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    const PACKET *packet = packet_of(launch, 0);
    unsigned *starts = (unsigned *)(shared + AT_STARTS);
    BLOCK_WORK work;
    HEAD_ROWS operands;
    const unsigned runs =
        open_work(launch, packet, ROWS, starts, WARPS * WARP_LANES, work, operands);
    const unsigned tokens = count_of(launch, packet), each = work.kv_heads * CHANNEL_PARTS;
    for (unsigned unit = blockIdx.x; unit < runs * each; unit += gridDim.x) {
        work.kv_head = unit % each / CHANNEL_PARTS, work.part = unit % CHANNEL_PARTS;
        // The rows that see the most positions come first.
        open_run(work, starts, runs - 1 - unit / each, tokens, operands.window);
        work.pages = pages_of(launch, work);
        if (work.count > 1)
            attend_block(work, operands, shared);
        else if (work.part == 0)
            for_heads_of_token(work, operands, [&](SPAN_WORK &token, float *y) {
                attend_token(token, operands.scale, shared, y);
            });
    }
}
