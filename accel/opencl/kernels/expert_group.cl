// Which pairs of a token and an expert share an expert: a counting sort.
//
// operands: ids int [tokens, used], starts int [experts], chunks CHUNK [most + 1],
//           order int [2, tokens * used]
// sizes:    tokens, used, experts
// order holds the pairs (token * used + place) by rising expert, those of an expert by rising pair,
// then the token of each; chunks are the stretches of it that matmul takes at a time, the first of
// them says how many follow. starts is scratch. One worker, or one work-group, does it all.

INLINE int routed_expert(MEMORY memory, const GLOBAL PACKET *packet, uint pair) {
    const uint used = packet->size[1];
    return OPERAND(int, 0)[pair / used * (ulong)packet->stride[0] + pair % used];
}

INLINE void place_pair(MEMORY memory, const GLOBAL PACKET *packet, uint pair, uint place) {
    const uint used = packet->size[1], pairs = packet->size[0] * used;
    OPERAND(int, 3)[place] = pair;
    OPERAND(int, 3)[pairs + place] = pair / used;
}

// Turns the number of each expert's pairs into its first place, and cuts the chunks.
static void cut_chunks(MEMORY memory, const GLOBAL PACKET *packet) {
    GLOBAL int *starts = OPERAND(int, 1);
    GLOBAL CHUNK *chunks = OPERAND(CHUNK, 2);
    int first = 0, number = 0;
    for (int expert = 0; expert < packet->size[2]; expert++) {
        int left = starts[expert];
        starts[expert] = first;
        while (left > 0) {
            const CHUNK chunk = {expert, first, min(left, CHUNK_TOKENS)};
            chunks[++number] = chunk;
            first += chunk.count;
            left -= chunk.count;
        }
    }
    chunks[0].count = number;
}

#if GROUP_SIZE == 1

void op_expert_group(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    if (worker != 0) return;
    const uint pairs = packet->size[0] * packet->size[1], experts = packet->size[2];
    GLOBAL int *starts = OPERAND(int, 1);
    for (uint expert = 0; expert < experts; expert++) starts[expert] = 0;
    for (uint pair = 0; pair < pairs; pair++) starts[routed_expert(memory, packet, pair)]++;
    cut_chunks(memory, packet);
    for (uint pair = 0; pair < pairs; pair++)
        place_pair(memory, packet, pair, starts[routed_expert(memory, packet, pair)]++);
}

#else

// An item looks for the pairs of its own experts, so that their order is that of the rule.
void op_expert_group(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    if (get_group_id(0) != 0) return;
    const uint pairs = packet->size[0] * packet->size[1], experts = packet->size[2];
    GLOBAL int *starts = OPERAND(int, 1);
    for (uint expert = get_local_id(0); expert < experts; expert += GROUP_SIZE) {
        int count = 0;
        for (uint pair = 0; pair < pairs; pair++)
            count += routed_expert(memory, packet, pair) == (int)expert;
        starts[expert] = count;
    }
    barrier(CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) == 0) cut_chunks(memory, packet);
    barrier(CLK_GLOBAL_MEM_FENCE);
    for (uint expert = get_local_id(0); expert < experts; expert += GROUP_SIZE) {
        uint place = starts[expert];
        for (uint pair = 0; pair < pairs; pair++)
            if (routed_expert(memory, packet, pair) == (int)expert)
                place_pair(memory, packet, pair, place++);
    }
}

#endif
