// p = softmax of a row of logits; the `used` largest p, renormalized (rules R4, R7).
//
// operands: logits, p, ids, weights
// sizes:    tokens, experts, used
// p is scratch [tokens, experts + used]: where an expert was chosen it holds TAKEN, and behind the
// experts what was chosen; results are written once, for all workers may do it at once. A row
// whose largest logit is not finite gets ids 0, 1, ... and NaN weights. Tokens are split among
// workers; or a work-group takes one at a time.

#define TAKEN -1.0f
#define SMALLEST_SUM 6.103515625e-05f  // 2^-14
#define SMALLEST_NORMAL_BITS 0x00800000u

INLINE float probability(float exponential, float sum) {
    const float p = divide1(exponential, sum);
    return p < as_float(SMALLEST_NORMAL_BITS) ? 0.0f : p;
}

// Chosen probabilities, in order, become weights.
INLINE void renormalize(const GLOBAL float *chosen, GLOBAL float *weights, uint used) {
    float total = 0.0f;
    for (uint place = 0; place < used; place++) total = total + chosen[place];
    total = larger(total, SMALLEST_SUM);
    for (uint place = 0; place < used; place++) weights[place] = divide1(chosen[place], total);
}

INLINE void route_nowhere(GLOBAL int *ids, GLOBAL float *weights, uint used) {
    for (uint place = 0; place < used; place++) {
        ids[place] = place;
        weights[place] = as_float(QUIET_NAN);
    }
}

#if GROUP_SIZE == 1

static float largest_of_row(const GLOBAL float *x, uint count) {
    float16 most = -INFINITY;
    uint k = 0;
    for (; k + 16 <= count; k += 16) most = larger16(most, vload16(0, x + k));
    float largest = largest_of_16(most);
    for (; k < count; k++) largest = larger(largest, x[k]);
    return largest;
}

static float sum_of_row(const GLOBAL float *x, uint count) {
    SPAN_FOLD fold = {0.0f, 0.0f, 0};
    for (uint first = 0; first < count; first += SEGMENT) {
        float16 v[16];
        for (int i = 0; i < 16; i++) {
            const uint k = first + 16 * i;
            v[i] = k < count ? load_padded(x + k, (int)(count - k)) : (float16)(0.0f);
        }
        fold_next(&fold, fold_segment(v));
    }
    return fold_end(&fold);
}

void op_expert_topk(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(expert_topk);
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        const GLOBAL float *logits = op.logits + (ulong)token * op.logits_stride;
        GLOBAL float *p = op.p + (ulong)token * op.p_stride;
        GLOBAL int *ids = op.ids + (ulong)token * op.ids_stride;
        GLOBAL float *weights = op.weights + (ulong)token * op.weights_stride;
        const float largest = largest_of_row(logits, op.experts);
        for (uint k = 0; k < op.experts; k += 16) {
            const int count = (int)(op.experts - k);
            store_partial(exp16(load_padded(logits + k, count) - largest), p + k, count);
        }
        const float sum = sum_of_row(p, op.experts);
        if (sum != sum) {
            route_nowhere(ids, weights, op.used);
            continue;
        }
        for (uint k = 0; k < op.experts; k++) p[k] = probability(p[k], sum);
        for (uint place = 0; place < op.used; place++) {
            const BEST best = best_in(p, 0, op.experts);
            ids[place] = best.id;
            p[best.id] = TAKEN;
            p[op.experts + place] = best.value;
        }
        renormalize(p + op.experts, weights, op.used);
    }
}

#else

INLINE float group_largest(MEMORY memory, const GLOBAL float *x, uint count) {
    __local float *all = (__local float *)memory->group;
    const uint item = get_local_id(0);
    float mine = -INFINITY;
    for (uint k = item; k < count; k += GROUP_SIZE) mine = larger(mine, x[k]);
    all[item] = mine;
    for (uint half_size = GROUP_SIZE / 2; half_size > 0; half_size /= 2) {
        LOCAL_BARRIER;
        if (item < half_size) all[item] = larger(all[item], all[item + half_size]);
    }
    LOCAL_BARRIER;
    const float largest = all[0];
    LOCAL_BARRIER;
    return largest;
}

// p = exp(logits - largest), and the sum of them.
INLINE float group_exponentials(MEMORY memory, const GLOBAL float *logits, float largest,
                                uint experts, GLOBAL float *p) {
    const uint segments = (experts + SEGMENT - 1) / SEGMENT;
    const uint mine = get_local_id(0) / 16 * SEGMENT + get_local_id(0) % 16;
    SPAN_FOLD fold = {0.0f, 0.0f, 0};
    for (uint first = 0; first < segments; first += GROUP_SEGMENTS) {
        float values[16];
        UNROLL for (int i = 0; i < 16; i++) {
            const uint k = first * SEGMENT + mine + 16 * i;
            values[i] = k < experts ? exp1(logits[k] - largest) : 0.0f;
            if (k < experts) p[k] = values[i];
        }
        fold_group_segments(memory, halved_sixteen(values),
                            min(segments - first, (uint)GROUP_SEGMENTS), &fold);
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    return fold_end(&fold);
}

void op_expert_topk(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(expert_topk);
    const uint item = get_local_id(0);
    FOR_GROUP_UNITS(token, op.tokens) {
        const GLOBAL float *logits = op.logits + (ulong)token * op.logits_stride;
        GLOBAL float *p = op.p + (ulong)token * op.p_stride;
        GLOBAL int *ids = op.ids + (ulong)token * op.ids_stride;
        GLOBAL float *weights = op.weights + (ulong)token * op.weights_stride;
        const float largest = group_largest(memory, logits, op.experts);
        const float sum = group_exponentials(memory, logits, largest, op.experts, p);
        if (sum != sum) {
            if (item == 0) route_nowhere(ids, weights, op.used);
            continue;
        }
        for (uint k = item; k < op.experts; k += GROUP_SIZE) p[k] = probability(p[k], sum);
        for (uint place = 0; place < op.used; place++) {
            BEST best = {0.0f, NO_TOKEN, 1};
            for (uint k = item; k < op.experts; k += GROUP_SIZE) {
                const BEST one = {p[k], (int)k, 1};
                best = best_of(best, one);
            }
            best = group_best(memory, best);
            if (best.id % GROUP_SIZE == item) p[best.id] = TAKEN;
            if (item != 0) continue;
            ids[place] = best.id;
            p[op.experts + place] = best.value;
        }
        if (item == 0) renormalize(p + op.experts, weights, op.used);
    }
}

#endif
