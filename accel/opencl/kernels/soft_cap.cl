// SOFT_CAP: y = cap * tanh(x / cap).
DEFINE_ELEMENTWISE(soft_cap, , soft_cap16(A(x), (float16)(op.cap)))
