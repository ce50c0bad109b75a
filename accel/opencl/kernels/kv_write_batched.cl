// KV_WRITE_BATCHED: kv[page_table[slot, position / 16], 0 or 1, position mod 16] = k or v.
//
// operands: k, v, query, page_table, kv
// sizes:    tokens, width (kv_heads * head_dim), page_tokens
// kv is float or half as dtype says. Tokens are split among workers.

#if GROUP_SIZE > 1

// Units are single elements.
void op_kv_write_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint tokens = packet->size[0], width = packet->size[1], page_tokens = packet->size[2];
    FOR_WORKER_UNITS(unit, tokens * 2 * width) {
        const uint token = unit / width / 2, which = unit / width % 2, k = unit % width;
        const GLOBAL int *query = OPERAND(int, 2) + token * packet->stride[2];
        const uint slot = query[1], position = query[2];
        const ulong page = OPERAND(int, 3)[(ulong)slot * packet->stride[3] + position / page_tokens];
        const float value = OPERAND(float, which)[(ulong)token * packet->stride[which] + k];
        const ulong place = ((page * 2 + which) * page_tokens + position % page_tokens) * width + k;
        if (packet->dtype == F32)
            OPERAND(float, 4)[place] = value;
        else
            store_half(value, OPERAND(half, 4) + place);
    }
}

#else

void op_kv_write_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint tokens = packet->size[0], width = packet->size[1], page_tokens = packet->size[2];
    const SHARE mine = share(tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        const GLOBAL int *query = OPERAND(int, 2) + token * packet->stride[2];
        uint slot = query[1], position = query[2];
        ulong page = OPERAND(int, 3)[(ulong)slot * packet->stride[3] + position / page_tokens];
        for (uint which = 0; which < 2; which++) {
            const GLOBAL float *x = OPERAND(float, which) + (ulong)token * packet->stride[which];
            ulong place = ((page * 2 + which) * page_tokens + position % page_tokens) * width;
            if (packet->dtype == F32) {
                GLOBAL float *y = OPERAND(float, 4) + place;
                for (uint k = 0; k < width; k++) y[k] = x[k];
            } else {
                GLOBAL half *y = OPERAND(half, 4) + place;
                for (uint k = 0; k < width; k++) store_half(x[k], y + k);
            }
        }
    }
}

#endif
