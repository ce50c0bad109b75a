// The simulated GPU: what it is, its memory, its modules, and the record of what was done wrong.
#include "fake.h"

enum { MAX_CALLS = 1 << 16, MAX_RANGES = 4096 };
typedef struct {
    uint64_t address, nbytes;
    char *bytes;
    int device;
    OBJECT *context;
} RANGE;

BEHAVIOUR behaviour;
static char problems[1 << 16], fail_name[64];
static int fail_number, fail_result, initialized, all_calls;
static const char *calls[MAX_CALLS];
static int call_count, alive[LOG + 1];
static RANGE ranges[MAX_RANGES];
static int range_count;
static uint64_t allocated;
static const char *(*translate)(const uint8_t *, size_t, const char **);
static int driver_mark, device_mark;

void problem(const char *function, const char *text) {
    const size_t used = strlen(problems);
    snprintf(problems + used, sizeof problems - used, "%s: %s\n", function, text);
}

static void kernel_problem(const char *text) { problem("a kernel", text); }

ze_result_t called(const char *function) {
    calls[call_count++ % MAX_CALLS] = function;
    all_calls++;
    if (behaviour.lost && initialized && !strstr(function, "Get")) return ZE_RESULT_ERROR_DEVICE_LOST;
    if (fail_result && !strcmp(fail_name, function) && --fail_number == 0) return fail_result;
    if (!initialized && strcmp(function, "zeInit")) {
        problem(function, "is called before zeInit");
        return ZE_RESULT_ERROR_UNINITIALIZED;
    }
    return ZE_RESULT_SUCCESS;
}

OBJECT *object(const char *function, void *handle, enum KIND kind) {
    OBJECT *found = handle;
    if (found && found->kind == kind && found->alive) return found;
    problem(function, !found ? "a handle is null"
                      : found->kind != kind ? "a handle is of another kind"
                                            : "a handle was destroyed");
    return NULL;
}

OBJECT *made(enum KIND kind, OBJECT *parent) {
    OBJECT *object = calloc(1, sizeof *object);
    object->kind = kind;
    object->alive = 1;
    object->parent = parent;
    if (parent) parent->children++;
    alive[kind]++;
    return object;
}

ze_result_t destroyed(const char *function, void *handle, enum KIND kind) {
    OBJECT *gone = object(function, handle, kind);
    if (!gone) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    if (gone->children) problem(function, "what was made from it still exists");
    if (pending_uses(gone)) problem(function, "it is in use by the device");
    gone->alive = 0;
    alive[kind]--;
    if (gone->parent) gone->parent->children--;
    return ZE_RESULT_SUCCESS;
}

void check_description(const char *function, const void *description, uint32_t kind) {
    const struct {
        uint32_t kind;
        const void *next;
    } *head = description;
    if (!head) problem(function, "a description is null");
    else if (head->kind != kind) problem(function, "a description has the type of another");
    else if (head->next) problem(function, "a description has an unknown extension");
}

static RANGE *range_of(uint64_t address, uint64_t nbytes) {
    for (int i = 0; i < range_count; i++)
        if (address >= ranges[i].address && address + nbytes <= ranges[i].address + ranges[i].nbytes)
            return &ranges[i];
    return NULL;
}

char *memory_at(uint64_t address, uint64_t nbytes) {
    RANGE *range = range_of(address, nbytes);
    return range ? range->bytes + (address - range->address) : NULL;
}

static char *find(uint64_t address, uint64_t nbytes, uint64_t *first, uint64_t *end, uint64_t *moved) {
    RANGE *range = range_of(address, nbytes);
    if (!range) {
        kernel_problem("a kernel accesses memory that is not allocated");
        return NULL;
    }
    *first = range->address;
    *end = range->address + range->nbytes;
    *moved = (uint64_t)range->bytes - range->address;
    return range->bytes + (address - range->address);
}

const HOST host = {find, kernel_problem};

