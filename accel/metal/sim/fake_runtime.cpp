// A simulated Objective-C runtime for x86-64: classes, selectors, messages, reference counts,
// autorelease pools, and memory of a simulated GPU whose addresses are not those of the host.
//
// What the real runtime leaves to chance is told: messages to objects that are gone, releases too
// many, objects left without a pool, and accesses of a kernel to memory it was not given.

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace {

struct Class;
struct Method { void *implementation; std::string types; };
struct Object { Class *isa; long references; };
struct Class {
    Object object;  // its isa is the metaclass
    std::string name;
    Class *parent;
    std::map<const char *, Method> methods;
};
typedef const char *Selector;
typedef void (*Told)(const char *);
typedef void (*Gone)(void *);

std::map<std::string, Class *> classes;
std::set<std::string> selectors;
std::set<Object *> alive;
std::map<void *, std::string> dead;
std::recursive_mutex guard;
thread_local std::vector<Object *> pooled;
thread_local int pools = 0;
Told told = nullptr;
Gone gone = nullptr;

void tell(const std::string &text) {
    if (told) told(text.c_str());
}

Method *method_of(Class *kind, Selector selector) {
    for (; kind; kind = kind->parent) {
        auto found = kind->methods.find(selector);
        if (found != kind->methods.end()) return &found->second;
    }
    return nullptr;
}

uint64_t nothing() { return 0; }

bool is_class(Object *object) {
    for (auto &entry : classes)
        if (&entry.second->object == object) return true;
    return false;
}

}  // namespace

