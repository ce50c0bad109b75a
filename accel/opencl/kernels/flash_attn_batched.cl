// FLASH_ATTN_BATCHED: causal attention over the paged KV cache (rule R6).
//
// operands: q, kv, page_table, query, y
// sizes:    tokens, heads, kv_heads, head_dim, window
// reals:    scale, soft_cap
// kv is float, half or Q8_0 as dtype says. The work is divided into units of one KV head and a block of
// tokens, which workers take in turn.

#if GROUP_SIZE > 1

// Units are one token and one head.
void op_flash_attn_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                           uint workers) {
    OPEN(flash_attn_batched);
    const uint tokens = op.tokens, heads = op.heads, kv_heads = op.kv_heads;
    const uint head_dim = op.head_dim, window = op.window;
    KV_HEAD head =
        kv_head_of(op.kv, packet->dtype, kv_heads, head_dim, op.scale, op.soft_cap);
    FOR_GROUP_UNITS(unit, tokens * heads) {
        const uint h = unit % heads, token = unit / heads;
        const GLOBAL int *query = op.query + token * op.query_stride;
        const uint end = query[2] + 1, from = window && end > window ? end - window : 0;
        float output[ITEM_COLUMNS], tile_output[ITEM_COLUMNS];
        SOFTMAX so_far = {0.0f, 0.0f};
        head.pages = op.page_table + (ulong)query[1] * op.page_table_stride;
        head.column = h / (heads / kv_heads) * head_dim;
        load_group_query(memory,
                         op.q + (ulong)token * op.q_stride + h * head_dim,
                         head_dim);
        for (uint tile = from / KV_TILE; tile * KV_TILE < end; tile++) {
            const uint start = tile * KV_TILE;
            const SOFTMAX softmax = group_tile(&head, memory, tile, max(from, start) - start,
                                               min(end - start, (uint)KV_TILE), tile_output);
            if (tile == from / KV_TILE) {
                so_far = softmax;
                UNROLL for (int i = 0; i < ITEM_COLUMNS; i++) output[i] = tile_output[i];
            } else {
                merge_group_tile(&so_far, output, softmax, tile_output);
            }
        }
        UNROLL for (int i = 0; i < ITEM_COLUMNS; i++) {
            const uint d = get_local_id(0) + GROUP_SIZE * i;
            if (d < head_dim)
                op.y[(ulong)token * op.y_stride + h * head_dim + d] =
                    divide1(output[i], so_far.total);
        }
    }
}

#else

typedef struct {
    float output[ATTENTION_QUERIES * HEAD_DIM_MAX];  // rows of padded_dim
    float scores[ATTENTION_QUERIES][KV_TILE];
    float tile_output[QUERY_STEP * HEAD_DIM_MAX];
    SOFTMAX softmax[ATTENTION_QUERIES];
    bool started[ATTENTION_QUERIES];
} ATTENTION_STATE;

// One tile for queries [first, first + queries) of the block, whose scores are there.
static void attend_step(const KV_HEAD *head, const QUERY_BLOCK *block, uint tile, uint first,
                        uint queries, ATTENTION_STATE *state) {
    const uint padded = padded_dim(head->head_dim), start = tile * KV_TILE;
    uint begin[QUERY_STEP], end[QUERY_STEP];
    SOFTMAX softmax[QUERY_STEP];
    for (uint i = 0; i < queries; i++) {
        const uint n = first + i;
        begin[i] = max(block->first[n], start) - start;
        end[i] = block->end[n] > start ? min(block->end[n] - start, (uint)KV_TILE) : 0;
        if (begin[i] < end[i]) softmax[i] = tile_weights(state->scores[n], begin[i], end[i]);
    }
    tile_values(head, tile, state->scores + first, begin, end, queries, state->tile_output);
    for (uint i = 0; i < queries; i++) {
        const uint n = first + i;
        float *output = state->output + n * padded, *tile_output = state->tile_output + i * padded;
        if (begin[i] >= end[i]) continue;
        if (state->started[n]) {
            merge_tile(&state->softmax[n], output, softmax[i], tile_output, head->head_dim);
            continue;
        }
        for (uint d = 0; d < padded; d += 16) vstore16(vload16(0, tile_output + d), 0, output + d);
        state->softmax[n] = softmax[i];
        state->started[n] = true;
    }
}

static void attend_block(const KV_HEAD *head, const QUERY_BLOCK *block, ATTENTION_STATE *state) {
    uint from = block->first[0], to = block->end[0];
    for (uint n = 0; n < block->count; n++) {
        from = min(from, block->first[n]);
        to = max(to, block->end[n]);
        state->started[n] = false;
    }
    for (uint tile = from / KV_TILE; tile * KV_TILE < to; tile++) {
        tile_scores(head, block, tile, from, to, state->scores);
        for (uint n = 0; n < block->count; n += QUERY_STEP)
            attend_step(head, block, tile, n, min(block->count - n, (uint)QUERY_STEP), state);
    }
}

void op_flash_attn_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                           uint workers) {
    OPEN(flash_attn_batched);
    const uint tokens = op.tokens, heads = op.heads, kv_heads = op.kv_heads;
    const uint head_dim = op.head_dim, window = op.window;
    const uint group = heads / kv_heads;
    const uint block_heads = min(group, (uint)ATTENTION_QUERIES);
    const uint head_blocks = (group + block_heads - 1) / block_heads;
    const uint block_tokens = max(ATTENTION_QUERIES / block_heads, 1u);
    const uint units = (tokens + block_tokens - 1) / block_tokens * head_blocks * kv_heads;
    KV_HEAD head =
        kv_head_of(op.kv, packet->dtype, kv_heads, head_dim, op.scale, op.soft_cap);
    QUERY_BLOCK block;
    ATTENTION_STATE state;
    for (uint unit = worker; unit < units; unit += workers) {
        const uint kv_head = unit % kv_heads;
        const uint first_head = kv_head * group + unit / kv_heads % head_blocks * block_heads;
        const uint end_head = min(first_head + block_heads, (kv_head + 1) * group);
        uint token = unit / kv_heads / head_blocks * block_tokens;
        const uint end_token = min(token + block_tokens, tokens);
        head.column = kv_head * head_dim;
        while (token < end_token) {
            const uint first_token = token;
            const int slot = op.query[token * op.query_stride + 1];
            head.pages = op.page_table + (ulong)slot * op.page_table_stride;
            block.count = 0;
            for (; token < end_token; token++) {
                const GLOBAL int *query = op.query + token * op.query_stride;
                if (query[1] != slot) break;
                for (uint h = first_head; h < end_head; h++)
                    load_query(&block,
                               op.q + (ulong)token * op.q_stride + h * head_dim,
                               head_dim, query[2], window);
            }
            attend_block(&head, &block, &state);
            for (uint n = 0; n < block.count; n++) {
                uint t = first_token + n / (end_head - first_head);
                uint h = first_head + n % (end_head - first_head);
                store_attention(state.output + n * padded_dim(head_dim), state.softmax[n].total,
                                op.y + (ulong)t * op.y_stride + h * head_dim,
                                head_dim);
            }
        }
    }
}

#endif
