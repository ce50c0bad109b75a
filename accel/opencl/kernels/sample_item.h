// Sampling by one worker a row.

#ifndef SAMPLE_ITEM_H
#define SAMPLE_ITEM_H

static CANDIDATES gather_candidates(MEMORY memory, const GLOBAL float *values, GLOBAL int *ids,
                                    GLOBAL uint *weights, uint vocab, float maximum) {
    CANDIDATES found = {values, ids, weights, 0};
    for (uint first = 0; first < vocab; first += 16) {
        const uint end = min(first + 16, vocab);
        if (end - first == 16 && !any(vload16(0, values + first) - maximum >= WEIGHTLESS)) continue;
        for (uint k = first; k < end; k++) {
            if (!has_weight(values[k], maximum)) continue;
            ids[found.count] = (int)k;
            weights[found.count++] = weight_of(values[k], maximum);
        }
    }
    return found;
}

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
