// SSM_CONV1D: z = left fold over i of weight[:, i] u[t - history + i], u = input_gate x or x, then
// + bias; y[t] = output_gate z, or silu(z) (rule R8).
//
// operands: x, weight [channels, history + 1], query, bias, input_gate, output_gate,
//           state [slots, history, channels], y; what follows a position of a slot is in row
//           slot * states + position mod states
// sizes:    tokens, channels, history, states
// Channels are split among workers; each goes through the tokens in order.

// Vectors of channels that take a token together: a token's channels are far from the next one's.
#define CONV_VECTORS 8
// Taps whose weights are kept side by side while the tokens pass.
#define KEPT_TAPS 8

// The weights of one tap for up to 16 channels.
INLINE float16 tap_weights(const GLOBAL float *weight, uint taps, uint tap, int count) {
    float lane[16];
    for (int i = 0; i < 16; i++) lane[i] = i < count ? weight[(ulong)i * taps + tap] : 0.0f;
    return vload16(0, lane);
}

// The weights of the first KEPT_TAPS taps.
INLINE void keep_taps(const GLOBAL float *weight, uint taps, int count, float16 *kept) {
    if (taps == 4 && count >= 16) {
        const float16 a = vload16(0, weight), b = vload16(1, weight);
        const float16 c = vload16(2, weight), d = vload16(3, weight);
        kept[0] = make_float16(a.s048c, b.s048c, c.s048c, d.s048c);
        kept[1] = make_float16(a.s159d, b.s159d, c.s159d, d.s159d);
        kept[2] = make_float16(a.s26ae, b.s26ae, c.s26ae, d.s26ae);
        kept[3] = make_float16(a.s37bf, b.s37bf, c.s37bf, d.s37bf);
        return;
    }
    for (uint tap = 0; tap < min(taps, (uint)KEPT_TAPS); tap++)
        kept[tap] = tap_weights(weight, taps, tap, count);
}

void op_ssm_conv1d(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(ssm_conv1d);
    const uint taps = op.history + 1;
    const SHARE mine = share(op.channels, column_granule(memory), worker, workers);
    for (uint first = mine.begin; first < mine.end; first += 16 * CONV_VECTORS) {
        const uint end = min(first + 16 * CONV_VECTORS, mine.end);
        float16 kept[CONV_VECTORS][KEPT_TAPS];
        for (uint c = first; c < end; c += 16)
            keep_taps(op.weight + (ulong)c * taps, taps, (int)(end - c),
                      kept[(c - first) / 16]);
        for (uint token = 0; token < op.tokens; token++) {
            const GLOBAL int *query = op.query + token * op.query_stride;
            const uint rows = (uint)query[1] * op.states, position = (uint)query[2];
            const bool starts = position == 0;
            const ulong width = (ulong)op.history * op.channels;
            const GLOBAL float *past =
                op.state + (rows + (position + op.states - 1) % op.states) * width;
            GLOBAL float *after = op.state + (rows + position % op.states) * width;
            const GLOBAL float *x = op.x + (ulong)token * op.x_stride;
            GLOBAL float *y = op.y + (ulong)token * op.y_stride;
            for (uint c = first; c < end; c += 16) {
                const int count = (int)(end - c);
                float16 now = load_padded(x + c, count);
                if (op.input_gate)
                    now = load_padded(op.input_gate + token * op.input_gate_stride + c, count) * now;
                float16 total = 0.0f;
                for (uint tap = 0; tap < taps; tap++) {
                    const ulong index = (ulong)tap * op.channels + c;
                    float16 value = now;
                    if (tap < op.history)
                        value = starts ? (float16)(0.0f) : load_padded(past + index, count);
                    const float16 weight =
                        tap < KEPT_TAPS ? kept[(c - first) / 16][tap]
                                        : tap_weights(op.weight + (ulong)c * taps, taps, tap,
                                                      count);
                    total = total + weight * value;
                    if (tap) store_partial(value, after + index - op.channels, count);
                }
                if (op.bias) total = total + load_padded(op.bias + c, count);
                if (op.output_gate)
                    total = load_padded(op.output_gate + token * op.output_gate_stride + c, count) *
                            total;
                else
                    total = silu16(total);
                store_partial(total, y + c, count);
            }
        }
    }
}

