// LOAD_REQUEST_STATE: value[r] = slot_table[slot_ids[r], field].
//
// operands: slot_ids, slot_table, value
// sizes:    rows, field

void op_load_request_state(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                           uint workers) {
    const SHARE mine = share(packet->size[0], 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++)
        OPERAND(int, 2)[row] =
            OPERAND(int, 1)[OPERAND(int, 0)[row] * packet->stride[1] + packet->size[1]];
}
