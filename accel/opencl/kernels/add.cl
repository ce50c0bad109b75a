// ADD: y = a + b.
DEFINE_ELEMENTWISE(add, , A(a) + A(b))
