// KV_WRITE_BATCHED: kv[page_table[slot, position / 16], 0 or 1, position mod 16] = k or v.
//
// operands: k, v, query, page_table, kv
// sizes:    tokens, width (kv_heads * head_dim), page_tokens, head_dim
// kv is float, half, Q8_0, I12, I4R or I3R as dtype says. Heads of keys and of values of all
// tokens are split among workers: if several wrote one page, its lines would go from core to core.

// One block of rule R6: d = largest magnitude / 127 as binary16, q = x / d to nearest even.
static inline void store_q8_0(const GLOBAL float *x, GLOBAL uchar *block) {
    const float16 low = vload16(0, x), high = vload16(1, x);
    const float most = largest_of_16(larger16(fabs(low), fabs(high)));
    GLOBAL char *q = (GLOBAL char *)block + 2;
    if (!(most < INFINITY)) {
        *(GLOBAL ushort *)block = HALF_QUIET_NAN;
        vstore16((char16)(0), 0, q);
        vstore16((char16)(0), 1, q);
        return;
    }
    store_half(divide1(most, 127.0f), (GLOBAL half *)block);
    const float d = half_at(block);
    if (d == 0.0f) {
        vstore16((char16)(0), 0, q);
        vstore16((char16)(0), 1, q);
        return;
    }
    // Quotients within +-127 are what rint_small16 is exact for.
    const float16 first = clamp(divide16(low, (float16)(d)), -127.0f, 127.0f);
    const float16 second = clamp(divide16(high, (float16)(d)), -127.0f, 127.0f);
    vstore16(convert_char16(rint_small16(first)), 0, q);
    vstore16(convert_char16(rint_small16(second)), 1, q);
}

// A row of rule R6 at index i of the record of its page and KV head; which is 0 for keys, 1 for
// values.
static void store_i12(const GLOBAL float *x, uint head_dim, uint which, GLOBAL uchar *record,
                      uint i) {
    const uint half_dim = head_dim / 2;
    const uint step = which ? PAGE_TOKENS : 1;
    GLOBAL uchar *high = record + (which ? I12_VALUES + i : i * head_dim);
    GLOBAL uchar *low = record + (which ? I12_VALUES + I12_LOW + i : I12_LOW + i * half_dim);
    int most = 0;
    for (uint d = 0; d < head_dim; d++) most = max(most, as_int(x[d]) & 0x7FFFFFFF);
    const int exponent = row_exponent(most);
    const float factor = row_factor(most, KV_BITS);
    for (uint d = 0; d < half_dim; d++) {
        int m[2];
        UNROLL for (uint k = 0; k < 2; k++) {
            m[k] = as_int(x[d + k * half_dim] * factor + ROUNDER) - as_int(ROUNDER);
            m[k] = exponent == BROKEN_ROW ? 0 : clamp(m[k], -KV_MAX, KV_MAX);
            high[(d + k * half_dim) * step] = (uchar)(m[k] >> 4);
        }
        low[d * step] = (uchar)((m[0] & 15) | (m[1] & 15) << 4);
    }
    record[I12_EXPONENTS + which * PAGE_TOKENS + i] = (uchar)exponent;
}

MATMUL_TARGET_BEGIN

INLINE int sum_of_16(int16 x) {
    const int8 a = x.lo + x.hi;
    const int4 b = a.lo + a.hi;
    return (b.x + b.z) + (b.y + b.w);
}

// Codes of the 32 integers `low` and `high` with a scale, and their sum of squared differences.
INLINE uint codes_with(int16 low, int16 high, int scale, int bits, int16 *codes) {
    const int top = (1 << bits) - 1;
    const int16 first[2] = {low, high};
    // Quotients are at least half a divisor's part away from an integer, so that their floor is
    // right however they are rounded.
    const float reciprocal = 1.0f / (float)(2 * max(scale, 1));
    int16 squares = (int16)(0);
    UNROLL for (int i = 0; i < 2; i++) {
        const int16 above = first[i] + ((scale << bits) - 1);
        const float16 quotient = (convert_float16(above) + 0.5f) * reciprocal;
        codes[i] = min(max(convert_int16(quotient), 0), top);
        codes[i] = select(codes[i], (int16)(0), (int16)(above < 0));
        const int16 difference = first[i] - (codes[i] * 2 - top) * scale;
        squares += difference * difference;
    }
    return (uint)sum_of_16(squares);
}

// A group of 32 channels of rule R13 whose largest magnitude is `most`: codes, and the first scale of
// six with the least difference.
INLINE int coded_group(int16 low, int16 high, int most, int bits, int16 *best) {
    const int top = (1 << bits) - 1;
    const int largest = min((most + top - 1) / top, min(2048 / top, 255));
    int scale = largest;
    uint least = codes_with(low, high, largest, bits, best);
    for (int i = 1; i < 6; i++) {
        const int tried = largest - largest * i / 16;
        int16 codes[2];
        const uint squares = codes_with(low, high, tried, bits, codes);
        if (squares >= least) continue;
        least = squares;
        scale = tried;
        best[0] = codes[0];
        best[1] = codes[1];
    }
    return scale;
}

