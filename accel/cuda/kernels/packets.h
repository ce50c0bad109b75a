// The packets of the ops that a launch replaces: PACKET_COUNT packets, which are arguments of the
// launch, with PEERS also what it needs to know of so many other devices (sending.h). An operand number is 16 times the number of the packet, counted from the first of the
// launch, plus the index of the operand in that packet; it is -1 for an absent operand.

#ifndef PACKETS_H
#define PACKETS_H

#ifndef PEERS
#define PEERS 0
#endif
#if PEERS
// Another device: its words, and by how many bytes each of SENDS tensors lies apart there.
struct PEER {
    U64 words;
    long long apart[SENDS ? SENDS : 1];
};
struct OTHERS {
    U64 stop, index, words;  // the stop word, this device's number, its words
    PEER of[PEERS];
};
#endif
struct PACKETS {
    PACKET of[PACKET_COUNT];
#if PEERS
    OTHERS others;
#endif
};

static __device__ __forceinline__ const PACKET *packet_of(const LAUNCH &launch, int number) {
    return (const PACKET *)launch.packets + launch.index + number;
}

// The address of an operand. `index` is 16 packet + operand; a negative one names none: address 0.
static __device__ __forceinline__ unsigned char *operand_at(const LAUNCH &launch, int index) {
    if (index < 0) return 0;
    const U64 stored = packet_of(launch, index / 16)->operand[index % 16];
    return (unsigned char *)address_of(launch, stored);
}

static __device__ __forceinline__ size_t stride_at(const LAUNCH &launch, int index) {
    return index < 0 ? 0 : packet_of(launch, index / 16)->stride[index % 16];
}

// The first size: tokens or rows of this step.
static __device__ __forceinline__ unsigned count_of(const LAUNCH &launch, const PACKET *packet) {
    const unsigned each = packet->size[0];
    return packet->counted ? each * U32_AT(launch.inputs, packet->counted - 1) : each;
}

// The same in two steps: the word that is read from the inputs, and its value. No thread waits for
// the first before the second.
static __device__ __forceinline__ unsigned counted_word(const LAUNCH &launch,
                                                        const PACKET *packet) {
    return U32_AT(launch.inputs, packet->counted ? packet->counted - 1 : 0);
}
static __device__ __forceinline__ unsigned count_by(const PACKET *packet, unsigned word) {
    return packet->size[0] * (packet->counted ? word : 1u);
}

#endif
