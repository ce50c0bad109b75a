// ROPE: (a, b) -> (a cos - b sin, a sin + b cos) for every pair of a head.
//
// operands: x, rope_table, query, y
// sizes:    tokens, heads, head_dim, neox, rotary_pairs
// Pair m is channels (m, m + pairs) if neox, else (2m, 2m + 1); later channels pass through. Tokens
// are split among workers.

void op_rope(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(rope);
    const uint pairs = op.rotary_pairs;
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        int position = op.query[token * op.query_stride + 2];
        const GLOBAL float *cosine = op.rope_table + (ulong)position * 2 * pairs;
        const GLOBAL float *sine = cosine + pairs;
        for (uint head = 0; head < op.heads; head++) {
            const GLOBAL float *x =
                op.x + (ulong)token * op.x_stride + head * op.head_dim;
            GLOBAL float *y = op.y + (ulong)token * op.y_stride + head * op.head_dim;
            if (op.neox) {
                for (uint m = 0; m < pairs; m += 16) {
                    int count = (int)(pairs - m);
                    float16 a = load_padded(x + m, count), b = load_padded(x + pairs + m, count);
                    float16 c = load_padded(cosine + m, count), s = load_padded(sine + m, count);
                    store_partial(a * c - b * s, y + m, count);
                    store_partial(a * s + b * c, y + pairs + m, count);
                }
            } else {
                for (uint m = 0; m < pairs; m++) {
                    float a = x[2 * m], b = x[2 * m + 1];
                    y[2 * m] = a * cosine[m] - b * sine[m];
                    y[2 * m + 1] = a * sine[m] + b * cosine[m];
                }
            }
            for (uint k = 2 * pairs; k < op.head_dim; k++) y[k] = x[k];
        }
    }
}

