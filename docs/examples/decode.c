/* Decodes with an exported plan, without Python: decode PLAN TOKENS COUNT [KERNELS].
 *
 *     zinc-rt export-plan model.plan --all-logits
 *     ./decode model.plan 1,2,3 8
 *
 * Prints the digest of the logits of TOKENS, which is that of `zinc-rt logits --tokens 1,2,3`, then
 * COUNT tokens, each the likeliest after those before. KERNELS is the folder of the kernel library
 * where that is not beside libzinc_rt. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zinc_rt.h>

#define SMALLER(a, b) ((a) < (b) ? (a) : (b))

static int failed(zinc_rt_plan *plan, int code) {
    fprintf(stderr, "decode: %s: %s\n", zinc_rt_name(code), plan->text);
    return code;
}

/* The number of token ids in a text of numbers with commas; `tokens` has room for all. */
static uint32_t parse(const char *text, int32_t *tokens) {
    uint32_t count = 0;
    for (char *end; *text; text = *end ? end + 1 : end) {
        tokens[count++] = (int32_t)strtol(text, &end, 10);
        if (end == text) return 0;
    }
    return count;
}

/* Computes tokens of slot 0 from a position on, each with a row of logits, and waits for them. */
static int step(zinc_rt_plan *plan, const int32_t *ids, uint32_t count, int32_t position,
                zinc_rt_token *tokens, uint32_t *rows, float *logits, int32_t *sampled) {
    for (uint32_t i = 0; i < count; i++) {
        tokens[i] = (zinc_rt_token){.token = ids[i], .position = position + (int32_t)i};
        rows[i] = i;
    }
    const zinc_rt_step step = {.tokens = count, .rows = count, .token = tokens, .row = rows,
                               .logits = logits};
    zinc_rt_event event;
    const int code = zinc_rt_submit(plan, &step, &event);
    return code ? code : zinc_rt_wait(plan, event, ZINC_RT_FOREVER, sampled);
}

static int decode(zinc_rt_plan *plan, const int32_t *prompt, uint32_t length, uint32_t count) {
    zinc_rt_info info;
    int code = zinc_rt_get_info(plan, &info);
    if (code) return code;
    const uint32_t most = SMALLER(info.tokens, info.rows);
    float *logits = malloc((size_t)most * info.vocab * sizeof(*logits));
    zinc_rt_token *tokens = malloc(most * sizeof(*tokens));
    uint32_t *rows = malloc(most * sizeof(*rows));
    int32_t *sampled = malloc(most * sizeof(*sampled)), last = 0;
    if (!logits || !tokens || !rows || !sampled) code = ZINC_RT_MEMORY;
    char text[65];
    zinc_rt_digest digest;
    zinc_rt_digest_begin(&digest);
    uint32_t done = 0;
    while (!code && (done < length || !length)) {
        const uint32_t part = SMALLER(most, length - done);
        code = step(plan, prompt + done, part, (int32_t)done, tokens, rows, logits, sampled);
        if (code) break;
        zinc_rt_digest_add(&digest, logits, (size_t)part * info.vocab);
        done += part;
        last = sampled[part - 1];
    }
    zinc_rt_digest_end(&digest, text);
    if (!code) printf("digest %s\ntokens", text);
    for (uint32_t i = 0; i < count && !code; i++) {
        printf(" %d", last);
        if (i + 1 < count)
            code = step(plan, &last, 1, (int32_t)(length + i), tokens, rows, 0, &last);
    }
    if (!code) printf("\n");
    free(logits);
    free(tokens);
    free(rows);
    free(sampled);
    return code;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: decode PLAN TOKENS COUNT [KERNELS]\n");
        return 2;
    }
    zinc_rt_plan plan = {0};
    const zinc_rt_options options = {.kernels = argc > 4 ? argv[4] : 0};
    int32_t *prompt = malloc((strlen(argv[2]) + 1) * sizeof(*prompt));
    if (!prompt) return ZINC_RT_MEMORY;
    int code = zinc_rt_open(&plan, ZINC_RT_ABI, argv[1], &options);
    if (!code) code = decode(&plan, prompt, parse(argv[2], prompt), (uint32_t)atoi(argv[3]));
    if (code) failed(&plan, code);
    zinc_rt_close(&plan);
    free(prompt);
    return code;
}
