// ARGMAX: the lowest id among the largest logits of each row, NO_TOKEN if not all are finite.
//
// argmax_part   operands: logits, parts          sizes: rows, vocab, parts
//               parts is BEST [rows, parts]; (row, part) pairs are split among workers.
// argmax        operands: parts, token           sizes: rows, parts
//               rows are split among workers.

#if GROUP_SIZE > 1

void op_argmax_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint rows = packet->size[0], vocab = packet->size[1], parts = packet->size[2];
    FOR_GROUP_UNITS(unit, rows * parts) {
        const SHARE columns = share_of_item(vocab, unit % parts, parts);
        const GLOBAL float *logits = OPERAND(float, 0) + (ulong)(unit / parts) * packet->stride[0];
        const BEST best = group_best(memory, best_in(logits, columns.begin, columns.end));
        if (get_local_id(0) == 0) OPERAND(BEST, 1)[unit] = best;
    }
}

void op_argmax(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint parts = packet->size[1];
    FOR_GROUP_UNITS(row, (uint)packet->size[0]) {
        BEST best = {0.0f, NO_TOKEN, 1};
        for (uint part = get_local_id(0); part < parts; part += GROUP_SIZE)
            best = best_of(best, OPERAND(BEST, 0)[row * parts + part]);
        best = group_best(memory, best);
        if (get_local_id(0) == 0) OPERAND(int, 1)[row] = token_of(best);
    }
}

#else

void op_argmax_part(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint rows = packet->size[0], vocab = packet->size[1], parts = packet->size[2];
    const SHARE mine = share(rows * parts, 1, worker, workers);
    for (uint unit = mine.begin; unit < mine.end; unit++) {
        const SHARE columns = share(vocab, COLUMN_GRANULE, unit % parts, parts);
        const GLOBAL float *logits = OPERAND(float, 0) + (ulong)(unit / parts) * packet->stride[0];
        OPERAND(BEST, 1)[unit] = best_in(logits, columns.begin, columns.end);
    }
}

void op_argmax(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint parts = packet->size[1];
    const SHARE mine = share(packet->size[0], 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        BEST best = {0.0f, NO_TOKEN, 1};
        for (uint part = 0; part < parts; part++)
            best = best_of(best, OPERAND(BEST, 0)[row * parts + part]);
        OPERAND(int, 1)[row] = token_of(best);
    }
}

#endif
