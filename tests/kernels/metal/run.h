// Behind a kernel ENTRY: runs all groups of a launch, one after the other.

static const uint STACK_BYTES = 1 << 16;
static ucontext_t caller, places[GROUP_SIZE];
static bool ended[GROUP_SIZE];
static std::vector<char> stacks(GROUP_SIZE * STACK_BYTES);
static LAUNCH launch_now;
static uint item_now, group_now, groups_now;

void meet() {
    const uint item = item_now;
    swapcontext(&places[item], &caller);
    item_now = item;
}

static void run_item() {
    const uint item = item_now;
    ENTRY(launch_now, item, group_now, groups_now);
    ended[item] = true;
}

// False if not all items of a group met at the same barriers.
extern "C" int run(ulong scratch, ulong inputs, ulong packets, uint index, uint groups) {
    launch_now = {scratch, inputs, packets, index};
    groups_now = groups;
    for (group_now = 0; group_now < groups; group_now++) {
        for (uint i = 0; i < GROUP_SIZE; i++) {
            getcontext(&places[i]);
            places[i].uc_stack.ss_sp = stacks.data() + i * STACK_BYTES;
            places[i].uc_stack.ss_size = STACK_BYTES;
            places[i].uc_link = &caller;
            ended[i] = false;
            makecontext(&places[i], run_item, 0);
        }
        for (bool all = false; !all;) {
            uint done = 0;
            for (uint i = 0; i < GROUP_SIZE; i++) {
                item_now = i;
                swapcontext(&caller, &places[i]);
                done += ended[i];
            }
            if (done != 0 && done != GROUP_SIZE) return 0;
            all = done == GROUP_SIZE;
        }
    }
    return 1;
}
