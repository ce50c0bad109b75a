// Reads and checks the files of a plan: nothing of them is used before it was found to be in range.

#if !defined(_WIN32) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "sha256.h"
#include "state.h"

#define MOST 0x7FFFFFFFu  // of every count in a plan
#define MAX_BUFFERS 65536u
#define PATH_BYTES 4096

void zinc_processor(uint64_t *words);

#define HAS(condition)                                                                     \
    do {                                                                                   \
        if (!(condition))                                                                  \
            return fail(plan, ZINC_RT_DAMAGED, "the plan is damaged: not %s", #condition); \
    } while (0)

static bool ended(const char *text, size_t bytes) { return memchr(text, 0, bytes) != 0; }

// Whether `count` records lie within so many bytes.
static bool within(uint64_t offset, uint64_t count, uint64_t record, uint64_t bytes) {
    return offset <= bytes && (!record || count <= (bytes - offset) / record);
}

static bool countable(uint32_t count) { return count > 0 && count <= MOST; }

static int check_limits(zinc_rt_plan *plan, const HEADER *h) {
    HAS(ended(h->machine, sizeof(h->machine)) && ended(h->variant, sizeof(h->variant)));
    HAS(ended(h->kernels, sizeof(h->kernels)) && ended(h->weights, sizeof(h->weights)));
    HAS(ended(h->kernels_digest, sizeof(h->kernels_digest)));
    HAS(ended(h->model, sizeof(h->model)) && ended(h->kv_dtype, sizeof(h->kv_dtype)));
    HAS(!strpbrk(h->kernels, SEPARATORS) && !strpbrk(h->weights, SEPARATORS));
    HAS(countable(h->slots) && countable(h->context) && countable(h->pages));
    HAS(countable(h->slot_pages) && countable(h->page_positions) && countable(h->vocab));
    HAS(countable(h->tokens) && countable(h->rows) && countable(h->recent));
    HAS((uint64_t)h->slot_pages * h->page_positions >= h->context);
    HAS(countable(h->ring_events) && !(h->ring_events & (h->ring_events - 1)));
    HAS(h->ring_events / ZINC_RT_IN_FLIGHT >= h->rows);
    HAS(h->workers > 0 && h->workers <= 1024);
    HAS(within(0, h->tokens, sizeof(zinc_rt_token), h->input_bytes));
    HAS(within(h->query, h->tokens, sizeof(zinc_rt_token), h->input_bytes));
    HAS(within(h->output_rows, h->rows, sizeof(uint32_t), h->input_bytes));
    HAS(within(h->sampling, h->rows, 64, h->input_bytes));
    HAS(!((h->query | h->output_rows | h->sampling) % 8));
    HAS(h->page_table == ABSENT_OFFSET ||
        (!(h->page_table % 8) && within(h->page_table, (uint64_t)h->slots * h->slot_pages,
                                        sizeof(int32_t), h->input_bytes)));
    HAS(h->scratch_bytes < OFFSET_MASK && h->own_bytes < OFFSET_MASK);
    HAS(h->input_bytes < OFFSET_MASK);
    return ZINC_RT_OK;
}

static int check_buffers(zinc_rt_plan *plan, const HEADER *h, const BUFFER_RECORD *buffers) {
    for (uint32_t i = 0; i < h->buffers; i++) {
        const BUFFER_RECORD *buffer = &buffers[i];
        HAS(ended(buffer->name, sizeof(buffer->name)) && buffer->bytes <= OFFSET_MASK);
        HAS(buffer->memory == MEMORY_ZEROED || buffer->memory == MEMORY_WEIGHTS);
        if (buffer->memory == MEMORY_WEIGHTS)
            HAS(!(buffer->offset % ALIGNMENT) &&
                within(buffer->offset, 1, buffer->bytes, h->weights_bytes));
    }
    HAS(h->ring < h->buffers && h->logits < h->buffers);
    HAS(buffers[h->ring].memory == MEMORY_ZEROED && buffers[h->logits].memory == MEMORY_ZEROED);
    HAS(within(0, h->ring_events, h->event_bytes, buffers[h->ring].bytes));
    HAS(within(h->event_token, 1, sizeof(int32_t), h->event_bytes) && !(h->event_token % 4));
    HAS(!(h->event_bytes % 4));
    HAS(within(0, (uint64_t)h->rows * h->vocab, sizeof(float), buffers[h->logits].bytes));
    return ZINC_RT_OK;
}

static int check_buckets(zinc_rt_plan *plan, const HEADER *h, const BUCKET_RECORD *buckets) {
    HAS(h->packet_bytes >= 8 && h->packet_bytes <= 4096 && !(h->packet_bytes % 8));
    HAS(!(h->operand_offset % 8));
    HAS(within(h->operand_offset, h->operands, sizeof(uint64_t), h->packet_bytes));
    for (uint32_t i = 0; i < h->buckets; i++) {
        const BUCKET_RECORD *bucket = &buckets[i];
        HAS(bucket->packets > 0 && bucket->packets <= MOST && !(bucket->packets_offset % 8));
        HAS(bucket->packets_offset >= sizeof(HEADER));
        HAS(within(bucket->packets_offset, bucket->packets, h->packet_bytes, h->file_bytes));
        HAS(i == 0 || bucket->packets_offset >= bucket[-1].packets_offset +
                                                    bucket[-1].packets * h->packet_bytes);
    }
    HAS(buckets[h->buckets - 1].tokens >= h->tokens && buckets[h->buckets - 1].rows >= h->rows);
    return ZINC_RT_OK;
}

// Whether an operand is one that packets may have.
static bool valid_operand(const HEADER *h, const BUFFER_RECORD *buffers, uint64_t operand) {
    const uint64_t offset = operand & OFFSET_MASK, kind = operand >> 60;
    const uint64_t index = operand >> BUFFER_SHIFT & 0xFFFF;
    if (operand == 0 || operand == ABSENT) return true;
    if (kind == 1) return index < h->buffers && offset <= buffers[index].bytes;
    if (index) return false;
    if (kind == 8) return offset <= h->own_bytes;
    if (kind == 4) return offset <= h->scratch_bytes;
    return kind == 2 && offset <= h->input_bytes;
}

static int check_packets(zinc_rt_plan *plan, const STATE *state) {
    const HEADER *h = state->header;
    for (uint32_t i = 0; i < h->buckets; i++) {
        const uint8_t *packet = (const uint8_t *)h + state->buckets[i].packets_offset;
        for (uint64_t n = 0; n < state->buckets[i].packets; n++, packet += h->packet_bytes) {
            const uint64_t *operand = (const uint64_t *)(packet + h->operand_offset);
            HAS(*(const uint32_t *)packet < h->ops);
            for (uint32_t k = 0; k < h->operands; k++)
                HAS(valid_operand(h, state->buffers, operand[k]));
        }
    }
    return ZINC_RT_OK;
}

static int check_tables(zinc_rt_plan *plan, STATE *state) {
    const HEADER *h = state->header;
    int code = check_limits(plan, h);
    if (code) return code;
    HAS(h->buffers > 0 && h->buffers <= MAX_BUFFERS && !(h->buffers_offset % 8));
    HAS(h->buffers_offset >= sizeof(HEADER) && h->buckets_offset >= sizeof(HEADER));
    HAS(within(h->buffers_offset, h->buffers, sizeof(BUFFER_RECORD), h->file_bytes));
    HAS(h->buckets > 0 && h->buckets <= 64 && !(h->buckets_offset % 8));
    HAS(within(h->buckets_offset, h->buckets, sizeof(BUCKET_RECORD), h->file_bytes));
    state->buffers = (BUFFER_RECORD *)((uint8_t *)state->header + h->buffers_offset);
    state->buckets = (BUCKET_RECORD *)((uint8_t *)state->header + h->buckets_offset);
    code = check_buffers(plan, h, state->buffers);
    if (!code) code = check_buckets(plan, h, state->buckets);
    return code ? code : check_packets(plan, state);
}

static int check_file(zinc_rt_plan *plan, const HEADER *h, uint64_t bytes) {
    if (bytes < sizeof(HEADER) || memcmp(h->magic, PLAN_MAGIC, sizeof(h->magic)))
        return fail(plan, ZINC_RT_DAMAGED, "the file is no plan");
    if (h->abi != ZINC_RT_ABI)
        return fail(plan, ZINC_RT_VERSION, "the plan has ABI version %u, the library %u: export it"
                    " again", h->abi, ZINC_RT_ABI);
    if (h->header_bytes != sizeof(HEADER))
        return fail(plan, ZINC_RT_DAMAGED, "the plan's header has %u bytes", h->header_bytes);
    if (h->file_bytes != bytes)
        return fail(plan, ZINC_RT_DAMAGED, "the plan has %llu of %llu bytes",
                    (unsigned long long)bytes, (unsigned long long)h->file_bytes);
    const uint64_t start = offsetof(HEADER, digest) + sizeof(h->digest);
    uint8_t found[32];
    zinc_rt_digest digest;
    sha256_begin(&digest);
    sha256_add(&digest, (const uint8_t *)h + start, bytes - start);
    sha256_end(&digest, found);
    if (memcmp(found, h->digest, sizeof(found)))
        return fail(plan, ZINC_RT_DAMAGED, "the plan was changed: its digest differs");
    return ZINC_RT_OK;
}

int read_plan(zinc_rt_plan *plan, STATE *state, const char *path) {
    INPUT_FILE file = {0};
    if (!open_input(&file, path))
        return fail(plan, ZINC_RT_FILE, "%s: %s", path, file.reason);
    state->header = take(state, file.bytes);
    int code = ZINC_RT_OK;
    if (!state->header)
        code = fail(plan, ZINC_RT_MEMORY, "no memory for %llu bytes of the plan",
                    (unsigned long long)file.bytes);
    else if (read_input(&file, state->header, file.bytes) != file.bytes)
        code = fail(plan, ZINC_RT_FILE, "%s: it cannot be read", path);
    close_input(&file);
    if (!code) code = check_file(plan, state->header, file.bytes);
    if (code) return code;
    hexadecimal(state->header->weights_digest, 32, state->digest);
    return check_tables(plan, state);
}

int check_processor(zinc_rt_plan *plan, const STATE *state) {
    const HEADER *h = state->header;
    uint64_t words[PROCESSOR_WORDS] = {0};
    zinc_processor(words);
    bool runs = !strcmp(h->machine, MACHINE);
    for (int i = 0; i < PROCESSOR_WORDS; i++) runs = runs && !(h->needs[i] & ~words[i]);
    if (runs) return ZINC_RT_OK;
    return fail(plan, ZINC_RT_PROCESSOR, "the plan is for %s, which this processor cannot run",
                h->variant);
}

int load_kernels(zinc_rt_plan *plan, STATE *state) {
    const HEADER *h = state->header;
    KERNELS *kernels = &state->kernels;
    char own[PATH_BYTES] = "", path[PATH_BYTES];
    const char *folder = state->options.kernels;
    if (strcmp(h->kernels_digest, ZINC_RT_KERNELS_DIGEST))
        return fail(plan, ZINC_RT_KERNELS, "the plan is for kernels %s, the library for %s: export"
                    " it again", h->kernels_digest, ZINC_RT_KERNELS_DIGEST);
    if (!folder && path_of((void *)load_kernels, own, sizeof(own))) own[folder_length(own)] = 0;
    const int length = snprintf(path, sizeof(path), "%s%s%s", folder ? folder : own,
                                folder ? "/" : "", h->kernels);
    if (length < 0 || (size_t)length >= sizeof(path))
        return fail(plan, ZINC_RT_KERNELS, "the folder of the kernels has too long a path");
    kernels->library = load_library(path);
    if (!kernels->library)
        return fail(plan, ZINC_RT_KERNELS, "cannot load the kernels %s", path);
    *(void **)&kernels->open = symbol_of(kernels->library, "zinc_open");
    *(void **)&kernels->close = symbol_of(kernels->library, "zinc_close");
    *(void **)&kernels->submit = symbol_of(kernels->library, "zinc_submit");
    *(void **)&kernels->wait = symbol_of(kernels->library, "zinc_wait");
    if (kernels->open && kernels->close && kernels->submit && kernels->wait) return ZINC_RT_OK;
    return fail(plan, ZINC_RT_KERNELS, "%s is no kernel library", path);
}

int map_weights(zinc_rt_plan *plan, STATE *state, const char *plan_path) {
    const HEADER *h = state->header;
    char path[PATH_BYTES];
    const char *given = state->options.weights;
    const int folder = given ? 0 : (int)folder_length(plan_path);
    const int length = snprintf(path, sizeof(path), "%.*s%s", folder, plan_path,
                                given ? given : h->weights);
    if (length < 0 || (size_t)length >= sizeof(path))
        return fail(plan, ZINC_RT_FILE, "the weights have too long a path");
    INPUT_FILE file = {0};
    WEIGHTS_HEADER header = {0};
    if (!open_input(&file, path))
        return fail(plan, ZINC_RT_FILE, "%s: %s", path, file.reason);
    if (read_input(&file, &header, sizeof(header)) == sizeof(header) &&
        file.bytes == WEIGHTS_HEADER_BYTES + h->weights_bytes) {
        state->mapped = map_input(&file);
        state->mapped_bytes = file.bytes;
    }
    close_input(&file);
    if (memcmp(header.magic, WEIGHTS_MAGIC, sizeof(header.magic)))
        return fail(plan, ZINC_RT_DAMAGED, "%s is no weights file", path);
    if (header.abi != ZINC_RT_ABI)
        return fail(plan, ZINC_RT_VERSION, "%s has ABI version %u", path, header.abi);
    if (memcmp(header.digest, h->weights_digest, sizeof(header.digest)))
        return fail(plan, ZINC_RT_MODEL, "%s is of another model than the plan, %s", path, h->model);
    if (file.bytes != WEIGHTS_HEADER_BYTES + h->weights_bytes)
        return fail(plan, ZINC_RT_DAMAGED, "%s has %llu bytes, its plan expects %llu", path,
                    (unsigned long long)file.bytes,
                    (unsigned long long)(WEIGHTS_HEADER_BYTES + h->weights_bytes));
    if (!state->mapped)
        return fail(plan, ZINC_RT_MEMORY, "cannot map the %llu bytes of %s",
                    (unsigned long long)file.bytes, path);
    return ZINC_RT_OK;
}
