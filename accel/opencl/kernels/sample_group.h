// Sampling by a work-group a row. Every item calls these and gets the same answer.

#ifndef SAMPLE_GROUP_H
#define SAMPLE_GROUP_H

#if GROUP_SIZE > 1

#define BINS 256

// In the group's memory; a 64-bit sum is two words, because local atomics have 32 bits.
typedef struct {
    uint tally[BINS];
    uint low[BINS];
    uint high[BINS];
    ulong sums[GROUP_SIZE];
    int token;
} SAMPLE_MEMORY;

#define SAMPLE_LOCAL ((__local SAMPLE_MEMORY *)memory->group)
#define EACH_OF_MINE(i, count) for (uint i = get_local_id(0); i < (count); i += GROUP_SIZE)

// The sum of `mine` over the items before this one, and over all.
static ulong sum_before(MEMORY memory, ulong mine, ulong *total) {
    __local ulong *sums = SAMPLE_LOCAL->sums;
    const uint item = get_local_id(0);
    ulong before = 0;
    LOCAL_BARRIER;
    sums[item] = mine;
    LOCAL_BARRIER;
    *total = 0;
    for (uint i = 0; i < GROUP_SIZE; i++) {
        if (i == item) before = *total;
        *total += sums[i];
    }
    return before;
}

static CANDIDATES gather_candidates(MEMORY memory, const GLOBAL float *values, GLOBAL int *ids,
                                    GLOBAL uint *weights, uint vocab, float maximum) {
    const SHARE mine = share(vocab, 1, get_local_id(0), GROUP_SIZE);
    uint found = 0;
    for (uint k = mine.begin; k < mine.end; k++) found += has_weight(values[k], maximum);
    ulong total;
    uint place = (uint)sum_before(memory, found, &total);
    for (uint k = mine.begin; k < mine.end; k++) {
        if (!has_weight(values[k], maximum)) continue;
        ids[place] = (int)k;
        weights[place++] = weight_of(values[k], maximum);
    }
    barrier(CLK_GLOBAL_MEM_FENCE | CLK_LOCAL_MEM_FENCE);
    CANDIDATES all = {values, ids, weights, (uint)total};
    return all;
}

// Counts and weights of the candidates whose keys agree with `key` above `shift`, by their next
// eight bits.
static void fill_bins(MEMORY memory, const CANDIDATES *all, uint key, int shift) {
    __local SAMPLE_MEMORY *local_memory = SAMPLE_LOCAL;
    LOCAL_BARRIER;
    EACH_OF_MINE(bin, BINS) {
        local_memory->tally[bin] = local_memory->low[bin] = local_memory->high[bin] = 0;
    }
    LOCAL_BARRIER;
    EACH_OF_MINE(i, all->count) {
        const uint own = key_of(all, i), weight = all->weights[i];
        if (((own ^ key) >> shift) >> 8) continue;
        const uint bin = own >> shift & (BINS - 1);
        atomic_inc(local_memory->tally + bin);
        const uint old = atomic_add(local_memory->low + bin, weight);
        if (old + weight < old) atomic_inc(local_memory->high + bin);
    }
    LOCAL_BARRIER;
}

static inline ulong weight_in_bin(MEMORY memory, int bin) {
    return (ulong)SAMPLE_LOCAL->high[bin] << 32 | SAMPLE_LOCAL->low[bin];
}

// The prefix of `wanted` tokens; wanted is in [1, count].
static PREFIX prefix_of_count(MEMORY memory, const CANDIDATES *all, uint wanted) {
    PREFIX prefix = {0, wanted};
    for (int shift = 24; shift >= 0; shift -= 8) {
        fill_bins(memory, all, prefix.key, shift);
        int bin = BINS - 1;
        for (; SAMPLE_LOCAL->tally[bin] < prefix.ties; bin--)
            prefix.ties -= SAMPLE_LOCAL->tally[bin];
        prefix.key |= (uint)bin << shift;
    }
    return prefix;
}

// How many tokens in order have less than `limit` weight before them.
static uint count_below_weight(MEMORY memory, const CANDIDATES *all, ulong limit) {
    uint key = 0, counted = 0;
    ulong before = 0;
    if (limit == 0) return 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        fill_bins(memory, all, key, shift);
        int bin = BINS - 1;
        for (; before + weight_in_bin(memory, bin) < limit; bin--) {
            if (bin == 0) return all->count;
            before += weight_in_bin(memory, bin);
            counted += SAMPLE_LOCAL->tally[bin];
        }
        if (shift == 0) {
            const ulong tally = SAMPLE_LOCAL->tally[bin];
            const ulong each = weight_in_bin(memory, bin) / tally;
            return counted + (uint)min(tally, (limit - before + each - 1) / each);
        }
        key |= (uint)bin << shift;
    }
    return counted;
}

// Candidates equal to the prefix's last key that come before this item's share of all.
static uint ties_before(MEMORY memory, const CANDIDATES *all, PREFIX prefix, SHARE mine) {
    uint ties = 0;
    for (uint i = mine.begin; i < mine.end; i++) ties += key_of(all, i) == prefix.key;
    ulong total;
    return (uint)sum_before(memory, ties, &total);
}

static ulong prefix_weight(MEMORY memory, const CANDIDATES *all, PREFIX prefix, ulong least,
                           uint *count) {
    const SHARE mine = share(all->count, 1, get_local_id(0), GROUP_SIZE);
    uint ties = ties_before(memory, all, prefix, mine), enough = 0;
    ulong weight = 0, total;
    for (uint i = mine.begin; i < mine.end; i++)
        if (in_prefix(key_of(all, i), prefix, &ties)) {
            weight += all->weights[i];
            enough += ((ulong)all->weights[i] << THRESHOLD_BITS) >= least;
        }
    sum_before(memory, enough, &total);
    *count = (uint)total;
    sum_before(memory, weight, &total);
    return total;
}

// The token at which the cumulative weight of the prefix, by rising id, passes `target`.
static int token_at(MEMORY memory, const CANDIDATES *all, PREFIX prefix, ulong target) {
    const SHARE mine = share(all->count, 1, get_local_id(0), GROUP_SIZE);
    const uint first_ties = ties_before(memory, all, prefix, mine);
    uint ties = first_ties;
    ulong weight = 0, total;
    for (uint i = mine.begin; i < mine.end; i++)
        if (in_prefix(key_of(all, i), prefix, &ties)) weight += all->weights[i];
    ulong cumulative = sum_before(memory, weight, &total);
    if (get_local_id(0) == 0) SAMPLE_LOCAL->token = NO_TOKEN;
    LOCAL_BARRIER;
    if (cumulative <= target && target < cumulative + weight) {
        ties = first_ties;
        for (uint i = mine.begin; cumulative <= target; i++)
            if (in_prefix(key_of(all, i), prefix, &ties)) {
                cumulative += all->weights[i];
                SAMPLE_LOCAL->token = all->ids[i];
            }
    }
    LOCAL_BARRIER;
    const int token = SAMPLE_LOCAL->token;
    LOCAL_BARRIER;
    return token;
}

#endif

#endif
