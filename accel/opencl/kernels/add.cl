// ADD: y = a + b.  operands: a, b, y.  sizes: tokens, width.
DEFINE_ELEMENTWISE(add, 2, , A(0) + A(1))
