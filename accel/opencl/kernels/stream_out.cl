// STREAM_OUT: append one OUTPUT_EVENT per row to the ring.
//
// operands: token, output_rows, query, ring
// sizes:    rows, ring_events
// Entry 0 counts the events ever written; event n lies in entry 1 + n mod (ring_events - 1). One
// worker does it all: later rows may overwrite earlier ones.

void op_stream_out(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(stream_out);
    if (worker != 0) return;
    GLOBAL int *ring = op.ring;
    const uint written = ring[0];
    for (uint row = 0; row < op.rows; row++) {
        const GLOBAL int *query =
            op.query + op.output_rows[row] * op.query_stride;
        uint number = written + row;
        GLOBAL int *event = ring + 8 * (1 + number % (op.ring_events - 1));
        event[0] = number;
        event[1] = query[1];
        event[3] = op.token[row];
        event[4] = query[2] + 1;
    }
    ring[0] = written + op.rows;
}
