// Divides a token's context among the blocks of a step kernel: the tiles each block takes, the
// addresses of its parts, and how the parts are merged. Parts consist of words as in exchange.h; a
// reader resets the words to 0.

#ifndef STEP_PARTS_H
#define STEP_PARTS_H

#include "attention_group.h"
#include "exchange.h"
#include "step_table.h"

#define AT_MERGED AT_RECORDS                 // [warp][U, l, o][lane], when tiles are done
#define PART_SHARES (HEAD_DIM / WARP_LANES)  // of a part, each read by one warp
#define SHARE_WORDS 40                       // o of so many channels, U, l
#define AHEAD 8  // parts that are requested at once

// The groups of heads to which this device attends, `count` from `first` on, their heads, `head` to
// end_head - 1, and how many blocks share the context of a group: of all groups or, of a context
// that devices divide, of a share. All devices decide alike. If it has its own heads only, they are
// `count` groups from 0 on.
struct OWN_GROUPS {
    unsigned first, count, head, end_head, blocks;
    bool divided;

    __device__ __forceinline__ OWN_GROUPS(const ATTENTION_PHASE &phase, unsigned of_kv_head)
        : first(0),
          count(phase.kv_heads * of_kv_head),
          head(0),
          end_head(phase.heads),
          blocks(max((unsigned)gridDim.x / count, 1u)),
          divided(false) {}
#if SHARED_STEP
    // The same of one token.
    __device__ __forceinline__ OWN_GROUPS(const ATTENTION_PHASE &phase, unsigned of_kv_head,
                                          const unsigned *query, const PEER_DEVICES &peers)
        : OWN_GROUPS(phase, of_kv_head) {
        const unsigned position = query[QUERY_POSITION];
        divided = phase.own_heads != 0;
        if (divided || position - first_visible(position, phase.window) < phase.divided_from) return;
        const unsigned index = peers.index, devices = peers.count + 1;
        const unsigned end = count * (index + 1) / devices, sharing = phase.heads / phase.kv_heads;
        first = count * index / devices, count = end - first, divided = true;
        head = first / of_kv_head * sharing + first % of_kv_head * HEADS;
        end_head = end / of_kv_head * sharing + end % of_kv_head * HEADS;
        blocks = max((unsigned)gridDim.x / max(count, 1u), 1u);
    }
#endif
};

// A block's share of a token's context: if there are few tiles, tiles, each of which is a part;
// otherwise a span, which is a part.
struct ITEM_WORK : SPAN_WORK {
    PARTS parts;
    unsigned items, each, more;  // items, parts of each, and how many items have one part more
    unsigned begin, end;   // tiles of this item

    // `sharing` blocks share the context of a group of heads.
    __device__ __forceinline__ void take_token(const ATTENTION_PHASE &phase,
                                               const unsigned *query, unsigned sharing) {
        position = query[QUERY_POSITION];
        first = first_visible(position, phase.window);
        parts = parts_of(first, position, phase.slots);
        items = parts.count;
        // A block takes as many tiles as it computes at once if they are all; otherwise it takes
        // only one of several if there are blocks for all, and about as many as any other block.
        if (parts.tiles == 1 && parts.count <= GROUPS) items = 1;
        if (parts.tiles == 1 && parts.count > sharing) items = min(items, sharing);
        each = parts.count / items, more = parts.count - each * items;
    }
    __device__ __forceinline__ unsigned first_span() const {
        return parts.first * parts.tiles / SPAN_TILES;
    }
    __device__ __forceinline__ unsigned end_span() const {
        return position / KV_TILE / SPAN_TILES + 1;
    }
    __device__ __forceinline__ void take_item(unsigned item) {
        const unsigned part = parts.first + item * each + min(item, more);
        begin = max(part * parts.tiles, first / KV_TILE);
        end = min((part + each + (item < more)) * parts.tiles, position / KV_TILE + 1);
    }
};

// Addresses of a phase's parts: [token][head][share][part].
struct PART_ADDRESSES {
    unsigned *words;
    unsigned heads, slots;
    __device__ __forceinline__ unsigned *share(unsigned token, unsigned channel,
                                               unsigned number) const {
        const size_t row = token * heads * PART_SHARES + channel / WARP_LANES;
        return words + (row * slots + number) * SHARE_WORDS;
    }
    __device__ __forceinline__ void store(unsigned token, unsigned channel, unsigned number,
                                          const SOFTMAX &softmax, float sum) const {
        float *to = (float *)share(token, channel, number);
        publish(to + channel % WARP_LANES, sum);
        if (channel % WARP_LANES) return;
        publish(to + WARP_LANES, softmax.top);
        publish(to + WARP_LANES + 1, softmax.total);
    }
};

