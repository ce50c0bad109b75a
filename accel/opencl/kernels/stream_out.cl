// STREAM_OUT: append one OUTPUT_EVENT per row to the ring.
//
// operands: token, output_rows, query, ring
// sizes:    rows, ring_events
// Entry 0 counts the events ever written; event n lies in entry 1 + n mod (ring_events - 1). One
// worker does it all: later rows may overwrite earlier ones.

void op_stream_out(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    if (worker != 0) return;
    const uint rows = packet->size[0], ring_events = packet->size[1];
    GLOBAL int *ring = OPERAND(int, 3);
    const uint written = ring[0];
    for (uint row = 0; row < rows; row++) {
        const GLOBAL int *query =
            OPERAND(int, 2) + OPERAND(int, 1)[row] * packet->stride[2];
        uint number = written + row;
        GLOBAL int *event = ring + 8 * (1 + number % (ring_events - 1));
        event[0] = number;
        event[1] = query[1];
        event[3] = OPERAND(int, 0)[row];
        event[4] = query[2] + 1;
    }
    ring[0] = written + rows;
}
