// Reports the features that the processor has and the operating system enables, as words that
// variants.py reads. It is compiled for the oldest processor of its architecture.

#include <stdint.h>

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t enabled_registers(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

// CPUID leaf 1 ECX, leaf 7 EBX and ECX, leaf 0x80000001 ECX, then XCR0: the registers whose state
// the operating system keeps.
EXPORTED void zinc_processor(uint64_t *words) {
    uint32_t a, b, c, d;
    for (int i = 0; i < 5; i++) words[i] = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) words[0] = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) words[1] = b, words[2] = c;
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) words[3] = c;
    if (words[0] >> 27 & 1) words[4] = enabled_registers();
}
#elif defined(__linux__)
#include <sys/auxv.h>

EXPORTED void zinc_processor(uint64_t *words) { words[0] = getauxval(AT_HWCAP); }
#else
// Every ARM processor that runs macOS has the features of the newest variant.
EXPORTED void zinc_processor(uint64_t *words) { words[0] = ~(uint64_t)0; }
#endif
