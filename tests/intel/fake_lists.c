// Command lists, the queue and events of the simulated GPU. Commands between two barriers run in the
// reverse order of the list, since nothing orders them.
#include "fake.h"

enum { MAX_PENDING = 4096 };
static OBJECT *pending[MAX_PENDING];
static int first_pending, pending_end, looks;

int pending_count(void) { return pending_end - first_pending; }

int pending_uses(const OBJECT *found) {
    for (int n = first_pending; n < pending_end; n++) {
        const OBJECT *list = pending[n % MAX_PENDING];
        if (list == found || found->kind == CONTEXT || found->kind == QUEUE) return 1;
        for (uint32_t c = 0; c < list->command_count; c++) {
            const COMMAND *command = &list->commands[c];
            if (command->signal == found || command->kernel == found) return 1;
            for (uint32_t w = 0; w < command->wait_count; w++)
                if (command->waits[w] == found) return 1;
        }
    }
    return 0;
}

static void signal_event(OBJECT *event) {
    if (!event) return;
    if (event->signaled) problem("an event", "is signaled again without a reset");
    event->signaled = 1;
}

static void run_command(COMMAND *command) {
    for (uint32_t w = 0; w < command->wait_count; w++)
        if (!command->waits[w]->signaled) problem("a command", "waits for an event that nothing signals");
    if (command->kind == COPY) {
        char *target = memory_at(command->target, command->nbytes);
        char *source = memory_at(command->source, command->nbytes);
        if (target && source) memmove(target, source, command->nbytes);
        else problem("a copy", "its memory was freed before it ran");
    } else if (command->kind == FILL) {
        char *target = memory_at(command->target, command->nbytes);
        if (!target) problem("a fill", "its memory was freed before it ran");
        for (uint64_t n = 0; target && n < command->nbytes; n++)
            target[n] = command->pattern[n % command->pattern_bytes];
    } else if (command->kind == LAUNCH) {
        run_kernel(command);
    }
    signal_event(command->signal);
}

static void run_list(OBJECT *list) {
    uint32_t start = 0;
    while (start < list->command_count) {
        uint32_t end = start;
        while (end < list->command_count && list->commands[end].kind > WAIT) end++;
        for (uint32_t c = end; c > start; c--) run_command(&list->commands[c - 1]);
        if (end < list->command_count) run_command(&list->commands[end]);
        start = end + 1;
    }
    list->in_flight = 0;
}

// All that a queue was given, or until an event is signaled.
void run_pending(OBJECT *until) {
    if (behaviour.hangs) return;
    while (pending_count() && !(until && until->signaled)) {
        OBJECT *list = pending[first_pending % MAX_PENDING];
        run_list(list);
        first_pending++;
    }
}

EXPORT ze_result_t zeCommandQueueCreate(ze_context_handle_t hContext, ze_device_handle_t hDevice,
                                        const ze_command_queue_desc_t *desc,
                                        ze_command_queue_handle_t *phCommandQueue) {
    CALLED;
    NEEDED(context, hContext, CONTEXT);
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC);
    RULE(hDevice && desc->ordinal == 1 && desc->index == 0 && desc->mode <= 2, "no queue is like that");
    *phCommandQueue = (ze_command_queue_handle_t)made(QUEUE, context);
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeCommandQueueDestroy(ze_command_queue_handle_t hCommandQueue) {
    CALLED;
    return destroyed(__func__, hCommandQueue, QUEUE);
}