static ze_result_t allocate(const char *function, OBJECT *context, size_t size, size_t alignment,
                            int device, void **out) {
    if (!size || size > behaviour.max_buffer_bytes) {
        problem(function, "the size is 0 or above the largest allocation");
        return ZE_RESULT_ERROR_UNSUPPORTED_SIZE;
    }
    if (alignment & (alignment - 1)) {
        problem(function, "the alignment is no power of two");
        return ZE_RESULT_ERROR_UNSUPPORTED_ALIGNMENT;
    }
    if (device && allocated + size > behaviour.memory_bytes) return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    if (range_count == MAX_RANGES) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    char *bytes = aligned_alloc(1 << 16, (size + 0xffff) & ~(size_t)0xffff);
    if (!bytes) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    memset(bytes, 0xAA, size);
    // No address of a process has bit 50: what the host reads or writes there ends it.
    const uint64_t address = (uint64_t)bytes | (device ? 1ull << 50 : 0);
    ranges[range_count++] = (RANGE){address, size, bytes, device, context};
    context->children++;
    allocated += device ? size : 0;
    *out = (void *)address;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeMemAllocDevice(ze_context_handle_t hContext, const ze_device_mem_alloc_desc_t *desc,
                                    size_t size, size_t alignment, ze_device_handle_t hDevice, void **pptr) {
    CALLED;
    NEEDED(context, hContext, CONTEXT);
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC);
    RULE((void *)hDevice == &device_mark, "there is no such device");
    return allocate(__func__, context, size, alignment, 1, pptr);
}

EXPORT ze_result_t zeMemAllocHost(ze_context_handle_t hContext, const ze_host_mem_alloc_desc_t *desc,
                                  size_t size, size_t alignment, void **pptr) {
    CALLED;
    NEEDED(context, hContext, CONTEXT);
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC);
    return allocate(__func__, context, size, alignment, 0, pptr);
}

