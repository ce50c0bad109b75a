// SSM_DELTA_NET and SSM_SCAN.
//
// SSM_DELTA_NET, the recurrence (rule R8): M = g M; r = v - M k; M = M + (b r) k^T; y = M q, a row of
// M being a value and a column a key, g one number or one a column; sums over the keys are R4
// segments.
//
// operands: x (..., values), qk and gates of ssm_delta_inputs, query,
//           state [slots, value_heads, state_size, state_size], y; what follows a position of a
//           slot is in row slot * states + position mod states
// sizes:    tokens, key_heads, value_heads, state_size, grouped, states
// Units are sixteen rows of a value head's state. A worker takes a unit through
// all tokens in order, so that its rows stay near while one slot's tokens pass.

#define STATE_ROWS 16

typedef struct {
    const GLOBAL float *q, *k, *v, *g;
    const GLOBAL float *before;
    GLOBAL float *after, *y;
    float b;
    bool starts;
} DELTA_TOKEN;

// Decays of a head, which stand before b in gates: 1, or one a key.
INLINE uint decays_of(const ssm_delta_net_fields *op) {
    return op->gates_stride / op->value_heads - 1;
}

// What `token` means for the rows from `row` of value head `head`.
INLINE DELTA_TOKEN delta_token(const ssm_delta_net_fields *op, uint token, uint head, uint row) {
    const uint size = op->state_size;
    const uint key_head =
        op->grouped ? head / (op->value_heads / op->key_heads) : head % op->key_heads;
    const GLOBAL int *query = op->query + token * op->query_stride;
    const GLOBAL float *gates = op->gates + (ulong)token * op->gates_stride;
    DELTA_TOKEN t;
    t.q = op->qk + (ulong)token * op->qk_stride + key_head * size;
    t.k = t.q + op->key_heads * size;
    t.v = op->x + (ulong)token * op->x_stride + (2 * op->key_heads + head) * size + row;
    const uint rows = (uint)query[1] * op->states, position = (uint)query[2];
    const uint after = rows + position % op->states;
    const uint before = rows + (position + op->states - 1) % op->states;
    t.after = op->state + (((ulong)after * op->value_heads + head) * size + row) * size;
    t.before = op->state + (((ulong)before * op->value_heads + head) * size + row) * size;
    t.y = op->y + (ulong)token * op->y_stride + head * size + row;
    t.g = gates + head * decays_of(op);
    t.b = gates[op->value_heads * decays_of(op) + head];
    t.starts = position == 0;
    return t;
}

// The first `count` lanes, the rest +0: what lies beyond a row must not reach its sum.
INLINE float16 first_lanes(float16 v, int count) {
    const int16 lane = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return count >= 16 ? v : select((float16)(0.0f), v, lane < (int16)(count));
}

INLINE float16 key_vector(const GLOBAL float *row, int count) {
    return count > 0 ? load_padded(row, count) : (float16)(0.0f);
}

// R4's halvings of 16 or 8 vectors of products down to 16 values.
INLINE float16 halved_row(float16 *p, const int vectors) {
    if (vectors == 16) {
        UNROLL for (int i = 0; i < 8; i++) p[i] = p[i] + p[i + 8];
    }
    UNROLL for (int i = 0; i < 4; i++) p[i] = p[i] + p[i + 4];
    return (p[0] + p[2]) + (p[1] + p[3]);
}

// One token through `rows` rows of `size` keys, which `vectors` vectors hold; with `many` every key
// has a decay of its own.
INLINE void delta_rows(const DELTA_TOKEN *t, const uint size, const int vectors, uint rows,
                       const bool many) {
    float16 key[16], query[16], g[16], halved[STATE_ROWS];
    float change[STATE_ROWS];
    UNROLL for (int i = 0; i < vectors; i++) {
        key[i] = key_vector(t->k + 16 * i, (int)size - 16 * i);
        query[i] = key_vector(t->q + 16 * i, (int)size - 16 * i);
        g[i] = many ? key_vector(t->g + 16 * i, (int)size - 16 * i) : (float16)(t->g[0]);
    }
    for (uint r = rows; r < STATE_ROWS; r++) halved[r] = 0.0f;
    for (uint r = 0; r < rows; r++) {
        const GLOBAL float *row = t->before + r * size;
        float16 p[16];
        UNROLL for (int i = 0; i < vectors; i++) {
            const int count = (int)size - 16 * i;
            p[i] = first_lanes((key_vector(row + 16 * i, count) * g[i]) * key[i], count);
        }
        halved[r] = halved_row(p, vectors);
    }
    vstore16(t->b * (load_padded(t->v, (int)rows) - fold_rows(halved)), 0, change);
    for (uint r = 0; r < rows; r++) {
        const GLOBAL float *row = t->before + r * size;
        GLOBAL float *after = t->after + r * size;
        float16 p[16];
        UNROLL for (int i = 0; i < vectors; i++) {
            const int count = (int)size - 16 * i;
            const float16 m = key_vector(row + 16 * i, count) * g[i] + change[r] * key[i];
            if (count > 0) store_partial(m, after + 16 * i, count);
            p[i] = first_lanes(m * query[i], count);
        }
        halved[r] = halved_row(p, vectors);
    }
    store_partial(fold_rows(halved), t->y, (int)rows);
}

