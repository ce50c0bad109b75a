// Checks, submits and collects steps.

#if !defined(_WIN32) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "state.h"

#define EVENT_NONE 0

// The first record of a step's inputs: STEP of contract/records.py.
typedef struct {
    uint32_t tokens, rows, first_event, reserved;
} STEP_RECORD;

// SAMPLING of contract/records.py.
typedef struct {
    float temperature, top_p, min_p, repeat_penalty;
    int32_t top_k;
    uint32_t seed_low, seed_high;
    int32_t position;
    float presence_penalty, frequency_penalty;
    int32_t repeat_last_n, slot, mask, bias_first, bias_count, reserved;
} SAMPLING_RECORD;

_Static_assert(sizeof(STEP_RECORD) == 16 && sizeof(SAMPLING_RECORD) == 64, "records");

static const zinc_rt_sampling GREEDY = {.top_p = 1, .repeat_penalty = 1};

static int32_t *pages_of(const STATE *state, const FLIGHT *flight) {
    const uint64_t offset = state->header->page_table;
    return offset == ABSENT_OFFSET ? 0 : (int32_t *)(flight->inputs + offset);
}

// ---- Checks, before anything changes.

// The position at which a slot's first token of a step may be, where the caller gives no pages or
// the slot has a recurrent state, which no page has.
static int check_begin(zinc_rt_plan *plan, const STATE *state, const zinc_rt_token *token) {
    const int32_t next = state->next[token->slot], position = token->position;
    if (position > next)
        return fail(plan, ZINC_RT_POSITION, "slot %d continues at position %d, not at %d",
                    token->slot, next, position);
    if (state->header->recurrent && position != next && position)
        return fail(plan, ZINC_RT_POSITION, "slot %d has a recurrent state at position %d and can"
                    " begin again at 0 only, not at %d", token->slot, next, position);
    return ZINC_RT_OK;
}

static int check_token(zinc_rt_plan *plan, const STATE *state, const zinc_rt_step *step,
                       uint32_t index) {
    const HEADER *h = state->header;
    const zinc_rt_token *token = &step->token[index], *before = token - 1;
    if (token->token < ZINC_RT_LAST_TOKEN || token->token >= (int32_t)h->vocab)
        return fail(plan, ZINC_RT_TOKEN, "token %u has the id %d, not from 0 to %u", index,
                    token->token, h->vocab - 1);
    if (token->slot < 0 || token->slot >= (int32_t)h->slots)
        return fail(plan, ZINC_RT_POSITION, "token %u is in slot %d of %u", index, token->slot,
                    h->slots);
    if (token->position < 0 || token->position >= (int32_t)h->context)
        return fail(plan, ZINC_RT_POSITION, "token %u is at position %d of %u", index,
                    token->position, h->context);
    if (index && before->slot == token->slot) {
        if (before->position + 1 == token->position) return ZINC_RT_OK;
        return fail(plan, ZINC_RT_POSITION, "token %u is at position %d, after one at %d", index,
                    token->position, before->position);
    }
    for (uint32_t i = 0; i < index; i++)
        if (step->token[i].slot == token->slot)
            return fail(plan, ZINC_RT_POSITION, "tokens %u and %u of slot %d do not follow each"
                        " other", i, index, token->slot);
    const bool free = step->pages && !state->header->recurrent;
    return free ? ZINC_RT_OK : check_begin(plan, state, token);
}

// The pages that a step's tokens read and write.
static int check_pages(zinc_rt_plan *plan, const STATE *state, const zinc_rt_step *step) {
    const HEADER *h = state->header;
    if (!step->pages) {
        if ((uint64_t)h->slots * h->slot_pages <= h->pages) return ZINC_RT_OK;
        return fail(plan, ZINC_RT_POSITION, "the plan has fewer pages than its slots: give a page"
                    " table");
    }
    for (uint32_t i = 0; i < step->tokens; i++) {
        const zinc_rt_token *token = &step->token[i];
        if (i + 1 < step->tokens && token[1].slot == token->slot) continue;
        const int32_t *pages = step->pages + (uint64_t)token->slot * h->slot_pages;
        for (uint32_t k = 0; k <= (uint32_t)token->position / h->page_positions; k++)
            if (pages[k] < 0 || pages[k] >= (int32_t)h->pages)
                return fail(plan, ZINC_RT_POSITION, "page %u of slot %d is %d, not from 0 to %u", k,
                            token->slot, pages[k], h->pages - 1);
    }
    return ZINC_RT_OK;
}

