// Ops that a whole work-group shares, on devices where a worker is a work-item (GROUP_SIZE > 1).
// Units of work are taken in turn by groups; there is no promise about who computes what, so the
// host's schedule has every packet wait for those it depends on.

#ifndef GROUP_H
#define GROUP_H

#if GROUP_SIZE > 1

#if GROUP_SIZE != 128
#error "work-groups have 1 or 128 items"
#endif

// A segment is halved by 16 items; a group takes this many at a time.
#define GROUP_SEGMENTS (GROUP_SIZE / 16)

#define LOCAL_BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#define FOR_GROUP_UNITS(unit, units) \
    for (uint unit = get_group_id(0); unit < (units); unit += get_num_groups(0))
#define FOR_WORKER_UNITS(unit, units) for (uint unit = worker; unit < (units); unit += workers)

// The sixteen products that item `place` of a segment's sixteen halves: 16 apart.
INLINE float halved_sixteen(const float *products) {
    return fold16(vload16(0, products));
}

// Adds `count` segments (R4, then R3), of which item i holds the halved products at i % 16 of
// segment i / 16. Every item gets the sum.
INLINE void fold_group_segments(MEMORY memory, float halved, uint count, SPAN_FOLD *fold) {
    __local float *places = (__local float *)memory->group;
    __local float *segments = places + GROUP_SIZE;
    const uint item = get_local_id(0);
    places[item] = halved;
    LOCAL_BARRIER;
    if (item < count) segments[item] = fold16(vload16(item, places));
    LOCAL_BARRIER;
    for (uint i = 0; i < count; i++) fold_next(fold, segments[i]);
}

#endif

#endif
