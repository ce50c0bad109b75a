// The loop the elementwise ops share.
//
// DEFINE_ELEMENTWISE(name, SETUP, EXPRESSION) defines op_name over y [tokens, width]: SETUP declares
// what the expression needs, EXPRESSION gives a float16 from A(operand), the elements of an operand
// at the same row and columns, and V(operand), those of a vector operand at the same columns.
// split_columns divides columns by column_granule(), as the matrix products do, else tokens are
// divided.
//
// DEFINE_BY_COLUMNS is the same for ops that always divide columns, as the product before them does;
// SETUP is done for every token.

#ifndef ELEMENTWISE_H
#define ELEMENTWISE_H

#define A(operand) load_padded(op.operand + (ulong)token * op.operand##_stride + k, count)
#define V(operand) load_padded(op.operand + k, count)

#define DEFINE_BY_COLUMNS(name, SETUP, EXPRESSION)                                              \
    void op_##name(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {     \
        OPEN(name);                                                                             \
        const SHARE columns = share(op.width, column_granule(memory), worker, workers);         \
        for (uint token = 0; token < op.tokens; token++) {                                      \
            SETUP;                                                                              \
            for (uint k = columns.begin; k < columns.end; k += 16) {                            \
                const int count = (int)(columns.end - k);                                       \
                const float16 value = EXPRESSION;                                               \
                store_partial(value, op.y + (ulong)token * op.y_stride + k, count);             \
            }                                                                                   \
        }                                                                                       \
    }

#define DEFINE_ELEMENTWISE(name, SETUP, EXPRESSION)                                             \
    void op_##name(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {     \
        OPEN(name);                                                                             \
        SETUP;                                                                                  \
        SHARE rows = {0, op.tokens}, columns = {0, op.width};                                   \
        if (packet->split_columns)                                                              \
            columns = share(op.width, column_granule(memory), worker, workers);                 \
        else                                                                                    \
            rows = share(op.tokens, 1, worker, workers);                                        \
        for (uint token = rows.begin; token < rows.end; token++) {                              \
            for (uint k = columns.begin; k < columns.end; k += 16) {                            \
                int count = (int)(columns.end - k);                                             \
                float16 value = EXPRESSION;                                                     \
                store_partial(value, op.y + (ulong)token * op.y_stride + k, count);             \
            }                                                                                   \
        }                                                                                       \
    }

#endif