EXPORT ze_result_t zeCommandQueueExecuteCommandLists(ze_command_queue_handle_t hCommandQueue,
                                                     uint32_t numCommandLists,
                                                     ze_command_list_handle_t *phCommandLists,
                                                     ze_fence_handle_t hFence) {
    CALLED;
    NEEDED(queue, hCommandQueue, QUEUE);
    (void)queue;
    RULE(numCommandLists && !hFence, "there are no command lists, or there is a fence");
    for (uint32_t n = 0; n < numCommandLists; n++) {
        NEEDED(list, phCommandLists[n], LIST);
        RULE(!list->immediate, "an immediate command list cannot be executed by a queue");
        RULE(list->closed, "a command list is executed before it is closed");
        RULE(!list->in_flight, "a command list is executed while the device uses it");
        RULE(pending_count() < MAX_PENDING, "too many command lists are in flight");
        list->in_flight = 1;
        pending[pending_end++ % MAX_PENDING] = list;
    }
    looks = behaviour.looks;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeCommandQueueSynchronize(ze_command_queue_handle_t hCommandQueue, uint64_t timeout) {
    CALLED;
    NEEDED(queue, hCommandQueue, QUEUE);
    (void)queue;
    (void)timeout;
    run_pending(NULL);
    return pending_count() ? ZE_RESULT_NOT_READY : ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeCommandListCreate(ze_context_handle_t hContext, ze_device_handle_t hDevice,
                                       const ze_command_list_desc_t *desc,
                                       ze_command_list_handle_t *phCommandList) {
    CALLED;
    NEEDED(context, hContext, CONTEXT);
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC);
    RULE(hDevice && desc->commandQueueGroupOrdinal == 1, "no command list is like that");
    *phCommandList = (ze_command_list_handle_t)made(LIST, context);
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeCommandListCreateImmediate(ze_context_handle_t hContext, ze_device_handle_t hDevice,
                                                const ze_command_queue_desc_t *desc,
                                                ze_command_list_handle_t *phCommandList) {
    CALLED;
    NEEDED(context, hContext, CONTEXT);
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC);
    RULE(hDevice && desc->ordinal == 1 && desc->mode <= 2, "no queue is like that");
    OBJECT *list = made(LIST, context);
    list->immediate = 1;
    *phCommandList = (ze_command_list_handle_t)list;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeCommandListDestroy(ze_command_list_handle_t hCommandList) {
    CALLED;
    return destroyed(__func__, hCommandList, LIST);
}

EXPORT ze_result_t zeCommandListClose(ze_command_list_handle_t hCommandList) {
    CALLED;
    NEEDED(list, hCommandList, LIST);
    RULE(!list->immediate && !list->closed, "a command list is immediate, or closed already");
    list->closed = 1;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeCommandListReset(ze_command_list_handle_t hCommandList) {
    CALLED;
    NEEDED(list, hCommandList, LIST);
    RULE(!list->immediate, "an immediate command list cannot be reset");
    RULE(!list->in_flight, "a command list is reset while the device uses it");
    list->closed = 0;
    list->command_count = 0;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t appended(const char *function, ze_command_list_handle_t handle, COMMAND command,
                            ze_event_handle_t signal, uint32_t count, ze_event_handle_t *waits) {
    OBJECT *list = object(function, handle, LIST);
    if (!list) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
    if (list->closed) {
        problem(function, "a command is appended to a closed command list");
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    command.wait_count = count;
    if (count > MAX_WAITS || (count && !waits)) {
        problem(function, "the events to wait for are missing");
        return ZE_RESULT_ERROR_INVALID_SIZE;
    }
    for (uint32_t n = 0; n < count; n++)
        if (!(command.waits[n] = object(function, waits[n], EVENT)))
            return ZE_RESULT_ERROR_INVALID_SYNCHRONIZATION_OBJECT;
    if (signal && !(command.signal = object(function, signal, EVENT)))
        return ZE_RESULT_ERROR_INVALID_SYNCHRONIZATION_OBJECT;
    if (list->immediate) {
        if (!behaviour.hangs) run_command(&command);
        return ZE_RESULT_SUCCESS;
    }
    if (list->command_count == list->command_room) {
        list->command_room = 2 * list->command_room + 16;
        list->commands = realloc(list->commands, list->command_room * sizeof command);
    }
    list->commands[list->command_count++] = command;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeCommandListAppendBarrier(ze_command_list_handle_t hCommandList,
                                              ze_event_handle_t hSignalEvent, uint32_t numWaitEvents,
                                              ze_event_handle_t *phWaitEvents) {
    CALLED;
    return appended(__func__, hCommandList, (COMMAND){.kind = BARRIER}, hSignalEvent, numWaitEvents,
                    phWaitEvents);
}

EXPORT ze_result_t zeCommandListAppendWaitOnEvents(ze_command_list_handle_t hCommandList, uint32_t numEvents,
                                                   ze_event_handle_t *phEvents) {
    CALLED;
    RULE(numEvents && phEvents, "there is no event to wait for");
    return appended(__func__, hCommandList, (COMMAND){.kind = WAIT}, NULL, numEvents, phEvents);
}

EXPORT ze_result_t zeCommandListAppendMemoryCopy(ze_command_list_handle_t hCommandList, void *dstptr,
                                                 const void *srcptr, size_t size,
                                                 ze_event_handle_t hSignalEvent, uint32_t numWaitEvents,
                                                 ze_event_handle_t *phWaitEvents) {
    CALLED;
    const uint64_t target = (uint64_t)dstptr, source = (uint64_t)srcptr;
    RULE(memory_at(target, size) && memory_at(source, size), "a copy leaves an allocation");
    RULE(target + size <= source || source + size <= target, "the two ranges overlap");
    COMMAND command = {.kind = COPY, .target = target, .source = source, .nbytes = size};
    return appended(__func__, hCommandList, command, hSignalEvent, numWaitEvents, phWaitEvents);
}

EXPORT ze_result_t zeCommandListAppendMemoryFill(ze_command_list_handle_t hCommandList, void *ptr,
                                                 const void *pattern, size_t pattern_size, size_t size,
                                                 ze_event_handle_t hSignalEvent, uint32_t numWaitEvents,
                                                 ze_event_handle_t *phWaitEvents) {
    CALLED;
    RULE(pattern_size && pattern_size <= 16 && !(pattern_size & (pattern_size - 1)),
         "the pattern is too long or no power of two");
    RULE(size % pattern_size == 0 && (uint64_t)ptr % pattern_size == 0, "the range is no whole patterns");
    RULE(memory_at((uint64_t)ptr, size), "a fill leaves an allocation");
    COMMAND command = {.kind = FILL, .target = (uint64_t)ptr, .nbytes = size};
    command.pattern_bytes = pattern_size;
    memcpy(command.pattern, pattern, pattern_size);
    return appended(__func__, hCommandList, command, hSignalEvent, numWaitEvents, phWaitEvents);
}

EXPORT ze_result_t zeCommandListAppendLaunchKernel(ze_command_list_handle_t hCommandList,
                                                   ze_kernel_handle_t hKernel,
                                                   const ze_group_count_t *pLaunchFuncArgs,
                                                   ze_event_handle_t hSignalEvent, uint32_t numWaitEvents,
                                                   ze_event_handle_t *phWaitEvents) {
    CALLED;
    NEEDED(kernel, hKernel, KERNEL);
    RULE(kernel->group_size, "the group size of the kernel is not set");
    RULE(kernel->given == (1u << kernel->count) - 1, "an argument of the kernel is not set");
    RULE((kernel->access & 3) == 3, "the kernel may not follow addresses to host and device memory");
    RULE(pLaunchFuncArgs->groupCountX && pLaunchFuncArgs->groupCountX <= 1 << 16 &&
             pLaunchFuncArgs->groupCountY == 1 && pLaunchFuncArgs->groupCountZ == 1,
         "the device takes no such number of groups");
    COMMAND command = {.kind = LAUNCH, .kernel = kernel, .groups = pLaunchFuncArgs->groupCountX};
    memcpy(command.arguments, kernel->arguments, sizeof command.arguments);
    return appended(__func__, hCommandList, command, hSignalEvent, numWaitEvents, phWaitEvents);
}

EXPORT ze_result_t zeEventPoolCreate(ze_context_handle_t hContext, const ze_event_pool_desc_t *desc,
                                     uint32_t numDevices, ze_device_handle_t *phDevices,
                                     ze_event_pool_handle_t *phEventPool) {
    CALLED;
    NEEDED(context, hContext, CONTEXT);
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_EVENT_POOL_DESC);
    RULE(desc->count && desc->count <= 64 && numDevices == 1 && phDevices[0], "no pool is like that");
    RULE(desc->flags & ZE_EVENT_POOL_FLAG_HOST_VISIBLE, "the host cannot see the events");
    OBJECT *pool = made(POOL, context);
    pool->count = desc->count;
    *phEventPool = (ze_event_pool_handle_t)pool;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeEventPoolDestroy(ze_event_pool_handle_t hEventPool) {
    CALLED;
    return destroyed(__func__, hEventPool, POOL);
}

EXPORT ze_result_t zeEventCreate(ze_event_pool_handle_t hEventPool, const ze_event_desc_t *desc,
                                 ze_event_handle_t *phEvent) {
    CALLED;
    NEEDED(pool, hEventPool, POOL);
    check_description(__func__, desc, ZE_STRUCTURE_TYPE_EVENT_DESC);
    RULE(desc->index < pool->count && !(pool->taken >> desc->index & 1), "the pool has no such event");
    RULE(desc->signal & ZE_EVENT_SCOPE_FLAG_HOST, "the host cannot see what the event orders");
    pool->taken |= 1ull << desc->index;
    OBJECT *event = made(EVENT, pool);
    event->index = desc->index;
    *phEvent = (ze_event_handle_t)event;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeEventDestroy(ze_event_handle_t hEvent) {
    CALLED;
    const ze_result_t result = destroyed(__func__, hEvent, EVENT);
    OBJECT *event = (OBJECT *)hEvent;
    if (!result) event->parent->taken &= ~(1ull << event->index);
    return result;
}

EXPORT ze_result_t zeEventHostReset(ze_event_handle_t hEvent) {
    CALLED;
    NEEDED(event, hEvent, EVENT);
    RULE(!pending_uses(event), "an event is reset while the device uses it");
    event->signaled = 0;
    return ZE_RESULT_SUCCESS;
}

EXPORT ze_result_t zeEventQueryStatus(ze_event_handle_t hEvent) {
    CALLED;
    NEEDED(event, hEvent, EVENT);
    if (looks) looks--;
    else run_pending(event);
    return event->signaled ? ZE_RESULT_SUCCESS : ZE_RESULT_NOT_READY;
}

EXPORT ze_result_t zeEventHostSynchronize(ze_event_handle_t hEvent, uint64_t timeout) {
    CALLED;
    NEEDED(event, hEvent, EVENT);
    (void)timeout;
    run_pending(event);
    return event->signaled ? ZE_RESULT_SUCCESS : ZE_RESULT_NOT_READY;
}
