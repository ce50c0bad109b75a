// STREAM_OUT: one OUTPUT_EVENT per row, event n in entry n mod ring_events of the ring; the step's
// record numbers them. Of several events at one entry the last one stays.

void op_stream_out(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {
    OPEN(stream_out);
    for (uint row = worker; row < op.rows; row += workers) {
        if (row + op.ring_events < op.rows) continue;
        const GLOBAL int *query = op.query + op.output_rows[row] * op.query_stride;
        const uint number = op.step[STEP_FIRST_EVENT] + row;
        GLOBAL int *event = op.ring + number % op.ring_events * EVENT_WORDS;
        event[0] = number;
        event[1] = query[1];
        event[3] = op.token[row];
        event[4] = query[2] + 1;
    }
}
