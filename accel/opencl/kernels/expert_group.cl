// Which pairs of a token and an expert share an expert: a counting sort.
//
// operands: ids int [tokens, used], starts int [experts], chunks CHUNK [most + 1],
//           order int [2, tokens * used]
// sizes:    tokens, used, experts
// order holds the pairs (token * used + rank) by rising expert, those of an expert by rising pair,
// then the token of each; chunks are the stretches of it that matmul takes at a time, the first of
// them says how many follow. starts is scratch. One worker does it all.

INLINE int routed_expert(const expert_group_fields *op, uint pair) {
    return op->ids[pair / op->used * (ulong)op->ids_stride + pair % op->used];
}

INLINE void put_pair(const expert_group_fields *op, uint pair, uint index) {
    const uint pairs = op->tokens * op->used;
    op->order[index] = pair;
    op->order[pairs + index] = pair / op->used;
}

// Turns the number of each expert's pairs into its first index in order, and cuts the chunks.
static void cut_chunks(const expert_group_fields *op) {
    GLOBAL int *starts = op->starts;
    GLOBAL CHUNK *chunks = op->chunks;
    int first = 0, number = 0;
    for (uint expert = 0; expert < op->experts; expert++) {
        int left = starts[expert];
        starts[expert] = first;
        while (left > 0) {
            const CHUNK chunk = {(int)expert, first, min(left, CHUNK_TOKENS)};
            chunks[++number] = chunk;
            first += chunk.count;
            left -= chunk.count;
        }
    }
    chunks[0].count = number;
}

void op_expert_group(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(expert_group);
    if (worker != 0) return;
    const uint pairs = op.tokens * op.used;
    GLOBAL int *starts = op.starts;
    for (uint expert = 0; expert < op.experts; expert++) starts[expert] = 0;
    for (uint pair = 0; pair < pairs; pair++) starts[routed_expert(&op, pair)]++;
    cut_chunks(&op);
    for (uint pair = 0; pair < pairs; pair++)
        put_pair(&op, pair, starts[routed_expert(&op, pair)]++);
}

