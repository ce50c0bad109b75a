// BIAS_ADD: y = x + bias.  operands: x, bias, y.  sizes: tokens, width.
DEFINE_ELEMENTWISE(bias_add, 2, , A(0) + V(1))
