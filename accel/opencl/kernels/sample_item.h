// Sampling by one worker a row.

#ifndef SAMPLE_ITEM_H
#define SAMPLE_ITEM_H

#define LISTED_BESIDE 256  // candidates in a full list beside twice as many as top-k keeps

// The prefix of `requested` tokens; wanted is in [1, count].
static PREFIX prefix_of_count(MEMORY memory, const CANDIDATES *all, uint wanted) {
    PREFIX prefix = {0, wanted};
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint tally[256];
        for (int bin = 0; bin < 256; bin++) tally[bin] = 0;
        for (uint i = 0; i < all->count; i++) {
            uint key = key_of(all, i);
            if (((key ^ prefix.key) >> shift) >> 8 == 0) tally[key >> shift & 255]++;
        }
        int bin = 255;
        for (; tally[bin] < prefix.ties; bin--) prefix.ties -= tally[bin];
        prefix.key |= (uint)bin << shift;
    }
    return prefix;
}

// Keeps the first `wanted` of a list of candidates, which are fewer than all; the last one's key.
static uint keep_first(MEMORY memory, CANDIDATES *all, GLOBAL int *ids, uint wanted) {
    const PREFIX prefix = prefix_of_count(memory, all, wanted);
    uint kept = 0, ties = 0;
    for (uint i = 0; i < all->count; i++)
        if (in_prefix(key_of(all, i), prefix, &ties)) ids[kept++] = all->ids[i];
    all->count = kept;
    return prefix.key;
}

// The candidates, of which top-k keeps `wanted` (0: all). A list that is full is cut to those; what
// comes behind them and is not larger than the last one is none of them. So few tokens of a large
// vocabulary are looked at twice, and few are weighed.
static CANDIDATES gather_candidates(MEMORY memory, const GLOBAL float *values, GLOBAL int *ids,
                                    GLOBAL uint *weights, uint vocab, float maximum, uint wanted) {
    CANDIDATES found = {values, ids, weights, 0};
    const uint full = wanted > 0 && wanted < vocab / 4 ? 2 * wanted + LISTED_BESIDE : vocab + 1;
    uint last = 0;
    float least = maximum + WEIGHTLESS - 1.0f;
    for (uint first = 0; first < vocab; first += 16) {
        const uint end = min(first + 16, vocab);
        if (end - first == 16 && !any(vload16(0, values + first) >= least)) continue;
        for (uint k = first; k < end; k++) {
            if (!has_weight(values[k], maximum) || order_key(values[k]) <= last) continue;
            ids[found.count++] = (int)k;
            if (found.count < full) continue;
            last = keep_first(memory, &found, ids, wanted);
            least = as_float(last & SIGN_BIT ? last ^ SIGN_BIT : ~last);
        }
    }
    if (full <= vocab && found.count > wanted) keep_first(memory, &found, ids, wanted);
    for (uint i = 0; i < found.count; i++) weights[i] = weight_of(values[ids[i]], maximum);
    return found;
}

// How many tokens in order have less than `limit` weight before them.
static uint count_below_weight(MEMORY memory, const CANDIDATES *all, ulong limit) {
    uint key_so_far = 0, counted = 0;
    ulong before = 0;
    if (limit == 0) return 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint tally[256];
        ulong weight[256];
        for (int bin = 0; bin < 256; bin++) tally[bin] = weight[bin] = 0;
        for (uint i = 0; i < all->count; i++) {
            uint key = key_of(all, i);
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

static ulong prefix_weight(MEMORY memory, const CANDIDATES *all, PREFIX prefix, ulong least,
                           uint *count) {
    ulong total = 0;
    uint ties = 0;
    *count = 0;
    for (uint i = 0; i < all->count; i++)
        if (in_prefix(key_of(all, i), prefix, &ties)) {
            total += all->weights[i];
            *count += ((ulong)all->weights[i] << THRESHOLD_BITS) >= least;
        }
    return total;
}

// The token at which the cumulative weight of the prefix, by rising id, passes `target`.
static int token_at(MEMORY memory, const CANDIDATES *all, PREFIX prefix, ulong target) {
    ulong cumulative = 0;
    uint ties = 0;
    for (uint i = 0; i < all->count; i++) {
        if (!in_prefix(key_of(all, i), prefix, &ties)) continue;
        cumulative += all->weights[i];
        if (cumulative > target) return all->ids[i];
    }
    return NO_TOKEN;
}

#endif
