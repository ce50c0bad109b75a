/* Runs an exported model without Python: `zinc-rt export-plan` writes the plan, a program opens it,
 * submits steps and reads tokens and logits, bit for bit those of every other tier.
 *
 * The library has no global state. A plan may be used by one thread at a time; different plans are
 * independent. Every function returns a code of enum zinc_rt_code, and `text` of the plan says what
 * went wrong. A plan is as trusted as a program: it names what the kernels read and write, so open
 * only plans that you exported. Files of an open plan may be deleted, and must not be changed. */

#ifndef ZINC_RT_H
#define ZINC_RT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32) && defined(ZINC_RT_BUILD)
#define ZINC_RT_FUNCTION __declspec(dllexport)
#elif defined(_WIN32)
#define ZINC_RT_FUNCTION
#else
#define ZINC_RT_FUNCTION __attribute__((visibility("default")))
#endif

#define ZINC_RT_ABI 1          /* version of this header and of plan files */
#define ZINC_RT_TEXT 256       /* bytes of a plan's text */
#define ZINC_RT_IN_FLIGHT 4    /* most steps that were submitted and not waited for */
#define ZINC_RT_LAST_TOKEN -1  /* the token that the slot's previous step sampled */
#define ZINC_RT_FOREVER UINT64_MAX

enum zinc_rt_code {
    ZINC_RT_OK = 0,
    ZINC_RT_ARGUMENT = 1,    /* a pointer is null, or a plan is opened twice */
    ZINC_RT_VERSION = 2,     /* the program or the plan has another ABI version */
    ZINC_RT_FILE = 3,        /* a file cannot be read */
    ZINC_RT_DAMAGED = 4,     /* a file is no plan, is truncated or was changed */
    ZINC_RT_KERNELS = 5,     /* the kernel library is missing or of another build */
    ZINC_RT_PROCESSOR = 6,   /* the plan needs a processor that this one is not */
    ZINC_RT_MODEL = 7,       /* the weights file belongs to another plan */
    ZINC_RT_MEMORY = 8,      /* memory could not be allocated */
    ZINC_RT_THREADS = 9,     /* the system cannot start the threads */
    ZINC_RT_CLOSED = 10,     /* the plan is not open */
    ZINC_RT_SIZE = 11,       /* a step has no tokens, or more tokens or rows than fit */
    ZINC_RT_TOKEN = 12,      /* a token id is out of range */
    ZINC_RT_POSITION = 13,   /* a slot, position, page or row is out of range or order */
    ZINC_RT_SAMPLING = 14,   /* a sampling parameter is out of range */
    ZINC_RT_BUSY = 15,       /* ZINC_RT_IN_FLIGHT steps wait for zinc_rt_wait */
    ZINC_RT_EVENT = 16,      /* no step in flight has this event */
    ZINC_RT_TIMEOUT = 17,    /* the step has not ended */
    ZINC_RT_NOT_FINITE = 18, /* a logit is NaN or infinite; that row's token is -1 */
    ZINC_RT_FORKED = 19,     /* the plan was opened by the parent process */
    ZINC_RT_CODES = 20
};

/* A plan as its caller holds it. Begin with all bytes zero; after zinc_rt_close it can be opened
 * again. `state` belongs to the library, `text` describes the last error in one line. */
typedef struct {
    void *state;
    char text[ZINC_RT_TEXT];
} zinc_rt_plan;

/* How a plan is opened; all bytes zero are the defaults. */
typedef struct {
    uint32_t threads;      /* 0: a thread a processor; at most those the plan was exported for */
    uint32_t reserved;
    const char *weights;   /* path of the weights; null: beside the plan, by the name in it */
    const char *kernels;   /* folder of the kernel library; null: that of this library */
    void *(*allocate)(void *context, size_t bytes); /* null: calloc; may return null */
    void (*release)(void *context, void *memory, size_t bytes);
    void *context;
} zinc_rt_options;

/* The sizes of a plan. A step has at most `tokens` tokens and `rows` rows. */
typedef struct {
    uint32_t abi, arithmetic;
    uint32_t slots;       /* sequences that it holds at once */
    uint32_t context;     /* positions of a sequence */
    uint32_t pages, slot_pages, page_positions; /* pages in all, of a slot; positions of a page */
    uint32_t tokens, rows, vocab;
    uint32_t recent;      /* most tokens that penalties look back at */
    uint32_t threads;
    uint32_t buffers;
    uint32_t recurrent;   /* 1: a slot's positions cannot be computed again, except from 0 */
    uint64_t memory_bytes, weights_bytes;
    const char *model, *kv_dtype, *variant; /* valid until the plan is closed */
    const char *digest;   /* SHA-256 of the weights, hexadecimal */
} zinc_rt_info;

