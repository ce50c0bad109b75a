// Opens every plan that it is given, with at most so much memory, and prints the code of each:
// open_plans KERNELS BYTES PLAN...

#include <stdio.h>
#include <stdlib.h>
#include <zinc_rt.h>

static size_t left;

static void *allocate(void *context, size_t bytes) {
    (void)context;
    if (bytes > left) return 0;
    void *memory = malloc(bytes);
    if (memory) left -= bytes;
    return memory;
}

static void release(void *context, void *memory, size_t bytes) {
    (void)context;
    free(memory);
    left += bytes;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    const size_t most = (size_t)strtoull(argv[2], 0, 10);
    const zinc_rt_options options = {.threads = 1, .kernels = argv[1], .allocate = allocate,
                                     .release = release};
    for (int i = 3; i < argc; i++) {
        zinc_rt_plan plan = {0};
        left = most;
        const int code = zinc_rt_open(&plan, ZINC_RT_ABI, argv[i], &options);
        printf("%s\t%s\n", zinc_rt_name(code), plan.text);
        if (zinc_rt_close(&plan) || left != most) return 3;
    }
    return 0;
}
