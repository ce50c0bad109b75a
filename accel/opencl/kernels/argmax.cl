// ARGMAX: the lowest id among the largest logits of each row, NO_TOKEN if not all are finite.
//
// argmax_part   operands: logits, parts          sizes: rows, vocab, parts
//               parts is BEST [rows, parts]; (row, part) pairs are split among workers.
// argmax        operands: parts, token           sizes: rows, parts
//               rows are split among workers.

#if GROUP_SIZE > 1

void op_argmax_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(argmax_part);
    FOR_GROUP_UNITS(unit, op.rows * op.parts) {
        const SHARE columns = share_of_item(op.vocab, unit % op.parts, op.parts);
        const GLOBAL float *logits = op.logits + (ulong)(unit / op.parts) * op.logits_stride;
        const BEST best = group_best(memory, best_in(logits, columns.begin, columns.end));
        if (get_local_id(0) == 0) op.best[unit] = best;
    }
}

void op_argmax(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(argmax);
    FOR_GROUP_UNITS(row, op.rows) {
        BEST best = {0.0f, NO_TOKEN, 1};
        for (uint part = get_local_id(0); part < op.parts; part += GROUP_SIZE)
            best = best_of(best, op.best[row * op.parts + part]);
        best = group_best(memory, best);
        if (get_local_id(0) == 0) op.token[row] = token_of(best);
    }
}

#else

void op_argmax_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(argmax_part);
    const SHARE mine = share(op.rows * op.parts, 1, worker, workers);
    for (uint unit = mine.begin; unit < mine.end; unit++) {
        const SHARE columns = share(op.vocab, COLUMN_GRANULE, unit % op.parts, op.parts);
        const GLOBAL float *logits = op.logits + (ulong)(unit / op.parts) * op.logits_stride;
        op.best[unit] = best_in(logits, columns.begin, columns.end);
    }
}

void op_argmax(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(argmax);
    const SHARE mine = share(op.rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        BEST best = {0.0f, NO_TOKEN, 1};
        for (uint part = 0; part < op.parts; part++)
            best = best_of(best, op.best[row * op.parts + part]);
        op.token[row] = token_of(best);
    }
}

#endif
