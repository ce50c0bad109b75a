// SCALE: y = x * factor.
DEFINE_ELEMENTWISE(scale, , A(x) * op.factor)
