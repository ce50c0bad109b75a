// Changes the inputs of a step behind one that verifies drafts: they are written as if all were
// accepted. Its events are in `ring`, which has `events` of them. A thread takes a sequence.

#define NO_QUERY 0xffffffffu

// A sequence with so many drafts, whose events begin with number `event`. The number of rejected
// ones is subtracted from the words `first` and `second`. `query` is the first word of the token
// behind all drafts, NO_QUERY if the step has none of them: the token that was sampled behind the
// accepted ones belongs as many records before it as were rejected.
struct SHIFT {
    unsigned event, drafts, first, second, query;
};
struct SHIFTS {
    SHIFT of[32];
};

extern "C" __global__ void shift_inputs(unsigned *inputs, const unsigned *ring, unsigned events,
                                        unsigned count, const __grid_constant__ SHIFTS shifts) {
    if (threadIdx.x >= count) return;
    const SHIFT &own = shifts.of[threadIdx.x];
    const unsigned accepted = ring[own.event % events * EVENT_WORDS + EVENT_FLAGS];
    const unsigned rejected = own.drafts - accepted;
    inputs[own.first] -= rejected;
    inputs[own.second] -= rejected;
    if (own.query != NO_QUERY) {
        const int token = (int)ring[(own.event + accepted) % events * EVENT_WORDS + EVENT_TOKEN];
        inputs[own.query - rejected * QUERY_WORDS + QUERY_TOKEN] = token < 0 ? 0 : token;
    }
}
