// Keys and values of I4R (rule R13): codes of 5 and of 4 bits, and a scale for every 32 channels.

#ifndef ATTENTION_CODES_H
#define ATTENTION_CODES_H

#define CODED_CHANNELS 32

MATMUL_TARGET_BEGIN

// load_keys for I4R, as pairs of channels 16 apart.
INLINE void load_keys_i4r(const KV_HEAD *head, uint position, uint begin, uint end, uint next,
                          KV_INTEGERS *tile, int *exponent) {
    const int16 lane = make_int16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const uint head_dim = head->head_dim, groups = head_dim / CODED_CHANNELS;
    const GLOBAL uchar *record = i4r_page(head, position);
    const GLOBAL char *exponents = (const GLOBAL char *)record + I4R_EXPONENTS;
    for (uint i = 0; i < PAGE_TOKENS; i++) {
        const GLOBAL uchar *codes = record + i * head_dim / 2;
        const GLOBAL uint *fifth = (const GLOBAL uint *)(record + I4R_FIFTH) + i * groups;
        const GLOBAL uchar *scales = record + I4R_SCALES + i * groups;
        prefetch_row(head, next, 0, i);
        exponent[i] = i < begin || i >= end ? LEAST_EXPONENT : exponents[i];
        for (uint n = 0; n < groups; n++) {
            const uint16 bytes = as_uint16(convert_int16(vload16(n, codes)));
            const uint16 high = ((uint16)(fifth[n]) >> as_uint16(lane)) & 0x00010001u;
            const uint16 doubled = ((bytes << 1 | bytes << 13) & 0x001E001Eu) | high << 5;
            const short16 scale = (short16)((short)scales[n]), odd = (short16)(31);
            tile->page[i][n] = make_uint16(as_uint8((as_short16(doubled.lo) - odd) * scale),
                                           as_uint8((as_short16(doubled.hi) - odd) * scale));
        }
    }
}

// load_values for I4R. Positions that are not written yet hold any integers.
INLINE void load_values_i4r(const KV_HEAD *head, uint position, uint begin, uint end, uint next,
                            uint16 *values, int *exponent) {
    const uint head_dim = head->head_dim, vectors = 2 * pair_vectors(head_dim);
    const GLOBAL uchar *record = i4r_page(head, position);
    const GLOBAL char *exponents = (const GLOBAL char *)record + I4R_EXPONENTS + PAGE_TOKENS;
    const GLOBAL uchar *codes = record + I4R_VALUES;
    const GLOBAL uchar *scales = record + I4R_SCALES + I4R_VALUE_SCALES;
    for (uint i = 0; i < PAGE_TOKENS; i++)
        exponent[i] = i < begin || i >= end ? LEAST_EXPONENT : exponents[i];
    for (uint n = 0; n < vectors; n++) {
        const short16 scale = convert_short16(vload16(n / 2, scales));
        const short shift = n % 2 ? 4 : 0;
        short16 channel[16];
        for (uint i = n * PAGE_TOKENS / vectors; i < (n + 1) * PAGE_TOKENS / vectors; i++)
            prefetch_row(head, next, 1, i);
        UNROLL for (uint k = 0; k < 16; k++) {
            const short16 bytes = convert_short16(vload16(n / 2 * 16 + k, codes));
            const short16 code = (bytes >> (short16)(shift)) & (short16)(15);
            channel[k] = (code + code - (short16)(15)) * scale;
        }
        channels_to_lanes(channel, values + n, vectors);
    }
}

MATMUL_TARGET_END

#endif
