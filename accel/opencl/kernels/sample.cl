// SAMPLE: penalties, temperature, top-k, top-p, min-p and the draw, in integers (rule R9).
//
// sample_part   operands: logits, sampling, recent, values, parts
//               sizes:    rows, vocab, parts, recent_tokens
//               parts is BEST [rows, parts] over the columns share(vocab, COLUMN_GRANULE, part,
//               parts) of the penalized logits divided by the temperature, which go to values
//               float [rows, vocab] unless the row is greedy and has no recent token.
// sample        operands: values, sampling, parts, ids, weights, token
//               sizes:    rows, vocab, parts
//               ids int and weights uint, both [rows, vocab], are scratch; values is overwritten.
//               Rows are split among workers.
//
// Tokens are ordered by value descending, then id ascending. Nothing is sorted: a radix selection
// finds where a prefix of that order ends.

#define THRESHOLD_BITS 16
#define WEIGHT_SCALE 16777216.0f
#define WEIGHTLESS -20.0f  // exp(-20) 2^24 rounds to 0, with room to spare

typedef struct {
    float temperature, top_p, min_p, repeat_penalty;
    int top_k;
    uint seed_low, seed_high;
    int position;
    float presence_penalty, frequency_penalty;
    int reserved[6];
} SAMPLING;

static bool has_recent(const GLOBAL int *recent, uint count) {
    for (uint i = 0; i < count; i++)
        if (recent[i] >= 0) return true;
    return false;
}

// Applies the penalties of the distinct recent tokens with ids in [begin, end).
static void penalize(GLOBAL float *values, const GLOBAL SAMPLING *how, const GLOBAL int *recent,
                     uint count, uint begin, uint end) {
    for (uint i = 0; i < count; i++) {
        const int id = recent[i];
        if (id < (int)begin || id >= (int)end) continue;
        int times = 0;
        bool again = false;
        for (uint j = 0; j < count; j++) {
            times += recent[j] == id;
            again |= j < i && recent[j] == id;
        }
        if (again) continue;
        float seen = values[id];
        seen = seen > 0.0f ? divide1(seen, how->repeat_penalty) : seen * how->repeat_penalty;
        seen = seen - (float)times * how->frequency_penalty;
        values[id] = seen - how->presence_penalty;
    }
}

void op_sample_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint rows = packet->size[0], vocab = packet->size[1], parts = packet->size[2];
    const uint recent_tokens = packet->size[3];
#if GROUP_SIZE > 1
    FOR_GROUP_UNITS(unit, rows * parts) {
        const SHARE columns = share_of_item(vocab, unit % parts, parts);
#else
    for (uint unit = worker; unit < rows * parts; unit += workers) {
        const SHARE columns = share(vocab, COLUMN_GRANULE, unit % parts, parts);
#endif
        const uint row = unit / parts;
        const GLOBAL float *logits = OPERAND(float, 0) + (ulong)row * packet->stride[0];
        const GLOBAL SAMPLING *how = OPERAND(SAMPLING, 1) + row;
        const GLOBAL int *recent = OPERAND(int, 2) + (ulong)row * packet->stride[2];
        const bool penalized = has_recent(recent, recent_tokens);
        BEST best = best_in(logits, columns.begin, columns.end);
        const bool random = how->temperature > 0.0f;
        if (penalized || random) {
            GLOBAL float *values = OPERAND(float, 3) + (ulong)row * vocab;
            const int finite = best.finite;
            for (uint k = columns.begin; k < columns.end; k += 16)
                store_partial(load_padded(logits + k, (int)(columns.end - k)), values + k,
                              (int)(columns.end - k));
            penalize(values, how, recent, recent_tokens, columns.begin, columns.end);
            if (random)
                for (uint k = columns.begin; k < columns.end; k += 16) {
                    int count = (int)(columns.end - k);
                    float16 v = load_padded(values + k, count);
                    store_partial(divide16(v, (float16)(how->temperature)), values + k, count);
                }
            best = best_in(values, columns.begin, columns.end);
            best.finite &= finite;
        }
#if GROUP_SIZE > 1
        best = group_best(memory, best);
        if (get_local_id(0) == 0) OPERAND(BEST, 4)[unit] = best;
#else
        OPERAND(BEST, 4)[unit] = best;
#endif
    }
}

// The tokens that can be drawn at all, in order of id.
typedef struct {
    const GLOBAL float *values;
    const GLOBAL int *ids;
    const GLOBAL uint *weights;
    uint count;
} CANDIDATES;

// A prefix of the order: every key above `key`, and the first `ties` equal to it.
typedef struct {
    uint key;
    uint ties;
} PREFIX;

// Larger key, larger value; the zeros are equal.
static inline uint order_key(float value) {
    uint bits = as_uint(value + 0.0f);
    return bits & SIGN_BIT ? ~bits : bits | SIGN_BIT;
}

// Whether candidate i is in the prefix; counts the ties, so ask in order of i.
static inline bool in_prefix(uint key, PREFIX prefix, uint *ties) {
    if (key == prefix.key) return (*ties)++ < prefix.ties;
    return key > prefix.key;
}