struct ATTENTION_RESULT {
    const ATTENTION_PHASE &phase;
    const STEP_MEMORY &step;
    size_t token;
    bool everywhere;
    __device__ __forceinline__ void operator()(unsigned channel, float value) const {
        step.store(phase.y, token * phase.y_stride + channel, value, everywhere);
        if (READ_OUTSIDE) step.store(phase.also, token * phase.also_stride + channel, value);
    }
};

// Words that the previous attention phase reset to 0 are 0 before any later write of this warp. The
// fence costs nothing here, since the parts of this phase are still to come.
DEVICE void settle_parts() { device_fence(); }

// The parts of one span of a warp's channels, from the left, as they arrive; `share` is that of
// part 0.
DEVICE SOFTMAX merged_span(const ITEM_WORK &work, unsigned *share, unsigned span,
                           const INCOMING &source, int lane, float &sum) {
    const unsigned each = SPAN_TILES / work.parts.tiles;
    const unsigned begin = max(span * each, work.parts.first) - work.parts.first;
    unsigned count = min((span + 1) * each - work.parts.first, work.parts.count) - begin;
    share += (size_t)begin * SHARE_WORDS;
    // Lane n has U of part n, lane AHEAD + n its l.
    unsigned *own = share + lane % AHEAD * SHARE_WORDS + WARP_LANES + lane / AHEAD % 2;
    share += lane;
    SOFTMAX all = no_softmax();
    sum = 0.0f;
    unsigned spins = 0;
#pragma unroll 1
    while (true) {
        unsigned word[AHEAD] = {}, header = 0;
        bool missing;
        do {
            missing = false;
#pragma unroll
            for (unsigned n = 0; n < AHEAD; n++)
                if (n < count && !word[n]) word[n] = load_shared_word(share + n * SHARE_WORDS);
            if (lane % AHEAD < count && !header) header = load_shared_word(own);
#pragma unroll
            for (unsigned n = 0; n < AHEAD; n++) missing |= n < count && !word[n];
            missing |= lane % AHEAD < count && !header;
        } while (source.waits(missing, spins));
        __syncwarp();
        if (lane < 2 * AHEAD && lane % AHEAD < count) __stcg((float *)own, 0.0f);
#pragma unroll
        for (unsigned n = 0; n < AHEAD; n++) {
            const float top = __uint_as_float(~__shfl_sync(ALL_LANES, header, n));
            const float total = __uint_as_float(~__shfl_sync(ALL_LANES, header, AHEAD + n));
            if (n >= count) break;
            __stcg((float *)share + n * SHARE_WORDS, 0.0f);
            const FACTORS factors = merge_later(all, softmax_of(top, total));
            sum = sum * factors.keep + __uint_as_float(~word[n]) * factors.add;
        }
        if (count <= AHEAD) return all;
        count -= AHEAD, share += AHEAD * SHARE_WORDS, own += AHEAD * SHARE_WORDS;
    }
}

// Channels from 32 `task` on of a token: a warp folds a span, then one warp folds all spans from
// the left. If there is one span, `alone`, a single warp calls this and waits for no other.
DEVICE void merge_channels(const ITEM_WORK &work, const PART_ADDRESSES &addresses, unsigned task,
                           bool alone, unsigned char *memory, const ATTENTION_RESULT &result) {
    const unsigned warp = alone ? 0 : threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const unsigned channel = task * WARP_LANES + lane, end = work.end_span();
    const INCOMING source = {true, result.step.stop, 0};
    float *found = (float *)(memory + AT_MERGED);
    settle_parts();
    CHANNEL_SUM all;
    all.begin();
#pragma unroll 1
    for (unsigned batch = work.first_span(); batch < end; batch += WARPS) {
        if (batch + warp < end) {
            float sum;
            const SOFTMAX span = merged_span(work, addresses.share(work.token, channel, 0),
                                             batch + warp, source, lane, sum);
            float *own = found + warp * 3 * WARP_LANES + lane;
            if (alone)
                all.span = span, all.part = sum;
            else
                own[0] = span.top, own[WARP_LANES] = span.total, own[2 * WARP_LANES] = sum;
        }
        if (alone) break;
        __syncthreads();
        if (warp == 0)
#pragma unroll 1
            for (unsigned n = 0; n < WARPS && batch + n < end; n++) {
                if (n || batch != work.first_span()) all.end_span();
                const float *one = found + n * 3 * WARP_LANES + lane;
                all.span = softmax_of(one[0], one[WARP_LANES]), all.part = one[2 * WARP_LANES];
            }
        __syncthreads();
    }
    all.end_span();
    if (warp == 0) result(channel, attention_output(all.sum, all.all.total));
}

#endif
