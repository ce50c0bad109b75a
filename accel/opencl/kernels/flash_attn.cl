// FLASH_ATTN, and FLASH_ATTN_BATCHED of few tokens: parts of the context in parallel, then merged
// in order (R6).
//
// flash_attn_part   operands: q, kv, page_table, query, parts
//                   sizes:    tokens, heads, kv_heads, head_dim, window, max_parts
//                   reals:    scale, soft_cap
//                   parts is float [tokens, heads, slots, 2 + head_dim up to whole sixteens]: U, l
//                   and o of each part of parts_of(). Units of one part and one KV head are taken
//                   in turn.
// flash_attn        operands: parts, query, y, sinks
//                   sizes:    tokens, heads, head_dim, window, max_parts
//                   Tokens are split among workers.

static inline uint part_floats(uint head_dim) {
    return PART_HEADER + (head_dim + 15) / 16 * 16;
}

void op_flash_attn_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(flash_attn_part);
    const uint tokens = op.tokens, heads = op.heads, kv_heads = op.kv_heads;
    const uint head_dim = op.head_dim, slots = op.max_parts;
    const uint group = heads / kv_heads, capacity = block_capacity(head_dim);
    KV_HEAD head = OPENED_KV_HEAD;
    QUERY_BLOCK block;
    uint unit = 0;
    for (uint token = 0; token < tokens; token++) {
        const GLOBAL int *query = op.query + token * op.query_stride;
        const GLOBAL float *q = op.q + token * op.q_stride;
        const PARTS parts = parts_of(first_visible(query[2], head.window), query[2], slots);
        head.pages = op.page_table + (ulong)query[1] * op.page_table_stride;
        for (uint part = 0; part < parts.count; part++) {
            const uint start = (parts.first + part) * parts.tiles;
            for (uint h = 0; h < heads; unit++) {
                const uint kv_head = h / group, first = h;
                h = min(h + capacity, (kv_head + 1) * group);
                if (unit % workers != worker) continue;
                head.kv_head = kv_head;
                clear_block(&block, head_dim);
                for (uint n = first; n < h; n++)
                    add_query(&block, &head, q + n * head_dim, query[2], 0);
                attend_tiles(&head, &block, start, start + parts.tiles);
                for (uint n = 0; n < block.count; n++) {
                    const ulong row = ((ulong)token * heads + first + n) * slots + part;
                    GLOBAL float *target = op.parts + row * part_floats(head_dim);
                    target[0] = block.span[n].top;
                    target[1] = block.span[n].total;
                    for (uint d = 0; d < head_dim; d += 16)
                        STORE16(block.output[n * 2 * block.vectors + d / 16],
                                target + PART_HEADER + d);
                }
            }
        }
    }
}

// Adds one part to what the earlier ones gave.
static void merge_part(SOFTMAX *so_far, float16 *output, SOFTMAX part, const float16 *part_output,
                       uint head_dim) {
    const FACTORS factors = merge_later(so_far, part);
    for (uint i = 0; i < (head_dim + 15) / 16; i++)
        output[i] = output[i] * factors.keep + part_output[i] * factors.add;
}

void op_flash_attn(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(flash_attn);
    const uint tokens = op.tokens, heads = op.heads, head_dim = op.head_dim;
    const uint window = op.window, slots = op.max_parts;
    const uint vectors = (head_dim + 15) / 16;
    const SHARE mine = share(tokens, 1, worker, workers);
    float16 output[HEAD_DIM_MAX / 16], span_output[HEAD_DIM_MAX / 16], one[HEAD_DIM_MAX / 16];
    for (uint unit = mine.begin * heads; unit < mine.end * heads; unit++) {
        const uint token = unit / heads, h = unit % heads;
        const uint position = op.query[token * op.query_stride + 2];
        const PARTS parts = parts_of(first_visible(position, window), position, slots);
        const GLOBAL float *source = op.parts + (ulong)unit * slots * part_floats(head_dim);
        const SOFTMAX none = NO_SOFTMAX;
        SOFTMAX all = none, span = none;
        for (uint i = 0; i < vectors; i++) output[i] = span_output[i] = (float16)(0.0f);
        for (uint part = 0; part < parts.count; part++, source += part_floats(head_dim)) {
            const SOFTMAX softmax = {source[0], source[1]};
            for (uint i = 0; i < vectors; i++) one[i] = vload16(i, source + PART_HEADER);
            merge_part(&span, span_output, softmax, one, head_dim);
            if (part + 1 < parts.count && !ends_span(parts, part)) continue;
            merge_part(&all, output, span, span_output, head_dim);
            span = none;
            for (uint i = 0; i < vectors; i++) span_output[i] = (float16)(0.0f);
        }
        GLOBAL float *y = op.y + token * op.y_stride + h * head_dim;
        const float keep =
            op.sinks ? merge_sink(&all, op.sinks[h]) : 1.0f;
        for (uint d = 0; d < head_dim; d++)
            y[d] = attention_output(((const float *)output)[d] * keep, all.total);
    }
}

