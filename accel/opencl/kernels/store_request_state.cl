// STORE_REQUEST_STATE: slot_table[slot_ids[r], field] = value[r]; slot_ids are distinct.
//
// operands: slot_ids, value, slot_table
// sizes:    rows, field

void op_store_request_state(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                            uint workers) {
    const SHARE mine = share(packet->size[0], 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++)
        OPERAND(int, 2)[OPERAND(int, 0)[row] * packet->stride[2] + packet->size[1]] =
            OPERAND(int, 1)[row];
}
