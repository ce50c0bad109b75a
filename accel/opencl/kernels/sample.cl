// SAMPLE: mask, bias, penalties, temperature, top-k, top-p, min-p and the draw, in integers (rule R9).
//
// sample_part   best [rows, parts] over the columns share(vocab, COLUMN_GRANULE, part, parts) of
//               what the row makes of its logits, which goes to values [rows, vocab] unless it
//               leaves them as they are. `finite` is about the logits; values may be -infinity.
// sample        ids and weights [rows, vocab] are scratch. Rows are split among workers.

// Applies the penalties of the distinct recent tokens with ids in [begin, end).
static void penalize(GLOBAL float *values, const GLOBAL SAMPLING *how, const RECENT *recent,
                     uint begin, uint end) {
    for (uint i = 0; i < recent->count; i++) {
        const int id = recent_token(recent, i);
        if (id < (int)begin || id >= (int)end) continue;
        int times = 0;
        bool again = false;
        for (uint j = 0; j < recent->count; j++) {
            const bool same = recent_token(recent, j) == id;
            times += same;
            again |= j < i && same;
        }
        if (again) continue;
        float seen = values[id];
        seen = seen > 0.0f ? divide1(seen, how->repeat_penalty) : seen * how->repeat_penalty;
        seen = seen - (float)times * how->frequency_penalty;
        values[id] = seen - how->presence_penalty;
    }
}

static void add_biases(GLOBAL float *values, const GLOBAL SAMPLING *how,
                       const GLOBAL LOGIT_BIAS *bias, uint begin, uint end) {
    for (int i = how->bias_first; i < how->bias_first + how->bias_count; i++) {
        const int id = bias[i].token;
        if (id >= (int)begin && id < (int)end) values[id] = values[id] + bias[i].bias;
    }
}

// Divides by the temperature and puts -infinity where the mask forbids. False if a NaN came out.
static bool divide_and_forbid(GLOBAL float *values, float temperature, const GLOBAL uint *mask,
                              uint begin, uint end) {
    int16 broken = 0;
    for (uint k = begin; k < end; k += 16) {
        const int count = (int)(end - k);
        float16 v = load_padded(values + k, count);
        if (temperature > 0.0f) v = divide16(v, (float16)(temperature));
        if (mask) v = select((float16)(-INFINITY), v, allowed_from(mask, k, count));
        broken |= v != v;
        store_partial(v, values + k, count);
    }
    return !any(broken);
}

void op_sample_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(sample_part);
    for (uint unit = worker; unit < op.rows * op.parts; unit += workers) {
        const SHARE columns = share(op.vocab, COLUMN_GRANULE, unit % op.parts, op.parts);
        const uint row = unit / op.parts;
        const GLOBAL float *logits = op.logits + (ulong)row * op.logits_stride;
        const GLOBAL SAMPLING *how = op.sampling + row;
        const RECENT recent = recent_of(how, op.recent, op.recent_stride, op.recent_tokens);
        const bool penalized = recent.count > 0;
        const GLOBAL uint *mask = mask_of(how, op.allowed, op.allowed_stride);
        const bool biased = op.bias && how->bias_count > 0;
        BEST best = best_in(logits, columns.begin, columns.end);
        if (penalized || biased || mask || how->temperature > 0.0f) {
            GLOBAL float *values = op.values + (ulong)row * op.vocab;
            int finite = best.finite;
            for (uint k = columns.begin; k < columns.end; k += 16)
                store_partial(load_padded(logits + k, (int)(columns.end - k)), values + k,
                              (int)(columns.end - k));
            if (biased) add_biases(values, how, op.bias, columns.begin, columns.end);
            penalize(values, how, &recent, columns.begin, columns.end);
            finite &= divide_and_forbid(values, how->temperature, mask, columns.begin, columns.end);
            best = best_in(values, columns.begin, columns.end);
            best.finite = finite;
        }
        op.best[unit] = best;
    }
}

static int draw_token(MEMORY memory, const CANDIDATES *all, const GLOBAL SAMPLING *how) {
    uint kept = how->top_k > 0 ? min((uint)how->top_k, all->count) : all->count;
    PREFIX prefix = prefix_of_count(memory, all, kept);
    const ulong unit = (ulong)1 << THRESHOLD_BITS;
    const ulong min_p = (ulong)rint(how->min_p * (float)unit) * (ulong)WEIGHT_SCALE;
    uint above_min_p;
    const ulong total = prefix_weight(memory, all, prefix, min_p, &above_min_p);
    if (how->top_p < 1.0f) {
        ulong threshold = (ulong)rint(how->top_p * (float)unit) * total;
        const ulong limit = (threshold + unit - 1) >> THRESHOLD_BITS;
        kept = min(kept, count_below_weight(memory, all, limit));
    }
    if (how->min_p > 0.0f) kept = min(kept, above_min_p);
    prefix = prefix_of_count(memory, all, max(kept, 1u));
    uint ignored;
    const ulong weight = prefix_weight(memory, all, prefix, 0, &ignored);
    const ulong u = philox_draw(how->seed_low, how->seed_high, (uint)how->position);
    const ulong target = u * (weight >> 32) + (u * (weight & 0xFFFFFFFFul) >> 32);
    return token_at(memory, all, prefix, target);
}

void op_sample(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(sample);
    const SHARE mine = share(op.rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        const GLOBAL SAMPLING *how = op.sampling + row;
        const BEST best = best_of_parts(memory, op.best + row * op.parts, op.parts, 1);
        int token = is_finite(best.value) ? token_of(best) : NO_TOKEN;
        if (how->temperature > 0.0f && token != NO_TOKEN) {
            const ulong index = (ulong)row * op.vocab;
            const CANDIDATES all =
                gather_candidates(memory, op.values + index, op.ids + index,
                                  op.weights + index, op.vocab, best.value,
                                  (uint)max(how->top_k, 0));
            token = draw_token(memory, &all, how);
        }
        op.token[row] = token;
    }
}
