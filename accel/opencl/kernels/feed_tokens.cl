// FEED_TOKENS: move every row on by one position; output_rows are distinct.
//
// operands: token, output_rows, query, sampling, recent
// sizes:    rows

#define SAMPLING_POSITION 7
#define SAMPLING_REPEAT_LAST_N 10

void op_feed_tokens(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(feed_tokens);
    const SHARE mine = share(op.rows, 1, worker, workers);
    for (uint row = mine.begin; row < mine.end; row++) {
        const int token = op.token[row];
        GLOBAL int *query = op.query + op.output_rows[row] * op.query_stride;
        GLOBAL int *sampling = op.sampling + row * op.sampling_stride;
        GLOBAL int *recent = op.recent + row * op.recent_stride;
        const int last_n = sampling[SAMPLING_REPEAT_LAST_N];
        if (token >= 0 && last_n > 0) recent[sampling[SAMPLING_POSITION] % last_n] = token;
        sampling[SAMPLING_POSITION]++;
        query[0] = max(token, 0);
        query[2]++;
    }
}
