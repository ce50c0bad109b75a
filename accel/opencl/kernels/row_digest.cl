// ROW_DIGEST: for each span of 1,024 logits eight words, the root of a tree of BLAKE3 digests (rule
// R12); zeros in rows that are not digested.
//
// operands: logits, digested, digest
// sizes:    rows, vocab
// Units of DIGEST_SPANS spans of a row are split among workers. The leaves of a span, the nodes of
// four spans and their roots are a vector each.

#define DIGEST_SPANS 4
#define LEAVES 16
#define FAN 4
#define DIGEST_WORDS 8
#define BLOCK 16
#define LEAF_BLOCKS (SPAN_SEGMENTS * SEGMENT / (LEAVES * BLOCK))
#define CHUNK_START 1u
#define CHUNK_END 2u
#define ROOT 8u

#define TURN(x, by) ((x) >> (uint16)(by) | (x) << (uint16)(32u - by))
#define HALF_MIX(a, b, c, d, m, by_d, by_b) \
    a = a + b + (m);                        \
    d = TURN(d ^ a, by_d);                  \
    c = c + d;                              \
    b = TURN(b ^ c, by_b);
#define MIX(a, b, c, d, x, y)         \
    HALF_MIX(a, b, c, d, x, 16u, 12u) \
    HALF_MIX(a, b, c, d, y, 8u, 7u)

// Replaces the digests of 16 messages by those behind one more block of each, which is used up.
INLINE void compress(uint16 *chain, uint16 *m, uint flags) {
    uint16 s[16] = {chain[0], chain[1], chain[2], chain[3], chain[4], chain[5], chain[6], chain[7],
                    (uint16)(0x6A09E667u), (uint16)(0xBB67AE85u), (uint16)(0x3C6EF372u),
                    (uint16)(0xA54FF53Au), (uint16)(0u), (uint16)(0u), (uint16)(4u * BLOCK),
                    (uint16)(flags)};
    UNROLL for (int round = 0; round < 7; round++) {
        MIX(s[0], s[4], s[8], s[12], m[0], m[1])
        MIX(s[1], s[5], s[9], s[13], m[2], m[3])
        MIX(s[2], s[6], s[10], s[14], m[4], m[5])
        MIX(s[3], s[7], s[11], s[15], m[6], m[7])
        MIX(s[0], s[5], s[10], s[15], m[8], m[9])
        MIX(s[1], s[6], s[11], s[12], m[10], m[11])
        MIX(s[2], s[7], s[8], s[13], m[12], m[13])
        MIX(s[3], s[4], s[9], s[14], m[14], m[15])
        // Two cycles of eight words.
        const uint16 first = m[0], second = m[1];
        m[0] = m[2], m[2] = m[3], m[3] = m[10], m[10] = m[12];
        m[12] = m[9], m[9] = m[11], m[11] = m[5], m[5] = first;
        m[1] = m[6], m[6] = m[4], m[4] = m[7], m[7] = m[13];
        m[13] = m[14], m[14] = m[15], m[15] = m[8], m[8] = second;
    }
    UNROLL for (int i = 0; i < DIGEST_WORDS; i++) chain[i] = s[i] ^ s[i + 8];
}

INLINE void begin(uint16 *chain) {
    chain[0] = (uint16)(0x6A09E667u), chain[1] = (uint16)(0xBB67AE85u);
    chain[2] = (uint16)(0x3C6EF372u), chain[3] = (uint16)(0xA54FF53Au);
    chain[4] = (uint16)(0x510E527Fu), chain[5] = (uint16)(0x9B05688Cu);
    chain[6] = (uint16)(0x1F83D9ABu), chain[7] = (uint16)(0x5BE0CD19u);
}

INLINE uint flags_of(int block, int blocks) {
    return (block == 0 ? CHUNK_START : 0u) | (block == blocks - 1 ? CHUNK_END | ROOT : 0u);
}

// The bits of logits: +0 for zeros and subnormals, one NaN for all.
INLINE uint16 canonical(float16 value) {
    const int16 bits = as_int16(value), magnitude = bits & (int16)(0x7FFFFFFF);
    const int16 normal = select(bits, (int16)(0), magnitude < (int16)(0x800000));
    return as_uint16(select(normal, (int16)(QUIET_NAN), magnitude > (int16)(INFINITY_BITS)));
}

