// Products where a work-group shares 16 rows: item i has row i % 16 and, of every segment, the block
// of 32 columns i / 16. Neighbouring items have neighbouring rows, whose dwords lie side by side.

#ifndef MATMUL_GROUP_H
#define MATMUL_GROUP_H

#if GROUP_SIZE > 1

#define SEGMENT_BLOCKS (SEGMENT / 32)
#if GROUP_SIZE != SEGMENT_BLOCKS * LANES
#error "a work-group is the blocks of a segment of 16 rows"
#endif

#if CHUNK_TOKENS != SEGMENT_BLOCKS
#error "a chunk of tokens fills the slots"
#endif

// What blocks contribute to a segment, by (slot, block, row); a slot is a segment of one token.
#define SLOTS SEGMENT_BLOCKS
typedef struct {
    int first[SLOTS][GROUP_SIZE];   // scaled sums, or 32-blocks' terms as bits of a float
    int second[SLOTS][GROUP_SIZE];  // sums times minima of super-blocks
} PARTIALS;

// One item's 32 weights. Bytes are in order of columns.
typedef struct {
    uint q[8];
    int scale[2];  // of the sub-blocks of a super-block
    int minimum[2];
    float d;       // of a 32-block
    float least;
} BLOCK;

// The bytes 0 2 1 3 of x.
INLINE uint swap_middle(uint x) {
#ifdef __NV_CL_C_VERSION
    uint y;
    __asm__("prmt.b32 %0, %1, 0, 0x3120;" : "=r"(y) : "r"(x));
    return y;
#else
    return (x & 0xFF0000FFu) | (x >> 8 & 0xFF00u) | (x & 0xFF00u) << 8;
#endif
}

