// The records that a step kernel reads: its phases in order, as persistent.py makes them with the
// same record types. An operand is 0 if absent, an offset in the bank of exchanged floats if
// EXCHANGE_MEMORY is set, and otherwise an address as in packets. Operands are vectors 1 to
// OPERAND_VECTORS of a record; in shared memory they are addresses that still contain
// EXCHANGE_MEMORY if they had it. `counted` and `multiplier` are those of a packet.

#ifndef STEP_TABLE_H
#define STEP_TABLE_H

#include "packets.h"
#include "unit_stream.h"

#define MAX_PHASE_MATRICES 3
#define PRODUCT_KIND 0
#define ATTENTION_KIND 1
#define END_KIND 2
#define RECORD_VECTORS 16  // of a phase
#define OPERAND_VECTORS 8
#define MAX_RECORDS 3     // in shared memory

struct STEP_HEAD {
    unsigned phases, exchange_at, bank_bytes, works_at;
    const unsigned *stop;  // of the host, 0 as long as the step may run
    unsigned banks, peers_at;  // offset of PEER_DEVICES, if SHARED_STEP
};

// Norm, quantization and up to three products of one x, with the ops after them. `also` is the
// address of results that launches other than the phases read. Bit i of `everywhere` is set if all
// devices need the results of matrix i. If `turned`, x is first rotated back (rule R13).
struct PRODUCT_PHASE {
    unsigned kind, multiplier, counted, columns;
    U64 x, norm_weight, residual, picked;
    U64 units[MAX_PHASE_MATRICES], bias[MAX_PHASE_MATRICES], y[MAX_PHASE_MATRICES],
        also[MAX_PHASE_MATRICES];
    unsigned rows[MAX_PHASE_MATRICES], x_stride;
    unsigned y_stride[MAX_PHASE_MATRICES], also_stride[MAX_PHASE_MATRICES];
    unsigned residual_stride;
    float eps;
    unsigned norm, paired, activation, formats, slot_bits, everywhere;
    unsigned turned;
    unsigned reserved[9];
};

// Norm and rotation of heads, keys and values into their pages, and attention. Several devices have
// `own_heads`, or all heads: then they divide those of a token that sees more than `divided_from`
// positions.
struct ATTENTION_PHASE {
    unsigned kind, multiplier, counted, heads;
    U64 q, k, v, q_weight, k_weight, rope_table, query, pages, kv, parts, y, also, none[4];
    unsigned kv_heads, window, slots, q_stride, k_stride, v_stride, query_stride;
    unsigned pages_stride, y_stride, also_stride, rotary_pairs, neox, q_norm, k_norm;
    float scale, q_eps, k_eps;
    unsigned other_window;  // than the attention before it
    unsigned divided_from, own_heads;
    unsigned reserved[8];
};

// The ops that use the logits of one row. If `arriving` is given, the logits come from all devices
// there, and are written to `logits`.
struct END_PHASE {
    unsigned kind, multiplier, counted, vocab;
    U64 logits, sampling, output_rows, query, step, slots, ring, best, arriving, none[7];
    unsigned query_stride, slots_stride, ring_events;
    unsigned reserved[25];
};

union PHASE {
    PRODUCT_PHASE product;
    ATTENTION_PHASE attention;
    END_PHASE end;
    uint4 vector[RECORD_VECTORS];
};
static_assert(sizeof(PHASE) == 256 && sizeof(STEP_HEAD) == 32, "as persistent.py has them");

// The data of a phase that is needed ahead of it: its products.
typedef UNIT_WORK<MAX_PHASE_MATRICES> PHASE_WORK;
static_assert(sizeof(PHASE_WORK) == 56, "as persistent.py has it");

// Of one launch: where operands are in this step.
struct STEP_MEMORY {
    LAUNCH launch;
    unsigned char *bank;
    const unsigned *stop;
    const PEER_DEVICES *peers;

    // Vector `number` of a record with operands as addresses.
    __device__ __forceinline__ uint4 resolved(const uint4 &v, unsigned number) const {
        if (number - 1 >= OPERAND_VECTORS) return v;
        const U64 first = resolved(v.x | (U64)v.y << 32), second = resolved(v.z | (U64)v.w << 32);
        return make_uint4((unsigned)first, (unsigned)(first >> 32), (unsigned)second,
                          (unsigned)(second >> 32));
    }
    __device__ __forceinline__ U64 resolved(U64 operand) const {
        if (operand & EXCHANGE_MEMORY)
            return (U64)(bank + (operand & OFFSET_MASK)) | EXCHANGE_MEMORY;
        return operand ? address_of(launch, operand) : 0;
    }
    __device__ __forceinline__ unsigned char *at(U64 resolved) const {
        return (unsigned char *)(resolved & OFFSET_MASK);
    }
    __device__ __forceinline__ const float *floats(U64 operand) const {
        return (const float *)at(operand);
    }
    __device__ __forceinline__ INCOMING incoming(U64 operand) const {
        return {(operand & EXCHANGE_MEMORY) != 0, stop, 0};
    }
    __device__ __forceinline__ void store(U64 operand, size_t index, float value,
                                          bool everywhere = false) const {
        float *own = (float *)at(operand) + index;
        if (operand & EXCHANGE_MEMORY) {
#if SHARED_STEP
            if (everywhere)
#pragma unroll 1
                for (unsigned peer = 0; peer < peers->count; peer++)
                    publish(at_peer(own, *peers, peer), value);
#endif
            publish(own, value);
        } else if (operand) {
            *own = value;
        }
    }
    __device__ __forceinline__ unsigned count(unsigned multiplier, unsigned counted) const {
        return counted ? multiplier * U32_AT(launch.inputs, counted - 1) : multiplier;
    }
};

#endif
