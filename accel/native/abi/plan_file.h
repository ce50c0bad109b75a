// The layout of a plan file and of its weights file; accel/native/plan_file.py mirrors it. All
// numbers are little-endian. A plan is HEADER, then the tables it names.

#ifndef PLAN_FILE_H
#define PLAN_FILE_H

#include <stdint.h>

#define PLAN_MAGIC "ZINCPLAN"
#define WEIGHTS_MAGIC "ZINCWGTS"
#define WEIGHTS_HEADER_BYTES 4096  // the weights begin at a page of the file
#define PROCESSOR_WORDS 5
#define ABSENT_OFFSET UINT64_MAX

typedef struct {
    char magic[8];
    uint32_t abi;
    uint32_t header_bytes;
    uint64_t file_bytes;
    uint8_t digest[32];          // SHA-256 of all bytes of the file that follow
    uint8_t weights_digest[32];  // SHA-256 of the weights, without their header
    uint64_t weights_bytes;
    uint64_t needs[PROCESSOR_WORDS];  // bits that zinc_processor must report
    char machine[16];            // the architecture, such as x86_64
    char variant[32];
    char kernels[96];            // file name of the kernel library
    char kernels_digest[24];     // digest of its texts
    char weights[256];           // file name of the weights
    char model[96];
    char kv_dtype[16];
    uint32_t arithmetic;
    uint32_t slots, context, pages, slot_pages, page_positions;
    uint32_t tokens, rows, vocab, recent, ring_events, workers;
    uint32_t recurrent;
    uint32_t packet_bytes;
    uint32_t operands, operand_offset;  // 64-bit operands of a packet, and where they begin
    uint32_t ops;                // op numbers are below this
    uint32_t ring, logits;       // indices of buffers
    uint32_t event_bytes, event_token;  // of a record of the ring; where its token is
    uint32_t buffers, buckets, reserved;
    uint64_t scratch_bytes, own_bytes, input_bytes;
    uint64_t query, output_rows, sampling, page_table;  // offsets in the inputs of a step
    uint64_t buffers_offset, buckets_offset;            // of the tables in this file
} HEADER;

enum { MEMORY_ZEROED = 0, MEMORY_WEIGHTS = 1 };

typedef struct {
    char name[160];
    uint64_t bytes;
    uint64_t offset;  // behind the header of the weights file
    uint32_t memory;  // MEMORY_ZEROED or MEMORY_WEIGHTS
    uint32_t reserved;
} BUFFER_RECORD;

// A shape bucket: steps of at most so many tokens and rows run these packets.
typedef struct {
    uint32_t tokens, rows;
    uint64_t packets_offset;
    uint64_t packets;
} BUCKET_RECORD;

typedef struct {
    char magic[8];
    uint32_t abi;
    uint32_t reserved;
    uint64_t bytes;
    uint8_t digest[32];
} WEIGHTS_HEADER;

// Operands of packets. Those of a buffer are BUFFER_MEMORY, its index and an offset.
#define ABSENT UINT64_MAX
#define OWN_MEMORY ((uint64_t)1 << 63)
#define SCRATCH_MEMORY ((uint64_t)1 << 62)
#define INPUT_MEMORY ((uint64_t)1 << 61)
#define BUFFER_MEMORY ((uint64_t)1 << 60)
#define BUFFER_SHIFT 44
#define OFFSET_MASK (((uint64_t)1 << BUFFER_SHIFT) - 1)

_Static_assert(sizeof(HEADER) % 8 == 0, "tables are aligned");

#endif