// sum + four unsigned bytes times four signed 16-bit numbers.
INLINE int dot_four(int sum, uint q, uint low, uint high) {
#ifdef __NV_CL_C_VERSION
    int half_sum, whole;
    __asm__("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(half_sum) : "r"(low), "r"(q), "r"(sum));
    __asm__("dp2a.hi.s32.u32 %0, %1, %2, %3;" : "=r"(whole) : "r"(high), "r"(q), "r"(half_sum));
    return whole;
#else
    sum += (int)(q & 0xFF) * (short)(low & 0xFFFFu) + (int)(q >> 8 & 0xFF) * ((int)low >> 16);
    return sum + (int)(q >> 16 & 0xFF) * (short)(high & 0xFFFFu) +
           (int)(q >> 24) * ((int)high >> 16);
#endif
}

INLINE int low_sum(uint sums) { return (short)(sums & 0xFFFFu); }
INLINE int high_sum(uint sums) { return (int)sums >> 16; }

// Where 16 rows lie, for the item's own row.
typedef struct {
    const GLOBAL uchar *header;
    const GLOBAL uint *lane;
} LANE_ROWS;

INLINE LANE_ROWS lane_rows(uint dtype, const MATMUL *p, uint row_group) {
    LANE_ROWS rows;
    rows.header = p->weight + (ulong)row_group * group_bytes(dtype, p->columns);
    rows.lane = (const GLOBAL uint *)(rows.header + header_bytes(dtype, p->columns)) +
                get_local_id(0) % LANES;
    return rows;
}

INLINE const GLOBAL uchar *unit_header(uint dtype, LANE_ROWS rows, uint column) {
    return rows.header + column / UNIT_ELEMENTS(dtype) * UNIT_BYTES(dtype);
}

// Block `part` of the segment that begins at `column`.
INLINE BLOCK load_block(uint dtype, LANE_ROWS rows, uint column, uint part) {
    BLOCK block;
    const uint item = get_local_id(0);
    const GLOBAL uchar *unit = unit_header(dtype, rows, column + 32 * part);
    const uint start = body_vectors(dtype, column);
    const uint vector = start + SUB_SCALE_VECTORS(dtype) + part * BLOCK_VECTORS(dtype);
    UNROLL for (int t = 0; t < 8; t++)
        block.q[t] = swap_middle(lane_bytes(dtype, rows.lane, vector, t));
    if (HAS_TABLE(dtype))
        vstore8(look_up_lanes(table_bytes(dtype), vload8(0, block.q)), 0, block.q);
    if (IS_SUPER(dtype)) {
        const uint halves = HAS_HALF_BLOCKS(dtype) ? 2 : 1;
        UNROLL for (uint i = 0; i < halves; i++) {
            const uint s = halves * part + i;
            block.scale[i] = lane_sub_scale(dtype, unit, item, rows.lane, start, s);
            if (HAS_MINIMUM(dtype))
                block.minimum[i] = lane_sub_minimum(dtype, rows.lane, start, s);
        }
    } else {
        block.d = lane_scale(dtype, unit, item);
        if (HAS_MINIMUM(dtype)) block.least = lane_minimum(unit, item);
    }
    return block;
}

// The block's contribution for the 32 activations m, whose sums are `sums`.
INLINE void add_block(uint dtype, const BLOCK *block, const GLOBAL short *m, uint sums,
                      __local PARTIALS *partials, uint slot) {
    const uint item = get_local_id(0);
    const GLOBAL uint4 *pairs = (const GLOBAL uint4 *)m;
    int dot[2] = {0, 0};
    UNROLL for (int i = 0; i < 4; i++) {
        const uint4 a = pairs[i];
        dot[i / 2] = dot_four(dot[i / 2], block->q[2 * i], a.x, a.y);
        dot[i / 2] = dot_four(dot[i / 2], block->q[2 * i + 1], a.z, a.w);
    }
    dot[0] -= OFFSET(dtype) * low_sum(sums);
    dot[1] -= OFFSET(dtype) * high_sum(sums);
    const int sum = low_sum(sums) + high_sum(sums);
    if (HAS_HALF_BLOCKS(dtype)) {
        partials->first[slot][item] = block->scale[0] * dot[0] + block->scale[1] * dot[1];
        if (HAS_MINIMUM(dtype))
            partials->second[slot][item] =
                block->minimum[0] * low_sum(sums) + block->minimum[1] * high_sum(sums);
    } else if (IS_SUPER(dtype)) {
        partials->first[slot][item] = block->scale[0] * (dot[0] + dot[1]);
        if (HAS_MINIMUM(dtype)) partials->second[slot][item] = block->minimum[0] * sum;
    } else {
        float term = block->d * (float)(dot[0] + dot[1]);
        if (HAS_MINIMUM(dtype)) term = term + block->least * (float)sum;
        partials->first[slot][item] = as_int(term);
    }
}

// The segment of `slot` that begins at `column`, for the item's row; before the activation's scale.
INLINE float slot_segment(uint dtype, LANE_ROWS rows, uint column, uint columns,
                          const __local PARTIALS *partials, uint slot) {
    const __local int *first = partials->first[slot] + get_local_id(0) % LANES;
    const __local int *second = partials->second[slot] + get_local_id(0) % LANES;
    if (IS_SUPER(dtype)) {
        const GLOBAL uchar *unit = unit_header(dtype, rows, column);
        int scaled = 0, minima = 0;
        UNROLL for (int b = 0; b < SEGMENT_BLOCKS; b++) {
            scaled += first[b * LANES];
            if (HAS_MINIMUM(dtype)) minima += second[b * LANES];
        }
        float value = lane_scale(dtype, unit, get_local_id(0)) * (float)scaled;
        if (HAS_MINIMUM(dtype))
            value = value - lane_minimum(unit, get_local_id(0)) * (float)minima;
        return value;
    }
    const uint blocks = min(columns - column, (uint)SEGMENT) / 32;
    float value = 0.0f;
    for (uint b = 0; b < blocks; b++) value = value + as_float(first[b * LANES]);
    return value;
}

// One token: the slots are eight segments.
INLINE void group_row_decode(uint dtype, MEMORY memory, const MATMUL *p, uint row_group) {
    __local PARTIALS *partials = (__local PARTIALS *)memory->group;
    __local float *values = (__local float *)(partials + 1);
    const uint item = get_local_id(0), part = item / LANES;
    const uint row = row_group * LANES + item % LANES;
    const LANE_ROWS rows = lane_rows(dtype, p, row_group);
    SPAN_FOLD fold = {0.0f, 0.0f, 0};
    for (uint first = 0; first < p->columns; first += SLOTS * SEGMENT) {
        const uint count = min((p->columns - first + SEGMENT - 1) / SEGMENT, (uint)SLOTS);
        _Pragma("unroll 4") for (uint slot = 0; slot < count; slot++) {
            const uint column = first + slot * SEGMENT, k = column + 32 * part;
            if (k >= p->columns) continue;
            const BLOCK block = load_block(dtype, rows, column, part);
            add_block(dtype, &block, p->m + k, p->sums[k / 32], partials, slot);
        }
        LOCAL_BARRIER;
        if (part < count) {
            const uint column = first + part * SEGMENT;
            values[item] = slot_segment(dtype, rows, column, p->columns, partials, part) *
                           p->scale[column / SEGMENT];
        }
        LOCAL_BARRIER;
        if (part == 0)
            for (uint slot = 0; slot < count; slot++)
                fold_next(&fold, values[slot * LANES + item]);
    }
    if (part == 0 && row < p->rows) p->y[row] = fold_end(&fold);
}

// Up to eight tokens: they are the slots.
INLINE void group_row_prefill(uint dtype, MEMORY memory, const MATMUL *p, uint row_group) {
    const uint item = get_local_id(0), part = item / LANES;
    const uint row = row_group * LANES + item % LANES;
    const uint count = p->tokens;
    const LANE_ROWS rows = lane_rows(dtype, p, row_group);
    const GLOBAL float *scale = p->scale + source_row(p, min(part, count - 1)) * p->scale_stride;
    SPAN_FOLD fold = {0.0f, 0.0f, 0};
    for (uint column = 0; column < p->columns; column += SEGMENT) {
        // Two buffers, so that one barrier a segment is enough.
        __local PARTIALS *partials = (__local PARTIALS *)memory->group + column / SEGMENT % 2;
        const uint k = column + 32 * part;
        if (k < p->columns) {
            const BLOCK block = load_block(dtype, rows, column, part);
            for (uint slot = 0; slot < count; slot++) {
                const ulong source = source_row(p, slot);
                add_block(dtype, &block, p->m + source * p->m_stride + k,
                          p->sums[source * p->sums_stride + k / 32], partials, slot);
            }
        }
        LOCAL_BARRIER;
        if (part < count)
            fold_next(&fold, slot_segment(dtype, rows, column, p->columns, partials, part) *
                                 scale[column / SEGMENT]);
    }
    LOCAL_BARRIER;
    if (part < count && row < p->rows)
        p->y[target_row(p, part) * p->y_stride + row] = fold_end(&fold);
}

INLINE void group_rows(uint dtype, MEMORY memory, const MATMUL *p, const EXPERTS *experts) {
    const uint row_groups = (p->rows + LANES - 1) / LANES;
    const uint units = row_groups * chunk_count(experts);
    if (single_tokens(experts)) {
        FOR_GROUP_UNITS(unit, units) {
            const MATMUL q = chunk_product(p, experts, unit / row_groups);
            group_row_decode(dtype, memory, &q, unit % row_groups);
        }
        return;
    }
    FOR_GROUP_UNITS(unit, units) {
        const MATMUL q = chunk_product(p, experts, unit / row_groups);
        group_row_prefill(dtype, memory, &q, unit % row_groups);
    }
}

#endif

#endif
