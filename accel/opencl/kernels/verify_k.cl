// VERIFY_K: accepted[r] = length of the common prefix of draft[r] and target[r].
//
// operands: draft, target, accepted
// sizes:    rows, draft_tokens

void op_verify_k(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(verify_k);
    const SHARE mine = share(op.rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        const GLOBAL int *draft = op.draft + row * op.draft_stride;
        const GLOBAL int *target = op.target + row * op.target_stride;
        uint length = 0;
        while (length < op.draft_tokens && draft[length] == target[length]) length++;
        op.accepted[row] = length;
    }
}
