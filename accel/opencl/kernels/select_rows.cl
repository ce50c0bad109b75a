// SELECT_ROWS: y[r] = x[output_rows[r]].
//
// operands: x, output_rows, y
// sizes:    rows, hidden
// Rows are split among workers.

void op_select_rows(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint rows = packet->size[0], hidden = packet->size[1];
    const SHARE mine = share(rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        int source = OPERAND(int, 1)[row];
        const GLOBAL float *x = OPERAND(float, 0) + (ulong)source * packet->stride[0];
        GLOBAL float *y = OPERAND(float, 2) + (ulong)row * packet->stride[2];
        for (uint k = 0; k < hidden; k++) y[k] = x[k];
    }
}
