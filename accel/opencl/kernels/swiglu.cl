// SWIGLU: y = silu(gate) * up, or gelu(gate) * up.
// operands: gate, up, y.  sizes: tokens, width, gelu.
DEFINE_ELEMENTWISE(swiglu, 2, const bool gelu = packet->size[2],
                   (gelu ? gelu16(A(0)) : silu16(A(0))) * A(1))
