// SCALE: y = x * factor.  operands: x, y.  sizes: tokens, width.  reals: factor.
DEFINE_ELEMENTWISE(scale, 1, const float16 factor = packet->real[0], A(0) * factor)