void op_ssm_delta_net(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(ssm_delta_net);
    const uint size = op.state_size;
    const uint blocks = (size + STATE_ROWS - 1) / STATE_ROWS;
    const bool many = decays_of(&op) > 1;
    const SHARE mine = share(op.value_heads * blocks, 1, worker, workers);
    for (uint unit = mine.begin; unit < mine.end; unit++) {
        const uint head = unit / blocks, first = unit % blocks * STATE_ROWS;
        const uint rows = min((uint)STATE_ROWS, size - first);
        for (uint token = 0; token < op.tokens; token++) {
            DELTA_TOKEN t = delta_token(&op, token, head, first);
            if (t.starts) {
                for (uint k = 0; k < rows * size; k++) t.after[k] = 0.0f;
                t.before = t.after;
            }
            if (size == 128 && !many)
                delta_rows(&t, 128, 8, rows, false);
            else if (size == 128)
                delta_rows(&t, 128, 8, rows, true);
            else if (size <= 128)
                delta_rows(&t, size, 8, rows, many);
            else
                delta_rows(&t, size, 16, rows, many);
        }
    }
}

// What SSM_SCAN needs of each token and head: g = exp(s decay) and s = softplus(dt + dt_bias).
//
// operands: dt, decay, dt_bias, gates [tokens, 2 heads]: g, then s
// sizes:    tokens, heads
void op_ssm_scan_gates(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(ssm_scan_gates);
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        const GLOBAL float *dt = op.dt + (ulong)token * op.dt_stride;
        GLOBAL float *gates = op.gates + (ulong)token * op.gates_stride;
        for (uint j = 0; j < op.heads; j++) {
            const float step = softplus1(dt[j] + op.dt_bias[j]);
            gates[j] = exp1(step * op.decay[j]);
            gates[op.heads + j] = step;
        }
    }
}

typedef struct {
    const GLOBAL float *v, *b, *c;
    const GLOBAL float *before;
    GLOBAL float *after, *y;
    float g, step, skip;
    bool starts;
} SCAN_TOKEN;

// What `token` means for the rows from `row` of head `head`.
INLINE SCAN_TOKEN scan_token(const ssm_scan_fields *op, uint token, uint head, uint row) {
    const uint size = op->state_size, group = head / (op->heads / op->groups);
    const GLOBAL int *query = op->query + token * op->query_stride;
    const GLOBAL float *gates = op->gates + (ulong)token * op->gates_stride;
    const GLOBAL float *x = op->x + (ulong)token * op->x_stride;
    const uint first = head * op->head_dim + row;
    SCAN_TOKEN t;
    t.v = x + first;
    t.b = x + op->heads * op->head_dim + group * size;
    t.c = t.b + op->groups * size;
    const uint rows = (uint)query[1] * op->states, position = (uint)query[2];
    const uint after = rows + position % op->states;
    const uint before = rows + (position + op->states - 1) % op->states;
    t.after = op->state + ((ulong)after * op->heads * op->head_dim + first) * size;
    t.before = op->state + ((ulong)before * op->heads * op->head_dim + first) * size;
    t.y = op->y + (ulong)token * op->y_stride + first;
    t.g = gates[head];
    t.step = gates[op->heads + head];
    t.skip = op->skip[head];
    t.starts = position == 0;
    return t;
}

// One token through `rows` rows of `size` elements, which `vectors` vectors hold.
INLINE void scan_rows(const SCAN_TOKEN *t, const uint size, const int vectors, uint rows) {
    float16 b[16], c[16], halved[STATE_ROWS];
    float change[STATE_ROWS];
    const float16 v = load_padded(t->v, (int)rows);
    UNROLL for (int i = 0; i < vectors; i++) {
        b[i] = key_vector(t->b + 16 * i, (int)size - 16 * i);
        c[i] = key_vector(t->c + 16 * i, (int)size - 16 * i);
    }
    vstore16(t->step * v, 0, change);
    for (uint r = rows; r < STATE_ROWS; r++) halved[r] = 0.0f;
    for (uint r = 0; r < rows; r++) {
        const GLOBAL float *row = t->before + r * size;
        GLOBAL float *after = t->after + r * size;
        float16 p[16];
        UNROLL for (int i = 0; i < vectors; i++) {
            const int count = (int)size - 16 * i;
            const float16 m = key_vector(row + 16 * i, count) * t->g + change[r] * b[i];
            if (count > 0) store_partial(m, after + 16 * i, count);
            p[i] = first_lanes(m * c[i], count);
        }
        halved[r] = halved_row(p, vectors);
    }
    store_partial(fold_rows(halved) + t->skip * v, t->y, (int)rows);
}

// SSM_SCAN, the recurrence (rule R8): M = g M + (s v) b^T; y = M c + skip v.
//
// operands: x (values of all heads, b of all groups, c of all groups), gates, skip, query,
//           state [slots, heads, head_dim, state_size] as of SSM_DELTA_NET, y
// sizes:    tokens, heads, groups, head_dim, state_size, states
// Units are those of SSM_DELTA_NET.
void op_ssm_scan(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(ssm_scan);
    const uint size = op.state_size;
    const uint blocks = (op.head_dim + STATE_ROWS - 1) / STATE_ROWS;
    const SHARE mine = share(op.heads * blocks, 1, worker, workers);
    for (uint unit = mine.begin; unit < mine.end; unit++) {
        const uint head = unit / blocks, first = unit % blocks * STATE_ROWS;
        const uint rows = min((uint)STATE_ROWS, op.head_dim - first);
        for (uint token = 0; token < op.tokens; token++) {
            SCAN_TOKEN t = scan_token(&op, token, head, first);
            if (t.starts) {
                for (uint k = 0; k < rows * size; k++) t.after[k] = 0.0f;
                t.before = t.after;
            }
            if (size == 128)
                scan_rows(&t, 128, 8, rows);
            else if (size <= 128)
                scan_rows(&t, size, 8, rows);
            else
                scan_rows(&t, size, 16, rows);
        }
    }
}