// The digests of the leaves of a span of `count` logits.
static void digest_leaves(const GLOBAL float *logits, int count, uint16 *chain) {
    begin(chain);
    for (int block = 0; block < LEAF_BLOCKS; block++) {
        uint16 m[16];
        for (int i = 0; i < BLOCK; i++) {
            const int k = (block * BLOCK + i) * LEAVES, left = min(max(count - k, 0), 16);
            m[i] = canonical(load_padded(logits + min(k, count), left));
        }
        compress(chain, m, flags_of(block, LEAF_BLOCKS));
    }
}

// The digests of FAN digests each: lane n of child i has its words at words[i * of_child + n].
static void digest_nodes(const uint *words, int of_child, int of_word, uint16 *chain) {
    begin(chain);
    for (int block = 0; block < 2; block++) {
        uint16 m[16];
        for (int i = 0; i < BLOCK; i++) {
            const int child = 2 * block + i / DIGEST_WORDS, word = i % DIGEST_WORDS;
            m[i] = vload16(0, words + child * of_child + word * of_word);
        }
        compress(chain, m, flags_of(block, 2));
    }
}

// The digests of up to DIGEST_SPANS spans that begin at `first`.
static void digest_spans(const GLOBAL float *logits, uint first, uint vocab, uint count,
                         GLOBAL uint *digest) {
    const int span_logits = SPAN_SEGMENTS * SEGMENT;
    // [child][word][span and node], then [node][word][span].
    uint leaves[FAN * DIGEST_WORDS * 16], nodes[FAN * DIGEST_WORDS * 16];
    uint words[16];
    uint16 chain[DIGEST_WORDS];
    for (uint span = 0; span < DIGEST_SPANS; span++) {
        const uint start = min((first + span) * span_logits, vocab);
        if (span < count) digest_leaves(logits + start, min((int)(vocab - start), span_logits), chain);
        for (int word = 0; word < DIGEST_WORDS; word++) {
            vstore16(chain[word], 0, words);
            for (int leaf = 0; leaf < LEAVES; leaf++)
                leaves[(leaf / FAN * DIGEST_WORDS + word) * 16 + span * FAN + leaf % FAN] = words[leaf];
        }
    }
    digest_nodes(leaves, DIGEST_WORDS * 16, 16, chain);
    for (int i = 0; i < FAN * DIGEST_WORDS * 16; i++) nodes[i] = 0;
    for (int word = 0; word < DIGEST_WORDS; word++) {
        vstore16(chain[word], 0, words);
        for (int lane = 0; lane < 16; lane++)
            nodes[(lane % FAN * DIGEST_WORDS + word) * 16 + lane / FAN] = words[lane];
    }
    digest_nodes(nodes, DIGEST_WORDS * 16, 16, chain);
    for (int word = 0; word < DIGEST_WORDS; word++) {
        vstore16(chain[word], 0, words);
        for (uint span = 0; span < count; span++)
            digest[(first + span) * DIGEST_WORDS + word] = words[span];
    }
}

void op_row_digest(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(row_digest);
    const uint spans = (op.vocab + SPAN_SEGMENTS * SEGMENT - 1) / (SPAN_SEGMENTS * SEGMENT);
    const uint pieces = (spans + DIGEST_SPANS - 1) / DIGEST_SPANS;
    const SHARE mine = share(op.rows * pieces, 1, worker, workers);
    for (uint unit = mine.begin; unit < mine.end; unit++) {
        const uint row = unit / pieces, first = unit % pieces * DIGEST_SPANS;
        const uint count = min(spans - first, (uint)DIGEST_SPANS);
        GLOBAL uint *digest = op.digest + (ulong)row * op.digest_stride;
        if (op.digested[row])
            digest_spans(op.logits + (ulong)row * op.logits_stride, first, op.vocab, count, digest);
        else
            for (uint i = 0; i < count * DIGEST_WORDS; i++) digest[first * DIGEST_WORDS + i] = 0;
    }
}
