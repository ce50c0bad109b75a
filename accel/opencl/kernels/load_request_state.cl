// LOAD_REQUEST_STATE: resolved[t] = query[t], its token the slot's last one (0 where that is none)
// if it is LAST_TOKEN, that of recent[slot, position mod recent_tokens] if it is RECENT_TOKEN, to
// which the token is written.
//
// Of several tokens with one index in recent the last one stays: a core writes them in order.

#define LAST_TOKEN -1
#define RECENT_TOKEN -2

// Word i of a QUERY_TOKEN is a lane, the token being the first, the slot the second.
INLINE ulong recent_index(const load_request_state_fields *op, int4 query) {
    return query.y * op->recent_stride + query.z % (int)op->recent_tokens;
}

INLINE int4 resolved_query(const load_request_state_fields *op, uint token) {
    int4 query = vload4(0, op->query + token * op->query_stride);
    if (query.x == LAST_TOKEN)
        query.x = max(op->slot_table[query.y * op->slot_table_stride + SLOT_LAST_TOKEN], 0);
    else if (query.x == RECENT_TOKEN)
        query.x = op->recent[recent_index(op, query)];
    return query;
}

void op_load_request_state(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                           uint workers) {
    OPEN(load_request_state);
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++)
        vstore4(resolved_query(&op, token), 0, op.resolved + token * op.resolved_stride);
    for (uint token = 0; token < op.tokens && worker == 0; token++) {
        const int4 query = resolved_query(&op, token);
        op.recent[recent_index(&op, query)] = query.x;
    }
}

