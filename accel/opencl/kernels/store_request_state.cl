// STORE_REQUEST_STATE: the slots of the rows take token[r] as last token, at the position after the
// query's. Of several rows of a slot the last one stays.

void op_store_request_state(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                            uint workers) {
    OPEN(store_request_state);
    const SHARE mine = share(op.rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        const GLOBAL int *query = op.query + op.output_rows[row] * op.query_stride;
        GLOBAL int *slot = op.slot_table + query[1] * op.slot_table_stride;
        bool last = true;
        for (uint later = row + 1; later < op.rows && last; later++)
            last = op.query[op.output_rows[later] * op.query_stride + 1] != query[1];
        if (!last) continue;
        slot[SLOT_POSITION] = query[2] + 1;
        slot[SLOT_LAST_TOKEN] = op.token[row];
    }
}
