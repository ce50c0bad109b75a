// LOAD_REQUEST_STATE: value[r] = slot_table[slot_ids[r], field].
//
// operands: slot_ids, slot_table, value
// sizes:    rows, field

void op_load_request_state(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                           uint workers) {
    OPEN(load_request_state);
    const SHARE mine = share(op.rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++)
        op.value[row] =
            op.slot_table[op.slot_ids[row] * op.slot_table_stride + op.field];
}
