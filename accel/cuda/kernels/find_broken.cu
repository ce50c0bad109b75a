// Checks that stored weights contain no numbers that are not finite, as they arrive on the device.
// A thread checks the words of a block, which need not be aligned, and continues with blocks at a
// fixed distance. All threads that find such a number write the same result.

typedef unsigned char BYTE;

static __device__ __forceinline__ unsigned word_at(const BYTE *at, unsigned bytes) {
    return bytes == 1 ? at[0] : at[0] | at[1] << 8;
}

extern "C" __global__ void find_broken(const unsigned char *stored, unsigned *broken,
                                       unsigned blocks, unsigned block_bytes, unsigned first,
                                       unsigned second, unsigned word_bytes, unsigned exponent) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < blocks;
         i += gridDim.x * blockDim.x) {
        const BYTE *block = stored + (unsigned long long)i * block_bytes;
        const unsigned a = word_at(block + first, word_bytes);
        const unsigned b = word_at(block + second, word_bytes);
        if ((a & exponent) == exponent || (b & exponent) == exponent) *broken = 1;
    }
}
