// R5, first half: activations become 12-bit integers with one power-of-two scale per segment.
//
// Not an opcode: lowering puts one in front of the products that share an input.
// operands: x float [tokens, columns], m short [tokens, padded], scale float [tokens, segments],
//           sums uint [tokens, padded / 32]: the sum over 16 columns and, in the upper half, over
//           the next 16, as 16-bit numbers
// sizes:    tokens, columns
// padded is columns rounded up to whole segments; m and sums are 0 beyond columns. A segment with a
// NaN or infinity has m = 0 and scale NaN. Tokens are split among workers.

static inline int sum16(int16 v) {
    int8 a = v.lo + v.hi;
    int4 b = a.lo + a.hi;
    return (b.x + b.y) + (b.z + b.w);
}

// The factors to and from the integers of a segment whose largest magnitude has bits `largest`.
typedef struct {
    bool silent;
    float up;
    float scale;
} QUANTIZER;

INLINE QUANTIZER quantizer_of(int largest) {
    QUANTIZER q;
    const bool broken = largest >= (int)INFINITY_BITS;
    const int exponent = (largest >> 23) - 127;
    q.silent = broken || exponent < -64;
    q.up = q.silent ? 0.0f : as_float((127 + 10 - exponent) << 23);
    q.scale = q.silent ? 0.0f : as_float((127 - 10 + exponent) << 23);
    if (broken) q.scale = as_float(QUIET_NAN);
    return q;
}

static inline int largest_int(int16 v) {
    int8 m8 = max(v.lo, v.hi);
    int4 m4 = max(m8.lo, m8.hi);
    return max(max(m4.x, m4.y), max(m4.z, m4.w));
}

void op_quantize_activation(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                            uint workers) {
    OPEN(quantize_activation);
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        const GLOBAL float *x = op.x + (ulong)token * op.x_stride;
        GLOBAL short *m = op.m + (ulong)token * op.m_stride;
        GLOBAL float *scale = op.scale + (ulong)token * op.scale_stride;
        GLOBAL uint *sums = op.sums + (ulong)token * op.sums_stride;
        for (uint first = 0; first < op.columns; first += SEGMENT) {
            int16 most = 0;
            for (uint k = first; k < first + SEGMENT && k < op.columns; k += 16) {
                int16 bits = as_int16(load_padded(x + k, op.columns - k)) & 0x7FFFFFFF;
                most = max(most, bits);
            }
            const QUANTIZER q = quantizer_of(largest_int(most));
            scale[first / SEGMENT] = q.scale;
            for (uint k = first; k < first + SEGMENT; k += 32) {
                int16 low = 0, high = 0;
                if (!q.silent) {
                    if (k < op.columns)
                        low = convert_int16(
                            rint_small16(load_padded(x + k, op.columns - k) * q.up));
                    if (k + 16 < op.columns)
                        high = convert_int16(
                            rint_small16(load_padded(x + k + 16, op.columns - k - 16) * q.up));
                    low = clamp(low, -2047, 2047);
                    high = clamp(high, -2047, 2047);
                }
                vstore16(convert_short16(low), 0, m + k);
                vstore16(convert_short16(high), 0, m + k + 16);
                sums[k / 32] = ((uint)sum16(low) & 0xFFFFu) | (uint)sum16(high) << 16;
            }
        }
    }
}

