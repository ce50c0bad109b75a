// SELECT_ROWS: y[r] = x[output_rows[r]].
//
// operands: x, output_rows, y
// sizes:    rows, hidden
// Rows are split among workers.

#if GROUP_SIZE > 1

// Units are single elements.
void op_select_rows(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint rows = packet->size[0], hidden = packet->size[1];
    FOR_WORKER_UNITS(unit, rows * hidden) {
        const uint row = unit / hidden, k = unit % hidden;
        const ulong source = OPERAND(int, 1)[row];
        OPERAND(float, 2)[(ulong)row * packet->stride[2] + k] =
            OPERAND(float, 0)[source * packet->stride[0] + k];
    }
}

#else

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

#endif
