// Sends this device's share of each tensor to every other device and receives their shares: a block
// copies its part of the rows to the memory of each peer (sending.h). When the kernel has ended, all
// shares have arrived and no peer has to read from this device.
//
// TENSORS is the number of packets with operands `part` and `whole`, from number FIRST_TENSOR on; it
// is 0 where devices only wait for each other. PEERS is the number of other devices.

#include "sending.h"

#define PART 0
#define COLUMNS 2
#define AT_ONCE 4

// The rows of a share for all peers, in vectors of four floats if all rows are aligned. A thread has
// several of them on their way.
template <typename T>
DEVICE void send(const float *from, float *const (&to)[PEERS], size_t stride, unsigned rows,
                 unsigned columns) {
    const unsigned each = sizeof(T) / sizeof(float), width = columns / each;
    const unsigned all = rows * width, step = gridDim.x * blockDim.x;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += AT_ONCE * step) {
        T sent[AT_ONCE];
        size_t at[AT_ONCE];
#pragma unroll
        for (unsigned n = 0; n < AT_ONCE; n++) {
            const unsigned own = i + n * step;
            at[n] = own / width * stride + own % width * each;
            if (own < all) sent[n] = *(const T *)(from + at[n]);
        }
#pragma unroll
        for (unsigned n = 0; n < AT_ONCE; n++)
            for (unsigned peer = 0; i + n * step < all && peer < PEERS; peer++)
                *(T *)(to[peer] + at[n]) = sent[n];
    }
}

extern "C" __global__ void all_gather(U64 scratch, U64 inputs, const __grid_constant__ PACKETS packets,
                                      U64 workspace) {
    const LAUNCH launch = {scratch, inputs, (U64)&packets, 0u};
    PRECEDING_DONE;
    FOLLOWING_MAY_START;
    for (unsigned tensor = FIRST_TENSOR; tensor < FIRST_TENSOR + TENSORS; tensor++) {
        const PACKET *packet = packet_of(launch, tensor);
        const float *part = (const float *)operand_at(launch, tensor * 16 + PART);
        const unsigned rows = count_of(launch, packet);
        const size_t stride = stride_at(launch, tensor * 16 + PART);
        const unsigned columns = packet->size[COLUMNS];
        float *to[PEERS];
        U64 alignment = (U64)part | stride * 4 | columns * 4;
#pragma unroll
        for (unsigned peer = 0; peer < PEERS; peer++) {
            to[peer] = (float *)((char *)part + others_of(launch).of[peer].apart[tensor - FIRST_TENSOR]);
            alignment |= (U64)to[peer];
        }
        if (alignment % sizeof(float4) == 0)
            send<float4>(part, to, stride, rows, columns);
        else
            send<float>(part, to, stride, rows, columns);
    }
    meet_others(launch);
}
