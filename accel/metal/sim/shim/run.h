// Behind a kernel ENTRY: runs all groups of a launch, one after the other.

enum { MAX_ITEMS = 1024, STACK_BYTES = 1 << 16 };
alignas(16) static char stacks[MAX_ITEMS * STACK_BYTES];
static void *caller, *places[MAX_ITEMS];
static bool ended[MAX_ITEMS], alone, parted;
static const LAUNCH *launch_now;
static uint item_now, group_now, groups_now;

// Keeps what a function must keep on the one stack, and goes on with the other.
extern "C" void change_places(void **left, void *taken);
asm(R"(
.text
.type change_places, @function
change_places:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

void meet() {
    if (alone) {
        parted = true;
        return;
    }
    const uint item = item_now;
    change_places(&places[item], caller);
    item_now = item;
}

static void run_item() {
    const uint item = item_now;
    ENTRY(*launch_now, item, group_now, groups_now);
    ended[item] = true;
    change_places(&places[item], caller);
    __builtin_unreachable();
}

static void begin(uint item) {
    char *top = stacks + (item + 1) * STACK_BYTES;
    void **frame = (void **)top - 2;
    frame[0] = (void *)run_item;
    places[item] = frame - 6;
    ended[item] = false;
}

static void go_on(uint item) {
    item_now = item;
    change_places(&caller, places[item]);
}

// Items that end without a barrier need no stack of their own, as long as all of them do.
static bool run_group(uint threads) {
    alone = parted = false;
    begin(0);
    go_on(0);
    if (ended[0]) {
        alone = true;
        for (uint i = 1; i < threads && !parted; i++) ENTRY(*launch_now, i, group_now, groups_now);
        return !parted;
    }
    for (uint i = 1; i < threads; i++) begin(i);
    for (uint first = 1;; first = 0) {
        for (uint i = first; i < threads; i++) go_on(i);
        uint done = 0;
        for (uint i = 0; i < threads; i++) done += ended[i];
        if (done != 0) return done == threads;
    }
}

// 0 if not all items of a group met at the same barriers, else 1.
extern "C" int run(const void *arguments, uint groups, uint threads) {
    launch_now = (const LAUNCH *)arguments;
    groups_now = groups;
    for (group_now = 0; group_now < groups; group_now++)
        if (!run_group(threads)) return 0;
    return 1;
}
