// FEED_TOKENS: move every row on by one position; output_rows are distinct.
//
// operands: token, output_rows, query, sampling, recent
// sizes:    rows

#define SAMPLING_POSITION 7
#define SAMPLING_REPEAT_LAST_N 10

void op_feed_tokens(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const SHARE mine = share(packet->size[0], 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        const int token = OPERAND(int, 0)[row];
        GLOBAL int *query = OPERAND(int, 2) + OPERAND(int, 1)[row] * packet->stride[2];
        GLOBAL int *sampling = OPERAND(int, 3) + row * packet->stride[3];
        GLOBAL int *recent = OPERAND(int, 4) + row * packet->stride[4];
        const int last_n = sampling[SAMPLING_REPEAT_LAST_N];
        if (token >= 0 && last_n > 0) recent[sampling[SAMPLING_POSITION] % last_n] = token;
        sampling[SAMPLING_POSITION]++;
        query[0] = max(token, 0);
        query[2]++;
    }
}
