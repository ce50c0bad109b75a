// A phase of attention of a step kernel. Whoever needs a head of this step makes it for itself: norm,
// rotation, and keys and values of all tokens of the step that lie in a span. So several blocks may
// write the same bytes to a page, and none waits for another to do so.

#ifndef STEP_ATTENTION_H
#define STEP_ATTENTION_H

#include "attention_span.h"
#include "heads.h"
#include "step_table.h"

#define AT_ROWS (AT_LAST + 16)  // [heads, then K and V of every token][HEAD_DIM]

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
                      const SPAN_WORK &work, unsigned token, unsigned position, bool values,
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

// Rows of a unit: queries of its heads, and of every token of its slot up to its own keys and values
// in its span.
DEVICE void make_rows(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                      const SPAN_WORK &work, unsigned tokens, float *rows) {
    const int warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned *queries = (const unsigned *)step.at(phase.query);
    const unsigned slot = queries[work.token * phase.query_stride + QUERY_SLOT];
#pragma unroll 1
    for (unsigned task = warp; task < HEADS + 2 * tokens; task += WARPS) {
        float *row = rows + task * HEAD_DIM;
        if (task < HEADS) {
            if (task >= work.heads) continue;
            const float *x = step.floats(phase.q) + work.token * phase.q_stride +
                             (work.head + task) * HEAD_DIM;
            take_row(row, x, step.incoming(phase.q), lane);
            turn_row(phase, step, row, phase.q_norm, phase.q_weight, phase.q_eps, work.position,
                     lane);
            continue;
        }
        const unsigned token = (task - HEADS) / 2;
        const unsigned *query = queries + token * phase.query_stride;
        const unsigned position = query[QUERY_POSITION];
        const bool seen = query[QUERY_SLOT] == slot && position <= work.position &&
                          position / (KV_TILE * SPAN_TILES) == work.span;
        if (seen) write_row(phase, step, work, token, position, (task - HEADS) % 2, row, lane);
    }
}

DEVICE void attention_phase(const ATTENTION_PHASE &phase, const STEP_MEMORY &step,
                            unsigned tokens, unsigned *workspace, unsigned char *memory) {
    const unsigned *queries = (const unsigned *)step.at(phase.query);
    const unsigned *pages = (const unsigned *)step.at(phase.pages);
    SPAN_WORK work;
    work.kv_heads = phase.kv_heads;
    work.kv = (U64)step.at(phase.kv);
    work.q = (const float *)(memory + AT_ROWS);
    const unsigned sharing = phase.heads / work.kv_heads;
    const unsigned each = work.kv_heads * ((sharing + HEADS - 1) / HEADS);
    unsigned unit = blockIdx.x;
    for (work.token = 0; work.token < tokens; work.token++) {
        const unsigned *query = queries + work.token * phase.query_stride;
        work.position = query[QUERY_POSITION];
        work.first = first_visible(work.position, phase.window);
        work.pages = pages + query[QUERY_SLOT] * phase.pages_stride;
        const unsigned begin = work.first / (KV_TILE * SPAN_TILES);
        const unsigned end = work.position / (KV_TILE * SPAN_TILES) + 1;
        const unsigned units = (end - begin) * each;
        for (; unit < units; unit += gridDim.x) {
            const unsigned group = unit % each;
            work.span = begin + unit / each;
            work.take_group(group, sharing);
            call_span(work);
            make_rows(phase, step, work, tokens, (float *)(memory + AT_ROWS));
            __syncthreads();
            float *parts = (float *)step.at(phase.parts) +
                           (size_t)(work.token * phase.heads + work.head) * phase.slots *
                               PART_FLOATS;
            const ATTENTION_RESULT result = {phase, step, work.token, work.head};
            attend_all_spans(work, phase.scale, memory, parts, phase.slots, begin, end,
                             workspace + phase.counters + work.token * each + group, result);
            __syncthreads();
        }
        unit -= units;
    }
}

#endif
