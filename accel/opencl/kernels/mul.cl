// MUL: y = a * b.  operands: a, b, y.  sizes: tokens, width.
DEFINE_ELEMENTWISE(mul, 2, , A(0) * A(1))
