// Mapped files that another program may cut: what can no longer be read is read as zeros and noted,
// where the system would end the process with SIGBUS.

#if defined(_WIN32)
// Windows refuses to cut a file that is mapped.
#define EXPORTED __declspec(dllexport)
EXPORTED int zinc_guard(unsigned long long start, unsigned long long bytes) { return -1; }
EXPORTED void zinc_unguard(int number) {}
EXPORTED unsigned long long zinc_lost(int number) { return 0; }
EXPORTED unsigned zinc_faults;
#else
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define MAX_GUARDED 1024

typedef struct {
    atomic_uintptr_t start;  // 0 in an entry that is free
    atomic_uintptr_t end;    // of the last page
    atomic_uintptr_t lost;   // 1 + the offset of the first byte that could not be read, 0 while all can
} GUARDED;

static GUARDED guarded[MAX_GUARDED];
static struct sigaction before;
EXPORTED atomic_uint zinc_faults;  // pages of guarded mappings that could not be read, in this process

static uintptr_t page_bytes(void) { return (uintptr_t)sysconf(_SC_PAGESIZE); }

// Has the pages from a lost one to the end of its mapping read as zeros: the end of a file is lost as
// a whole, and nobody uses what is computed from then on.
static int replaced(uintptr_t address) {
    uintptr_t last = 0;
    for (int i = 0; i < MAX_GUARDED; i++) {
        const uintptr_t start = atomic_load(&guarded[i].start), end = atomic_load(&guarded[i].end);
        if (!start || address < start || address >= end) continue;
        uintptr_t none = 0;
        atomic_compare_exchange_strong(&guarded[i].lost, &none, address - start + 1);
        last = end;
    }
    const uintptr_t page = address & ~(page_bytes() - 1);
    atomic_fetch_add(&zinc_faults, last != 0);
    return last && mmap((void *)page, last - page, PROT_READ, MAP_PRIVATE | MAP_ANON | MAP_FIXED, -1,
                        0) != MAP_FAILED;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const int error = errno;
    if (info->si_code == BUS_ADRERR && replaced((uintptr_t)info->si_addr)) {
        errno = error;
    } else if (before.sa_flags & SA_SIGINFO && before.sa_sigaction != on_bus_error) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN &&
               !(before.sa_flags & SA_SIGINFO)) {
        before.sa_handler(number);
    } else {
        // The access that is repeated ends the process; a signal that was sent is sent again.
        signal(number, SIG_DFL);
        if (info->si_code <= 0) raise(number);
    }
}

// Guards a mapping of so many bytes. Returns its number, or -1 where there are too many.
EXPORTED int zinc_guard(unsigned long long start, unsigned long long bytes) {
    struct sigaction now, own = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&own.sa_mask);
    if (!sigaction(SIGBUS, 0, &now) && now.sa_sigaction != on_bus_error) {
        before = now;
        sigaction(SIGBUS, &own, 0);
    }
    const uintptr_t pages = page_bytes();
    for (int i = 0; i < MAX_GUARDED; i++) {
        if (atomic_load(&guarded[i].start)) continue;
        atomic_store(&guarded[i].lost, 0);
        atomic_store(&guarded[i].end, (uintptr_t)(start + bytes + pages - 1) & ~(pages - 1));
        atomic_store(&guarded[i].start, (uintptr_t)start);
        return i;
    }
    return -1;
}

EXPORTED void zinc_unguard(int number) { atomic_store(&guarded[number].start, 0); }

// 1 + the offset of the first byte that could not be read; 0 while all can.
EXPORTED unsigned long long zinc_lost(int number) { return atomic_load(&guarded[number].lost); }
#endif
