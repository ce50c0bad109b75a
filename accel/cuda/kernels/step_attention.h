// A phase of attention of a step kernel. Whoever needs a head of this step makes it for itself: norm,
// rotation, and keys and values of all tokens of the step that lie in a span. So several blocks may
// write the same bytes to a page, and none waits for another to do so.

#ifndef STEP_ATTENTION_H
#define STEP_ATTENTION_H

#include "attention_span.h"
#include "heads.h"
#include "step_table.h"

// Keys and values of a token of this step, as a tile reads them; nowhere where the block has none.
struct alignas(16) FRESH_ROW {
    unsigned char high[HEAD_DIM], low[HALF_DIM];
    short value[HEAD_DIM];
    int key_exponent, value_exponent;
    unsigned position;
};
#define NOWHERE 0xFFFFFFFFu

#define AT_ROWS (AT_LAST + 16)  // [heads, then K and V of every token][HEAD_DIM]
#define AT_FRESH (AT_ROWS + (HEADS + 2 * TOKENS) * HEAD_DIM * 4)
#define AT_FRESH_WEIGHTS (AT_FRESH + TOKENS * (int)sizeof(FRESH_ROW))  // [warp][token][head]

// Those of a block. Pages may have them already or not: what is read there does not count.
struct FRESH_ROWS {
    const FRESH_ROW *row;
    int *weights;
    unsigned tokens;
    int weight[TOKENS];

    __device__ __forceinline__ void settle(unsigned start, PAGE_KEYS &keys, int lane) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int f = 0; f < TOKENS; f++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (f >= tokens || row[f].position != start + g + 8 * r) continue;
                load_words(row[f].low + t * LANE_BYTES, keys.low[r]);
                load_words(row[f].high + t * LANE_BYTES, keys.high[0][r]);
                load_words(row[f].high + HALF_DIM + t * LANE_BYTES, keys.high[1][r]);
                keys.key[r] = row[f].key_exponent, keys.value[r] = row[f].value_exponent;
            }
    }
    // What is left of a position's weight for the values in pages.
    __device__ __forceinline__ int taken(unsigned position, int weight, int t) const {
#pragma unroll
        for (int f = 0; f < TOKENS; f++)
            if (f < tokens && row[f].position == position) {
                weights[f * HEADS + t] = weight;
                weight = 0;
            }
        return weight;
    }
    __device__ __forceinline__ void begin(unsigned start, int t) {
#pragma unroll
        for (int f = 0; f < TOKENS; f++) {
            const bool here = f < tokens && row[f].position - start < KV_TILE;
            weight[f] = here ? weights[f * HEADS + t] : 0;
        }
    }
    __device__ __forceinline__ int sum(int channel) const {
        int all = 0;
#pragma unroll
        for (int f = 0; f < TOKENS; f++)
            if (weight[f]) all += weight[f] * row[f].value[channel];
        return all;
    }
};

// Puts integers of keys, or of values, into a fresh row.
struct KEYS_OF_FRESH {
    FRESH_ROW &row;
    __device__ __forceinline__ void operator()(unsigned k, int integer) const {
        row.high[k] = (unsigned char)(integer >> 4);
        // The lane that has a channel of the lower half has the other one after it.
        unsigned char &low = row.low[k % HALF_DIM];
        low = (unsigned char)(k < HALF_DIM ? integer & 15 : low | (integer & 15) << 4);
    }
    __device__ __forceinline__ void exponent(int exponent) const { row.key_exponent = exponent; }
};
struct VALUES_OF_FRESH {
    FRESH_ROW &row;
    __device__ __forceinline__ void operator()(unsigned k, int integer) const {
        row.value[k] = (short)integer;
    }
    __device__ __forceinline__ void exponent(int exponent) const { row.value_exponent = exponent; }
};

// What a row is multiplied with, asked for before the row is there.
struct ROW_FACTORS {
    float weight[HEAD_DIM / WARP_LANES];
    float2 angle[HALF_DIM / WARP_LANES];
    const float *weights;

