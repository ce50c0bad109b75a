// FLASH_ATTN_BATCHED: causal attention over the paged KV cache (rule R6).
//
// operands: q, kv, page_table, query, y, sinks
// sizes:    tokens, heads, kv_heads, head_dim, window
// reals:    scale, soft_cap
// kv is float, half, Q8_0, I12, I4R or I3R as dtype says. The work is divided into units of one KV head and a
// block of tokens, which workers take in turn.

// Fewest rows that are worth turning keys and values into integers for.
#define MIN_ROWS 32
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
    const uint least = (MIN_ROWS + block_heads - 1) / block_heads;
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