extern "C" {

Selector sel_registerName(const char *name) {
    std::lock_guard<std::recursive_mutex> lock(guard);
    return selectors.insert(name).first->c_str();
}

void *objc_getClass(const char *name) {
    std::lock_guard<std::recursive_mutex> lock(guard);
    auto found = classes.find(name);
    return found == classes.end() ? nullptr : found->second;
}

void *object_getClass(Object *object) { return object ? object->isa : nullptr; }
const char *class_getName(Class *kind) { return kind->name.c_str(); }

void *class_getInstanceMethod(Class *kind, Selector selector) {
    return kind ? method_of(kind, selector) : nullptr;
}

const char *method_getTypeEncoding(Method *method) { return method->types.c_str(); }

void *objc_allocateClassPair(Class *parent, const char *name, size_t) {
    Class *meta = new Class{{nullptr, 1}, name, parent ? parent->object.isa : nullptr, {}};
    return new Class{{meta, 1}, name, parent, {}};
}

void objc_registerClassPair(Class *kind) { classes[kind->name] = kind; }

bool class_addMethod(Class *kind, Selector selector, void *implementation, const char *types) {
    return kind->methods.emplace(selector, Method{implementation, types}).second;
}

void *class_createInstance(Class *kind, size_t) {
    std::lock_guard<std::recursive_mutex> lock(guard);
    Object *object = new Object{kind, 1};
    alive.insert(object);
    return object;
}

// What objc_msgSend jumps to; nil answers 0, and so does what is no object any more.
void *fake_lookup(Object *receiver, Selector selector) {
    if (!receiver) return reinterpret_cast<void *>(nothing);
    std::lock_guard<std::recursive_mutex> lock(guard);
    auto lost = dead.find(receiver);
    if (lost != dead.end()) {
        tell(std::string(selector) + " was sent to a released " + lost->second);
        return reinterpret_cast<void *>(nothing);
    }
    if (!alive.count(receiver) && !is_class(receiver)) {
        tell(std::string(selector) + " was sent to what is no object");
        return reinterpret_cast<void *>(nothing);
    }
    Method *method = method_of(receiver->isa, selector);
    if (!method) {
        tell(receiver->isa->name + " does not know " + selector);
        return reinterpret_cast<void *>(nothing);
    }
    return method->implementation;
}

Object *objc_retain(Object *object) {
    std::lock_guard<std::recursive_mutex> lock(guard);
    if (object && alive.count(object)) object->references++;
    return object;
}

void objc_release(Object *object) {
    std::lock_guard<std::recursive_mutex> lock(guard);
    if (!object || !alive.count(object) || --object->references) return;
    dead[object] = object->isa->name;
    alive.erase(object);
    if (gone) gone(object);
}

Object *objc_autorelease(Object *object) {
    if (!pools) tell("a " + object->isa->name + " was left to a pool and there is none");
    pooled.push_back(object);
    return object;
}

void *objc_autoreleasePoolPush() {
    pools++;
    return reinterpret_cast<void *>(pooled.size() + 1);
}

void objc_autoreleasePoolPop(void *pool) {
    const size_t start = reinterpret_cast<size_t>(pool) - 1;
    if (!pools || start > pooled.size()) return tell("a pool was popped that is not the last");
    pools--;
    while (pooled.size() > start) {
        Object *object = pooled.back();
        pooled.pop_back();
        objc_release(object);
    }
}

bool fake_responds(Object *object, Selector, Selector queried) { return method_of(object->isa, queried); }

void fake_listen(Told problems, Gone released) {
    told = problems;
    gone = released;
}

long fake_alive() {
    std::lock_guard<std::recursive_mutex> lock(guard);
    return static_cast<long>(alive.size());
}

const char *fake_name_of(long number) {
    std::lock_guard<std::recursive_mutex> lock(guard);
    for (Object *object : alive)
        if (!number--) return object->isa->name.c_str();
    return nullptr;
}
long fake_pools() { return pools; }

// Memory of the GPU: pages that host and GPU see at different addresses.

struct Pages { void *host, *device; };

bool fake_map(uint64_t nbytes, Pages *pages) {
    const int file = memfd_create("simulated GPU", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(nbytes))) return false;
    pages->host = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    // A page that is never given lies behind, so that no two buffers touch.
    const uint64_t page = static_cast<uint64_t>(getpagesize());
    char *place = static_cast<char *>(
        mmap(nullptr, nbytes + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    pages->device = mmap(place, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0);
    close(file);
    return pages->host != MAP_FAILED && pages->device != MAP_FAILED;
}

// The same pages at an address of the GPU; of a private mapping there is no second view.
void *fake_alias(void *host, uint64_t nbytes) {
    void *device = mremap(host, 0, nbytes, MREMAP_MAYMOVE);
    if (device == MAP_FAILED) return nullptr;
    mprotect(device, nbytes, PROT_NONE);
    return device;
}

void fake_unmap(void *address, uint64_t nbytes) { munmap(address, nbytes); }

bool fake_give(void *address, uint64_t nbytes, int access) {
    return mprotect(address, nbytes, access) == 0;
}

// Launches.

typedef int (*Launch)(const void *arguments, unsigned groups, unsigned threads);

static sigjmp_buf before_fault;
static void *faulting;

static void on_fault(int, siginfo_t *about, void *) {
    faulting = about->si_addr;
    siglongjmp(before_fault, 1);
}

enum { DONE = 1, UNEVEN = 0, FAULT = 2 };

// DONE, UNEVEN if items of a group parted at a barrier, or FAULT with its address.
int fake_run(Launch launch, const void *arguments, unsigned groups, unsigned threads,
             void **address) {
    static char handler_stack[1 << 16];
    stack_t own = {}, old_stack;
    own.ss_sp = handler_stack;
    own.ss_size = sizeof handler_stack;
    sigaltstack(&own, &old_stack);
    struct sigaction action = {}, old_segv, old_bus;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    volatile int result = FAULT;
    if (!sigsetjmp(before_fault, 1)) result = launch(arguments, groups, threads);
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    sigaltstack(&old_stack, nullptr);
    *address = result == FAULT ? faulting : nullptr;
    return result;
}

void objc_msgSend();

}  // extern "C"

// Arguments stay where the caller put them: the method is called as if by its own name.
asm(R"(
.text
.globl objc_msgSend
.type objc_msgSend, @function
objc_msgSend:
    push %rbp
    mov %rsp, %rbp
    sub $192, %rsp
    mov %rdi, -8(%rbp)
    mov %rsi, -16(%rbp)
    mov %rdx, -24(%rbp)
    mov %rcx, -32(%rbp)
    mov %r8, -40(%rbp)
    mov %r9, -48(%rbp)
    movups %xmm0, -64(%rbp)
    movups %xmm1, -80(%rbp)
    movups %xmm2, -96(%rbp)
    movups %xmm3, -112(%rbp)
    movups %xmm4, -128(%rbp)
    movups %xmm5, -144(%rbp)
    movups %xmm6, -160(%rbp)
    movups %xmm7, -176(%rbp)
    call fake_lookup@PLT
    mov %rax, %r11
    mov -8(%rbp), %rdi
    mov -16(%rbp), %rsi
    mov -24(%rbp), %rdx
    mov -32(%rbp), %rcx
    mov -40(%rbp), %r8
    mov -48(%rbp), %r9
    movups -64(%rbp), %xmm0
    movups -80(%rbp), %xmm1
    movups -96(%rbp), %xmm2
    movups -112(%rbp), %xmm3
    movups -128(%rbp), %xmm4
    movups -144(%rbp), %xmm5
    movups -160(%rbp), %xmm6
    movups -176(%rbp), %xmm7
    leave
    jmp *%r11
)");
