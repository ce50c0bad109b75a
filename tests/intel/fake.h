// A simulated driver of Level Zero with one GPU: what its parts share. It checks every call against
// the rules of the specification, and executes what a queue was given as late as it may.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ze_api.h"

#define EXPORT __attribute__((visibility("default")))

enum KIND { CONTEXT = 1, QUEUE, LIST, POOL, EVENT, MODULE, KERNEL, LOG };
enum COMMAND_KIND { BARRIER, WAIT, COPY, FILL, LAUNCH };
enum { MAX_ARGUMENTS = 8, MAX_WAITS = 4, MOVED = 1 << 24 };

typedef struct OBJECT OBJECT;

typedef struct {
    enum COMMAND_KIND kind;
    OBJECT *signal, *kernel, *waits[MAX_WAITS];
    uint32_t wait_count, groups, pattern_bytes;
    uint64_t target, source, nbytes, arguments[MAX_ARGUMENTS];
    uint8_t pattern[16];
} COMMAND;

// One object behind a handle; it stays when it is destroyed, so that later uses are noticed.
struct OBJECT {
    enum KIND kind;
    int alive, closed, immediate, in_flight, signaled, children;
    OBJECT *parent;
    uint32_t index, count, items, given, access, group_size;
    uint64_t arguments[MAX_ARGUMENTS];
    uint64_t taken;
    COMMAND *commands;
    uint32_t command_count, command_room;
    void *library;
    const uint32_t *sizes;
    char text[4096];
};

typedef struct {
    char *(*find)(uint64_t, uint64_t, uint64_t *, uint64_t *, uint64_t *);
    void (*problem)(const char *);
} HOST;

// What a test may choose about the machine.
typedef struct {
    uint64_t memory_bytes, max_buffer_bytes;
    uint32_t drivers, integrated, fp16, spirv_minor, group_items, computes, hangs, looks, lost;
} BEHAVIOUR;

extern BEHAVIOUR behaviour;
extern const HOST host;

void problem(const char *function, const char *text);
ze_result_t called(const char *function);
OBJECT *object(const char *function, void *handle, enum KIND kind);
OBJECT *made(enum KIND kind, OBJECT *parent);
ze_result_t destroyed(const char *function, void *handle, enum KIND kind);
void check_description(const char *function, const void *description, uint32_t kind);
char *memory_at(uint64_t address, uint64_t nbytes);
void run_pending(OBJECT *until);
int pending_uses(const OBJECT *found);
int pending_count(void);
void run_kernel(const COMMAND *command);

#define CALLED                                                                                \
    do {                                                                                      \
        const ze_result_t injected = called(__func__);                                        \
        if (injected) return injected;                                                        \
    } while (0)
#define NEEDED(name, handle, kind)                                                            \
    OBJECT *name = object(__func__, handle, kind);                                            \
    if (!name) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE
#define RULE(holds, text)                                                                     \
    do {                                                                                      \
        if (!(holds)) {                                                                       \
            problem(__func__, text);                                                          \
            return ZE_RESULT_ERROR_INVALID_ARGUMENT;                                          \
        }                                                                                     \
    } while (0)
