// VERIFY_K: accepted[r] = length of the common prefix of draft[r] and target[r].
//
// operands: draft, target, accepted
// sizes:    rows, draft_tokens

void op_verify_k(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const uint draft_tokens = packet->size[1];
    const SHARE mine = share(packet->size[0], 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        const GLOBAL int *draft = OPERAND(int, 0) + row * packet->stride[0];
        const GLOBAL int *target = OPERAND(int, 1) + row * packet->stride[1];
        uint length = 0;
        while (length < draft_tokens && draft[length] == target[length]) length++;
        OPERAND(int, 2)[row] = length;
    }
}