/* A named part of memory. Steps read and write it, so no step may be in flight while the caller
 * does; memory that is not `writable` is mapped from the weights. */
typedef struct {
    const char *name;
    void *memory;
    uint64_t bytes;
    uint32_t writable, reserved;
} zinc_rt_buffer;

/* One query token. Tokens of a slot follow each other, at positions one after the other. */
typedef struct {
    int32_t token;     /* or ZINC_RT_LAST_TOKEN */
    int32_t slot;
    int32_t position;
    int32_t reserved;
} zinc_rt_token;

/* How a row is sampled. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 allow every token;
 * a repeat_penalty of 1 and other penalties of 0 change nothing. */
typedef struct {
    float temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
    int32_t top_k, repeat_last_n;
    uint64_t seed;
} zinc_rt_sampling;

/* One step; the library copies everything but `logits`, which it fills until the step has ended.
 * Without `pages`, int32 [slots][slot_pages], every slot has pages of its own, and positions begin
 * at 0 and leave out none. With `pages` the caller decides which slots share pages, and where a slot
 * without a recurrent state continues. */
typedef struct {
    uint32_t tokens, rows;
    const zinc_rt_token *token;       /* [tokens] */
    const uint32_t *row;              /* [rows]: ascending indices of tokens whose next is sampled */
    const zinc_rt_sampling *sampling; /* [rows]; null: greedy */
    const int32_t *pages;
    float *logits;                    /* [rows][vocab]; null: not requested */
} zinc_rt_step;

typedef uint64_t zinc_rt_event;

/* The ABI version of the library, and the name of a code. */
ZINC_RT_FUNCTION uint32_t zinc_rt_abi(void);
ZINC_RT_FUNCTION const char *zinc_rt_name(int code);

/* Maps, checks and prepares a plan and starts its threads. `abi` is ZINC_RT_ABI of the program;
 * `options` may be null. After an error the plan is closed. */
ZINC_RT_FUNCTION int zinc_rt_open(zinc_rt_plan *plan, uint32_t abi, const char *path,
                                  const zinc_rt_options *options);

/* Reads the weights once and compares their digest: DAMAGED where they changed. */
ZINC_RT_FUNCTION int zinc_rt_verify(zinc_rt_plan *plan);

ZINC_RT_FUNCTION int zinc_rt_get_info(zinc_rt_plan *plan, zinc_rt_info *info);

/* The buffer of an index below info.buffers. */
ZINC_RT_FUNCTION int zinc_rt_get_buffer(zinc_rt_plan *plan, uint32_t index, zinc_rt_buffer *buffer);

/* Queues a step after all earlier ones; a refused step changes nothing. */
ZINC_RT_FUNCTION int zinc_rt_submit(zinc_rt_plan *plan, const zinc_rt_step *step,
                                    zinc_rt_event *event);

/* Waits for a step, at most so many nanoseconds, and writes the sampled tokens, int32 [rows], unless
 * `tokens` is null. After OK or NOT_FINITE the event is used up. */
ZINC_RT_FUNCTION int zinc_rt_wait(zinc_rt_plan *plan, zinc_rt_event event, uint64_t nanoseconds,
                                  int32_t *tokens);

/* Waits for all steps, ends the threads and frees everything; a closed plan stays closed. */
ZINC_RT_FUNCTION int zinc_rt_close(zinc_rt_plan *plan);

/* SHA-256 over logits as `zinc-rt logits` prints it: little-endian, -0 as +0. */
typedef struct {
    uint32_t hash[8];
    uint64_t bytes;
    uint8_t block[64];
} zinc_rt_digest;
ZINC_RT_FUNCTION void zinc_rt_digest_begin(zinc_rt_digest *digest);
ZINC_RT_FUNCTION void zinc_rt_digest_add(zinc_rt_digest *digest, const float *values, size_t count);
ZINC_RT_FUNCTION void zinc_rt_digest_end(zinc_rt_digest *digest, char text[65]);

#ifdef __cplusplus
}
#endif
#endif
