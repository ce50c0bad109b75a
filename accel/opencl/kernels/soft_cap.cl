// SOFT_CAP: y = cap * tanh(x / cap).  operands: x, y.  sizes: tokens, width.  reals: cap.
DEFINE_ELEMENTWISE(soft_cap, 1, const float16 cap = packet->real[0], soft_cap16(A(0), cap))
