// Keys and values of I4R and I3R (rule R13): codes, and a scale for every 32 channels. `dtype` is a
// constant.

#ifndef ATTENTION_CODES_H
#define ATTENTION_CODES_H

#define CODED_CHANNELS 32

MATMUL_TARGET_BEGIN

// load_keys for coded pages, as pairs of channels 16 apart.
INLINE void load_keys_coded(const KV_HEAD *head, uint dtype, uint position, uint begin, uint end,
                            uint next, KV_INTEGERS *tile, int *exponent) {
    const int16 lane = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const uint head_dim = head->head_dim, groups = head_dim / CODED_CHANNELS;
    const short16 odd = (short16)((short)(dtype == I4R ? 31 : 15));
    const GLOBAL uchar *record = coded_page(head, position);
    const GLOBAL char *exponents = (const GLOBAL char *)record + CODED_EXPONENTS(dtype);
    for (uint i = 0; i < PAGE_TOKENS; i++) {
        const GLOBAL uchar *codes = record + i * head_dim / 2;
        const GLOBAL uint *tops = (const GLOBAL uint *)(record + CODED_TOPS(dtype)) + i * groups;
        const GLOBAL uchar *scales = record + CODED_SCALES(dtype) + i * groups;
        prefetch_row(head, next, 0, i);
        exponent[i] = i < begin || i >= end ? MIN_EXPONENT : exponents[i];
        for (uint n = 0; n < groups; n++) {
            const uint16 bytes = as_uint16(convert_int16(vload16(n, codes)));
            uint16 doubled = (bytes << 1 | bytes << 13) & 0x001E001Eu;
            if (dtype == I4R)
                doubled |= (((uint16)(tops[n]) >> as_uint16(lane)) & 0x00010001u) << 5;
            const short16 scale = (short16)((short)scales[n]);
            tile->page[i][n] = make_uint16(as_uint8((as_short16(doubled.lo) - odd) * scale),
                                           as_uint8((as_short16(doubled.hi) - odd) * scale));
        }
    }
}

// load_values for coded pages. Positions that are not written yet hold any integers.
INLINE void load_values_coded(const KV_HEAD *head, uint dtype, uint position, uint begin, uint end,
                              uint next, uint16 *values, int *exponent) {
    const uint head_dim = head->head_dim, vectors = 2 * pair_vectors(head_dim);
    const uint low_bits = dtype == I4R ? 4 : 2, octets = 4 * low_bits;
    const short16 odd = (short16)((short)(dtype == I4R ? 15 : 7));
    const GLOBAL uchar *record = coded_page(head, position);
    const GLOBAL char *exponents =
        (const GLOBAL char *)record + CODED_EXPONENTS(dtype) + PAGE_TOKENS;
    const GLOBAL uint *tops = (const GLOBAL uint *)(record + CODED_TOPS(dtype));
    const GLOBAL uchar *scales = record + CODED_SCALES(dtype) + CODED_VALUE_SCALES;
    for (uint i = 0; i < PAGE_TOKENS; i++)
        exponent[i] = i < begin || i >= end ? MIN_EXPONENT : exponents[i];
    for (uint n = 0; n < vectors; n++) {
        const short16 scale = convert_short16(vload16(n / 2, scales));
        const GLOBAL uchar *codes = record + CODED_VALUES + n / 2 * octets * PAGE_TOKENS;
        short16 channel[16], top = (short16)(0);
        if (dtype == I3R)
            top = convert_short16((vload16(n / 2, tops) >> (uint16)(n % 2 * 16)) & 0xFFFFu);
        for (uint i = n * PAGE_TOKENS / vectors; i < (n + 1) * PAGE_TOKENS / vectors; i++)
            prefetch_row(head, next, 1, i);
        UNROLL for (uint k = 0; k < 16; k++) {
            const uint of_group = n % 2 * 16 + k;
            const short shift = (short)(of_group / octets * low_bits);
            const short16 bytes = convert_short16(vload16(of_group % octets, codes));
            short16 code = (bytes >> (short16)(shift)) & (short16)((short)((1 << low_bits) - 1));
            if (dtype == I3R) code |= ((top >> (short16)((short)k)) & (short16)(1)) << (short16)(2);
            channel[k] = (code + code - odd) * scale;
        }
        channels_to_lanes(channel, values + n, vectors);
    }
}

MATMUL_TARGET_END

#endif
