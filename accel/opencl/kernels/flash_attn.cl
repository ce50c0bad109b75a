// FLASH_ATTN, and FLASH_ATTN_BATCHED of few tokens: tiles in parallel, then merged in order (R6).
//
// flash_attn_part   operands: q, kv, page_table, query, parts
//                   sizes:    tokens, heads, kv_heads, head_dim, window, tiles
//                   reals:    scale, soft_cap
//                   parts is float [tokens, heads, tiles, 2 + head_dim up to whole sixteens]: the
//                   maximum, weight sum and weighted values of each tile the token attends. Units
//                   of one tile, one KV head and at most ATTENTION_QUERIES heads are taken in turn.
// flash_attn        operands: parts, query, y
//                   sizes:    tokens, heads, head_dim, window, tiles
//                   Tokens are split among workers.

#define PART_HEADER 2

static inline uint first_tile(int position, uint window) {
    return window && position + 1 > (int)window ? (position + 1 - window) / KV_TILE : 0;
}

#if GROUP_SIZE > 1

// Units are one tile and one head.
void op_flash_attn_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(flash_attn_part);
    const uint tokens = op.tokens, heads = op.heads, kv_heads = op.kv_heads;
    const uint head_dim = op.head_dim, window = op.window, tiles = op.tiles;
    const uint part = PART_HEADER + padded_dim(head_dim);
    KV_HEAD head =
        kv_head_of(op.kv, packet->dtype, kv_heads, head_dim, op.scale, op.soft_cap);
    FOR_GROUP_UNITS(unit, tokens * tiles * heads) {
        const uint h = unit % heads, tile = unit / heads % tiles, token = unit / heads / tiles;
        const GLOBAL int *query = op.query + token * op.query_stride;
        const int position = query[2];
        if (tile < first_tile(position, window) || tile > position / KV_TILE) continue;
        const uint first = window && position + 1 > (int)window ? position + 1 - window : 0;
        const uint start = tile * KV_TILE;
        float output[ITEM_COLUMNS];
        head.pages = op.page_table + (ulong)query[1] * op.page_table_stride;
        head.column = h / (heads / kv_heads) * head_dim;
        load_group_query(memory,
                         op.q + (ulong)token * op.q_stride + h * head_dim,
                         head_dim);
        const SOFTMAX softmax = group_tile(&head, memory, tile, max(first, start) - start,
                                           min(position + 1 - start, (uint)KV_TILE), output);
        GLOBAL float *place =
            op.parts + (((ulong)token * heads + h) * tiles + tile) * part;
        if (get_local_id(0) == 0) {
            place[0] = softmax.maximum;
            place[1] = softmax.total;
        }
        UNROLL for (int i = 0; i < ITEM_COLUMNS; i++) {
            const uint d = get_local_id(0) + GROUP_SIZE * i;
            if (d < head_dim) place[PART_HEADER + d] = output[i];
        }
    }
}

// Units are one column of one head.
void op_flash_attn(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(flash_attn);
    const uint tokens = op.tokens, heads = op.heads, head_dim = op.head_dim;
    const uint window = op.window, tiles = op.tiles;
    const uint part = PART_HEADER + padded_dim(head_dim);
    FOR_WORKER_UNITS(unit, tokens * heads * head_dim) {
        const uint d = unit % head_dim, h = unit / head_dim % heads;
        const uint token = unit / head_dim / heads;
        const int position = op.query[token * op.query_stride + 2];
        const uint first = first_tile(position, window);
        const GLOBAL float *parts =
            op.parts + (((ulong)token * heads + h) * tiles + first) * part;
        SOFTMAX so_far = {parts[0], parts[1]};
        float output = parts[PART_HEADER + d];
        for (uint tile = first + 1; tile <= position / KV_TILE; tile++) {
            parts += part;
            const float maximum = larger(so_far.maximum, parts[0]);
            const float a = exp1(so_far.maximum - maximum), b = exp1(parts[0] - maximum);
            so_far.total = so_far.total * a + parts[1] * b;
            so_far.maximum = maximum;
            output = output * a + parts[PART_HEADER + d] * b;
        }
        op.y[(ulong)token * op.y_stride + h * head_dim + d] =
            divide1(output, so_far.total);
    }
}