static CANDIDATES gather_candidates(GLOBAL float *values, GLOBAL int *ids, GLOBAL uint *weights,
                                    uint vocab, float maximum) {
    CANDIDATES found = {values, ids, weights, 0};
    for (uint first = 0; first < vocab; first += 16) {
        const uint end = min(first + 16, vocab);
        if (end - first == 16 && !any(vload16(0, values + first) - maximum >= WEIGHTLESS)) continue;
        for (uint k = first; k < end; k++) {
            const float below = values[k] - maximum;
            if (!(below >= WEIGHTLESS)) continue;
            values[found.count] = values[k];
            ids[found.count] = (int)k;
            weights[found.count++] = (uint)rint(exp1(below) * WEIGHT_SCALE);
        }
    }
    return found;
}

// The prefix of `wanted` tokens; wanted is in [1, count].
static PREFIX prefix_of_count(const CANDIDATES *all, uint wanted) {
    PREFIX prefix = {0, wanted};
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint tally[256];
        for (int bin = 0; bin < 256; bin++) tally[bin] = 0;
        for (uint i = 0; i < all->count; i++) {
            uint key = order_key(all->values[i]);
            if (((key ^ prefix.key) >> shift) >> 8 == 0) tally[key >> shift & 255]++;
        }
        int bin = 255;
        for (; tally[bin] < prefix.ties; bin--) prefix.ties -= tally[bin];
        prefix.key |= (uint)bin << shift;
    }
    return prefix;
}

// How many tokens in order have less than `limit` weight before them.
static uint count_below_weight(const CANDIDATES *all, ulong limit) {
    uint key_so_far = 0, counted = 0;
    ulong before = 0;
    if (limit == 0) return 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint tally[256];
        ulong weight[256];
        for (int bin = 0; bin < 256; bin++) tally[bin] = weight[bin] = 0;
        for (uint i = 0; i < all->count; i++) {
            uint key = order_key(all->values[i]);
            if (((key ^ key_so_far) >> shift) >> 8) continue;
            tally[key >> shift & 255]++;
            weight[key >> shift & 255] += all->weights[i];
        }
        int bin = 255;
        for (; before + weight[bin] < limit; bin--) {
            if (bin == 0) return all->count;
            before += weight[bin];
            counted += tally[bin];
        }
        if (shift == 0) {
            ulong each = weight[bin] / tally[bin];
            return counted + (uint)min((ulong)tally[bin], (limit - before + each - 1) / each);
        }
        key_so_far |= (uint)bin << shift;
    }
    return counted;
}

static ulong prefix_weight(const CANDIDATES *all, PREFIX prefix, ulong least, uint *count) {
    ulong total = 0;
    uint ties = 0;
    *count = 0;
    for (uint i = 0; i < all->count; i++)
        if (in_prefix(order_key(all->values[i]), prefix, &ties)) {
            total += all->weights[i];
            *count += ((ulong)all->weights[i] << THRESHOLD_BITS) >= least;
        }
    return total;
}

static int draw_token(const CANDIDATES *all, const GLOBAL SAMPLING *how) {
    uint kept = how->top_k > 0 ? min((uint)how->top_k, all->count) : all->count;
    PREFIX prefix = prefix_of_count(all, kept);
    const ulong unit = 1ul << THRESHOLD_BITS;
    const ulong min_p = (ulong)rint(how->min_p * (float)unit) * (ulong)WEIGHT_SCALE;
    uint above_min_p;
    const ulong total = prefix_weight(all, prefix, min_p, &above_min_p);
    if (how->top_p < 1.0f) {
        ulong threshold = (ulong)rint(how->top_p * (float)unit) * total;
        kept = min(kept, count_below_weight(all, (threshold + unit - 1) >> THRESHOLD_BITS));
    }
    if (how->min_p > 0.0f) kept = min(kept, above_min_p);
    prefix = prefix_of_count(all, max(kept, 1u));
    uint ignored, ties = 0;
    const ulong weight = prefix_weight(all, prefix, 0, &ignored);
    const ulong u = philox_draw(how->seed_low, how->seed_high, (uint)how->position);
    const ulong target = u * (weight >> 32) + (u * (weight & 0xFFFFFFFFul) >> 32);
    ulong cumulative = 0;
    for (uint i = 0; i < all->count; i++) {
        if (!in_prefix(order_key(all->values[i]), prefix, &ties)) continue;
        cumulative += all->weights[i];
        if (cumulative > target) return all->ids[i];
    }
    return NO_TOKEN;
}

void op_sample(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint vocab = packet->size[1], parts = packet->size[2];
    const SHARE mine = share(packet->size[0], 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        const GLOBAL SAMPLING *how = OPERAND(SAMPLING, 1) + row;
        BEST best = {0.0f, NO_TOKEN, 1};
        for (uint part = 0; part < parts; part++)
            best = best_of(best, OPERAND(BEST, 2)[row * parts + part]);
        int token = token_of(best);
        if (how->temperature > 0.0f && token != NO_TOKEN) {
            const ulong place = (ulong)row * vocab;
            CANDIDATES all =
                gather_candidates(OPERAND(float, 0) + place, OPERAND(int, 3) + place,
                                  OPERAND(uint, 4) + place, vocab, best.value);
            token = draw_token(&all, how);
        }
        OPERAND(int, 5)[row] = token;
    }
}
