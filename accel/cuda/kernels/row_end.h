// The results of STREAM_OUT and STORE_REQUEST_STATE for the token of a step's only row.

#ifndef ROW_END_H
#define ROW_END_H

// The end of a row: its slot, the position after it, and the number of its event.
struct ROW_END {
    unsigned slot, position, event;

    // `query` is the record of the row's token, `step` that of the step.
    __device__ __forceinline__ void open(ADDRESS query, ADDRESS step) {
        slot = U32_AT(query, QUERY_SLOT), position = U32_AT(query, QUERY_POSITION) + 1;
        event = U32_AT(step, STEP_FIRST_EVENT);
    }
    // `slots` are records of slots, `ring` those of `events` events.
    __device__ __forceinline__ void store(ADDRESS slots, size_t stride, ADDRESS ring,
                                          unsigned events, unsigned token) const {
        const ADDRESS state = ROW(slots, slot, stride);
        U32_AT(state, SLOT_POSITION) = position;
        U32_AT(state, SLOT_LAST_TOKEN) = token;
        const ADDRESS entry = ROW(ring, event % events, EVENT_WORDS);
        U32_AT(entry, EVENT_SEQUENCE) = event;
        U32_AT(entry, EVENT_SLOT) = slot;
        U32_AT(entry, EVENT_TOKEN) = token;
        U32_AT(entry, EVENT_POSITION) = position;
    }
};

#endif
