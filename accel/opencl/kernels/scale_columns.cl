// SCALE_COLUMNS: y = x * factors, one factor a column or one for all.
// operands: x, factors, y.  sizes: tokens, width, factors.
DEFINE_ELEMENTWISE(scale_columns, 2, const bool single = packet->size[2] == 1,
                   A(0) * (single ? (float16)(OPERAND(float, 1)[0]) : V(1)))
