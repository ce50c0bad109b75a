// SELECT_ROWS: y[r] = x[output_rows[r]].
//
// operands: x, output_rows, y
// sizes:    rows, hidden
// Rows are split among workers.

void op_select_rows(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(select_rows);
    const SHARE mine = share(op.rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        int source = op.output_rows[row];
        const GLOBAL float *x = op.x + (ulong)source * op.x_stride;
        GLOBAL float *y = op.y + (ulong)row * op.y_stride;
        for (uint k = 0; k < op.hidden; k++) y[k] = x[k];
    }
}

