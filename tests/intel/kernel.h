// What a kernel of SPIR-V becomes when it is translated to C: memory that is checked, and the items of
// a work-group as fibers that meet at barriers.
#include <stdint.h>
#include <string.h>

#define NOINLINE __attribute__((noinline))
#define ALIAS __attribute__((may_alias))
typedef uint8_t ALIAS u8;
typedef uint16_t ALIAS u16;
typedef uint32_t ALIAS u32;
typedef uint64_t ALIAS u64;
typedef float ALIAS f32;

typedef struct {
    // The host's address of `nbytes` at a device's address, 0 where no allocation has them; sets the
    // range around it.
    char *(*find)(uint64_t address, uint64_t nbytes, uint64_t *first, uint64_t *end, uint64_t *moved);
    void (*problem)(const char *text);
} HOST;

static const HOST *host;
static uint64_t range_first, range_end, range_moved;
static char nowhere[64];

static NOINLINE char *searched(uint64_t address, uint64_t nbytes, uint64_t align) {
    if (address % align) host->problem("a kernel accesses an address that is not aligned");
    char *found = host->find(address, nbytes, &range_first, &range_end, &range_moved);
    return found ? found : nowhere;
}

static inline char *global_at(uint64_t address, uint64_t nbytes, uint64_t align) {
    if (address >= range_first && address + nbytes <= range_end && !(address & (align - 1)))
        return (char *)(address + range_moved);
    return searched(address, nbytes, align);
}

static inline float widened(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, low = bits & 0x7fff;
    union { uint32_t u; float f; } x = {low << 13}, scale = {0x77800000};
    if (low >= 0x7c00) x.u |= 0x7f800000;
    else x.f *= scale.f;
    x.u |= sign;
    return x.f;
}

static inline float as_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t as_u32(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

enum { MAX_ITEMS = 1024, STACK_BYTES = 1 << 15 };
static _Alignas(16) char stacks[MAX_ITEMS * STACK_BYTES];
static void *caller, *contexts[MAX_ITEMS];
static uint32_t met[MAX_ITEMS];
static uint32_t item_now, group_now, groups_now, items_now;
static uint64_t arguments_now[8];
static const uint32_t ENDED = 0xffffffff;

static void run_kernel(void);
static void clear_group_memory(void);

void switch_context(void **left, void *taken);
__asm__(
    ".text\n.hidden switch_context\n.type switch_context, @function\nswitch_context:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static void meet(uint32_t barrier) {
    const uint32_t item = item_now;
    met[item] = barrier;
    switch_context(&contexts[item], caller);
    item_now = item;
}

static void run_item(void) {
    run_kernel();
    met[item_now] = ENDED;
    switch_context(&contexts[item_now], caller);
    __builtin_unreachable();
}

static void run_fibers(void) {
    for (uint32_t i = 0; i < items_now; i++) {
        void **frame = (void **)(stacks + (i + 1) * STACK_BYTES) - 2;
        frame[0] = (void *)run_item;
        contexts[i] = frame - 6;
    }
    do {
        for (uint32_t i = 0; i < items_now; i++) {
            item_now = i;
            switch_context(&caller, contexts[i]);
        }
        for (uint32_t i = 1; i < items_now; i++)
            if (met[i] != met[0]) {
                host->problem("the items of a group meet at different barriers");
                return;
            }
    } while (met[0] != ENDED);
}

static void run_groups(const HOST *given, const uint64_t *arguments, uint32_t groups, uint32_t items,
                       int has_barriers) {
    host = given;
    range_end = 0;
    memcpy(arguments_now, arguments, sizeof arguments_now);
    groups_now = groups;
    items_now = items;
    for (group_now = 0; group_now < groups; group_now++) {
        clear_group_memory();
        if (has_barriers) run_fibers();
        else
            for (item_now = 0; item_now < items; item_now++) run_kernel();
    }
}
