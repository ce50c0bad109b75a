// KV_WRITE_BATCHED: kv[page_table[slot, position / 16], 0 or 1, position mod 16] = k or v.
//
// operands: k, v, query, page_table, kv
// sizes:    tokens, width (kv_heads * head_dim), page_tokens, head_dim
// kv is float, half, Q8_0 or I12 as dtype says. Tokens are split among workers.

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

// A row of rule R6 at place i of the record of its page and KV head; which is 0 for keys, 1 for
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
            m[k] = exponent == BROKEN_ROW ? 0 : clamp(m[k], -KV_MOST, KV_MOST);
            high[(d + k * half_dim) * step] = (uchar)(m[k] >> 4);
        }
        low[d * step] = (uchar)((m[0] & 15) | (m[1] & 15) << 4);
    }
    record[I12_EXPONENTS + which * PAGE_TOKENS + i] = (uchar)exponent;
}

// Elements from `place` on, as many as share a block of dtype.
static inline void store_kv(uint dtype, const GLOBAL float *x, GLOBAL uchar *kv, ulong place) {
    if (dtype == F32)
        ((GLOBAL float *)kv)[place] = *x;
    else if (dtype == F16)
        store_half(*x, (GLOBAL half *)kv + place);
    else
        store_q8_0(x, kv + place / Q8_0_ELEMENTS * Q8_0_BYTES);
}

void op_kv_write_batched(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(kv_write_batched);
    const uint tokens = op.tokens, width = op.width, page_tokens = op.page_tokens;
    const uint head_dim = op.head_dim, kv_heads = width / head_dim;
    const SHARE mine = share(tokens, 1, worker, workers);
    GLOBAL uchar *kv = op.kv;
    for (uint token = mine.begin; token < mine.end; token++) {
        const GLOBAL int *query = op.query + token * op.query_stride;
        uint slot = query[1], position = query[2];
        ulong page = op.page_table[slot * op.page_table_stride + position / page_tokens];
        for (uint which = 0; which < 2; which++) {
            const GLOBAL float *x = which ? op.v + token * op.v_stride : op.k + token * op.k_stride;
            ulong place = ((page * 2 + which) * page_tokens + position % page_tokens) * width;
            if (packet->dtype == F32)
                for (uint k = 0; k < width; k++) store_kv(F32, x + k, kv, place + k);
            else if (packet->dtype == F16)
                for (uint k = 0; k < width; k++) store_kv(F16, x + k, kv, place + k);
            else if (packet->dtype == I12)
                for (uint h = 0; h < kv_heads; h++)
                    store_i12(x + h * head_dim, head_dim, which,
                              kv + i12_record(head_dim, kv_heads, page, h),
                              position % page_tokens);
            else
                for (uint k = 0; k < width; k += Q8_0_ELEMENTS)
                    store_kv(Q8_0, x + k, kv, place + k);
        }
    }
}

