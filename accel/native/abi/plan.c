// Opens and closes plans, and says what is in them.

#if !defined(_WIN32) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <stdarg.h>

#include "sha256.h"
#include "state.h"
#if defined(__linux__)
#include <sched.h>
#endif

static const char *const NAMES[ZINC_RT_CODES] = {
    "ok",      "argument", "version", "file",     "damaged",  "kernels",  "processor",
    "model",   "memory",   "threads", "closed",   "size",     "token",    "position",
    "sampling", "busy",    "event",   "timeout",  "not finite", "forked",
};

uint32_t zinc_rt_abi(void) { return ZINC_RT_ABI; }

const char *zinc_rt_name(int code) {
    return code >= 0 && code < ZINC_RT_CODES ? NAMES[code] : "unknown";
}

int fail(zinc_rt_plan *plan, int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(plan->text, sizeof(plan->text), format, arguments);
    va_end(arguments);
    // Names in a damaged plan may hold anything.
    for (char *at = plan->text; *at; at++)
        if ((unsigned char)*at < ' ' || *at == 0x7F) *at = '?';
    return code;
}

STATE *state_of(zinc_rt_plan *plan, int *code) {
    *code = ZINC_RT_ARGUMENT;
    if (!plan) return 0;
    STATE *state = plan->state;
    *code = ZINC_RT_OK;
    if (!state) *code = fail(plan, ZINC_RT_CLOSED, "the plan is not open");
    else if (state->process != process_id())
        *code = fail(plan, ZINC_RT_FORKED, "this process was forked from the one that opened the"
                     " plan: open it in this one");
    return *code ? 0 : state;
}

// ---- Memory.

static void *allocate(const zinc_rt_options *options, uint64_t bytes) {
    if (bytes > SIZE_MAX / 2) return 0;
    if (!options->allocate) return calloc(1, (size_t)bytes);
    void *memory = options->allocate(options->context, (size_t)bytes);
    return memory ? memset(memory, 0, (size_t)bytes) : 0;
}

static void release(const zinc_rt_options *options, void *memory, uint64_t bytes) {
    if (!options->allocate) free(memory);
    else if (options->release) options->release(options->context, memory, (size_t)bytes);
}

