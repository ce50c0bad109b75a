// EMBED: y[t] = table[query[t].token], expanded to binary32.
//
// operands: query, table, y
// sizes:    tokens, hidden
// stride[1] is the bytes of a row of a table in the stored layout. Tokens are split among workers.

static int table_value(uint dtype, int nibble) {
    return (int)(look_up_lane(table_bytes(dtype), (uint)nibble) & 0xFF) - OFFSET(dtype);
}

static float dequantized(uint dtype, const GLOBAL uchar *row, uint k) {
    switch (dtype) {
        case F32: return ((const GLOBAL float *)row)[k];
        case F16: return vload_half(k, (const GLOBAL half *)row);
        case BF16: return as_float((uint)((const GLOBAL ushort *)row)[k] << 16);
        case Q4_0: {
            const GLOBAL uchar *block = row + k / 32 * 18;
            return (float)(nibble_value(block + 2, 0, k % 32) - 8) * half_at(block);
        }
        case Q4_1: {
            const GLOBAL uchar *block = row + k / 32 * 20;
            float scaled = (float)nibble_value(block + 4, 0, k % 32) * half_at(block);
            return scaled + half_at(block + 2);
        }
        case Q5_0: {
            const GLOBAL uchar *block = row + k / 32 * 22;
            int value = nibble_value(block + 6, uint_at(block + 2), k % 32) - 16;
            return (float)value * half_at(block);
        }
        case Q5_1: {
            const GLOBAL uchar *block = row + k / 32 * 24;
            int value = nibble_value(block + 8, uint_at(block + 4), k % 32);
            return (float)value * half_at(block) + half_at(block + 2);
        }
        case Q8_0: {
            const GLOBAL uchar *block = row + k / 32 * 34;
            return (float)((const GLOBAL char *)block)[2 + k % 32] * half_at(block);
        }
        case Q4_K:
        case Q5_K: {
            const GLOBAL uchar *block = row + k / 256 * (dtype == Q4_K ? 144 : 176);
            int i = k % 256;
            float scale = half_at(block) * (float)sub_scale(block + 4, i / 32);
            float minimum = half_at(block + 2) * (float)sub_minimum(block + 4, i / 32);
            return scale * (float)affine_super_value(dtype, block, i) - minimum;
        }
        case Q2_K: {
            const GLOBAL uchar *block = row + k / 256 * 84;
            int i = k % 256;
            float scale = half_at(block + 80) * (float)(block[i / 16] & 15);
            float minimum = half_at(block + 82) * (float)(block[i / 16] >> 4);
            return scale * (float)two_bit_value(block + 16, i) - minimum;
        }
        case Q3_K: {
            const GLOBAL uchar *block = row + k / 256 * 110;
            int i = k % 256;
            int upper = block[i % 32] >> i / 32 & 1;
            float scale = half_at(block + 108) * (float)q3_k_scale(block + 96, i / 16);
            return scale * (float)((two_bit_value(block + 32, i) | upper << 2) - 4);
        }
        case IQ4_NL: {
            const GLOBAL uchar *block = row + k / 32 * 18;
            int nibble = nibble_value(block + 2, 0, k % 32);
            return (float)table_value(dtype, nibble) * half_at(block);
        }
        case MXFP4: {
            const GLOBAL uchar *block = row + k / 32 * 17;
            int nibble = nibble_value(block + 1, 0, k % 32);
            return (float)table_value(dtype, nibble) * power_scale(block[0]);
        }
        case IQ4_XS: {
            const GLOBAL uchar *block = row + k / 256 * 136;
            int s = k % 256 / 32;
            int nibble = nibble_value(block + 8 + 16 * s, 0, k % 32);
            float scale = half_at(block) * (float)iq4_xs_scale(block, s);
            return scale * (float)table_value(dtype, nibble);
        }
        default: {
            const GLOBAL uchar *block = row + k / 256 * 210;
            int i = k % 256;
            float scale = half_at(block + 208) * (float)((const GLOBAL char *)block)[192 + i / 16];
            return scale * (float)q6_k_value(block, i);
        }
    }
}

void op_embed(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(embed);
    const SHARE mine = share(op.tokens, 1, worker, workers);
    for (uint token = mine.begin; token < mine.end; token++) {
        int id = op.query[token * op.query_stride];
        GLOBAL float *y = op.y + (ulong)token * op.y_stride;
        if (packet->layout == LAYOUT_LANES) {
            for (uint k = 0; k < op.hidden; k++)
                y[k] = lanes_element(packet->dtype, op.table, op.hidden, id, k);
        } else {
            const GLOBAL uchar *row = op.table + (ulong)id * op.table_stride;
            for (uint k = 0; k < op.hidden; k++) y[k] = dequantized(packet->dtype, row, k);
        }
    }
}

