// What the start-up self-test asks the device: bits of divisions and roots, whether it reads host
// addresses, and how it lays a packet out.

__kernel void divide_and_root(__global const float *a, __global const float *b,
                              __global float *quotient, __global float *root,
                              __global float *product) {
    const uint i = get_global_id(0);
    quotient[i] = divide1(a[i], b[i]);
    root[i] = sqrt1(a[i]);
    product[i] = a[i] * b[i] + a[i];
}

#if SHARED_ADDRESSES
__kernel void copy_word(ulong from, ulong to) {
    *(GLOBAL uint *)to = *(const GLOBAL uint *)from;
}
#endif

__kernel void packet_layout(__global uint *offsets) {
    PACKET packet;
    offsets[0] = sizeof(PACKET);
#define OFFSET(field) (uint)((uchar *)&packet.field - (uchar *)&packet)
    offsets[1] = OFFSET(op);
    offsets[2] = OFFSET(wait);
    offsets[3] = OFFSET(everyone);
    offsets[4] = OFFSET(split_columns);
    offsets[5] = OFFSET(dtype);
    offsets[6] = OFFSET(layout);
    offsets[7] = OFFSET(counted);
    offsets[8] = OFFSET(operand);
    offsets[9] = OFFSET(stride);
    offsets[10] = OFFSET(size);
    offsets[11] = OFFSET(real);
#undef OFFSET
}
