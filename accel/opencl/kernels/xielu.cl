// XIELU: y = (p x) x + b x where x > 0, else ((exp(min(x, e)) - 1) - x) n + b x. A comparison with NaN
// is false, so NaN stays.

INLINE float16 xielu16(float16 x, const GLOBAL float *parameters) {
    const float16 p = (float16)(parameters[0]), n = (float16)(parameters[1]);
    const float16 b = (float16)(parameters[2]), e = (float16)(parameters[3]);
    const float16 bounded = select(x, e, (int16)(x > e));
    const float16 below = ((exp16(bounded) - (float16)(1.0f)) - x) * n;
    return select(below, (p * x) * x, (int16)(x > (float16)(0.0f))) + b * x;
}

DEFINE_ELEMENTWISE(xielu, , xielu16(A(x), op.parameters))
