// LOG_PROBABILITIES: log p(v) = (x_v - m) - log(sum of exp(x - m)), m the largest (rule R10).
//
// log_probabilities_part   the largest `top` logits of each part of a row, in order, go to best
//                          [rows, parts, top]; `finite` of a part's first is about all of it.
// log_probabilities_sum    the sum of exp(x - m) over each span of a row goes to spans (R3, R4);
//                          a unit of work is SUM_SPANS of them.
// log_probabilities        merges the parts' lists and the spans. Rows are split among workers.

#define SPAN (SPAN_SEGMENTS * SEGMENT)
#define SUM_SPANS 2

INLINE uint spans_of(uint vocab) {
    return (vocab + SPAN - 1) / SPAN;
}

INLINE bool precedes(BEST a, BEST b) {
    return b.id == NO_TOKEN || a.value > b.value || (a.value == b.value && a.id < b.id);
}

INLINE float log_probability(float x, float largest, float log_sum) {
    return (x - largest) - log_sum;
}

// log of the left fold of a row's spans.
INLINE float log_of_sum(const GLOBAL float *spans, uint count) {
    float total = 0.0f;
    for (uint span = 0; span < count; span++) total = total + spans[span];
    return log1(total);
}

INLINE float log_of_chosen(const GLOBAL float *logits, int id, uint vocab, BEST best,
                           float log_sum) {
    if (!best.finite || id < 0 || id >= (int)vocab) return as_float(QUIET_NAN);
    return log_probability(logits[id], best.value, log_sum);
}

// Puts `one` into a list that is in order, whose last goes.
static void insert(BEST *list, uint top, BEST one) {
    if (!precedes(one, list[top - 1])) return;
    uint rank = top - 1;
    for (; rank > 0 && precedes(one, list[rank - 1]); rank--) list[rank] = list[rank - 1];
    list[rank] = one;
}

static void clear_list(BEST *list, uint top) {
    const BEST nothing = {0.0f, NO_TOKEN, 1};
    for (uint i = 0; i < top; i++) list[i] = nothing;
}

// The list of x[begin, end); returns whether all of it is finite.
static int list_of(const GLOBAL float *x, uint begin, uint end, BEST *list, uint top) {
    int16 magnitude = 0;
    clear_list(list, top);
    for (uint k = begin; k < end; k += 16) {
        const int count = min((int)(end - k), 16);
        const float16 v = load_padded(x + k, count);
        const BEST last = list[top - 1];
        magnitude = max(magnitude, as_int16(v) & 0x7FFFFFFF);
        if (last.id != NO_TOKEN && !any(v > last.value)) continue;
        for (int i = 0; i < count; i++) {
            const BEST one = {x[k + i], (int)k + i, 1};
            insert(list, top, one);
        }
    }
    return !any(magnitude >= (int16)(INFINITY_BITS));
}

void op_log_probabilities_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                               uint workers) {
    OPEN(log_probabilities_part);
    for (uint unit = worker; unit < op.rows * op.parts; unit += workers) {
        const SHARE columns = share(op.vocab, COLUMN_GRANULE, unit % op.parts, op.parts);
        const GLOBAL float *logits = op.logits + (ulong)(unit / op.parts) * op.logits_stride;
        BEST list[MAX_LOG_PROBABILITIES];
        list[0].finite = list_of(logits, columns.begin, columns.end, list, op.top);
        for (uint i = 0; i < op.top; i++) op.best[unit * op.top + i] = list[i];
    }
}

static float sum_of_span(const GLOBAL float *logits, uint first, uint vocab, float largest) {
    const int16 lane = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float sum = 0.0f;
    for (uint begin = first; begin < min(first + SPAN, vocab); begin += SEGMENT) {
        float16 v[16];
        for (int i = 0; i < 16; i++) {
            const uint k = begin + 16 * i;
            const int count = k < vocab ? (int)(vocab - k) : 0;
            const float16 e = exp16(load_padded(logits + min(k, vocab), count) - largest);
            v[i] = select((float16)(0.0f), e, lane < (int16)(count));
        }
        sum = sum + fold_segment(v);
    }
    return sum;
}

void op_log_probabilities_sum(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                              uint workers) {
    OPEN(log_probabilities_sum);
    const uint spans = spans_of(op.vocab), pieces = (spans + SUM_SPANS - 1) / SUM_SPANS;
    const SHARE mine = share(op.rows * pieces, 1, worker, workers);
    for (uint unit = mine.begin; unit < mine.end; unit++) {
        const uint row = unit / pieces, first = unit % pieces * SUM_SPANS;
        const GLOBAL float *logits = op.logits + (ulong)row * op.logits_stride;
        const GLOBAL BEST *lists = op.best + (ulong)row * op.parts * op.top;
        const BEST best = best_of_parts(memory, lists, op.parts, op.top);
        for (uint span = first; span < min(first + SUM_SPANS, spans); span++)
            op.spans[row * op.spans_stride + span] =
                sum_of_span(logits, span * SPAN, op.vocab, best.value);
    }
}

void op_log_probabilities(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(log_probabilities);
    const SHARE mine = share(op.rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        const GLOBAL float *logits = op.logits + (ulong)row * op.logits_stride;
        const GLOBAL BEST *lists = op.best + (ulong)row * op.parts * op.top;
        const BEST best = best_of_parts(memory, lists, op.parts, op.top);
        const float log_sum = log_of_sum(op.spans + row * op.spans_stride, spans_of(op.vocab));
        BEST list[MAX_LOG_PROBABILITIES];
        clear_list(list, op.top);
        for (uint i = 0; i < op.parts * op.top; i++)
            if (lists[i].id != NO_TOKEN) insert(list, op.top, lists[i]);
        op.chosen[row] = log_of_chosen(logits, op.token[row], op.vocab, best, log_sum);
        for (uint i = 0; i < op.top; i++) {
            op.top_ids[row * op.top_ids_stride + i] = best.finite ? list[i].id : NO_TOKEN;
            op.top_logs[row * op.top_logs_stride + i] =
                best.finite ? log_probability(list[i].value, best.value, log_sum)
                            : as_float(QUIET_NAN);
        }
    }
}

