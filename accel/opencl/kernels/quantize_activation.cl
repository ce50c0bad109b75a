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

void op_quantize_activation(MEMORY memory, const GLOBAL PACKET *packet, uint worker,
                            uint workers) {
    const uint tokens = packet->size[0], columns = packet->size[1];
    const SHARE mine = share(tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        const GLOBAL float *x = OPERAND(float, 0) + (ulong)token * packet->stride[0];
        GLOBAL short *m = OPERAND(short, 1) + (ulong)token * packet->stride[1];
        GLOBAL float *scale = OPERAND(float, 2) + (ulong)token * packet->stride[2];
        GLOBAL uint *sums = OPERAND(uint, 3) + (ulong)token * packet->stride[3];
        for (uint first = 0; first < columns; first += SEGMENT) {
            int16 most = 0;
            for (uint k = first; k < first + SEGMENT && k < columns; k += 16) {
                int16 bits = as_int16(load_padded(x + k, columns - k)) & 0x7FFFFFFF;
                most = max(most, bits);
            }
            int8 m8 = max(most.lo, most.hi);
            int4 m4 = max(m8.lo, m8.hi);
            int largest = max(max(m4.x, m4.y), max(m4.z, m4.w));
            bool broken = largest >= (int)INFINITY_BITS;
            int exponent = (largest >> 23) - 127;
            bool silent = broken || exponent < -64;
            float up = silent ? 0.0f : as_float((127 + 10 - exponent) << 23);
            float down = silent ? 0.0f : as_float((127 - 10 + exponent) << 23);
            scale[first / SEGMENT] = broken ? as_float(QUIET_NAN) : down;
            for (uint k = first; k < first + SEGMENT; k += 32) {
                int16 low = 0, high = 0;
                if (!silent) {
                    if (k < columns)
                        low = convert_int16(rint_small16(load_padded(x + k, columns - k) * up));
                    if (k + 16 < columns)
                        high = convert_int16(
                            rint_small16(load_padded(x + k + 16, columns - k - 16) * up));
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