    __device__ __forceinline__ void load(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                                         U64 norm_weight, unsigned position, int lane) {
        weights = step.floats(norm_weight);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / WARP_LANES; i++)
            weight[i] = weights ? weights[lane + WARP_LANES * i] : 0.0f;
        const unsigned pairs = phase.rotary_pairs;
        const float *cosine = step.floats(phase.rope_table) + (size_t)position * 2 * pairs;
#pragma unroll
        for (int i = 0; i < HALF_DIM / WARP_LANES; i++) {
            const unsigned m = lane + WARP_LANES * i;
            if (m < pairs) angle[i] = {cosine[m], cosine[pairs + m]};
        }
    }
    __device__ __forceinline__ float operator()(float value, unsigned k) const {
        return weights ? value * weight[k / WARP_LANES] : value;
    }
    __device__ __forceinline__ float2 operator()(unsigned m) const {
        return angle[m / WARP_LANES];
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

// A row of HEAD_DIM floats comes into shared memory. Few blocks read it: every lane waits for itself.
DEVICE void take_row(float *row, const float *x, const INCOMING &source, int lane) {
#pragma unroll
    for (int k = 4 * lane; k < HEAD_DIM; k += 4 * WARP_LANES)
        *(float4 *)(row + k) = source.settled(source.four(x + k), x + k);
    __syncwarp();
}

// Rows of a unit: queries of its heads, and of every token of its slot up to its own keys and values
// in its span.
struct ROWS_OF_STEP {
    const ATTENTION_PHASE &phase;
    const STEP_MEMORY &step;
    const SPAN_WORK &work;
    unsigned char *memory;
    unsigned tokens;

    __device__ __forceinline__ void operator()() const {
        const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
#pragma unroll 1
        for (unsigned task = warp; task < HEADS + 2 * tokens; task += WARPS) make(task, lane);
        __syncthreads();
    }
    __device__ __forceinline__ void make(unsigned task, int lane) const {
        float *row = (float *)(memory + AT_ROWS) + task * HEAD_DIM;
        const bool is_query = task < HEADS, is_value = !is_query && (task - HEADS) % 2;
        const unsigned token = is_query ? work.token : (task - HEADS) / 2;
        const unsigned *queries = (const unsigned *)step.at(phase.query);
        const unsigned *query = queries + token * phase.query_stride;
        const unsigned position = query[QUERY_POSITION];
        FRESH_ROW &fresh = ((FRESH_ROW *)(memory + AT_FRESH))[is_query ? 0 : token];
        bool exists = is_query && task < work.heads;
        if (!is_query) {
            const unsigned slot = queries[work.token * phase.query_stride + QUERY_SLOT];
            exists = query[QUERY_SLOT] == slot && position <= work.position &&
                     position / (KV_TILE * SPAN_TILES) == work.span;
            if (lane == 0 && is_value) fresh.position = exists ? position : NOWHERE;
        }
        if (exists) {
            const U64 operand = is_query ? phase.q : is_value ? phase.v : phase.k;
            const unsigned stride =
                is_query ? phase.q_stride : is_value ? phase.v_stride : phase.k_stride;
            const unsigned head = is_query ? work.head + task : work.kv_head;
            const float *x = step.floats(operand) + token * stride + head * HEAD_DIM;
            ROW_FACTORS factors;
            factors.load(phase, step, is_query ? phase.q_weight : phase.k_weight, position, lane);
            take_row(row, x, step.incoming(operand), lane);
            if (!is_value) {
                if (is_query ? phase.q_norm : phase.k_norm)
                    norm_row(row, HEAD_DIM, factors, is_query ? phase.q_eps : phase.k_eps, lane);
                rotate_row(row, phase.rotary_pairs, HALF_DIM, phase.neox != 0, factors, lane);
            }
        }
        if (is_query)
            split_query(row, exists, phase.scale, memory, (int)task, lane);
        else if (exists)
            keep(row, is_value, fresh, position, lane);
    }
    __device__ __forceinline__ void keep(const float *row, bool is_value, FRESH_ROW &fresh,
                                         unsigned position, int lane) const {
        unsigned char *record = (unsigned char *)i12_record(
            work.kv, work.pages[position / PAGE_TOKENS], work.kv_heads, work.kv_head, HEAD_DIM);
        const unsigned i = position % PAGE_TOKENS;
        const VALUES_OF_FRESH values = {fresh};
        const KEYS_OF_FRESH keys = {fresh};
        if (is_value)
            store_integers_of(row, HEAD_DIM, 1, record, i, lane, values);
        else
            store_integers_of(row, HEAD_DIM, 0, record, i, lane, keys);
    }
};

// Calls each(work, begin, end, group) for the block's spans of every token: of those `begin` to `end` - 1
// of the token work.span, of the group of heads `group`.
template <class EACH>
DEVICE void for_spans(const ATTENTION_PHASE &phase, const STEP_MEMORY &step, unsigned tokens,
                      const EACH &each) {
    const unsigned *queries = (const unsigned *)step.at(phase.query);
    const unsigned *pages = (const unsigned *)step.at(phase.pages);
    SPAN_WORK work;
    work.kv_heads = phase.kv_heads;
    work.kv = (U64)step.at(phase.kv);
    work.q = 0;
    const unsigned sharing = phase.heads / work.kv_heads;
    const unsigned groups = work.kv_heads * ((sharing + HEADS - 1) / HEADS);
    unsigned unit = blockIdx.x;
#pragma unroll 1
    for (work.token = 0; work.token < tokens; work.token++) {
        const unsigned *query = queries + work.token * phase.query_stride;
        work.position = query[QUERY_POSITION];
        work.first = first_visible(work.position, phase.window);
        work.pages = pages + query[QUERY_SLOT] * phase.pages_stride;
        const unsigned begin = work.first / (KV_TILE * SPAN_TILES);
        const unsigned end = work.position / (KV_TILE * SPAN_TILES) + 1;
        const unsigned units = (end - begin) * groups;
#pragma unroll 1
        for (; unit < units; unit += gridDim.x) {
            const unsigned group = unit % groups;
            work.span = begin + unit / groups;
            work.take_group(group, sharing);
            each(work, begin, end, work.token * groups + group);
        }
        unit -= units;
    }
}

// Lets the keys and values of a phase come nearer, long before anybody reads them.
DEVICE void call_attention(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                           unsigned tokens) {
    for_spans(phase, step, tokens,
              [](const SPAN_WORK &work, unsigned, unsigned, unsigned) { call_span(work); });
}

DEVICE void attention_phase(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                            unsigned tokens, unsigned *workspace, unsigned char *memory) {
    for_spans(phase, step, tokens, [&](const SPAN_WORK &work, unsigned begin, unsigned end,
                                       unsigned counter) {
        const ROWS_OF_STEP rows = {phase, step, work, memory, tokens};
        const FRESH_ROWS fresh = {
            (const FRESH_ROW *)(memory + AT_FRESH),
            (int *)(memory + AT_FRESH_WEIGHTS) + threadIdx.x / WARP_LANES * TOKENS * HEADS,
            tokens,
        };
        float *parts = (float *)step.at(phase.parts) +
                       (size_t)(work.token * phase.heads + work.head) * phase.slots * PART_FLOATS;
        const ATTENTION_RESULT result = {phase, step, work.token, work.head};
        attend_all_spans(work, memory, parts, phase.slots, begin, end,
                         workspace + phase.counters + counter, rows, fresh, result);
        __syncthreads();
    });
}

#endif
