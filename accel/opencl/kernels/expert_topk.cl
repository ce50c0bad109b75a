// p = softmax of a row of logits; the weights of the `used` largest p (rules R4, R7).
//
// operands: logits, p, ids, weights
// sizes:    tokens, experts, used, renormalize
// p is scratch [tokens, experts + used]: where an expert was chosen it holds TAKEN, and behind the
// experts what was chosen; results are written once, for all workers may do it at once. A row
// whose largest logit is not finite gets ids 0, 1, ... and NaN weights. Tokens are split among
// workers.

#define TAKEN -1.0f
#define SMALLEST_SUM 6.103515625e-05f  // 2^-14
#define SMALLEST_NORMAL_BITS 0x00800000u
#define CHOSEN (-INFINITY)
#define LOWEST as_float(0xFF7FFFFFu)
#define MAX_GROUPS 64
#define RENORMALIZE_BIT 1u
#define SOFTMAX_BIT 2u

INLINE float probability(float exponential, float sum) {
    const float p = divide1(exponential, sum);
    return p < as_float(SMALLEST_NORMAL_BITS) ? 0.0f : p;
}

// Chosen probabilities, in order, become weights: over their sum, or over 1.
INLINE void weigh(const GLOBAL float *chosen, GLOBAL float *weights, uint used, bool renormalize) {
    float total = 0.0f;
    for (uint rank = 0; rank < used; rank++) total = total + chosen[rank];
    total = renormalize ? larger(total, SMALLEST_SUM) : 1.0f;
    for (uint rank = 0; rank < used; rank++) weights[rank] = divide1(chosen[rank], total);
}

INLINE void route_nowhere(GLOBAL int *ids, GLOBAL float *weights, uint used) {
    for (uint rank = 0; rank < used; rank++) {
        ids[rank] = rank;
        weights[rank] = as_float(QUIET_NAN);
    }
}

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

// exp(logits - their largest), in p; their sum.
static float exponentials(const GLOBAL float *logits, GLOBAL float *p, uint experts) {
    const float largest = largest_of_row(logits, experts);
    for (uint k = 0; k < experts; k += 16) {
        const int count = (int)(experts - k);
        store_partial(exp16(load_padded(logits + k, count) - largest), p + k, count);
    }
    return sum_of_row(p, experts);
}

void op_expert_topk(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(expert_topk);
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        const GLOBAL float *logits = op.logits + (ulong)token * op.logits_stride;
        GLOBAL float *p = op.p + (ulong)token * op.p_stride;
        GLOBAL int *ids = op.ids + (ulong)token * op.ids_stride;
        GLOBAL float *weights = op.weights + (ulong)token * op.weights_stride;
        const float sum = exponentials(logits, p, op.experts);
        if (sum != sum) {
            route_nowhere(ids, weights, op.used);
            continue;
        }
        for (uint k = 0; k < op.experts; k++) p[k] = probability(p[k], sum);
        for (uint rank = 0; rank < op.used; rank++) {
            const BEST best = best_in(p, 0, op.experts);
            ids[rank] = best.id;
            p[best.id] = TAKEN;
            p[op.experts + rank] = best.value;
        }
        weigh(p + op.experts, weights, op.used, op.renormalize);
    }
}

// EXPERT_CHOICE: p = sigmoid of a row of logits, or its softmax; the `used` largest p + bias, weighted
// by p (rules R2, R4, R7).
//
// operands: logits, bias, s, ids, weights
// sizes:    tokens, experts, used, weighting, groups, groups_used
// s is scratch [tokens, experts + used]: p + bias of each expert, CHOSEN where it was chosen, and behind
// the experts p of what was chosen. Of several groups of experts those are chosen from whose two largest
// p + bias have the largest sums; the experts of the others have LOWEST. A row with a p + bias that is not finite gets ids 0, 1, ... and NaN
// weights. Tokens are split among workers.

INLINE float flushed(float x) {
    return (as_uint(x) & ~SIGN_BIT) < SMALLEST_NORMAL_BITS ? 0.0f : x;
}

// The groups_used best of several groups keep their scores.
static void keep_best_groups(GLOBAL float *s, uint experts, uint groups, uint groups_used) {
    const uint size = experts / groups;
    float sum[MAX_GROUPS];
    bool whole = true;
    for (uint k = 0; k < experts; k++) whole = whole && is_finite(s[k]);
    if (!whole) return;
    for (uint group = 0; group < groups; group++) {
        float first = CHOSEN, second = CHOSEN;
        for (uint k = group * size; k < (group + 1) * size; k++) {
            second = larger(second, s[k] < first ? s[k] : first);
            first = larger(first, s[k]);
        }
        sum[group] = flushed(first + second);
    }
    for (uint group = 0; group < groups; group++) {
        uint better = 0;
        for (uint other = 0; other < groups; other++)
            better += sum[other] > sum[group] || (sum[other] == sum[group] && other < group);
        if (better < groups_used) continue;
        for (uint k = group * size; k < (group + 1) * size; k++) s[k] = LOWEST;
    }
}

void op_expert_choice(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(expert_choice);
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        const GLOBAL float *logits = op.logits + (ulong)token * op.logits_stride;
        GLOBAL float *s = op.s + (ulong)token * op.s_stride;
        GLOBAL int *ids = op.ids + (ulong)token * op.ids_stride;
        GLOBAL float *weights = op.weights + (ulong)token * op.weights_stride;
        const bool softmax = op.weighting & SOFTMAX_BIT;
        const float sum = softmax ? exponentials(logits, s, op.experts) : 0.0f;
        const float maximum = softmax ? largest_of_row(logits, op.experts) : 0.0f;
        for (uint k = 0; k < op.experts; k++) {
            const float p = softmax ? probability(s[k], sum) : sigmoid1(logits[k]);
            s[k] = flushed(p + flushed(op.bias[k]));
        }
        if (op.groups > 1) keep_best_groups(s, op.experts, op.groups, op.groups_used);
        bool whole = true;
        for (uint rank = 0; rank < op.used && whole; rank++) {
            const BEST best = best_in(s, 0, op.experts);
            whole = rank > 0 || best.finite != 0;
            if (!whole) break;
            ids[rank] = best.id;
            s[best.id] = CHOSEN;
            const float logit = logits[best.id];
            const float p = softmax ? probability(exp1(logit - maximum), sum) : sigmoid1(logit);
            s[op.experts + rank] = p;
        }
        if (whole) weigh(s + op.experts, weights, op.used, op.weighting & RENORMALIZE_BIT);
        else route_nowhere(ids, weights, op.used);
    }
}