EXPORT ze_result_t zeMemFree(ze_context_handle_t hContext, void *ptr) {
    CALLED;
    NEEDED(context, hContext, CONTEXT);
    RANGE *range = range_of((uint64_t)ptr, 1);
    RULE(range && range->address == (uint64_t)ptr && range->context == context,
         "the pointer is not the begin of an allocation of the context");
    context->children--;
    if (pending_count()) problem(__func__, "kernels that may access it are in use by the device");
    allocated -= range->device ? range->nbytes : 0;
    free(range->bytes);
    *range = ranges[--range_count];
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeInit(uint32_t flags) {
    CALLED;
    initialized = 1;
    if (flags & ~3u) problem(__func__, "there are no such flags");
    return behaviour.drivers ? ZE_RESULT_SUCCESS : ZE_RESULT_ERROR_UNINITIALIZED;
}

static ze_result_t one(const char *function, uint32_t *count, void **handles, void *mark) {
    if (!count) problem(function, "the count is null");
    if (handles && *count) handles[0] = mark;
    *count = 1;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeDriverGet(uint32_t *pCount, ze_driver_handle_t *phDrivers) {
    CALLED;
    return one(__func__, pCount, (void **)phDrivers, &driver_mark);
}

EXPORT ze_result_t zeDeviceGet(ze_driver_handle_t hDriver, uint32_t *pCount, ze_device_handle_t *phDevices) {
    CALLED;
    RULE((void *)hDriver == &driver_mark, "there is no such driver");
    return one(__func__, pCount, (void **)phDevices, &device_mark);
}

EXPORT ze_result_t zeDriverGetApiVersion(ze_driver_handle_t hDriver, uint32_t *version) {
    CALLED;
    RULE((void *)hDriver == &driver_mark, "there is no such driver");
    *version = 1 << 16 | 4;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeDriverGetProperties(ze_driver_handle_t hDriver, ze_driver_properties_t *properties) {
    CALLED;
    RULE((void *)hDriver == &driver_mark, "there is no such driver");
    check_description(__func__, properties, ZE_STRUCTURE_TYPE_DRIVER_PROPERTIES);
    properties->driverVersion = 1 << 24 | 2 << 16 | 3;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeDeviceGetProperties(ze_device_handle_t hDevice, ze_device_properties_t *properties) {
    CALLED;
    RULE((void *)hDevice == &device_mark, "there is no such device");
    check_description(__func__, properties, ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES);
    properties->type = ZE_DEVICE_TYPE_GPU;
    properties->vendorId = 0x8086;
    properties->flags = behaviour.integrated ? ZE_DEVICE_PROPERTY_FLAG_INTEGRATED : 0;
    properties->maxMemAllocSize = behaviour.max_buffer_bytes;
    strcpy(properties->name, "Intel GPU (simulated)");
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeDeviceGetComputeProperties(ze_device_handle_t hDevice,
                                                ze_device_compute_properties_t *properties) {
    CALLED;
    RULE((void *)hDevice == &device_mark, "there is no such device");
    check_description(__func__, properties, ZE_STRUCTURE_TYPE_DEVICE_COMPUTE_PROPERTIES);
    properties->maxTotalGroupSize = properties->maxGroupSizeX = behaviour.group_items;
    properties->maxGroupCountX = 1 << 16;
    properties->maxSharedLocalMemory = 64 << 10;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeDeviceGetModuleProperties(ze_device_handle_t hDevice,
                                               ze_device_module_properties_t *properties) {
    CALLED;
    RULE((void *)hDevice == &device_mark, "there is no such device");
    check_description(__func__, properties, ZE_STRUCTURE_TYPE_DEVICE_MODULE_PROPERTIES);
    properties->spirvVersionSupported = 1 << 16 | behaviour.spirv_minor;
    properties->flags = behaviour.fp16 ? ZE_DEVICE_MODULE_FLAG_FP16 : 0;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeDeviceGetCommandQueueGroupProperties(ze_device_handle_t hDevice, uint32_t *pCount,
                                                          ze_command_queue_group_properties_t *properties) {
    CALLED;
    RULE((void *)hDevice == &device_mark, "there is no such device");
    // The first group only copies.
    for (uint32_t i = 0; properties && i < *pCount && i < 2; i++) {
        check_description(__func__, &properties[i], ZE_STRUCTURE_TYPE_COMMAND_QUEUE_GROUP_PROPERTIES);
        properties[i].flags = i && behaviour.computes ? ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE : 2;
        properties[i].numQueues = 1;
        properties[i].maxMemoryFillPatternSize = 16;
    }
    *pCount = 2;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeDeviceGetMemoryProperties(ze_device_handle_t hDevice, uint32_t *pCount,
                                               ze_device_memory_properties_t *properties) {
    CALLED;
    RULE((void *)hDevice == &device_mark, "there is no such device");
    if (properties && *pCount) {
        check_description(__func__, properties, ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES);
        properties->totalSize = behaviour.memory_bytes;
    }
    *pCount = 1;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeContextCreate(ze_driver_handle_t hDriver, const ze_context_desc_t *desc,
                                   ze_context_handle_t *phContext) {
    CALLED;
    RULE((void *)hDriver == &driver_mark, "there is no such driver");
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_CONTEXT_DESC);
    *phContext = (ze_context_handle_t)made(CONTEXT, NULL);
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeContextDestroy(ze_context_handle_t hContext) {
    CALLED;
    return destroyed(__func__, hContext, CONTEXT);
}

EXPORT ze_result_t zeModuleCreate(ze_context_handle_t hContext, ze_device_handle_t hDevice,
                                  const ze_module_desc_t *desc, ze_module_handle_t *phModule,
                                  ze_module_build_log_handle_t *phBuildLog) {
    CALLED;
    NEEDED(context, hContext, CONTEXT);
    RULE((void *)hDevice == &device_mark, "there is no such device");
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_MODULE_DESC);
    RULE(desc->format == ZE_MODULE_FORMAT_IL_SPIRV, "the format is not SPIR-V");
    RULE(desc->inputSize >= 20 && desc->inputSize % 4 == 0, "the module is no whole number of words");
    RULE(((const uint32_t *)desc->pInputModule)[0] == 0x07230203, "the module has no magic number");
    const char *log = "";
    const char *path = translate(desc->pInputModule, desc->inputSize, &log);
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (phBuildLog) {
        OBJECT *text = made(LOG, NULL);
        snprintf(text->text, sizeof text->text, "%s", log);
        *phBuildLog = (ze_module_build_log_handle_t)text;
    }
    if (!library) return ZE_RESULT_ERROR_MODULE_BUILD_FAILURE;
    OBJECT *module = made(MODULE, context);
    module->library = library;
    *phModule = (ze_module_handle_t)module;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeModuleDestroy(ze_module_handle_t hModule) {
    CALLED;
    return destroyed(__func__, hModule, MODULE);
}

EXPORT ze_result_t zeModuleBuildLogGetString(ze_module_build_log_handle_t hLog, size_t *pSize, char *text) {
    CALLED;
    NEEDED(log, hLog, LOG);
    if (text) memcpy(text, log->text, *pSize);
    *pSize = strlen(log->text) + 1;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeModuleBuildLogDestroy(ze_module_build_log_handle_t hLog) {
    CALLED;
    return destroyed(__func__, hLog, LOG);
}

EXPORT ze_result_t zeKernelCreate(ze_module_handle_t hModule, const ze_kernel_desc_t *desc,
                                  ze_kernel_handle_t *phKernel) {
    CALLED;
    NEEDED(module, hModule, MODULE);
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_KERNEL_DESC);
    if (strcmp(dlsym(module->library, "kernel_name"), desc->pKernelName))
        return ZE_RESULT_ERROR_INVALID_KERNEL_NAME;
    OBJECT *kernel = made(KERNEL, module);
    kernel->library = module->library;
    kernel->items = *(uint32_t *)dlsym(module->library, "kernel_items");
    kernel->count = *(uint32_t *)dlsym(module->library, "kernel_arguments");
    kernel->sizes = dlsym(module->library, "kernel_sizes");
    *phKernel = (ze_kernel_handle_t)kernel;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeKernelDestroy(ze_kernel_handle_t hKernel) {
    CALLED;
    return destroyed(__func__, hKernel, KERNEL);
}

EXPORT ze_result_t zeKernelSetGroupSize(ze_kernel_handle_t hKernel, uint32_t x, uint32_t y, uint32_t z) {
    CALLED;
    NEEDED(kernel, hKernel, KERNEL);
    RULE(x && y && z && (uint64_t)x * y * z <= behaviour.group_items, "the group is too large or empty");
    RULE(x == kernel->items && y == 1 && z == 1, "the module demands another group size");
    kernel->group_size = x;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeKernelSetArgumentValue(ze_kernel_handle_t hKernel, uint32_t index, size_t size,
                                            const void *value) {
    CALLED;
    NEEDED(kernel, hKernel, KERNEL);
    RULE(index < kernel->count, "there is no such argument");
    RULE(size == kernel->sizes[index], "the argument has another size");
    kernel->arguments[index] = 0;
    memcpy(&kernel->arguments[index], value, size);
    kernel->given |= 1u << index;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeKernelSetIndirectAccess(ze_kernel_handle_t hKernel, uint32_t flags) {
    CALLED;
    NEEDED(kernel, hKernel, KERNEL);
    kernel->access = flags;
    return ZE_RESULT_SUCCESS;
}

void run_kernel(const COMMAND *command) {
    void (*run)(const HOST *, const uint64_t *, uint32_t, uint32_t) =
        dlsym(command->kernel->library, "kernel_run");
    run(&host, command->arguments, command->groups, command->kernel->items);
}

EXPORT void fake_begin(const BEHAVIOUR *given,
                       const char *(*translator)(const uint8_t *, size_t, const char **)) {
    behaviour = *given;
    translate = translator;
}
EXPORT BEHAVIOUR *fake_behaviour(void) { return &behaviour; }
EXPORT const char *fake_problems(void) { return problems; }
EXPORT void fake_forget(void) { problems[0] = 0; call_count = 0; }
EXPORT int fake_calls(void) { return call_count; }
EXPORT const char *fake_call(int number) { return calls[number]; }
EXPORT void fake_fail(const char *name, int number, int result) {
    snprintf(fail_name, sizeof fail_name, "%s", name);
    fail_number = number;
    fail_result = result;
}
EXPORT int fake_leaked(void) {
    int count = range_count;
    for (int kind = CONTEXT; kind <= LOG; kind++) count += alive[kind];
    return count;
}
