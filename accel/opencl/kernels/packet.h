// What every op receives: the memory map, its packet, and which worker of how many it is.
//
// Build options: SHARED_ADDRESSES is 1 when the device dereferences host addresses; else an address
// names one of BANKS buffers and an offset in it. A worker is a core, and a work-group of one item.

#ifndef PACKET_H
#define PACKET_H

#define GLOBAL __global

// A vector of several parts: accel/native/opencl_c.h has functions of these names for C.
#ifndef NATIVE_C
#define make_float16 (float16)
#define make_int16 (int16)
#define make_uint16 (uint16)
#define make_uint4 (uint4)
#define make_uint8 (uint8)
#define make_ulong8 (ulong8)
#endif

// Short loops over vectors must be unrolled to stay in registers.
#define UNROLL _Pragma("unroll")
#ifdef __clang__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif
#define OUTLINED static __attribute__((noinline))

// Mirrored by accel/packets/packet.py, which also says how many OPERANDS, SIZES and REALS there are;
// every device is asked whether the two agree. Kernels read the operands, sizes and reals by the
// names accel/packets/ops.py gives them, see OPEN.
typedef struct {
    uint op;                  // which op_<name>, by its index in the list of ops
    uint wait;                // 1: all workers meet at a barrier before this packet
    uint everyone;            // 1: every worker computes the whole packet into its own memory
    uint split_columns;       // 1: an elementwise op divides columns among workers, 0: rows
    uint dtype;               // GGML type id of the stored operand
    uint layout;              // how layouts.py arranged its bytes
    uint counted;             // the first size is what it says (0), or for each of the step's
                              // tokens (1) or rows (2)
    uint reserved;
    ulong operand[OPERANDS];  // addresses for at(); ABSENT where an optional operand is left out
    uint stride[OPERANDS];    // elements from one row of the operand to the next
    int size[SIZES];          // dimensions and integer parameters, in the order of the table
    float real[REALS];        // float parameters, in the order of the table
} PACKET;

// An address with OWN_MEMORY is an offset into the worker's own scratch memory, one with
// SCRATCH_MEMORY into the scratch memory all workers share, one with INPUT_MEMORY into the inputs of
// the step, which begin with its STEP record.
#define OFFSET_MASK ((ulong)0x00FFFFFFFFFFFFFF)

#if SHARED_ADDRESSES
typedef struct {
    ulong scratch;
    ulong own;
    ulong input;
} MEMORY_MAP;
#define BANK_PARAMETERS
#else
typedef struct {
    GLOBAL uchar *bank[BANKS];
    GLOBAL uchar *scratch;
    GLOBAL uchar *own;
    GLOBAL uchar *input;
} MEMORY_MAP;
#define BANK_PARAMETERS \
    GLOBAL uchar *bank0, GLOBAL uchar *bank1, GLOBAL uchar *bank2, GLOBAL uchar *bank3, \
        GLOBAL uchar *bank4, GLOBAL uchar *bank5, GLOBAL uchar *bank6, GLOBAL uchar *bank7, \
        GLOBAL uchar *bank8, GLOBAL uchar *bank9, GLOBAL uchar *bank10, GLOBAL uchar *bank11, \
        GLOBAL uchar *bank12, GLOBAL uchar *bank13, GLOBAL uchar *bank14, GLOBAL uchar *bank15,
#define BANK_POINTERS \
    { bank0, bank1, bank2, bank3, bank4, bank5, bank6, bank7, bank8, bank9, bank10, bank11, \
      bank12, bank13, bank14, bank15 }
#endif

typedef const MEMORY_MAP *MEMORY;

static inline GLOBAL uchar *at(MEMORY memory, ulong address) {
#if SHARED_ADDRESSES
    ulong base = 0;
    if (address & OWN_MEMORY) base = memory->own;
    else if (address & SCRATCH_MEMORY) base = memory->scratch;
    else if (address & INPUT_MEMORY) base = memory->input;
    return (GLOBAL uchar *)(base + (address & OFFSET_MASK));
#else
    ulong offset = address & OFFSET_MASK;
    if (address & OWN_MEMORY) return memory->own + offset;
    if (address & SCRATCH_MEMORY) return memory->scratch + offset;
    if (address & INPUT_MEMORY) return memory->input + offset;
    return memory->bank[address >> BANK_SHIFT] + offset;
#endif
}

// The first size of a packet in this step.
static inline uint count_of(MEMORY memory, const GLOBAL PACKET *packet) {
    const uint number = packet->size[0];
    if (!packet->counted) return number;
    return number * ((const GLOBAL uint *)at(memory, INPUT_MEMORY))[packet->counted - 1];
}

// The part of [0, count) that belongs to a worker: whole granules, contiguous, at most one granule
// apart in size. Ops that split the same count by the same granule own the same elements, which is
// what lets one follow the other without a barrier.
typedef struct {
    uint begin;
    uint end;
} SHARE;

static inline SHARE share(uint count, uint granule, uint worker, uint workers) {
    ulong granules = (count + granule - 1) / granule;
    SHARE s;
    s.begin = min((uint)(granules * worker / workers * granule), count);
    s.end = min((uint)(granules * (worker + 1) / workers * granule), count);
    return s;
}

// Columns of products, and of elementwise ops after them, are divided at multiples of this: groups
// of rows in steps whose products take one at a time, so that small matrices keep more workers busy,
// else tiles of two groups.
static inline uint column_granule(MEMORY memory) {
    const uint tokens = *(const GLOBAL uint *)at(memory, INPUT_MEMORY);
    return tokens <= FEW_TOKENS ? COLUMN_GRANULE / 2 : COLUMN_GRANULE;
}

#endif
