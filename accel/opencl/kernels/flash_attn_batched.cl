// FLASH_ATTN_BATCHED: causal attention over the paged KV cache (rule R6).
//
// operands: q, kv, page_table, query, y, sinks
// sizes:    tokens, heads, kv_heads, head_dim, window
// reals:    scale, soft_cap
// kv is float, half, Q8_0 or I12 as dtype says. The work is divided into units of one KV head and a
// block of tokens, which workers take in turn.

#if GROUP_SIZE > 1

// The first token of the run of one slot that `token` is in, within its block of tokens.
INLINE uint block_begin(const GLOBAL int *query, ulong stride, uint token, uint block_tokens) {
    while (token % block_tokens && query[(token - 1) * stride + 1] == query[token * stride + 1])
        token--;
    return token;
}

// Units are one KV head and the tokens of one slot in a block of few, found by their first, or one
// token and some of the heads that read it.
void op_flash_attn_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                           uint workers) {
    OPEN(flash_attn_batched);
    __local TILE_MEMORY *tile = (__local TILE_MEMORY *)memory->group;
    const uint tokens = op.tokens, heads = op.heads, kv_heads = op.kv_heads;
    const uint head_dim = op.head_dim, group = heads / kv_heads;
    const uint block_heads = min(group, group_queries(head_dim));
    const uint head_blocks = (group + block_heads - 1) / block_heads;
    const uint block_tokens = group_queries(head_dim) / block_heads;
    KV_HEAD head = OPENED_KV_HEAD;
    GROUP_ROWS rows;
    rows.q_stride = op.q_stride;
    rows.query_stride = op.query_stride;
    rows.y_stride = op.y_stride;
    FOR_GROUP_UNITS(unit, tokens * head_blocks * kv_heads) {
        const uint kv_head = unit % kv_heads, begin = unit / kv_heads / head_blocks;
        const uint first_head = kv_head * group + unit / kv_heads % head_blocks * block_heads;
        const int slot = op.query[begin * op.query_stride + 1];
        if (begin != block_begin(op.query, op.query_stride, begin, block_tokens)) continue;
        uint end = begin + 1;
        while (end < tokens && end % block_tokens &&
               op.query[end * op.query_stride + 1] == slot)
            end++;
        head.kv_head = kv_head;
        head.pages = op.page_table + slot * op.page_table_stride;
        rows.heads = min(block_heads, (kv_head + 1) * group - first_head);
        rows.count = (end - begin) * rows.heads;
        rows.query = op.query + begin * op.query_stride;
        rows.q = op.q + begin * op.q_stride + first_head * head_dim;
        rows.y = op.y + begin * op.y_stride + first_head * head_dim;
        begin_rows(tile, &head, &rows);
        const uint spans = attend_group(tile, &head, &rows, 0, UINT_MAX);
        FOR_ITEM_CHANNELS(d, get_local_id(0), GROUP_SIZE, head_dim)
        for (uint n = 0; n < rows.count; n++) {
            GLOBAL float *y = row_output(&rows, n, head_dim) + d;
            SOFTMAX all = spans ? tile->all[n] : tile->span[n];
            float keep = 1.0f;
            if (op.sinks)
                keep = merge_sink(&all, op.sinks[first_head + n % rows.heads]);
            *y = attention_output((spans ? *y : tile->output[n * head_dim + d]) * keep, all.total);
        }
    }
}

#else

// Fewest rows that are worth turning keys and values into integers for.
#define LEAST_ROWS 32
// Blocks for each worker, so that all are busy to the end.
#define WORKER_UNITS 4

void op_flash_attn_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                           uint workers) {
    OPEN(flash_attn_batched);
    const uint tokens = op.tokens, heads = op.heads, kv_heads = op.kv_heads;
    const uint head_dim = op.head_dim, group = heads / kv_heads;
    const uint block_heads = min(group, block_capacity(head_dim));
    const uint head_blocks = (group + block_heads - 1) / block_heads;
    const uint fair = tokens * kv_heads * head_blocks / (WORKER_UNITS * workers);
    const uint least = (LEAST_ROWS + block_heads - 1) / block_heads;
    const uint block_tokens = min(max(fair, least), block_capacity(head_dim) / block_heads);
    const uint units = (tokens + block_tokens - 1) / block_tokens * head_blocks * kv_heads;
    const bool sinks = op.sinks;
    KV_HEAD head = OPENED_KV_HEAD;
    QUERY_BLOCK block;
    // Later blocks see more positions: who got the smaller one of a round gets the larger one next.
    for (uint round = 0; round * workers < units; round++) {
        const uint unit = round * workers + (round % 2 ? workers - 1 - worker : worker);
        if (unit >= units) continue;
        const uint kv_head = unit % kv_heads;
        const uint first_head = kv_head * group + unit / kv_heads % head_blocks * block_heads;
        const uint end_head = min(first_head + block_heads, (kv_head + 1) * group);
        uint token = unit / kv_heads / head_blocks * block_tokens;
        const uint end_token = min(token + block_tokens, tokens);
        head.kv_head = kv_head;
        while (token < end_token) {
            const int slot = op.query[token * op.query_stride + 1];
            head.pages = op.page_table + slot * op.page_table_stride;
            clear_block(&block, head_dim);
            for (; token < end_token; token++) {
                const GLOBAL int *query = op.query + token * op.query_stride;
                const GLOBAL float *q = op.q + token * op.q_stride;
                GLOBAL float *y = op.y + token * op.y_stride;
                if (query[1] != slot) break;
                for (uint h = first_head; h < end_head; h++) {
                    if (sinks) block.sink[block.count] = op.sinks[h];
                    add_query(&block, &head, q + h * head_dim, query[2], y + h * head_dim);
                }
            }
            attend_tiles(&head, &block, 0, UINT_MAX);
            store_attention(&block, head_dim, sinks);
        }
    }
}

#endif
