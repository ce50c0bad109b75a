// One tile of rule R6 for one query, shared by a work-group.

#ifndef ATTENTION_GROUP_H
#define ATTENTION_GROUP_H

#if GROUP_SIZE > 1

// Columns of the output an item keeps: item + GROUP_SIZE i.
#define ITEM_COLUMNS (HEAD_DIM_MAX / GROUP_SIZE)

typedef struct {
    float q[HEAD_DIM_MAX];
    float scores[KV_TILE];
    float weights[KV_TILE];
    float chunks[KV_TILE * HEAD_DIM_MAX / 16];  // q . k_j, sixteen products each
} TILE_MEMORY;

INLINE float kv_element(const KV_HEAD *head, ulong element) {
    if (head->dtype == F32) return ((const GLOBAL float *)head->kv)[element];
    if (head->dtype == Q8_0) {
        const GLOBAL uchar *block = head->kv + element / Q8_0_ELEMENTS * Q8_0_BYTES;
        return (float)((const GLOBAL char *)block)[2 + element % Q8_0_ELEMENTS] * half_at(block);
    }
    return vload_half(element, (const GLOBAL half *)head->kv);
}

INLINE void load_group_query(MEMORY memory, const GLOBAL float *q, uint head_dim) {
    __local TILE_MEMORY *tile = (__local TILE_MEMORY *)memory->group;
    LOCAL_BARRIER;
    for (uint d = get_local_id(0); d < head_dim; d += GROUP_SIZE) tile->q[d] = q[d];
    LOCAL_BARRIER;
}

// Scores of positions [begin, end) of a tile.
INLINE void group_tile_scores(const KV_HEAD *head, uint number, uint begin, uint end,
                              __local TILE_MEMORY *tile) {
    const uint item = get_local_id(0), chunks = (head->head_dim + 15) / 16;
    for (uint unit = begin * chunks + item; unit < end * chunks; unit += GROUP_SIZE) {
        const uint d = unit % chunks * 16, stop = min(head->head_dim - d, 16u);
        const ulong key = kv_row(head, number * KV_TILE + unit / chunks, 0) + d;
        float sum = 0.0f;
        if (stop == 16) {
            UNROLL for (uint i = 0; i < 16; i++)
                sum = sum + tile->q[d + i] * kv_element(head, key + i);
        } else {
            for (uint i = 0; i < stop; i++)
                sum = sum + tile->q[d + i] * kv_element(head, key + i);
        }
        tile->chunks[unit] = sum;
    }
    LOCAL_BARRIER;
    if (item < KV_TILE) {
        float score = -INFINITY;
        if (item >= begin && item < end) {
            score = 0.0f;
            for (uint i = 0; i < chunks; i++) score = score + tile->chunks[item * chunks + i];
            score = score * head->scale;
            if (head->soft_cap > 0.0f) score = soft_cap1(score, head->soft_cap);
        }
        tile->scores[item] = score;
    }
    LOCAL_BARRIER;
}

// Maximum and weight sum of a tile; weighted values in `output`. Every item gets the first two.
INLINE SOFTMAX group_tile(const KV_HEAD *head, MEMORY memory, uint number, uint begin, uint end,
                          float *output) {
    __local TILE_MEMORY *tile = (__local TILE_MEMORY *)memory->group;
    const uint item = get_local_id(0);
    SOFTMAX softmax;
    group_tile_scores(head, number, begin, end, tile);
    float16 most = larger16(larger16(vload16(0, tile->scores), vload16(1, tile->scores)),
                            larger16(vload16(2, tile->scores), vload16(3, tile->scores)));
    softmax.maximum = largest_of_16(most);
    if (item < KV_TILE) {
        const bool kept = item >= begin && item < end;
        tile->weights[item] = kept ? exp1(tile->scores[item] - softmax.maximum) : 0.0f;
    }
    LOCAL_BARRIER;
    softmax.total = fold16((vload16(0, tile->weights) + vload16(2, tile->weights)) +
                           (vload16(1, tile->weights) + vload16(3, tile->weights)));
    UNROLL for (int i = 0; i < ITEM_COLUMNS; i++) {
        const uint d = item + GROUP_SIZE * i;
        float sum = 0.0f;
        if (d >= head->head_dim) continue;
        for (uint j = begin; j < end;) {
            const uint stop = min(end, (j / PAGE_TOKENS + 1) * PAGE_TOKENS);
            ulong value = kv_row(head, number * KV_TILE + j, 1) + d;
            for (; j < stop; j++, value += head->width)
                sum = sum + tile->weights[j] * kv_element(head, value);
        }
        output[i] = sum;
    }
    return softmax;
}

// merge_tile for an item's columns.
INLINE void merge_group_tile(SOFTMAX *so_far, float *output, SOFTMAX tile,
                             const float *tile_output) {
    const float maximum = larger(so_far->maximum, tile.maximum);
    const float a = exp1(so_far->maximum - maximum), b = exp1(tile.maximum - maximum);
    so_far->total = so_far->total * a + tile.total * b;
    so_far->maximum = maximum;
    UNROLL for (int i = 0; i < ITEM_COLUMNS; i++) output[i] = output[i] * a + tile_output[i] * b;
}

#endif

#endif