// A rotated row at index i of the record of its page and KV head.
OUTLINED void store_coded(const GLOBAL float *x, uint dtype, uint head_dim, uint which,
                          GLOBAL uchar *record, uint i) {
    const uint groups = head_dim / CODED_CHANNELS, bits = (dtype == I4R ? 5 : 4) - which;
    const uint low_bits = bits & ~1u, octets = 4 * low_bits;
    int16 largest = (int16)(0), codes[2];
    for (uint d = 0; d < head_dim; d += 16)
        largest = max(largest, magnitude_bits(vload16(0, x + d)));
    const int most = max_of_16(largest), exponent = row_exponent(most);
    const float factor = row_factor(most, KV_BITS);
    for (uint n = 0; n < groups; n++) {
        int16 m[2];
        // NVIDIA's compilers lose negations in chains of integer maxima, so the largest is a float's.
        const int max_bits = max_of_16(
            max(magnitude_bits(vload16(2 * n, x)), magnitude_bits(vload16(2 * n + 1, x))));
        int max_integer = as_int(as_float(max_bits) * factor + ROUNDER) - as_int(ROUNDER);
        max_integer = exponent == BROKEN_ROW ? 0 : min(max_integer, KV_MAX);
        UNROLL for (uint k = 0; k < 2; k++) {
            const float16 scaled = vload16(2 * n + k, x) * factor;
            m[k] = as_int16(scaled + ROUNDER) - (int16)(as_int(ROUNDER));
            m[k] = exponent == BROKEN_ROW ? (int16)(0) : min(max(m[k], -KV_MAX), KV_MAX);
        }
        const int scale = coded_group(m[0], m[1], max_integer, (int)bits, codes);
        uint tops = 0;
        for (uint k = 0; k < octets; k++) {
            uint octet = 0;
            for (uint c = k; c < CODED_CHANNELS; c += octets) {
                const uint code = (uint)((const int *)codes)[c];
                octet |= (code & ((1 << low_bits) - 1)) << (c / octets * low_bits);
                tops |= code >> low_bits << c;
            }
            const uint at = which ? CODED_VALUES + (octets * n + k) * PAGE_TOKENS + i
                                  : i * head_dim / 2 + octets * n + k;
            record[at] = (uchar)octet;
        }
        const uint at = which ? n * PAGE_TOKENS + i : i * groups + n;
        if (bits > low_bits) ((GLOBAL uint *)(record + CODED_TOPS(dtype)))[at] = tops;
        record[CODED_SCALES(dtype) + which * CODED_VALUE_SCALES + at] = (uchar)scale;
    }
    record[CODED_EXPONENTS(dtype) + which * PAGE_TOKENS + i] = (uchar)exponent;
}

MATMUL_TARGET_END

// Elements from `index` on, as many as share a block of dtype.
static inline void store_kv(uint dtype, const GLOBAL float *x, GLOBAL uchar *kv, ulong index) {
    if (dtype == F32)
        ((GLOBAL float *)kv)[index] = *x;
    else if (dtype == F16)
        store_half(*x, (GLOBAL half *)kv + index);
    else
        store_q8_0(x, kv + index / Q8_0_ELEMENTS * Q8_0_BYTES);
}

// Keys (which 0) or values (which 1) of one token and head.
static void write_head(const GLOBAL PACKET *packet, const kv_write_batched_fields *op, uint token,
                       uint which, uint head) {
    const uint width = op->width, head_dim = op->head_dim, heads = width / head_dim;
    const GLOBAL int *query = op->query + token * op->query_stride;
    const uint slot = query[1], i = query[2] % op->page_tokens;
    const ulong page = op->page_table[slot * op->page_table_stride + query[2] / op->page_tokens];
    const GLOBAL float *x =
        which ? op->v + token * op->v_stride : op->k + token * op->k_stride;
    if (packet->dtype == I12) {
        store_i12(x + head * head_dim, head_dim, which,
                  op->kv + i12_record(head_dim, heads, page, head), i);
        return;
    }
    if (packet->dtype == I4R || packet->dtype == I3R) {
        store_coded(x + head * head_dim, packet->dtype, head_dim, which,
                    op->kv + coded_record(packet->dtype, head_dim, heads, page, head), i);
        return;
    }
    // Whole blocks of Q8_0, whatever the width of a head is.
    const SHARE mine = share(width, Q8_0_ELEMENTS, head, heads);
    const ulong index = ((page * 2 + which) * op->page_tokens + i) * width;
    if (packet->dtype == F32)
        for (uint k = mine.begin; k < mine.end; k++) store_kv(F32, x + k, op->kv, index + k);
    else if (packet->dtype == F16)
        for (uint k = mine.begin; k < mine.end; k++) store_kv(F16, x + k, op->kv, index + k);
    else
        for (uint k = mine.begin; k < mine.end; k += Q8_0_ELEMENTS)
            store_kv(Q8_0, x + k, op->kv, index + k);
}

void op_kv_write_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(kv_write_batched);
    const uint heads = op.width / op.head_dim;
    const SHARE mine = share(op.tokens * 2 * heads, 1, worker, workers);
    for (uint unit = mine.begin; unit < mine.end; unit++)
        write_head(packet, &op, unit / (2 * heads), unit / heads % 2, unit % heads);
}
