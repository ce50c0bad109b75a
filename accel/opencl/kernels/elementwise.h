// The loop the elementwise ops share.
//
// DEFINE_ELEMENTWISE(name, OUTPUT, SETUP, EXPRESSION) defines op_name over [tokens, width]: SETUP
// declares what the expression needs, EXPRESSION gives a float16 from A(i), the elements of operand
// i at the same row and columns, and V(i), those of a vector operand at the same columns.
// sizes begin with tokens, width. split_columns divides columns by COLUMN_GRANULE, as the matrix
// products do, else tokens are divided.
//
// DEFINE_BY_COLUMNS is the same for ops that always divide columns, as the product before them does;
// SETUP is done for every token.

#ifndef ELEMENTWISE_H
#define ELEMENTWISE_H

#define A(i) load_padded(OPERAND(float, i) + (ulong)token * packet->stride[i] + k, count)
#define V(i) load_padded(OPERAND(float, i) + k, count)

#if GROUP_SIZE > 1

#define DEFINE_ELEMENTWISE(name, OUTPUT, SETUP, EXPRESSION)                                     \
    void op_##name(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {     \
        const uint tokens = packet->size[0], width = packet->size[1];                           \
        const uint pieces = (width + 15) / 16;                                                  \
        SETUP;                                                                                  \
        FOR_WORKER_UNITS(unit, tokens * pieces) {                                               \
            const uint token = unit / pieces, k = unit % pieces * 16;                           \
            const int count = (int)(width - k);                                                 \
            const float16 value = EXPRESSION;                                                   \
            GLOBAL float *y = OPERAND(float, OUTPUT);                                           \
            store_partial(value, y + (ulong)token * packet->stride[OUTPUT] + k, count);         \
        }                                                                                       \
    }

#define DEFINE_BY_COLUMNS(name, OUTPUT, SETUP, EXPRESSION)                                      \
    void op_##name(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {     \
        const uint tokens = packet->size[0], width = packet->size[1];                           \
        const uint pieces = (width + 15) / 16;                                                  \
        FOR_WORKER_UNITS(unit, tokens * pieces) {                                               \
            const uint token = unit / pieces, k = unit % pieces * 16;                           \
            const int count = (int)(width - k);                                                 \
            SETUP;                                                                              \
            const float16 value = EXPRESSION;                                                   \
            GLOBAL float *y = OPERAND(float, OUTPUT);                                           \
            store_partial(value, y + (ulong)token * packet->stride[OUTPUT] + k, count);         \
        }                                                                                       \
    }

#else

#define DEFINE_BY_COLUMNS(name, OUTPUT, SETUP, EXPRESSION)                                      \
    void op_##name(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {     \
        const uint tokens = packet->size[0];                                                    \
        const SHARE columns = share(packet->size[1], COLUMN_GRANULE, worker, workers);          \
        for (uint token = 0; token < tokens; token++) {                                         \
            SETUP;                                                                              \
            for (uint k = columns.begin; k < columns.end; k += 16) {                            \
                const int count = (int)(columns.end - k);                                       \
                const float16 value = EXPRESSION;                                               \
                GLOBAL float *y = OPERAND(float, OUTPUT);                                       \
                store_partial(value, y + (ulong)token * packet->stride[OUTPUT] + k, count);     \
            }                                                                                   \
        }                                                                                       \
    }

#define DEFINE_ELEMENTWISE(name, OUTPUT, SETUP, EXPRESSION)                                     \
    void op_##name(MEMORY memory, const GLOBAL PACKET *packet, uint worker, uint workers) {     \
        const uint tokens = packet->size[0], width = packet->size[1];                           \
        SETUP;                                                                                  \
        SHARE rows = {0, tokens}, columns = {0, width};                                         \
        if (packet->split_columns)                                                              \
            columns = share(width, COLUMN_GRANULE, worker, workers);                            \
        else                                                                                    \
            rows = share(tokens, 1, worker, workers);                                           \
        for (uint token = rows.begin; token < rows.end; token++) {                              \
            for (uint k = columns.begin; k < columns.end; k += 16) {                            \
                int count = (int)(columns.end - k);                                             \
                float16 value = EXPRESSION;                                                     \
                GLOBAL float *y = OPERAND(float, OUTPUT);                                       \
                store_partial(value, y + (ulong)token * packet->stride[OUTPUT] + k, count);     \
            }                                                                                   \
        }                                                                                       \
    }

#endif

#endif
