// STORE_REQUEST_STATE: slot_table[slot_ids[r], field] = value[r]; slot_ids are distinct.
//
// operands: slot_ids, value, slot_table
// sizes:    rows, field

void op_store_request_state(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                            uint workers) {
    OPEN(store_request_state);
    const SHARE mine = share(op.rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++)
        op.slot_table[op.slot_ids[row] * op.slot_table_stride + op.field] = op.value[row];
}
