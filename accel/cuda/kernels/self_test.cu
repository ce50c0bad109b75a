// What the arithmetic rules build on: quotient, root, and a product that is rounded before the sum.

extern "C" __global__ void arithmetic(const float *a, const float *b, float *quotient, float *root,
                                      float *sum, uint count) {
    const uint i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    quotient[i] = NATIVE_QUOTIENT(a[i], b[i]);
    root[i] = NATIVE_SQUARE_ROOT(a[i]);
    sum[i] = a[i] * b[i] + a[i];
}