void *take(STATE *state, uint64_t bytes) {
    if (bytes > SIZE_MAX / 4) return 0;
    const uint64_t all = bytes + sizeof(ALLOCATION) + ALIGNMENT;
    ALLOCATION *made = allocate(&state->options, all);
    if (!made) return 0;
    made->next = state->allocations;
    made->bytes = all;
    state->allocations = made;
    state->allocated += all;
    const uintptr_t begin = (uintptr_t)(made + 1);
    return (void *)((begin + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

static uint64_t aligned(uint64_t bytes) {
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static int take_memory(zinc_rt_plan *plan, STATE *state) {
    const HEADER *h = state->header;
    const char *what = "the table of buffers";
    uint64_t bytes = h->buffers * sizeof(*state->address);
    if (!(state->address = take(state, bytes))) goto none;
    for (uint32_t i = 0; i < h->buffers; i++) {
        const BUFFER_RECORD *buffer = &state->buffers[i];
        what = buffer->name;
        bytes = buffer->bytes;
        if (buffer->memory == MEMORY_WEIGHTS)
            state->address[i] = state->mapped + WEIGHTS_HEADER_BYTES + buffer->offset;
        else if (!(state->address[i] = take(state, bytes)))
            goto none;
    }
    what = "scratch";
    bytes = h->scratch_bytes;
    if (!(state->scratch = take(state, bytes))) goto none;
    state->own_bytes = aligned(h->own_bytes);
    bytes = state->own_bytes * state->threads;
    if (!(state->own = take(state, bytes))) goto none;
    what = "inputs";
    bytes = h->input_bytes;
    for (int i = 0; i < ZINC_RT_IN_FLIGHT; i++)
        if (!(state->flights[i].inputs = take(state, bytes))) goto none;
    what = "positions";
    bytes = h->slots * sizeof(*state->next);
    if ((state->next = take(state, bytes))) return ZINC_RT_OK;
none:
    return fail(plan, ZINC_RT_MEMORY, "no memory for %llu bytes of %s", (unsigned long long)bytes,
                what);
}

// Replaces the buffers that packets name by addresses.
static void relocate(STATE *state) {
    const HEADER *h = state->header;
    for (uint32_t i = 0; i < h->buckets; i++) {
        uint8_t *packet = (uint8_t *)state->header + state->buckets[i].packets_offset;
        for (uint64_t n = 0; n < state->buckets[i].packets; n++, packet += h->packet_bytes) {
            uint64_t *operand = (uint64_t *)(packet + h->operand_offset);
            for (uint32_t k = 0; k < h->operands; k++)
                if (operand[k] >> 60 == BUFFER_MEMORY >> 60)
                    operand[k] = (uint64_t)(uintptr_t)state->address[operand[k] >> BUFFER_SHIFT &
                                                                     0xFFFF] +
                                 (operand[k] & OFFSET_MASK);
        }
    }
}

// ---- Opening and closing.

static uint32_t threads_of(const STATE *state) {
    const uint32_t most = state->header->workers;
    uint32_t threads = state->options.threads;
    if (!threads) {
        threads = processors();
#if defined(__linux__)
        cpu_set_t allowed;
        if (!sched_getaffinity(0, sizeof(allowed), &allowed))
            threads = (uint32_t)CPU_COUNT(&allowed);
#endif
    }
    return threads < most ? threads : most;
}

static int prepare(zinc_rt_plan *plan, STATE *state, const char *path) {
    int code = read_plan(plan, state, path);
    if (!code) code = check_processor(plan, state);
    if (!code) code = load_kernels(plan, state);
    if (!code) code = map_weights(plan, state, path);
    if (code) return code;
    state->threads = threads_of(state);
    code = take_memory(plan, state);
    if (code) return code;
    relocate(state);
    state->pool = state->kernels.open(state->threads);
    if (state->pool) return ZINC_RT_OK;
    return fail(plan, ZINC_RT_THREADS, "the system cannot start %u threads", state->threads);
}

static void destroy(STATE *state) {
    // A forked process does not have the threads.
    if (state->process == process_id()) {
        if (state->pool) state->kernels.close(state->pool);
        if (state->kernels.library) unload_library(state->kernels.library);
    }
    if (state->mapped) unmap(state->mapped, state->mapped_bytes);
    const zinc_rt_options options = state->options;
    for (ALLOCATION *next, *made = state->allocations; made; made = next) {
        next = made->next;
        release(&options, made, made->bytes);
    }
    release(&options, state, sizeof(*state));
}

int zinc_rt_open(zinc_rt_plan *plan, uint32_t abi, const char *path,
                 const zinc_rt_options *options) {
    static const zinc_rt_options defaults;
    if (!plan) return ZINC_RT_ARGUMENT;
    if (abi != ZINC_RT_ABI)
        return fail(plan, ZINC_RT_VERSION, "the program has ABI version %u, the library %u", abi,
                    ZINC_RT_ABI);
    if (!path) return fail(plan, ZINC_RT_ARGUMENT, "there is no path");
    if (plan->state) return fail(plan, ZINC_RT_ARGUMENT, "the plan is open: close it first");
    if (!options) options = &defaults;
    plan->text[0] = 0;
    STATE *state = allocate(options, sizeof(STATE));
    if (!state) return fail(plan, ZINC_RT_MEMORY, "no memory for a plan");
    state->options = *options;
    state->process = process_id();
    const int code = prepare(plan, state, path);
    if (code) destroy(state);
    else plan->state = state;
    return code;
}

int zinc_rt_close(zinc_rt_plan *plan) {
    if (!plan) return ZINC_RT_ARGUMENT;
    if (plan->state) destroy(plan->state);
    plan->state = 0;
    return ZINC_RT_OK;
}

// ---- What is in a plan.

int zinc_rt_get_info(zinc_rt_plan *plan, zinc_rt_info *info) {
    int code;
    const STATE *state = state_of(plan, &code);
    if (!state) return code;
    if (!info) return fail(plan, ZINC_RT_ARGUMENT, "there is no room for the information");
    const HEADER *h = state->header;
    *info = (zinc_rt_info){
        .abi = h->abi, .arithmetic = h->arithmetic, .slots = h->slots, .context = h->context,
        .pages = h->pages, .slot_pages = h->slot_pages, .page_positions = h->page_positions,
        .tokens = h->tokens, .rows = h->rows, .vocab = h->vocab, .recent = h->recent,
        .threads = state->threads, .buffers = h->buffers, .recurrent = h->recurrent,
        .memory_bytes = state->allocated, .weights_bytes = h->weights_bytes, .model = h->model,
        .kv_dtype = h->kv_dtype, .variant = h->variant, .digest = state->digest,
    };
    return ZINC_RT_OK;
}

int zinc_rt_get_buffer(zinc_rt_plan *plan, uint32_t index, zinc_rt_buffer *buffer) {
    int code;
    const STATE *state = state_of(plan, &code);
    if (!state) return code;
    if (!buffer || index >= state->header->buffers)
        return fail(plan, ZINC_RT_ARGUMENT, "there is no buffer %u of %u", index,
                    state->header->buffers);
    const BUFFER_RECORD *record = &state->buffers[index];
    *buffer = (zinc_rt_buffer){.name = record->name, .memory = state->address[index],
                               .bytes = record->bytes,
                               .writable = record->memory == MEMORY_ZEROED};
    return ZINC_RT_OK;
}

int zinc_rt_verify(zinc_rt_plan *plan) {
    int code;
    const STATE *state = state_of(plan, &code);
    if (!state) return code;
    uint8_t found[32];
    zinc_rt_digest digest;
    sha256_begin(&digest);
    sha256_add(&digest, state->mapped + WEIGHTS_HEADER_BYTES, state->header->weights_bytes);
    sha256_end(&digest, found);
    if (!memcmp(found, state->header->weights_digest, sizeof(found))) return ZINC_RT_OK;
    return fail(plan, ZINC_RT_DAMAGED, "the weights were changed: their digest differs");
}

// ---- Digests of logits.

void zinc_rt_digest_begin(zinc_rt_digest *digest) { sha256_begin(digest); }

void zinc_rt_digest_add(zinc_rt_digest *digest, const float *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const float value = values[i] + 0.0f;
        sha256_add(digest, &value, sizeof(value));
    }
}

void zinc_rt_digest_end(zinc_rt_digest *digest, char text[65]) {
    uint8_t result[32];
    sha256_end(digest, result);
    hexadecimal(result, 32, text);
}
