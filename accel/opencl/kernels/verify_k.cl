// VERIFY_K: the event of each row takes the number of drafted tokens behind the row's that are right:
// each is the next token of the query, of the same slot and with the next row, and was sampled before.

static bool next_is_right(verify_k_fields op, uint row) {
    if (row + 1 >= op.rows || op.output_rows[row + 1] != op.output_rows[row] + 1) return false;
    const GLOBAL int *query = op.query + op.output_rows[row] * op.query_stride;
    const GLOBAL int *draft = query + op.query_stride;
    return draft[1] == query[1] && draft[0] == op.token[row];
}

void op_verify_k(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(verify_k);
    for (uint row = worker; row < op.rows; row += workers) {
        if (row + op.ring_events < op.rows) continue;
        uint accepted = 0;
        while (accepted < op.draft_tokens && next_is_right(op, row + accepted)) accepted++;
        const uint number = op.step[STEP_FIRST_EVENT] + row;
        op.ring[number % op.ring_events * EVENT_WORDS + 5] = accepted;
    }
}
