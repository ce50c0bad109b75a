// FLASH_ATTN_BATCHED: causal attention over the paged KV cache (rule R6).
//
// operands: q, kv, page_table, query, y, sinks
// sizes:    tokens, heads, kv_heads, head_dim, window
// reals:    scale, soft_cap
// kv is float, half, Q8_0 or I12 as dtype says. The work is divided into units of one KV head and a
// block of tokens, which workers take in turn.

#if GROUP_SIZE == 1

// Fewest rows that are worth turning keys and values into integers for.
#define LEAST_ROWS 32
// Blocks for each worker, so that all are busy to the end.
#define WORKER_UNITS 4

void op_flash_attn_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                           uint workers) {
    const uint tokens = packet->size[0], heads = packet->size[1], kv_heads = packet->size[2];
    const uint head_dim = packet->size[3], group = heads / kv_heads;
    const uint block_heads = min(group, block_capacity(head_dim));
    const uint head_blocks = (group + block_heads - 1) / block_heads;
    const uint fair = tokens * kv_heads * head_blocks / (WORKER_UNITS * workers);
    const uint least = (LEAST_ROWS + block_heads - 1) / block_heads;
    const uint block_tokens = min(max(fair, least), block_capacity(head_dim) / block_heads);
    const uint units = (tokens + block_tokens - 1) / block_tokens * head_blocks * kv_heads;
    const bool sinks = packet->operand[5] != ABSENT;
    KV_HEAD head = kv_head_of(packet, OPERAND(uchar, 1));
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
            const int slot = OPERAND(int, 3)[token * packet->stride[3] + 1];
            head.pages = OPERAND(int, 2) + (ulong)slot * packet->stride[2];
            clear_block(&block, head_dim);
            for (; token < end_token; token++) {
                const GLOBAL int *query = OPERAND(int, 3) + token * packet->stride[3];
                const GLOBAL float *q = OPERAND(float, 0) + (ulong)token * packet->stride[0];
                GLOBAL float *y = OPERAND(float, 4) + (ulong)token * packet->stride[4];
                if (query[1] != slot) break;
                for (uint h = first_head; h < end_head; h++) {
                    if (sinks) block.sink[block.count] = OPERAND(float, 5)[h];
                    add_query(&block, &head, q + h * head_dim, query[2], y + h * head_dim);
                }
            }
            attend_tiles(&head, &block, 0, UINT_MAX);
            store_attention(&block, head_dim, sinks);
        }
    }
}

#endif
