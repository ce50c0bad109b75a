// MUL: y = a * b.
DEFINE_ELEMENTWISE(mul, , A(a) * A(b))
