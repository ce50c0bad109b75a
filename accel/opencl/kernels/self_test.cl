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

__kernel void packet_layout(__global uint *place) {
    PACKET packet;
    place[0] = sizeof(PACKET);
#define PLACE(field) (uint)((uchar *)&packet.field - (uchar *)&packet)
    place[1] = PLACE(op);
    place[2] = PLACE(wait);
    place[3] = PLACE(everyone);
    place[4] = PLACE(split_columns);
    place[5] = PLACE(dtype);
    place[6] = PLACE(layout);
    place[7] = PLACE(counted);
    place[8] = PLACE(operand);
    place[9] = PLACE(stride);
    place[10] = PLACE(size);
    place[11] = PLACE(real);
#undef PLACE
}
