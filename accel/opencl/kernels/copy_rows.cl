// COPY_ROWS: target[pairs[r, 1]] = source[pairs[r, 0]], bits unchanged; targets are distinct.
// Columns are split among workers.

void op_copy_rows(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(copy_rows);
    const SHARE mine = share(op.width, COLUMN_GRANULE, worker, workers);
    for (uint row = 0; row < op.rows; row++) {
        const GLOBAL int *pair = op.pairs + row * op.pairs_stride;
        const GLOBAL uint *source = op.source + pair[0] * op.source_stride;
        GLOBAL uint *target = op.target + pair[1] * op.target_stride;
        for (uint k = mine.begin; k < mine.end; k++) target[k] = source[k];
    }
}

