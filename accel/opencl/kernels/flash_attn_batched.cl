// FLASH_ATTN_BATCHED: causal attention over the paged KV cache (rule R6).
//
// operands: q, kv, page_table, query, y, sinks
// sizes:    tokens, heads, kv_heads, head_dim, window
// reals:    scale, soft_cap
// kv is float, half, Q8_0 or I12 as dtype says. The work is divided into units of one KV head and a
// block of tokens, which workers take in turn.

#if GROUP_SIZE > 1

// The first token of the run of one slot that `token` is in, within its block of tokens.
INLINE uint block_begin(const GLOBAL PACKET *packet, const GLOBAL int *query, uint token,
                        uint block_tokens) {
    const uint stride = packet->stride[3];
    while (token % block_tokens && query[(token - 1) * stride + 1] == query[token * stride + 1])
        token--;
    return token;
}

// Units are one KV head and the tokens of one slot in a block of few, found by their first, or one
// token and some of the heads that read it.
void op_flash_attn_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                           uint workers) {
    __local TILE_MEMORY *tile = (__local TILE_MEMORY *)memory->group;
    const uint tokens = packet->size[0], heads = packet->size[1], kv_heads = packet->size[2];
    const uint head_dim = packet->size[3], group = heads / kv_heads;
    const uint block_heads = min(group, group_queries(head_dim));
    const uint head_blocks = (group + block_heads - 1) / block_heads;
    const uint block_tokens = group_queries(head_dim) / block_heads;
    KV_HEAD head = kv_head_of(packet, OPERAND(uchar, 1));
    GROUP_ROWS rows;
    rows.q_stride = packet->stride[0];
    rows.query_stride = packet->stride[3];
    rows.y_stride = packet->stride[4];
    FOR_GROUP_UNITS(unit, tokens * head_blocks * kv_heads) {
        const uint kv_head = unit % kv_heads, begin = unit / kv_heads / head_blocks;
        const uint first_head = kv_head * group + unit / kv_heads % head_blocks * block_heads;
        const int slot = OPERAND(int, 3)[begin * packet->stride[3] + 1];
        if (begin != block_begin(packet, OPERAND(int, 3), begin, block_tokens)) continue;
        uint end = begin + 1;
        while (end < tokens && end % block_tokens &&
               OPERAND(int, 3)[end * packet->stride[3] + 1] == slot)
            end++;
        head.kv_head = kv_head;
        head.pages = OPERAND(int, 2) + (ulong)slot * packet->stride[2];
        rows.heads = min(block_heads, (kv_head + 1) * group - first_head);
        rows.count = (end - begin) * rows.heads;
        rows.query = OPERAND(int, 3) + begin * packet->stride[3];
        rows.q = OPERAND(float, 0) + (ulong)begin * packet->stride[0] + first_head * head_dim;
        rows.y = OPERAND(float, 4) + (ulong)begin * packet->stride[4] + first_head * head_dim;
        begin_rows(tile, &head, &rows);
        const uint spans = attend_group(tile, &head, &rows, 0, UINT_MAX);
        FOR_ITEM_CHANNELS(d, get_local_id(0), GROUP_SIZE, head_dim)
        for (uint n = 0; n < rows.count; n++) {
            GLOBAL float *y = row_output(&rows, n, head_dim) + d;
            SOFTMAX all = spans ? tile->all[n] : tile->span[n];
            float keep = 1.0f;
            if (packet->operand[5] != ABSENT)
                keep = merge_sink(&all, OPERAND(float, 5)[first_head + n % rows.heads]);
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
