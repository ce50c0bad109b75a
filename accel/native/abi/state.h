// What an open plan is made of.

#ifndef STATE_H
#define STATE_H

#include "plan_file.h"
#include "system.h"
#include "zinc_rt.h"

#define ALIGNMENT 256  // of everything that packets address, in bytes

// COPY and JOB are those of accel/native/pool.c.
typedef struct {
    uint64_t source;
    uint64_t target;
    uint64_t bytes;
} COPY;

typedef struct {
    uint64_t scratch;
    uint64_t own;
    uint64_t own_bytes;
    uint64_t input;
    uint64_t packets;
    uint64_t copies;
    uint64_t cancelled;
    uint32_t count;
    uint32_t copy_count;
    uint32_t workers;
    uint32_t reserved;
} JOB;

// The functions of the kernel library.
typedef struct {
    void *library;
    void *(*open)(uint32_t workers);
    void (*close)(void *pool);
    uint32_t (*submit)(void *pool, const JOB *job);
    int (*wait)(void *pool, uint32_t number, uint64_t nanoseconds);
} KERNELS;

// A step that was submitted; `event` is 0 where there is none. `default_pages` says that the page
// table in `inputs` is the default one.
typedef struct {
    zinc_rt_event event;
    uint32_t number, rows, first_event;
    bool default_pages;
    COPY logits;
    uint8_t *inputs;
} FLIGHT;

// The begin of each allocation, ALIGNMENT bytes before its memory at most.
typedef struct ALLOCATION {
    struct ALLOCATION *next;
    uint64_t bytes;
} ALLOCATION;

typedef struct {
    zinc_rt_options options;
    ALLOCATION *allocations;
    uint64_t allocated;
    HEADER *header;         // the plan file in memory, its packets with addresses
    BUFFER_RECORD *buffers;
    BUCKET_RECORD *buckets;
    uint8_t **address;      // of each buffer
    uint8_t *mapped;        // the weights file
    uint64_t mapped_bytes;
    uint8_t *scratch, *own;
    uint64_t own_bytes;     // of each thread
    int32_t *next;          // of each slot: the position behind the last one computed
    KERNELS kernels;
    void *pool;
    uint32_t threads;
    long process;
    zinc_rt_event events;   // steps submitted so far
    uint32_t ring_events;   // events of the output ring so far
    FLIGHT flights[ZINC_RT_IN_FLIGHT];
    char digest[65];
} STATE;

// Writes the text of an error and returns its code.
int fail(zinc_rt_plan *plan, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// The state of an open plan; null after an error, whose code is in `code`.
STATE *state_of(zinc_rt_plan *plan, int *code);

// Zeroed memory of the plan at a multiple of ALIGNMENT; null where there is none.
void *take(STATE *state, uint64_t bytes);

// Each returns a code.
int read_plan(zinc_rt_plan *plan, STATE *state, const char *path);
int check_processor(zinc_rt_plan *plan, const STATE *state);
int load_kernels(zinc_rt_plan *plan, STATE *state);
int map_weights(zinc_rt_plan *plan, STATE *state, const char *path);

#endif
