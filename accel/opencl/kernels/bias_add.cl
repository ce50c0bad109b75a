// BIAS_ADD: y = x + bias.
DEFINE_ELEMENTWISE(bias_add, , A(x) + V(bias))
