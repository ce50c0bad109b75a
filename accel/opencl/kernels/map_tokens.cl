// MAP_TOKENS: the token of another vocabulary; -1 where a row has none.

void op_map_tokens(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(map_tokens);
    for (uint row = worker; row < op.rows; row += workers)
        op.mapped[row] = op.token[row] < 0 ? -1 : op.table[op.token[row]];
}