// Written so that NaN is out of range.
static bool in_range(float value, float low, float high) { return value >= low && value <= high; }

static int check_sampling(zinc_rt_plan *plan, const STATE *state, const zinc_rt_sampling *s) {
    const char *what = 0;
    if (!in_range(s->temperature, 1e-3f, 100) && s->temperature != 0) what = "temperature";
    else if (!in_range(s->top_p, 0x1p-16f, 1)) what = "top_p";
    else if (!in_range(s->min_p, 0, 1)) what = "min_p";
    else if (!in_range(s->repeat_penalty, 0.01f, 100)) what = "repeat_penalty";
    else if (!in_range(s->presence_penalty, -2, 2)) what = "presence_penalty";
    else if (!in_range(s->frequency_penalty, -2, 2)) what = "frequency_penalty";
    else if (s->top_k < 0) what = "top_k";
    else if (s->repeat_last_n < 0 || s->repeat_last_n > (int32_t)state->header->recent)
        what = "repeat_last_n";
    if (!what) return ZINC_RT_OK;
    return fail(plan, ZINC_RT_SAMPLING, "%s is out of range", what);
}

static int check_step(zinc_rt_plan *plan, const STATE *state, const zinc_rt_step *step) {
    const HEADER *h = state->header;
    if (step->tokens == 0 || step->tokens > h->tokens)
        return fail(plan, ZINC_RT_SIZE, "a step of %u tokens, not 1 to %u", step->tokens, h->tokens);
    if (step->rows > h->rows || step->rows > step->tokens)
        return fail(plan, ZINC_RT_SIZE, "a step of %u rows and %u tokens; rows are at most %u",
                    step->rows, step->tokens, h->rows);
    if (!step->token || (step->rows && !step->row))
        return fail(plan, ZINC_RT_ARGUMENT, "the step has no tokens or no rows");
    int code = ZINC_RT_OK;
    for (uint32_t i = 0; i < step->tokens && !code; i++) code = check_token(plan, state, step, i);
    if (!code) code = check_pages(plan, state, step);
    for (uint32_t i = 0; i < step->rows && !code; i++) {
        if (step->row[i] >= step->tokens || (i && step->row[i] <= step->row[i - 1]))
            code = fail(plan, ZINC_RT_POSITION, "row %u is of token %u of %u, or out of order", i,
                        step->row[i], step->tokens);
        else if (step->sampling)
            code = check_sampling(plan, state, &step->sampling[i]);
    }
    return code;
}

// ---- Inputs.

static void write_pages(const STATE *state, FLIGHT *flight, const int32_t *given) {
    const HEADER *h = state->header;
    const uint64_t count = (uint64_t)h->slots * h->slot_pages;
    int32_t *pages = pages_of(state, flight);
    if (!pages) return;
    if (given) memcpy(pages, given, count * sizeof(*pages));
    else if (!flight->default_pages)
        for (uint64_t i = 0; i < count; i++) pages[i] = (int32_t)i;
    flight->default_pages = !given;
}

static void write_inputs(STATE *state, FLIGHT *flight, const zinc_rt_step *step) {
    const HEADER *h = state->header;
    uint8_t *inputs = flight->inputs;
    *(STEP_RECORD *)inputs = (STEP_RECORD){step->tokens, step->rows, flight->first_event, 0};
    zinc_rt_token *query = (zinc_rt_token *)(inputs + h->query);
    int32_t *rows = (int32_t *)(inputs + h->output_rows);
    SAMPLING_RECORD *sampling = (SAMPLING_RECORD *)(inputs + h->sampling);
    for (uint32_t i = 0; i < step->tokens; i++) {
        query[i] = step->token[i];
        query[i].reserved = 0;
        state->next[query[i].slot] = query[i].position + 1;
    }
    for (uint32_t i = 0; i < step->rows; i++) {
        const zinc_rt_sampling *s = step->sampling ? &step->sampling[i] : &GREEDY;
        const zinc_rt_token *token = &query[step->row[i]];
        const bool penalizes = s->repeat_penalty != 1 || s->presence_penalty != 0 ||
                               s->frequency_penalty != 0;
        rows[i] = (int32_t)step->row[i];
        sampling[i] = (SAMPLING_RECORD){
            .temperature = s->temperature, .top_p = s->top_p, .min_p = s->min_p,
            .repeat_penalty = s->repeat_penalty, .top_k = s->top_k, .seed_low = (uint32_t)s->seed,
            .seed_high = (uint32_t)(s->seed >> 32), .position = token->position + 1,
            .presence_penalty = s->presence_penalty, .frequency_penalty = s->frequency_penalty,
            .repeat_last_n = penalizes ? s->repeat_last_n : 0, .slot = token->slot,
        };
    }
    write_pages(state, flight, step->pages);
}