#else

static void attend_tile(const KV_HEAD *head, const QUERY_BLOCK *block, uint tile,
                        GLOBAL float *parts, ulong part_stride) {
    float scores[ATTENTION_QUERIES][KV_TILE];
    float output[HEAD_DIM_MAX];
    const uint start = tile * KV_TILE;
    const uint begin = max(block->first[0], start) - start;
    const uint end = min(block->end[0] - start, (uint)KV_TILE);
    tile_scores(head, block, tile, block->first[0], block->end[0], scores);
    for (uint n = 0; n < block->count; n++, parts += part_stride) {
        const SOFTMAX softmax = tile_weights(scores[n], begin, end);
        tile_values(head, tile, scores + n, &begin, &end, 1, output);
        parts[0] = softmax.maximum;
        parts[1] = softmax.total;
        for (uint d = 0; d < head->head_dim; d += 16)
            vstore16(vload16(0, output + d), 0, parts + PART_HEADER + d);
    }
}

void op_flash_attn_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(flash_attn_part);
    const uint tokens = op.tokens, heads = op.heads, kv_heads = op.kv_heads;
    const uint head_dim = op.head_dim, window = op.window, tiles = op.tiles;
    const uint group = heads / kv_heads, part = PART_HEADER + padded_dim(head_dim);
    KV_HEAD head =
        kv_head_of(op.kv, packet->dtype, kv_heads, head_dim, op.scale, op.soft_cap);
    QUERY_BLOCK block;
    uint unit = 0;
    for (uint token = 0; token < tokens; token++) {
        const GLOBAL int *query = op.query + token * op.query_stride;
        const GLOBAL float *q = op.q + (ulong)token * op.q_stride;
        head.pages = op.page_table + (ulong)query[1] * op.page_table_stride;
        for (uint tile = first_tile(query[2], window); tile <= query[2] / KV_TILE; tile++) {
            for (uint h = 0; h < heads; unit++) {
                const uint kv_head = h / group;
                const uint stop = min(h + ATTENTION_QUERIES, (kv_head + 1) * group);
                if (unit % workers == worker) {
                    const ulong place = (((ulong)token * heads + h) * tiles + tile) * part;
                    head.column = kv_head * head_dim;
                    block.count = 0;
                    for (uint n = h; n < stop; n++)
                        load_query(&block, q + n * head_dim, head_dim, query[2], window);
                    attend_tile(&head, &block, tile, op.parts + place,
                                (ulong)tiles * part);
                }
                h = stop;
            }
        }
    }
}

void op_flash_attn(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(flash_attn);
    const uint tokens = op.tokens, heads = op.heads, head_dim = op.head_dim;
    const uint window = op.window, tiles = op.tiles;
    const uint part = PART_HEADER + padded_dim(head_dim);
    const SHARE mine = share(tokens, 1, worker, workers);
    float output[HEAD_DIM_MAX], tile_output[HEAD_DIM_MAX];
    for (uint token = mine.begin; token < mine.end; token++) {
        const int position = op.query[token * op.query_stride + 2];
        const uint first = first_tile(position, window);
        for (uint h = 0; h < heads; h++) {
            const GLOBAL float *parts =
                op.parts + (((ulong)token * heads + h) * tiles + first) * part;
            SOFTMAX so_far = {parts[0], parts[1]};
            for (uint d = 0; d < head_dim; d += 16)
                vstore16(vload16(0, parts + PART_HEADER + d), 0, output + d);
            for (uint tile = first + 1; tile <= position / KV_TILE; tile++) {
                parts += part;
                const SOFTMAX softmax = {parts[0], parts[1]};
                for (uint d = 0; d < head_dim; d += 16)
                    vstore16(vload16(0, parts + PART_HEADER + d), 0, tile_output + d);
                merge_tile(&so_far, output, softmax, tile_output, head_dim);
            }
            store_attention(output, so_far.total,
                            op.y + (ulong)token * op.y_stride + h * head_dim,
                            head_dim);
        }
    }
}

#endif
