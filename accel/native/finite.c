// Finds scales of stored blocks that are NaN or infinite, once, when weights are uploaded.

// True when a word has all exponent bits set in some block of [first, end).
static bool any_broken(const uchar *data, ulong first, ulong end, uint block_bytes, uint offset,
                       uint word_bytes, uint exponent) {
    uint found = 0;
    const uchar *word = data + first * block_bytes + offset;
    for (ulong block = first; block < end; block++, word += block_bytes) {
        const uint value = word_bytes == 2 ? (uint)word[0] | (uint)word[1] << 8 : word[0];
        found |= (value & exponent) == exponent;
    }
    return found;
}

// operand: the stored bytes, a 32-bit flag that becomes 1 for a broken word, the number of blocks.
// stride: bytes of a block, bytes of a word, the exponent bits, words of a block, their offsets.
void op_finite(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    const ulong blocks = packet->operand[2];
    const ulong first = blocks * worker / workers, end = blocks * (worker + 1) / workers;
    const uchar *data = (const uchar *)packet->operand[0];
    const uint *form = packet->stride;
    for (uint i = 0; i < form[3]; i++)
        if (any_broken(data, first, end, form[0], form[4 + i], form[1], form[2]))
            *(volatile uint *)packet->operand[1] = 1;
}
