// SWIGLU: y = f(gate) * up; f is silu (0), gelu (1) or sigmoid (2).
DEFINE_ELEMENTWISE(swiglu, ,
                   (op.activation == 2   ? sigmoid16(A(gate))
                    : op.activation == 1 ? gelu16(A(gate))
                                         : silu16(A(gate))) *
                       A(up))