// ---- Steps.

static const BUCKET_RECORD *bucket_of(const STATE *state, const zinc_rt_step *step) {
    const BUCKET_RECORD *bucket = state->buckets;
    while (bucket->tokens < step->tokens || bucket->rows < step->rows) bucket++;
    return bucket;
}

int zinc_rt_submit(zinc_rt_plan *plan, const zinc_rt_step *step, zinc_rt_event *event) {
    int code;
    STATE *state = state_of(plan, &code);
    if (!state) return code;
    if (!step || !event)
        return fail(plan, ZINC_RT_ARGUMENT, "there is no step, or no room for its event");
    const HEADER *h = state->header;
    FLIGHT *flight = &state->flights[(state->events + 1) % ZINC_RT_IN_FLIGHT];
    if (flight->event)
        return fail(plan, ZINC_RT_BUSY, "wait for step %llu first",
                    (unsigned long long)flight->event);
    if ((code = check_step(plan, state, step))) return code;
    flight->first_event = state->ring_events;
    flight->rows = step->rows;
    write_inputs(state, flight, step);
    flight->logits = (COPY){(uint64_t)(uintptr_t)state->address[h->logits],
                            (uint64_t)(uintptr_t)step->logits,
                            (uint64_t)step->rows * h->vocab * sizeof(float)};
    const BUCKET_RECORD *bucket = bucket_of(state, step);
    const JOB job = {
        .scratch = (uint64_t)(uintptr_t)state->scratch,
        .own = (uint64_t)(uintptr_t)state->own,
        .own_bytes = state->own_bytes,
        .input = (uint64_t)(uintptr_t)flight->inputs,
        .packets = (uint64_t)(uintptr_t)state->header + bucket->packets_offset,
        .copies = (uint64_t)(uintptr_t)&flight->logits,
        .count = (uint32_t)bucket->packets,
        .copy_count = step->logits && step->rows,
        .workers = state->threads,
    };
    state->ring_events += step->rows;
    flight->event = *event = ++state->events;
    flight->number = state->kernels.submit(state->pool, &job);
    return ZINC_RT_OK;
}

// Whether the step ends within so many nanoseconds. The pool returns early after a signal.
static bool ends(const STATE *state, const FLIGHT *flight, uint64_t limit) {
    const uint64_t begun = nanoseconds();
    for (uint64_t passed = 0;; passed = nanoseconds() - begun) {
        const uint64_t left = passed < limit ? limit - passed : 0;
        const uint64_t part = left < 1000000000u ? left : 1000000000u;
        if (state->kernels.wait(state->pool, flight->number, part)) return true;
        if (!left) return false;
    }
}

int zinc_rt_wait(zinc_rt_plan *plan, zinc_rt_event event, uint64_t limit, int32_t *tokens) {
    int code;
    STATE *state = state_of(plan, &code);
    if (!state) return code;
    FLIGHT *flight = &state->flights[event % ZINC_RT_IN_FLIGHT];
    if (event == EVENT_NONE || flight->event != event)
        return fail(plan, ZINC_RT_EVENT, "no step in flight has the event %llu",
                    (unsigned long long)event);
    if (!ends(state, flight, limit))
        return fail(plan, ZINC_RT_TIMEOUT, "step %llu has not ended", (unsigned long long)event);
    const HEADER *h = state->header;
    const uint8_t *ring = state->address[h->ring];
    for (uint32_t i = 0; i < flight->rows; i++) {
        const uint32_t entry = (flight->first_event + i) & (h->ring_events - 1);
        const int32_t token =
            *(const int32_t *)(ring + (uint64_t)entry * h->event_bytes + h->event_token);
        if (tokens) tokens[i] = token;
        if (token < 0)
            code = fail(plan, ZINC_RT_NOT_FINITE, "a logit of row %u is NaN or infinite", i);
    }
    flight->event = EVENT_NONE;
    return code;
}
