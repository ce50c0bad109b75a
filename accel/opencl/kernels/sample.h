// What is sampled from: the record of a row, the candidates, and the order they stand in.
//
// Tokens are ordered by value descending, then id ascending. Nothing is sorted: a radix selection
// finds where a prefix of that order ends.

#ifndef SAMPLE_H
#define SAMPLE_H

#define THRESHOLD_BITS 16
#define WEIGHT_SCALE 16777216.0f
#define WEIGHTLESS -20.0f  // exp(-20) 2^24 rounds to 0, with room to spare

typedef struct {
    float temperature, top_p, min_p, repeat_penalty;
    int top_k;
    uint seed_low, seed_high;
    int position;
    float presence_penalty, frequency_penalty;
    int repeat_last_n;
    int slot;
    int mask, bias_first, bias_count;
    int reserved;
} SAMPLING;

// The tokens before the sampled position that the penalties look at: `count` of a ring of `size`,
// from index `first` on.
typedef struct {
    const GLOBAL int *tokens;
    uint size, first, count;
} RECENT;

static inline RECENT recent_of(const GLOBAL SAMPLING *how, const GLOBAL int *recent, ulong stride,
                               uint size) {
    const int first = max(0, how->position - how->repeat_last_n);
    RECENT r = {recent + how->slot * stride, size, first, max(0, how->position - first)};
    return r;
}

static inline int recent_token(const RECENT *recent, uint i) {
    return recent->tokens[(recent->first + i) % recent->size];
}

typedef struct {
    int token;
    float bias;
} LOGIT_BIAS;

// The bits of the row's mask; 0 where every token is allowed.
static inline const GLOBAL uint *mask_of(const GLOBAL SAMPLING *how, const GLOBAL uint *allowed,
                                         ulong stride) {
    return allowed && how->mask > 0 ? allowed + (ulong)(how->mask - 1) * stride : 0;
}

// Whether tokens k to k + 15 are allowed, -1 or 0; of the last `count` of a mask, anything behind.
static inline int16 allowed_from(const GLOBAL uint *mask, uint k, int count) {
    const int16 lane = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const uint word = k / 32, shift = k % 32, last = (k + (uint)min(count, 16) - 1) / 32;
    uint bits = mask[word] >> shift;
    if (last > word) bits |= mask[last] << (32 - shift);
    return -(((int16)((int)(bits & 0xFFFFu)) >> lane) & 1);
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

// The best of a row, from the first of each part's `stride` records.
static BEST best_of_parts(MEMORY memory, const GLOBAL BEST *parts, uint count, uint stride) {
    BEST best = {0.0f, NO_TOKEN, 1};
    for (uint part = 0; part < count; part++) best = best_of(best, parts[part * stride]);
    return best;
}

static inline bool has_weight(float value, float maximum) {
    return value - maximum >= WEIGHTLESS;
}

static inline uint weight_of(float value, float maximum) {
    return (uint)rint(exp1(value - maximum) * WEIGHT_SCALE);
}

// Larger key, larger value; the zeros are equal.
static inline uint order_key(float value) {
    uint bits = as_uint(value + 0.0f);
    return bits & SIGN_BIT ? ~bits : bits | SIGN_BIT;
}

static inline uint key_of(const CANDIDATES *all, uint i) {
    return order_key(all->values[all->ids[i]]);
}

// Whether a candidate with `key` is in the prefix; counts the ties, so ask in order of id.
static inline bool in_prefix(uint key, PREFIX prefix, uint *ties) {
    if (key == prefix.key) return (*ties)++ < prefix.ties;
    return key > prefix.key;
}

#endif
