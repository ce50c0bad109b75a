// SWIGLU: y = f(gate) * up; f is silu (0), gelu (1) or sigmoid (2).
// operands: gate, up, y.  sizes: tokens, width, activation.
DEFINE_ELEMENTWISE(swiglu, 2, const int activation = packet->size[2],
                   (activation == 2   ? sigmoid16(A(0))
                    : activation == 1 ? gelu16(A(0))
                                      : silu16(A(0))) *
                       A(1))
